"""Properties of rules, merging, hashing and parsing, over generated policies."""

from __future__ import annotations

import contextlib
import pickle
from fnmatch import fnmatchcase

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerzero import env
from layerzero.errors import PolicyValidationError
from layerzero.model.config import Policy, Rule
from layerzero.policy.layers import Level, PolicyLayer, merge
from layerzero.policy.load import from_bytes, from_mapping
from layerzero.policy.rules import evaluate, has_exact, holds, parse_conditions, thresholds

KERNELS = [("sdpa.attention.flash", "sdpa"), ("sdpa.attention.math", "sdpa"), ("liger.rms_norm.triton", "liger")]
FIELDS = ("seq_len_k", "head_dim")
quick = settings(
    max_examples=400 if env.read().prove else 40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

patterns = st.lists(
    st.sampled_from(["sdpa", "sdpa.*", "*.flash", "liger", "*", "sdpa.attention.math"]), max_size=3, unique=True
)
ops = st.sampled_from(["*", "attention", "att*", "rms_norm", "*_norm"])
numbers = st.one_of(st.integers(-5, 40), st.integers(0, 400).map(lambda n: n / 10))
wanted = st.one_of(
    st.tuples(st.sampled_from([">", ">=", "<", "<=", "==", "!="]), numbers).map(lambda pair: f"{pair[0]}{pair[1]}"),
    st.integers(-5, 40),
    st.lists(st.integers(-5, 40), min_size=1, max_size=3),
)
kernel_ids = st.sampled_from(["a.attention.x", "b.attention.x", "c.rms_norm.x"])
points = st.integers(-40, 40).map(lambda n: n / 4)


@st.composite
def rules(draw):
    when = tuple(c for name in draw(st.sets(st.sampled_from(FIELDS))) for c in parse_conditions(name, draw(wanted)))
    return Rule(
        match_op=draw(ops),
        when=when,
        allow=draw(st.none() | patterns.map(tuple)),
        deny=tuple(draw(patterns)),
        prefer=tuple(draw(patterns)),
        avoid=tuple(draw(patterns)),
        boosts=tuple((pattern, draw(points)) for pattern in draw(patterns)),
        lock=draw(st.none() | kernel_ids),
    )


@st.composite
def layers(draw):
    return PolicyLayer.of(
        draw(st.sampled_from(list(Level))),
        source=draw(st.sampled_from(["", "one", "two"])),
        locks=draw(st.dictionaries(ops, st.none() | kernel_ids, max_size=3)),
        allow=draw(st.none() | patterns),
        deny=draw(patterns),
        prefer=draw(patterns),
        avoid=draw(patterns),
        boosts={pattern: draw(points) for pattern in draw(patterns)},
        rules=draw(st.lists(rules(), max_size=2)),
        **draw(
            st.fixed_dictionaries({}, optional={"strict_mode": st.booleans(), "memory_headroom_mb": st.integers(0, 9)})
        ),
    )


def everything(policy, **fields):
    """All that can be asked of a policy."""
    return [
        evaluate(policy, op, kernel, backend, fields.get)
        for op in ("attention", "rms_norm")
        for kernel, backend in KERNELS
    ]


@quick
@given(
    st.lists(rules(), max_size=4),
    st.sampled_from(["attention", "rms_norm"]),
    st.integers(-10, 45),
    st.integers(-10, 45),
)
def test_between_two_cuts_no_rule_changes_its_mind(given_rules, op, low, other):
    policy = Policy(rules=tuple(given_rules))
    cuts = thresholds(policy, op, "seq_len_k")
    assert cuts == sorted(set(cuts))
    assert not has_exact(policy, op, "seq_len_k")

    def bucket(value):
        return sum(cut < value for cut in cuts)

    if bucket(low) == bucket(other):
        for kernel, backend in KERNELS:
            ways = [evaluate(policy, op, kernel, backend, {"seq_len_k": n, "head_dim": 7}.get) for n in (low, other)]
            assert ways[0] == ways[1]


@quick
@given(wanted)
def test_every_cut_is_needed(condition):
    policy = Policy(rules=(Rule("*", parse_conditions("seq_len_k", condition)),))

    def mind(value):
        return [holds(item, value) for item in policy.rules[0].when]

    for cut in thresholds(policy, "attention", "seq_len_k"):
        assert mind(cut) != mind(cut + 1) or isinstance(condition, list)  # neighbours in a list may share a side


@quick
@given(st.lists(layers(), max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_layers_on_different_levels_is_irrelevant(given_layers, random):
    stable = sorted(given_layers, key=lambda layer: layer.level)
    buckets = {level: [layer for layer in given_layers if layer.level == level] for level in Level}
    order = [layer.level for layer in given_layers]
    random.shuffle(order)
    mixed = [buckets[level].pop(0) for level in order]
    assert merge(mixed) == merge(stable)
    assert merge(mixed).policy_hash == merge(stable).policy_hash


@quick
@given(st.lists(layers(), max_size=4), layers())
def test_a_stronger_layer_decides_wherever_it_speaks(weaker, layer):
    weaker = [each for each in weaker if each.level < Level.CALL]
    top = PolicyLayer(**{**layer.__dict__, "level": Level.CALL})
    alone, together = merge([top]), merge([*weaker, top])
    fields = {"seq_len_k": 10, "head_dim": 7}
    for mine, ours in zip(everything(alone, **fields), everything(together, **fields), strict=True):
        assert mine.locked_to is None or ours.locked_to == mine.locked_to
        assert not mine.denied_by or ours.denied_by
        assert not mine.allow_list or (ours.allow_list, ours.allowed) == (mine.allow_list, mine.allowed)
        assert not mine.avoided or ours.avoided
    for name, value in top.settings.items():
        assert getattr(together, name) == value


@quick
@given(st.lists(layers(), max_size=4))
def test_a_deny_holds_at_every_level_and_no_other_layer_can_take_it_back(given_layers):
    everywhere = merge(given_layers)
    for layer in given_layers:
        for pattern in layer.deny:
            for kernel, backend in KERNELS:
                if fnmatchcase(kernel, pattern) or fnmatchcase(backend, pattern):
                    assert evaluate(everywhere, "attention", kernel, backend, {}.get).denied_by


@quick
@given(st.lists(layers(), max_size=3), st.lists(layers(), max_size=2), st.sampled_from(list(Level)))
def test_a_layer_that_says_nothing_changes_nothing(before, after, level):
    with_it, without = merge([*before, PolicyLayer.of(level, source="silent"), *after]), merge([*before, *after])
    assert with_it == without and hash(with_it) == hash(without)


@quick
@given(st.lists(layers(), max_size=4))
def test_the_hash_is_that_of_the_meaning_not_of_the_objects(given_layers):
    policy = merge(given_layers)
    copy = pickle.loads(pickle.dumps(policy))
    moved = merge([PolicyLayer(**{**layer.__dict__, "source": "elsewhere"}) for layer in given_layers])
    assert copy == policy and copy.policy_hash == policy.policy_hash == moved.policy_hash
    for mine, theirs in zip(everything(policy, head_dim=3), everything(moved, head_dim=3), strict=True):
        assert (mine.bonus, mine.allowed, mine.locked_to) == (theirs.bonus, theirs.allowed, theirs.locked_to)


@quick
@given(
    st.dictionaries(st.sampled_from(["prefer", "avoid", "deny", "allow"]), patterns, max_size=4),
    st.randoms(use_true_random=False),
)
def test_the_hash_ignores_the_order_of_keys_and_of_lists(mapping, random):
    keys = list(mapping)
    random.shuffle(keys)
    shuffled = {key: random.sample(mapping[key], len(mapping[key])) for key in keys}
    assert merge([from_mapping(mapping)]).policy_hash == merge([from_mapping(shuffled)]).policy_hash


@settings(max_examples=3_000 if env.read().prove else 150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.binary(max_size=80), st.text(alphabet="ab:-[]{}&*!?|>'\"\n \t#,%@0.", max_size=60).map(str.encode)))
def test_no_bytes_crash_the_readers(raw):
    for name in ("p.yaml", "p.toml", "pyproject.toml"):
        layer = None
        with contextlib.suppress(PolicyValidationError):  # a refusal is fine, anything else is not
            layer = from_bytes(raw, name)
        if layer is not None:
            merge([layer])

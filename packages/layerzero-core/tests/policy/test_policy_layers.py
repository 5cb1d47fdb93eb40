"""How layers of wishes become one Policy."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle

import pytest

from layerzero import env
from layerzero.errors import PolicyValidationError
from layerzero.model.config import Policy, Rule
from layerzero.policy.layers import Level, PolicyLayer, from_env, merge, next_expiry
from layerzero.policy.load import from_bytes, from_mapping
from layerzero.policy.rules import evaluate, judge, parse_conditions

FLASH, MATH = "sdpa.attention.flash", "sdpa.attention.math"
LEVELS = (Level.FILE, Level.ENV, Level.PROGRAMMATIC, Level.CONTEXT, Level.CALL)


def ask(policy, kernel=FLASH, op="attention", **fields):
    return evaluate(policy, op, kernel, kernel.split(".")[0], fields.get)


def test_no_layers_give_the_default_policy():
    assert merge([]) == Policy()
    assert merge([PolicyLayer.of(), from_env(env.read({}))]).policy_hash == Policy().policy_hash


@pytest.mark.req("R-POL-02")
def test_environment_beats_yaml_code_beats_environment_scope_beats_code():
    file = from_bytes(
        b"locks: {attention: a.attention.x}\nstrict_mode: true\nmemory_headroom_mb: 1\n", "layerzero.yaml"
    )
    variables = from_env(env.read({"LAYERZERO_LOCK_ATTENTION": "b.attention.x", "LAYERZERO_STRICT": "0"}))
    code = from_mapping({"locks": {"attention": "c.attention.x"}})
    scope = PolicyLayer.of(Level.CONTEXT, locks={"attention": "d.attention.x"})
    call = PolicyLayer.of(Level.CALL, locks={"attention": "e.attention.x"})
    stack = [file, variables, code, scope, call]
    for depth, letter in enumerate("abcde", 1):
        assert judge(merge(stack[:depth]), "attention", {}.get).locked_to == f"{letter}.attention.x"
    assert merge(stack[:1]).strict_mode and not merge(stack[:2]).strict_mode
    assert merge(stack).memory_headroom_mb == 1  # what nobody overrides stays
    # leaving the scope is dropping its layer
    assert judge(merge([file, variables, code]), "attention", {}.get).locked_to == "c.attention.x"


@pytest.mark.req("R-POL-02")
@pytest.mark.parametrize(("weak", "strong"), list(itertools.combinations(LEVELS, 2)))
def test_the_order_in_which_layers_arrive_matters_only_inside_a_level(weak, strong):
    low = PolicyLayer.of(weak, locks={"attention": FLASH}, avoid="sdpa", allow="reference", on_fault="raise")
    high = PolicyLayer.of(strong, locks={"att*": MATH}, prefer="sdpa", allow="sdpa", on_fault="fallback")
    assert merge([low, high]) == merge([high, low])
    verdict = ask(merge([low, high]))
    assert (verdict.locked_to, verdict.bonus, verdict.allowed, merge([low, high]).on_fault) == (
        MATH,
        20,
        True,
        "fallback",
    )


def test_of_two_layers_on_one_level_the_later_is_stronger():
    outer, inner = (PolicyLayer.of(Level.CONTEXT, locks={"attention": kernel}) for kernel in (FLASH, MATH))
    assert judge(merge([outer, inner]), "attention", {}.get).locked_to == MATH


@pytest.mark.parametrize("level", LEVELS)
def test_deny_of_any_level_beats_everything(level):
    everything = [PolicyLayer.of(other, allow=FLASH, prefer=FLASH, locks={"attention": FLASH}) for other in LEVELS]
    policy = merge([*everything, PolicyLayer.of(level, deny="sdpa", source="ops team")])
    assert ask(policy).denied_by == "sdpa (ops team)"


def test_deny_lists_add_up_over_all_levels():
    policy = merge([PolicyLayer.of(level, deny=f"b{level}") for level in LEVELS])
    assert policy.deny == ("b5", "b4", "b3", "b2", "b1")
    assert all(ask(policy, f"b{level}.attention.x").denied_by for level in LEVELS)


def test_a_stronger_wish_about_a_kernel_replaces_the_weaker_one_and_leaves_the_others():
    file = PolicyLayer.of(Level.FILE, prefer=["sdpa", "liger"], boosts={"sdpa": 5, "sdpa.*": 1})
    code = PolicyLayer.of(avoid=["sdpa.attention.*"], boosts={"sdpa": 7})
    policy = merge([file, code])
    assert ask(policy).bonus == -50 + 7 + 1  # the file's sdpa: 5 is replaced, its sdpa.*: 1 is another pattern
    assert ask(policy, "liger.rms_norm.triton", "rms_norm").bonus == 20


def test_a_stronger_list_beats_a_weaker_conditional_rule():
    rule = Rule("attention", parse_conditions("head_dim", ">=64"), avoid=("sdpa",), lock=MATH)
    policy = merge(
        [PolicyLayer.of(Level.FILE, rules=[rule]), PolicyLayer.of(prefer="sdpa", locks={"attention": FLASH})]
    )
    verdict = ask(policy, head_dim=128)
    assert (verdict.bonus, verdict.locked_to) == (20, FLASH)


def test_a_stronger_layer_can_lift_a_lock_and_an_allow_list():
    file = PolicyLayer.of(Level.FILE, locks={"attention*": FLASH}, allow=["reference"])
    policy = merge([file, PolicyLayer.of(locks={"attention": None}, allow=[])])
    verdict = ask(policy)
    assert verdict.locked_to is None and verdict.allowed
    assert judge(policy, "attention_x", {}.get).locked_to == FLASH
    assert policy.locks_by_op() == {"attention*": FLASH}
    both = merge([PolicyLayer.of(Level.FILE, locks={"attention": FLASH}), PolicyLayer.of(locks={"attention": None})])
    assert both.locks_by_op() == {} and both.to_json()["locks"] == {}


@pytest.mark.req("R-POL-11")
def test_a_timebox_holds_before_its_end_and_not_at_it():
    base = PolicyLayer.of(prefer="sdpa")
    boxed = PolicyLayer.of(Level.CONTEXT, avoid="sdpa").until(100.0)
    assert ask(merge([base, boxed], now=99.9)).avoided
    assert ask(merge([base, boxed], now=100.0)).bonus == 20
    assert merge([base, boxed], now=100.0) == merge([base])
    assert merge([base, boxed], now=99.9).expires_at == 100.0
    assert merge([base, boxed], now=100.0).expires_at is None
    assert next_expiry([boxed, base, base.until(50.0)]) == 50.0


@pytest.mark.req("R-POL-11")
def test_a_call_overrides_for_itself_alone():
    standing = [PolicyLayer.of(Level.FILE, locks={"attention": FLASH}), PolicyLayer.of(Level.CONTEXT, strict_mode=True)]
    before = merge(standing)
    request = merge([*standing, PolicyLayer.of(Level.CALL, locks={"attention": MATH}, strict_mode=False)])
    assert (ask(request).locked_to, request.strict_mode) == (MATH, False)
    assert merge(standing) == before and ask(before).locked_to == FLASH and before.strict_mode


def test_renewing_a_timebox_keeps_the_hash_so_that_caches_stay():
    layer = PolicyLayer.of(prefer="sdpa")
    assert merge([layer.until(5.0)], now=0).policy_hash == merge([layer.until(9.0)], now=0).policy_hash


@pytest.mark.req("R-POL-12")
def test_changing_and_restoring_a_wish_at_run_time_is_deterministic():
    base = [PolicyLayer.of(Level.FILE, prefer="sdpa")]
    first = merge(base)
    changed = merge([*base, PolicyLayer.of(avoid="sdpa", locks={"attention": MATH})])
    assert ask(changed).avoided and ask(changed).locked_to == MATH
    assert changed.policy_hash != first.policy_hash
    again = merge(list(base))
    assert again == first and again.policy_hash == first.policy_hash and ask(again) == ask(first)


def test_without_a_database_shipped_measurements_may_rank_or_not():
    off = {"LAYERZERO_PERFDB": "off"}
    for said, rank in (({}, True), ({"LAYERZERO_PERFDB_SHIPPED": "0"}, False)):
        policy = merge([from_env(env.read({**off, **said}))])
        assert (policy.setting("perfdb.enabled"), policy.setting("perfdb.shipped")) == (False, rank)


def test_every_setting_of_the_environment_reaches_the_policy():
    seen = env.read(
        {
            "LAYERZERO_DISABLED": "1",
            "LAYERZERO_STRICT": "1",
            "LAYERZERO_ALLOW_ADAPTATION": "0",
            "LAYERZERO_DETERMINISTIC": "1",
            "LAYERZERO_GRAPH_STRICT_MODE": "1",
            "LAYERZERO_FALLBACK": "0",
            "LAYERZERO_ON_FAULT": "fallback",
            "LAYERZERO_PLAN_MODE": "1",
            "LAYERZERO_ISOLATION": "subprocess",
            "LAYERZERO_MEMORY_HEADROOM_MB": "64",
            "LAYERZERO_CACHE_SIZE": "5",
            "LAYERZERO_CACHE_TTL": "6",
            "LAYERZERO_BREAKER_FAILURES": "7",
            "LAYERZERO_BREAKER_COOLDOWN": "8",
            "LAYERZERO_PERFDB": "/var/times.db",
            "LAYERZERO_PLUGINS": "",
            "LAYERZERO_PLUGINS_DENY": "bad",
            "LAYERZERO_ALLOW": "sdpa",
            "LAYERZERO_BOOST_SDPA": "3",
        }
    )
    policy = merge([from_env(seen)])
    assert not policy.enabled and policy.strict_mode and not policy.allow_adaptation and policy.deterministic
    assert policy.graph_strict_mode and not policy.fallback_enabled and policy.plan_mode
    assert (policy.on_fault, policy.isolation_of("x"), policy.memory_headroom_mb) == ("fallback", "subprocess", 64.0)
    assert (policy.cache.max_entries, policy.cache.ttl_s) == (5, 6.0)
    assert (policy.breaker.failures, policy.breaker.cooldown_s, policy.breaker.successes) == (7, 8.0, 1)
    assert dict(policy.perfdb) == {"path": "/var/times.db"}
    assert dict(policy.plugins) == {"allow": (), "deny": ("bad",)}
    assert policy.allow == ("sdpa",) and ask(policy).bonus == 3


def test_sub_mappings_merge_key_by_key_and_what_they_forbid_adds_up():
    file = PolicyLayer.of(
        Level.FILE, cache={"max_entries": 5, "ttl_s": 1}, hub={"deny": ["a"], "revoked": ["r1"], "x": 1}
    )
    code = PolicyLayer.of(cache={"ttl_s": None}, hub={"deny": ["b"], "revoked": ["r2"]}, memory_headroom_mb=None)
    policy = merge([file, code, PolicyLayer.of(Level.ENV, memory_headroom_mb=3)])
    assert (policy.cache.max_entries, policy.cache.ttl_s) == (5, None)
    assert dict(policy.hub) == {"deny": ("b", "a"), "revoked": ("r2", "r1"), "x": 1}
    assert policy.memory_headroom_mb is None  # saying "no limit" is saying something


def test_isolation_may_differ_per_backend_and_a_blanket_word_hides_weaker_ones():
    file = PolicyLayer.of(Level.FILE, isolation={"flashattn": "subprocess"})
    assert merge([file]).isolation_of("flashattn") == "subprocess"
    assert merge([file]).isolation_of("sdpa") == "in_process"
    one_more = merge([file, PolicyLayer.of(isolation={"sdpa": "subprocess"})])
    assert one_more.isolation_of("flashattn") == one_more.isolation_of("sdpa") == "subprocess"
    assert merge([file, PolicyLayer.of(isolation="in_process")]).isolation_of("flashattn") == "in_process"


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"strct_mode": True}, "strct_mode"),
        ({"strict_mode": 1}, "strict_mode"),
        ({"memory_headroom_mb": float("nan")}, "memory_headroom_mb"),
        ({"memory_headroom_mb": True}, "memory_headroom_mb"),
        ({"cache": {"size": 3}}, "cache"),
        ({"cache": {"max_entries": 0}}, "cache"),
        ({"cache": 3}, "cache"),
        ({"isolation": {"a": "thread"}}, "isolation"),
        ({"on_fault": "explode"}, "on_fault"),
        ({"graph_whitelist": "abc"}, "graph_whitelist"),
        ({"locks": {"attention": "flash"}}, "locks.attention"),
        ({"boosts": {"sdpa": float("inf")}}, "boosts.sdpa"),
        ({"boosts": {"sdpa": "5"}}, "boosts.sdpa"),
        ({"prefer": [3]}, "prefer"),
        ({"deny": [""]}, "deny"),
    ],
)
def test_a_wrong_value_in_code_is_refused_by_key(wrong, key):
    with pytest.raises(PolicyValidationError) as caught:
        PolicyLayer.of(**wrong)
    assert caught.value.key == key
    assert caught.value.code == "POLICY_INVALID"
    assert "expected" in str(caught.value)


@pytest.mark.req("R-POL-07")
@pytest.mark.parametrize(
    "other",
    [
        {"enabled": False}, {"locks": {"attention": FLASH}}, {"allow": "sdpa"}, {"deny": "sdpa"}, {"prefer": "sdpa"},
        {"avoid": "sdpa"}, {"boosts": {"sdpa": 1}}, {"rules": [Rule(deny=("sdpa",))]}, {"strict_mode": True},
        {"allow_adaptation": False}, {"deterministic": True}, {"graph_strict_mode": True}, {"graph_whitelist": ["a"]},
        {"memory_headroom_mb": 1}, {"on_fault": "fallback"}, {"fallback_enabled": False}, {"isolation": "subprocess"},
        {"plan_mode": True}, {"breaker": {"failures": 2}}, {"cache": {"ttl_s": 1}},
        {"distributed": {"tp_invariant": True}}, {"hub": {"x": 1}}, {"plugins": {"deny": ["x"]}},
    ],
)  # fmt: skip
def test_every_key_that_decides_something_is_in_the_hash(other):
    assert merge([PolicyLayer.of(**other)]).policy_hash != Policy().policy_hash


@pytest.mark.req("R-POL-07")
def test_the_hash_does_not_depend_on_where_or_in_what_order_things_were_written():
    yaml = from_bytes(b"prefer: [b, a]\nboosts: {x: 1, y: 2}\nrules:\n- {deny: [q, p]}\n", "layerzero.yaml")
    toml = from_bytes(
        b'[boosts]\ny = 2.0\nx = 1\n[[rules]]\n\n\ndeny = ["p", "q"]\n'.join([b'prefer = ["a", "b"]\n', b""]),
        "other.toml",
    )
    code = PolicyLayer.of(prefer=["a", "b"], boosts={"y": 2, "x": 1}, rules=[Rule(deny=("p", "q"))])
    assert merge([yaml]).policy_hash == merge([toml]).policy_hash == merge([code]).policy_hash
    direct = Policy(prefer=("a", "b"), boosts=(("x", 1.0), ("y", 2.0)), rules=(Rule(deny=("q", "p")),))
    assert direct.policy_hash == merge([code]).policy_hash


def test_a_merged_policy_survives_json_and_pickle():
    policy = merge([PolicyLayer.of(prefer="sdpa", hub={"allow": ["a"]}, rules=[Rule(deny=("x",))]).until(9.0)], now=0)
    assert json.loads(json.dumps(policy.to_json()))["policy_hash"] == policy.policy_hash
    copy = pickle.loads(pickle.dumps(policy))
    assert copy == policy and hash(copy) == hash(policy) and copy.policy_hash == policy.policy_hash


def test_settings_of_a_merged_policy_may_be_replaced_but_its_lists_not_behind_the_levels_back():
    policy = merge([PolicyLayer.of(prefer="sdpa", locks={"attention": FLASH})])
    assert dataclasses.replace(policy, strict_mode=True).strict_mode
    for change in ({"prefer": ("x",)}, {"locks": ()}, {"deny": ("x",)}, {"allow": ("x",)}, {"rules": (Rule(),)}):
        with pytest.raises(ValueError, match="merge again"):
            dataclasses.replace(policy, **change)

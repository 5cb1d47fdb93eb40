"""Speculative verification: whatever the draft is, the tokens are the target's. Exactly, and by counting."""

from __future__ import annotations

import itertools
import json
import math
import os

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.numerics import tolerance
from layerzero.tuning.inputs import build
from layerzero.tuning.truth import UNLIKELY, chi_square
from layerzero_cli.root import cli
from layerzero_models.drafts.kernels import judge_chain, judge_tree
from layerzero_verify.testing.run import counts_of

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
V = 3


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def distribution(generator, vocab=V, sharpness=1.5):
    return torch.softmax(torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness, dim=-1).tolist()


class Target:
    """A model of tiny vocabulary: a distribution for each text."""

    def __init__(self, seed, depth=3, vocab=V):
        generator = seeded(seed)
        texts = [text for length in range(depth) for text in itertools.product(range(vocab), repeat=length)]
        self.after = {text: distribution(generator, vocab) for text in texts}

    def joint(self, length):
        """Probability of each text of a length."""
        return {
            text: math.prod(self.after[text[:i]][text[i]] for i in range(length))
            for text in itertools.product(range(V), repeat=length)
        }


# -- the scheme, enumerated --------------------------------------------------------------------------
def outcomes(parents, ids, proposals, target):
    """Every way the judgement of these candidates can go: (uniform interval of each node, of the last draw, tokens,
    kept nodes, probability). Written from the scheme's definition, over Python numbers."""

    def text(node):
        return () if node < 0 else (*text(parents[node]), ids[node])

    def walk(node, left, begin, intervals, path, chance):
        for i in range(begin, len(parents)):
            if parents[i] != node or ids[i] < 0:
                continue
            accept = min(1.0, left[ids[i]] / proposals[i][ids[i]])
            if accept > 0:
                known = {**intervals, i: (0.0, accept)}
                yield from walk(i, target.after[text(i)], i + 1, known, (*path, i), chance * accept)
            over = [max(p - q, 0.0) for p, q in zip(left, proposals[i], strict=True)]
            # With the target's own numbers a quotient may miss one by its last bit; nothing is left to draw from then.
            if accept < 1 and sum(over) > 0:
                rest = [x / sum(over) for x in over]
                known = {**intervals, i: (accept, 1.0)}
                yield from walk(node, rest, i + 1, known, path, chance * (1 - accept))
            return
        mass = 0.0
        for token, share in enumerate(left):
            if share > 0:
                yield intervals, (mass, mass + share), (*text(node), token), path, chance * share
            mass += share

    yield from walk(-1, target.after[()], 0, {}, (), 1.0)


def inside(interval, where):
    low, high = interval
    return low + (high - low) * where


def exact_law(parents, drafts, target, judge):
    """The distribution of three tokens that `judge` and then the target itself produce, summed over every draft and
    every uniform number; `drafts` yields (ids, proposals, probability). Checks the judge at the edges of every cell."""
    nodes = len(parents)
    rows, expected, law = [], [], {text: 0.0 for text in itertools.product(range(V), repeat=3)}
    for ids, proposals, weight in drafts:
        texts = []
        for i, parent in enumerate(parents):
            texts.append((*(texts[parent] if parent >= 0 else ()), ids[i]))
        table = [target.after[()], *(target.after.get(text, [1.0, 0.0, 0.0]) for text in texts)]
        for intervals, last, tokens, path, chance in outcomes(parents, ids, proposals, target):
            for where in (1e-9, 0.5, 1 - 1e-9):
                uniform = [inside(intervals.get(i, (0.0, 1.0)), where) for i in range(nodes)] + [inside(last, where)]
                rows.append((ids, proposals, table, uniform))
                expected.append((tokens, path))
            for rest in itertools.product(range(V), repeat=3 - len(tokens)):
                full = (*tokens, *rest)
                known = len(tokens)
                law[full] += weight * chance * math.prod(target.after[full[:i]][full[i]] for i in range(known, 3))
    parts = [torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(1, 4)]
    found = judge(torch.tensor([row[0] for row in rows]), *parts)
    for row, (tokens, path) in enumerate(expected):
        assert found[0][row].tolist() == [*tokens, *[-1] * (nodes + 1 - len(tokens))]
        assert int(found[1][row]) == len(path) == len(tokens) - 1
        if len(found) > 2:
            assert found[2][row].tolist() == [*path, *[-1] * (nodes - len(path))]
    return law


def drawn_trees(parents, proposal, *, twice):
    """Every draft of a tree whose nodes are drawn from a distribution of the text before: (ids, what each was drawn
    from, probability). Siblings are drawn one after the other, independently (`twice`) or none twice; a node for which
    nothing is left is -1, and so are its children."""

    def grow(ids, texts, proposals, weight):
        i = len(ids)
        if i == len(parents):
            yield ids, proposals, weight
            return
        before = texts[parents[i]] if parents[i] >= 0 else ()
        left = [0.0] * V if -1 in before else list(proposal[before])
        taken = set() if twice else {ids[j] for j in range(i) if parents[j] == parents[i]}
        left = [0.0 if x in taken else share for x, share in enumerate(left)]
        total = sum(left)
        for x in [x for x in range(V) if left[x] > 0] or [-1]:
            row = [share / total for share in left] if total else left
            chance = row[x] if x >= 0 else 1.0
            yield from grow((*ids, x), (*texts, (*before, x)), (*proposals, row), weight * chance)

    yield from grow((), (), (), 1.0)


CHAIN = (-1, 0)


def proposals_of(kind, target):
    """Drafts of every quality, by text."""
    if kind == "the target itself":
        return target.after
    if kind == "another model":
        return Target(99).after
    if kind == "with gaps":
        return {text: ([0.0, 0.7, 0.3] if len(text) % 2 == 0 else [1.0, 0.0, 0.0]) for text in target.after}
    return {text: [float(p == min(probs)) for p in probs] for text, probs in target.after.items()}


@pytest.mark.req("R-SPEC-04")
@pytest.mark.parametrize("kind", ["the target itself", "another model", "with gaps", "the worst"])
@pytest.mark.parametrize("seed", range(3))
def test_a_chain_has_exactly_the_law_of_the_target(kind, seed):
    target = Target(seed)
    drafts = drawn_trees(CHAIN, proposals_of(kind, target), twice=True)
    law = exact_law(CHAIN, drafts, target, judge_chain)
    for text, chance in target.joint(3).items():
        assert law[text] == pytest.approx(chance, abs=1e-12)


@pytest.mark.req("R-SPEC-04")
def test_a_picked_chain_has_exactly_the_law_of_the_target():
    target = Target(5)
    for ids in itertools.product(range(V), repeat=2):
        certain = [[float(x == token) for x in range(V)] for token in ids]
        law = exact_law(
            CHAIN, [(ids, certain, 1.0)], target, lambda ids, q, p, uniform: judge_chain(ids, None, p, uniform)
        )
        for text, chance in target.joint(3).items():
            assert law[text] == pytest.approx(chance, abs=1e-12)


TREES = {"fork": (-1, -1, 0, 0), "brush": (-1, -1, -1), "chain": (-1, 0), "lopsided": (-1, -1, 1, 1)}


@pytest.mark.req("R-SPEC-03", "R-SPEC-04")
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("kind", ["the target itself", "another model", "with gaps"])
@pytest.mark.parametrize("twice", [True, False], ids=["independent", "without replacement"])
def test_a_tree_has_exactly_the_law_of_the_target(twice, kind, shape):
    target, parents = Target(7), TREES[shape]
    drafts = drawn_trees(parents, proposals_of(kind, target), twice=twice)

    def judge(ids, q, p, uniform):
        return judge_tree(ids, q, p, torch.tensor(parents), uniform)

    law = exact_law(parents, drafts, target, judge)
    for text, chance in target.joint(3).items():
        assert law[text] == pytest.approx(chance, abs=1e-12)


@pytest.mark.req("R-SPEC-03", "R-SPEC-04")
def test_a_picked_tree_has_exactly_the_law_of_the_target():
    target, parents = Target(8), TREES["fork"]
    ids = (2, 0, 1, 0)
    certain = [[float(x == token) for x in range(V)] for token in ids]
    law = exact_law(
        parents,
        [(ids, certain, 1.0)],
        target,
        lambda ids, q, p, uniform: judge_tree(ids, None, p, torch.tensor(parents), uniform),
    )
    for text, chance in target.joint(3).items():
        assert law[text] == pytest.approx(chance, abs=1e-12)


def test_a_scheme_without_the_residual_would_be_noticed():
    """The classic mistake: after a refusal the token is drawn from the target itself."""
    target = Target(0)

    def careless(ids, q, p, uniform):
        _, kept = judge_chain(ids, q, p, uniform)
        cdf = p[torch.arange(len(ids)), kept].cumsum(dim=-1)
        last = torch.searchsorted(cdf, uniform[:, 2:].contiguous(), right=True).clamp(max=V - 1)
        place = torch.arange(3)
        room = torch.cat((ids, last), dim=1)
        after = torch.where(place == kept[:, None], last, -1)
        return torch.where(place < kept[:, None], room, after), kept

    with pytest.raises(AssertionError):
        exact_law(CHAIN, drawn_trees(CHAIN, Target(99).after, twice=True), target, careless)


# -- the public op, by counting ----------------------------------------------------------------------
WORDS = 5


def tables(seed):
    """Target distributions of three places: [V], [V, V], [V, V, V], by the tokens before."""
    generator = seeded(seed)
    shapes = [(WORDS,) * size for size in (1, 2, 3)]
    return [torch.softmax(torch.randn(*shape, generator=generator).double() * 1.5, dim=-1) for shape in shapes]


def blended(table, quality):
    """A draft: with quality 1 the target, with 0 its opposite."""
    opposite = torch.softmax(-3 * table.log(), dim=-1)
    return quality * table + (1 - quality) * opposite


def draw(probs, generator):
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)


@pytest.mark.req("R-SPEC-04", "R-SAMP-02")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("quality", "low", "high"), [(0.0, 0.0, 0.4), (0.5, 0.4, 0.9), (0.97, 0.9, 1.0)])
def test_tokens_and_pairs_and_triples_follow_the_target(quality, low, high, dtype):
    rows = 400_000 if PROVE else 60_000
    generator = seeded(3)
    # The narrow types round the probabilities; the law is then that of the rounded ones, which no longer add up to one.
    given = [table.to(dtype) for table in tables(1)]
    first, second, third = (table.double() / table.double().sum(dim=-1, keepdim=True) for table in given)
    draft = [blended(table, quality).to(dtype) for table in (first, second)]
    a = draw(draft[0].double().expand(rows, -1), generator)
    b = draw(draft[1][a].double(), generator)
    draft_probs = torch.stack((draft[0].expand(rows, -1), draft[1][a]), dim=1)
    target_probs = torch.stack((given[0].expand(rows, -1), given[1][a], given[2][a, b]), dim=1)
    tokens, kept = lz.sample_speculative(torch.stack((a, b), dim=1), draft_probs, target_probs, generator=generator)
    rate = (kept >= 1).double().mean().item()
    overlap = torch.minimum(first, draft[0].double() / draft[0].double().sum()).sum().item()
    assert low <= rate <= high and rate == pytest.approx(overlap, abs=5 * math.sqrt(0.25 / rows) + 1e-9)
    assert chi_square(counts_of(tokens[:, 0], WORDS), first) > UNLIKELY
    # The target itself goes on where the judgement ended.
    two = torch.where(tokens[:, 1] >= 0, tokens[:, 1], draw(second[tokens[:, 0]], generator))
    three = torch.where(tokens[:, 2] >= 0, tokens[:, 2], draw(third[tokens[:, 0], two], generator))
    pairs, triples = tokens[:, 0] * WORDS + two, (tokens[:, 0] * WORDS + two) * WORDS + three
    joint = first[:, None] * second
    assert chi_square(counts_of(pairs, WORDS**2), joint) > UNLIKELY
    assert chi_square(counts_of(triples, WORDS**3), joint[..., None] * third) > UNLIKELY


def test_counting_notices_a_target_that_is_not_the_one():
    rows, (first, _, _) = 60_000, tables(1)
    draft = blended(first, 0.5)
    ids = draw(draft.expand(rows, -1), seeded())[:, None]
    probs = torch.stack((first, first)).expand(rows, -1, -1)
    tokens, _ = lz.sample_speculative(ids, draft.expand(rows, 1, -1), probs, generator=seeded(1))
    assert chi_square(counts_of(tokens[:, 0], WORDS), first) > UNLIKELY
    assert chi_square(counts_of(tokens[:, 0], WORDS), 0.95 * first + 0.05 * draft) < UNLIKELY


# -- single calls ------------------------------------------------------------------------------------
def chain(batch=50, length=3, vocab=20, seed=0, dtype=torch.float32):
    generator = seeded(seed)
    draft = torch.softmax(torch.randn(batch, length, vocab, generator=generator), dim=-1).to(dtype)
    noise = torch.randn(batch, length + 1, vocab, generator=generator) * 0.7
    target = torch.softmax(torch.cat((draft.float(), draft[:, :1].float()), dim=1).log() + noise, dim=-1).to(dtype)
    ids = torch.multinomial(draft.flatten(0, 1).float(), 1, generator=generator).reshape(batch, length)
    return ids, draft, target


def one_by_one(ids, draft, target, uniform):
    """The scheme for one row, over Python numbers."""
    kept = []
    for i, x in enumerate(ids):
        q, p = ([w / math.fsum(row) for w in row] for row in (draft[i], target[i]))
        if uniform[i] * q[x] < p[x]:
            kept.append(x)
            continue
        left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        break
    else:
        left = target[len(ids)]
    mark = uniform[-1] * math.fsum(left)
    token = next(token for token, mass in enumerate(itertools.accumulate(left)) if mass > mark)
    return [*kept, token, *[-1] * (len(ids) - len(kept))], len(kept)


@pytest.mark.req("R-SPEC-04", "R-TOL-05")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_op_spends_one_number_on_each_candidate_and_one_on_the_last_token(dtype):
    ids, draft, target = chain(dtype=dtype)
    tokens, kept = lz.sample_speculative(ids, draft, target, generator=seeded(4))
    uniform = torch.rand(50, 4, dtype=torch.float64, generator=seeded(4)).tolist()
    for row in range(50):
        wanted = one_by_one(ids[row].tolist(), draft[row].tolist(), target[row].tolist(), uniform[row])
        assert (tokens[row].tolist(), int(kept[row])) == wanted
    assert 0 < kept.double().mean() < 3, "the case shows neither refusal nor acceptance"


@pytest.mark.req("R-SPEC-03", "R-TOL-05")
@pytest.mark.parametrize("greedy", [False, True])
def test_a_chain_gives_the_same_as_a_tree_of_one_branch(greedy):
    ids, draft, target = chain()
    seed = {} if greedy else {"generator": seeded(2)}
    tokens, kept = lz.sample_speculative(ids, draft, target, greedy=greedy, **seed)
    seed = {} if greedy else {"generator": seeded(2)}
    wood, count, path = lz.sample_tree(ids, draft, target, [-1, 0, 1], greedy=greedy, **seed)
    assert torch.equal(tokens, wood) and torch.equal(kept, count)
    assert path.tolist() == [[*range(n), *[-1] * (3 - n)] for n in kept.tolist()]


@pytest.mark.req("R-SPEC-04")
@pytest.mark.parametrize("given", ["logits", "probabilities", "certainties"])
def test_greedy_keeps_what_the_target_would_have_said(given):
    ids, _, target = chain(seed=1)
    best = target.argmax(dim=-1)
    ids = torch.where(torch.rand(ids.shape, generator=seeded()) < 0.7, best[:, :-1], ids)
    if given == "certainties":  # the drawing form agrees where nothing is left to chance
        sure = lz.sampling_probs(target.log(), temperature=0.0)
        tokens, kept = lz.sample_speculative(ids, None, sure, generator=seeded())
    else:
        tokens, kept = lz.sample_speculative(ids, None, target.log() if given == "logits" else target, greedy=True)
    for row in range(ids.shape[0]):
        count = 0
        while count < 3 and ids[row, count] == best[row, count]:
            count += 1
        assert tokens[row].tolist() == [*best[row, : count + 1].tolist(), *[-1] * (3 - count)]
        assert int(kept[row]) == count


@pytest.mark.parametrize("greedy", [False, True])
def test_what_is_no_candidate_ends_the_chain(greedy):
    ids, draft, target = chain()
    best = target.argmax(dim=-1)
    ids[:, 0] = best[:, 0]
    target[:, 0] = lz.sampling_probs(target[:, 0].log(), temperature=0.0)  # the first is always kept
    for gone in (-1, 20, 10**6):
        ids[:, 1] = gone
        tokens, kept = lz.sample_speculative(ids, draft, target, greedy=greedy, generator=None if greedy else seeded())
        assert (kept == 1).all() and (tokens[:, 2:] == -1).all()
        if not greedy:  # drawn from the target itself, not from a residual
            alone = draw_with(target[:, 1], seeded())
            assert torch.equal(tokens[:, 1], alone)


def draw_with(probs, generator):
    """What the last uniform number of a row of a chain of three draws."""
    uniform = torch.rand(probs.shape[0], 4, dtype=torch.float64, generator=generator)[:, 3:]
    cdf = probs.double().cumsum(dim=-1)
    return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).squeeze(1)


def test_a_candidate_without_probability_in_its_own_draft_is_none():
    ids, draft, target = chain(length=1)
    draft = draft.scatter(2, ids.unsqueeze(-1), 0.0)
    assert (lz.sample_speculative(ids, draft, target, generator=seeded())[1] == 0).all()
    assert (lz.sample_tree(ids, draft, target, [-1], generator=seeded())[1] == 0).all()


@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_a_target_without_a_distribution_gives_no_token(value):
    ids, draft, target = chain()
    target[7] = value
    tokens, kept = lz.sample_speculative(ids, draft, target, generator=seeded())
    assert tokens[7].tolist() == [-1] * 4 and kept[7] == 0
    wood, count, _ = lz.sample_tree(ids, draft, target, [-1, 0, -1], generator=seeded())
    assert wood[7].tolist() == [-1] * 4 and count[7] == 0
    others = torch.arange(50) != 7
    assert (tokens[others, 0] >= 0).all() and (wood[others, 0] >= 0).all()


@pytest.mark.req("R-TOL-05")
def test_equal_seeds_give_equal_tokens_and_rows_do_not_disturb_each_other():
    lz.list_ops()
    assert all(tolerance(op, torch.float32).exact for op in ("sample_speculative", "sample_tree"))
    ids, draft, target = chain()
    first = lz.sample_speculative(ids, draft, target, generator=seeded(9))
    again = lz.sample_speculative(ids, draft, target, generator=seeded(9))
    other = lz.sample_speculative(ids, draft, target, generator=seeded(8))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    half = lz.sample_speculative(ids[:20], draft[:20], target[:20], generator=seeded(9))
    assert torch.equal(first[0][:20], half[0])
    torch.manual_seed(1)
    default = lz.sample_speculative(ids, draft, target)
    torch.manual_seed(1)
    assert torch.equal(default[0], lz.sample_speculative(ids, draft, target)[0])


def test_empty_batches_and_drafts():
    for batch, length in ((0, 3), (4, 0), (0, 0)):
        ids, probs = torch.zeros(batch, length, dtype=torch.int64), torch.full((batch, length + 1, 5), 0.2)
        tokens, kept = lz.sample_speculative(ids, probs[:, :length], probs, generator=seeded())
        assert tokens.shape == (batch, length + 1) and kept.tolist() == [0] * batch and (tokens >= -1).all()
        assert lz.sample_tree(ids, None, probs, list(range(-1, length - 1)))[2].shape == (batch, length)


@pytest.mark.req("R-SPEC-04", "R-SPEC-03")
@settings(max_examples=1500 if PROVE else 60, deadline=None)
@given(
    st.integers(0, 4), st.integers(0, 4), st.integers(1, 9), st.integers(0, 999), st.booleans(), st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]), st.data(),
)  # fmt: skip
def test_laws_of_a_judgement(batch, length, vocab, seed, picked, strided, dtype, data):
    generator = seeded(seed)

    def probs(places):
        made = torch.softmax(torch.randn(vocab, places, batch, generator=generator) * 3, dim=0).to(dtype)
        return made.permute(2, 1, 0) if strided else made.permute(2, 1, 0).contiguous()

    ids = torch.randint(-1, vocab, (batch, length), generator=generator)
    draft, target = None if picked else probs(length), probs(length + 1)
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(length)]
    before = target.clone()
    for form in range(2):
        runs = []
        for _ in range(2):
            if form == 0:
                runs.append(lz.sample_speculative(ids, draft, target, generator=seeded(seed)))
            else:
                runs.append(lz.sample_tree(ids, draft, target, parents, generator=seeded(seed)))
        tokens, kept, *path = runs[0]
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True)), "equal seeds gave different tokens"
        assert torch.equal(target, before)
        for row in range(batch):
            count = int(kept[row])
            nodes = path[0][row].tolist() if path else [*range(count), *[-1] * (length - count)]
            assert 0 <= count <= length and nodes[count:] == [-1] * (length - count)
            assert [ids[row, node].item() for node in nodes[:count]] == tokens[row, :count].tolist()
            assert 0 <= tokens[row, count] < vocab and (tokens[row, count + 1 :] == -1).all()
            tree = [-1, *nodes[: count - 1]] if count else []
            assert [parents[node] if form else node - 1 for node in nodes[:count]] == tree


BAD = {
    "ids of one axis": (lambda i, q, p: lz.sample_speculative(i[0], q, p), "RANK_INVALID"),
    "ids that are none": (lambda i, q, p: lz.sample_speculative(i.float(), q, p), "DTYPE_UNSUPPORTED"),
    "a target one place short": (lambda i, q, p: lz.sample_speculative(i, q, p[:, :-1]), "SHAPE_INVALID"),
    "a draft of another vocabulary": (lambda i, q, p: lz.sample_speculative(i, q[..., :-1], p), "SHAPE_INVALID"),
    "a draft of integers": (lambda i, q, p: lz.sample_speculative(i, q.long(), p), "DTYPE_UNSUPPORTED"),
    "no target": (lambda i, q, p: lz.sample_speculative(i, q, None), "TYPE_INVALID"),
    "no vocabulary": (lambda i, q, p: lz.sample_speculative(i, None, p[..., :0]), "SHAPE_INVALID"),
    "greedy by a word": (lambda i, q, p: lz.sample_speculative(i, q, p, greedy="yes"), "VALUE_INVALID"),
    "a parent after its child": (lambda i, q, p: lz.sample_tree(i, q, p, [1, -1, 0]), "VALUE_INVALID"),
    "a tensor of parents too short": (lambda i, q, p: lz.sample_tree(i, q, p, torch.tensor([-1])), "SHAPE_INVALID"),
    "parents that are fractions": (lambda i, q, p: lz.sample_tree(i, q, p, torch.zeros(3)), "DTYPE_UNSUPPORTED"),
    "parents that are words": (lambda i, q, p: lz.sample_tree(i, q, p, ["a", "b", "c"]), "TYPE_INVALID"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_means_nothing_is_refused(name):
    call, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call(*chain())
    assert caught.value.code == code


# -- what is derived from the declarations -----------------------------------------------------------
OPS = ("sample_speculative", "sample_tree")


@pytest.mark.parametrize("op", OPS)
def test_a_call_moves_its_tensors_and_its_result_at_least_and_not_much_more(op):
    spec = public_op(op)
    ctx = Context(op, dims=(("batch", 4), ("vocab", 97), ("draft_len", 3)), rank=2)
    args = build(ctx, seed=1).args
    given, result = (
        sum(item.nbytes for item in items if isinstance(item, torch.Tensor))
        for items in (args, spec.fallback_impl(*args))
    )
    cost = spec.cost(ctx)
    assert given < cost.bytes <= 2 * (given + result) and cost.flops > 0
    assert spec.cost(ctx.with_dims(vocab=194)).flops == 2 * cost.flops


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_each_op_can_be_asked_about_and_has_its_reference(op, device):
    result = CliRunner().invoke(cli, ["explain", op, "--shape", "2,4,1000", "--device", device, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["chosen"] == f"reference.{op}.plain"
    (kernel,) = lz.list_kernels(op)
    assert kernel.tp_invariant and kernel.workspace is not None

"""Sampling probabilities and speculative verification under torch.library and torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chain(length=3, vocab=9):
    target = torch.softmax(rand(4, length + 1, vocab), dim=-1)
    draft = torch.softmax(rand(4, length, vocab, seed=1), dim=-1)
    return torch.randint(vocab, (4, length), generator=torch.Generator().manual_seed(2)), draft, target


IDS, DRAFT, TARGET = chain()
PARENTS = torch.tensor([-1, -1, 0])
ROWS, HEATS = torch.tensor([2, 3, 9, 1]), torch.tensor([0.0, 0.5, 1.0, 2.0])

SAMPLES = {
    "sampling_probs": (rand(4, 9), 5, None, 0.9, None, None, None, 0.7, None, None),
    "sampling_probs by row": (rand(4, 9), None, ROWS, None, None, 0.1, None, 1.0, HEATS, None),
    "sampling_probs with a gradient": (rand(4, 9).requires_grad_(), 5, None, None, None, None, None, 0.7, None, None),
    "sample_speculative": (IDS, DRAFT, TARGET, False, None),
    "sample_speculative greedy": (IDS, None, TARGET, True, None),
    "sample_tree": (IDS, DRAFT, TARGET, PARENTS, False, None),
    "sample_tree greedy": (IDS, None, TARGET, PARENTS, True, None),
}  # fmt: skip


# Traced with gradients over symbolic shapes, this takes seconds.
LONG = {"sampling_probs with a gradient": [pytest.mark.slow]}


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in SAMPLES])
def test_opcheck(name):
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if name in ("sample_speculative", "sample_tree"):
        utils = utils[:3]  # the last runs the op twice and expects equal numbers; these draw
    op = name.split()[0]
    assert getattr(lz, op) is getattr(lz.ops, op)  # an op of a package is known to torch once it was looked up
    torch.library.opcheck(getattr(torch.ops.layerzero, op).default, SAMPLES[name], test_utils=utils)


CALLS = {
    "probs": lambda x: lz.sampling_probs(x, top_k=5, top_p=0.9, temperature=0.7),
    "probs by row": lambda x: lz.sampling_probs(x, top_k=ROWS, temperature=ROWS.float()),
    "probs of three axes": lambda x: lz.sampling_probs(x.view(2, 2, 9), min_p=0.1, temperature=HEATS[1:3]),
}  # fmt: skip


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize(("grad", "backend"), [(False, "aot_eager"), (True, "eager")])
@pytest.mark.parametrize("name", CALLS)
def test_probabilities_compile_into_one_graph(name, grad, backend):
    results = []
    for compiled in (False, True):
        x = rand(4, 9).requires_grad_(grad)
        call = torch.compile(CALLS[name], fullgraph=True, backend=backend) if compiled else CALLS[name]
        out = call(x)
        if grad:
            (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        results.append((out.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("greedy", [False, True])
def test_verification_compiles_into_one_graph(greedy, backend):
    def judge(ids, draft, target):
        one = lz.sample_speculative(ids, draft, target, greedy=greedy)
        two = lz.sample_tree(ids, draft, target, PARENTS, greedy=greedy)
        three = lz.sample_tree(ids, None, target, [-1, 0, 1], greedy=greedy)
        return *one, *two, *three

    traced = torch.compile(judge, fullgraph=True, backend=backend)
    runs = []
    for function in (judge, traced):
        torch.manual_seed(4)
        runs.append(function(IDS, DRAFT, TARGET))
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))
    assert sum(counters["graph_break"].values()) == 0


def test_a_generator_breaks_the_graph_and_still_counts():
    generator = torch.Generator()

    def judge(ids, draft, target):
        return lz.sample_speculative(ids * 1, draft, target, generator=generator)[0] * 1

    runs = []
    for function in (judge, torch.compile(judge, backend="eager")):
        generator.manual_seed(3)
        runs.append(function(IDS, DRAFT, TARGET))
    assert torch.equal(*runs)


def test_fake_tensors_give_the_shapes_and_dtypes():
    narrow = TARGET.half()
    with FakeTensorMode() as mode:
        ids, draft, target = (mode.from_tensor(item) for item in (IDS, DRAFT, narrow))
        tokens, kept = lz.sample_speculative(ids, draft, target)
        assert (tokens.shape, tokens.dtype, kept.shape, kept.dtype) == ((4, 4), torch.int64, (4,), torch.int64)
        assert [item.shape for item in lz.sample_tree(ids, draft, target, mode.from_tensor(PARENTS))] == [
            (4, 4), (4,), (4, 3),
        ]  # fmt: skip
        assert lz.sampling_probs(target.flatten(0, 1)).dtype == torch.float32


class Wrapped(torch.Tensor):
    """A tensor subclass that changes nothing."""


def test_a_subclass_reaches_the_same_kernels():
    ids, draft, target = (item.as_subclass(Wrapped) for item in (IDS, DRAFT, TARGET))
    for call in (
        lambda i, q, p: lz.sample_speculative(i, q, p, generator=torch.Generator().manual_seed(2)),
        lambda i, q, p: lz.sample_tree(i, q, p, PARENTS, generator=torch.Generator().manual_seed(2)),
        lambda i, q, p: lz.sample_speculative(i, q, p, greedy=True),
        lambda i, q, p: (lz.sampling_probs(p.flatten(0, 1), top_k=3),),
    ):
        for left, right in zip(call(ids, draft, target), call(IDS, DRAFT, TARGET), strict=True):
            torch.testing.assert_close(left.as_subclass(torch.Tensor), right)

"""Grouped and latent attention as torch ops: opcheck, gradients, one graph under torch.compile, subclasses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.torch_ops.library import opaque_ops

OPS = [made for made in opaque_ops() if made.name.startswith(("grouped_attention", "mla_paged_attention"))]

NAMES = [op.name for op in OPS]


def rand(*shape, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


OFFSETS_Q, OFFSETS_K, KV_LENS = ints(0, 2, 3, 5, 6), ints(0, 5, 9), ints([3, 2], [5, 4])
GROUPED_HOST = ([0, 2, 3, 5, 6], [0, 5, 9], [3, 2, 5, 4])
TABLES, LENS, QUERY_LENS = ints([0, 2], [1, 3]), ints(7, 4), ints(2, 1)


def grouped(grad=True, host=True):
    parts = (OFFSETS_Q, OFFSETS_K, KV_LENS, *(GROUPED_HOST if host else (None,) * 3))
    return rand(6, 4, 8, grad=grad), rand(9, 2, 8, grad=grad), rand(9, 2, 8, grad=grad), *parts


def latent(grad=True, host=True):
    tensors = [rand(*shape, grad=grad) for shape in ((3, 4, 8), (3, 4, 2), (4, 4, 8), (4, 4, 2))]
    return *tensors, TABLES, LENS, QUERY_LENS, *(([7, 4], [2, 1]) if host else (None, None))


def samples(grad=True):
    return {
        "grouped_attention": (*grouped(grad), True, 0.3, None),
        "grouped_attention_lse": (*grouped(grad), False, None, None),
        "mla_paged_attention": (*latent(grad), 0.3, None),
        "mla_paged_attention_lse": (*latent(grad), 0.3, None),
    }


def op(name):
    return getattr(torch.ops.layerzero, name).default


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize("grad", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "gradients"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, grad):
    torch.library.opcheck(op(name), samples(grad)[name])


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_give_meta_results(name):
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in samples(False)[name]]
        faked = op(name)(*args)
    real = op(name)(*samples(False)[name])
    pairs = zip(faked, real, strict=True) if isinstance(real, tuple) else [(faked, real)]
    for left, right in pairs:
        assert (left.shape, left.dtype, left.stride()) == (right.shape, right.dtype, right.stride())


@pytest.mark.req("R-PT-04")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_plain_torch(name):
    plain = next(o.plain for o in OPS if o.name == name)
    args = tuple(a.detach().double().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                 for a in samples()[name])  # fmt: skip
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    results = []
    for function in (op(name), plain):
        out = function(*args)
        outs = out if isinstance(out, tuple) else (out,)
        total = sum((o * torch.arange(o.numel()).view(o.shape).cos()).sum() for o in outs)
        results.append((outs, torch.autograd.grad(total, inputs)))
    torch.testing.assert_close(results[0], results[1], check_stride=False)


def batches():
    return (
        lz.grouped_batch(OFFSETS_Q, OFFSETS_K, KV_LENS),
        lz.paged_batch(TABLES, LENS, query_lens=QUERY_LENS),
    )


def block(q, k, v, q_nope, q_pe, ckv, kpe, plans):
    out, lse = lz.grouped_attention(q, k, v, plans[0], scale=0.4, return_lse=True)
    return out, lse, lz.mla_paged_attention(q_nope, q_pe, ckv, kpe, plans[1], scale=0.2)


@pytest.mark.req("R-PT-02")
def test_one_graph_computes_what_eager_computes():
    args = (*grouped(False)[:3], *latent(False)[:4])
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(*args, batches()), block(*args, batches()))


@pytest.mark.req("R-PT-02", "R-PT-04")
def test_one_graph_has_the_gradients_of_eager():
    args = (*grouped()[:3], *latent()[:4])
    plans = (
        lz.grouped_batch(ints(0, 2, 6), ints(0, 9), ints([3], [9])),
        lz.paged_batch(TABLES[:1], LENS[:1], query_lens=ints(3)),
    )
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for function in (compiled, block):
        outs = function(*args, plans)
        results.append((outs, torch.autograd.grad(sum(t.square().sum() for t in outs), args)))
    torch.testing.assert_close(*results)


def unplanned(q, k, v):
    return 2 * lz.grouped_attention(q, k, v, OFFSETS_Q, OFFSETS_K, KV_LENS, causal=False)


def test_a_call_without_a_plan_is_planned_when_the_graph_runs():
    args = grouped(False)[:3]
    torch.testing.assert_close(torch.compile(unplanned, fullgraph=True, backend="eager")(*args), unplanned(*args))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
def test_a_gradient_without_a_plan_breaks_the_graph_and_is_right():
    args = grouped()[:3]
    compiled = torch.compile(unplanned, backend="aot_eager")
    grads = [torch.autograd.grad(function(*args).square().sum(), args) for function in (compiled, unplanned)]
    torch.testing.assert_close(*grads)


def test_the_opaque_op_stands_in_the_graph_when_no_gradient_is_needed():
    seen = []

    def backend(module, inputs):
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    args = (*grouped(False)[:3], *latent(False)[:4])
    torch.compile(block, fullgraph=True, backend=backend, dynamic=False)(*args, batches())
    assert {"layerzero.grouped_attention_lse.call", "layerzero.mla_paged_attention.call"} <= set(seen)


class Tagged(torch.Tensor):
    """A subclass that lets every op through."""


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_subclass_goes_through_the_opaque_op(which):
    if which == 0:
        q, k, v = grouped(False)[:3]
        call = lambda t: lz.grouped_attention(t, k, v, batches()[0])  # noqa: E731
    else:
        q, *rest = latent(False)[:4]
        call = lambda t: lz.mla_paged_attention(t, *rest, batches()[1], scale=0.2)  # noqa: E731
    out = call(q.as_subclass(Tagged))
    assert type(out) is Tagged
    torch.testing.assert_close(out.as_subclass(torch.Tensor), call(q))


def test_vmap_and_func_grad_take_the_reference():
    q, k, v = grouped(False)[:3]
    plan = batches()[0]
    many = torch.stack((q, 2 * q))
    got = torch.func.vmap(lambda t: lz.grouped_attention(t, k, v, plan))(many)
    torch.testing.assert_close(got, torch.stack([lz.grouped_attention(t, k, v, plan) for t in many]))
    grad = torch.func.grad(lambda t: lz.grouped_attention(t, k, v, plan).sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(lz.grouped_attention(leaf, k, v, plan).sum(), leaf)[0])

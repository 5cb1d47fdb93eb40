"""XPos, Gemma's norms, cross-entropy and cast as torch ops: opcheck, fakes, gradients, one graph, export."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.torch_ops.library import opaque_ops

OPS = [made for made in opaque_ops() if made.name.startswith(("xpos", "gemma_", "cross_entropy", "cast"))]

NAMES = [op.name for op in OPS]


def rand(*shape, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


LABELS = torch.tensor([[0, 3, -100], [6, 1, 2]])


def samples(grad=True):
    """(op, args) for every op; every tensor that may have a gradient asks for one."""
    q, k = rand(2, 4, 5, 8, grad=grad), rand(2, 2, 5, 8, grad=grad)
    swapped = rand(2, 5, 4, 8, grad=False).transpose(1, 2).requires_grad_(grad)
    cos, sin = lz.rope_tables(8, 5)
    x, residual, weight = rand(3, 4, 8, grad=grad), rand(4, 3, 8, grad=grad), rand(8, grad=grad)
    logits = rand(2, 3, 7, grad=grad)
    return [
        ("xpos", (swapped, k, cos, sin, False, "BHSD", None, 8.0, 0.4, 2.0, None)),
        ("xpos_query", (q, cos[:, :2], sin[:, :2], True, "BHSD", torch.arange(5), 8.0, 0.4, 0.0, None)),
        ("gemma_rms_norm", (x, weight, 1e-6, None)),
        ("gemma_rms_norm", (x.detach().transpose(0, 1).requires_grad_(grad), weight, 1e-6, None)),
        ("gemma_add_rms_norm", (x, residual.detach().transpose(0, 1).requires_grad_(grad), weight, 1e-6, None)),
        ("cross_entropy", (logits, LABELS, -100, None, None, None, "mean", None)),
        ("cross_entropy", (logits, LABELS, -100, 0.1, 4.0, 0.01, "none", None)),
        ("cross_entropy_lse", (logits, LABELS, -100, 0.1, None, None, "sum", None)),
        ("cast", (x, torch.bfloat16, False, None)),
        ("cast", (x, torch.float64, True, None)),
        ("cast", (x, torch.float32, False, None)),
    ]


CASES = [pytest.param(name, i, id=f"{name}-{i}") for i, (name, _) in enumerate(samples(False))]
FIRST = {name: i for i, (name, _) in reversed(list(enumerate(samples(False))))}
# With gradients over symbolic shapes a check takes seconds, so `make check` checks each op once, without.
CHECKS = [
    pytest.param(name, i, grad, id=f"{name}-{i}-{grad}", marks=[pytest.mark.slow] if grad or i != FIRST[name] else [])
    for i, (name, _) in enumerate(samples(False))
    for grad in (False, True)
]


def op(name):
    return getattr(torch.ops.layerzero, name).default


def test_every_op_has_a_sample():
    assert {name for name, _ in samples(False)} == set(NAMES)


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize(("name", "index", "grad"), CHECKS)
def test_opcheck(name, index, grad):
    torch.library.opcheck(op(name), samples(grad)[index][1])


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize(("name", "index"), CASES)
def test_fake_results_are_like_the_real_ones(name, index):
    args = samples(False)[index][1]
    with FakeTensorMode() as mode:
        fake = op(name)(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    real = op(name)(*args)
    for left, right in zip(fake, real, strict=True) if isinstance(real, tuple) else [(fake, real)]:
        assert (left.shape, left.dtype, left.stride()) == (right.shape, right.dtype, right.stride())


@pytest.mark.req("R-PT-01")
def test_casts_to_what_has_no_gradient_are_traced_too():
    x = torch.tensor([[1.5, -300.0, 1e9]])
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2):
        with FakeTensorMode() as mode:
            assert lz.cast(mode.from_tensor(x), dtype).dtype == dtype
        assert torch.equal(op("cast")(x, dtype, True).float(), lz.cast(x, dtype, saturate=True).float())


@pytest.mark.req("R-PT-04")
@pytest.mark.parametrize(("name", "index"), [c for c in CASES if c.id != "cast-8"])
def test_gradients_equal_those_of_plain_torch(name, index):
    plain = next(o.plain for o in OPS if o.name == name)
    args = tuple(
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in samples()[index][1]
    )
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    results = []
    for function in (op(name), plain):
        out = function(*args)
        outs = out if isinstance(out, tuple) else (out,)
        total = sum((o * torch.arange(o.numel()).view(o.shape).cos()).sum() for o in outs)
        results.append((outs, torch.autograd.grad(total, inputs)))
    torch.testing.assert_close(results[0], results[1], check_stride=False)


def block(q, k, x, residual, weight, logits):
    cos, sin = lz.rope_tables(8, 5, scaling={"rope_type": "linear", "factor": 2.0})
    turned = lz.xpos(q, k, cos, sin, scale_base=8.0)
    alone, _ = lz.xpos(q, None, cos, sin, interleaved=True)
    normed = lz.gemma_rms_norm(x, weight, 1e-5)
    added, stream = lz.gemma_add_rms_norm(normed, residual, weight)
    loss, lse = lz.cross_entropy(logits, LABELS, label_smoothing=0.1, z_loss=0.01, return_lse=True)
    plain = lz.cross_entropy(logits, LABELS, softcap=3.0, reduction="sum")
    narrow = lz.cast(added, torch.bfloat16, saturate=True)
    return *turned, alone, added, stream, loss, lse, plain, lz.cast(narrow, torch.float32)


def inputs(grad):
    return (
        rand(2, 4, 5, 8, grad=grad), rand(2, 2, 5, 8, grad=grad), rand(3, 4, 8, grad=grad), rand(3, 4, 8, grad=grad),
        rand(8, grad=grad), rand(2, 3, 7, grad=grad),
    )  # fmt: skip


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_computes_what_eager_computes(backend):
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=False)
    torch.testing.assert_close(compiled(*inputs(False)), block(*inputs(False)), check_stride=False)


@pytest.mark.req("R-PT-02", "R-PT-04")
def test_one_graph_has_the_gradients_of_eager():
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for function in (compiled, block):
        given = inputs(True)
        outs = function(*given)
        results.append((outs, torch.autograd.grad(sum(t.square().sum() for t in outs), given)))
    torch.testing.assert_close(*results, check_stride=False)


def test_foreign_kernels_stand_in_the_graph_as_opaque_ops_when_no_gradient_is_needed(lab):
    seen = []  # every kernel of the laboratory records its calls, so none is taken for plain torch

    def backend(module, _):
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compile(block, fullgraph=True, backend=backend, dynamic=False)(*inputs(False))
    assert {f"layerzero.{name}.call" for name in NAMES} <= set(seen)
    seen.clear()
    torch._dynamo.reset()
    torch.compile(block, fullgraph=True, backend=backend, dynamic=False)(*inputs(True))
    assert not any("layerzero" in name for name in seen)


class Tagged(torch.Tensor):
    """A subclass that lets every op through."""


def test_tensor_subclasses_reach_the_ops():
    q, k, x, residual, weight, logits = inputs(False)
    with torch.no_grad():
        want = block(q, k, x, residual, weight, logits)
        got = block(*(t.as_subclass(Tagged) for t in (q, k, x, residual, weight, logits)))
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left.as_subclass(torch.Tensor), right, check_stride=False)


@pytest.mark.req("R-PT-01")
def test_export_keeps_the_ops():
    class Module(torch.nn.Module):
        def forward(self, x, weight, logits):
            return lz.cast(lz.gemma_rms_norm(x, weight), torch.float16), lz.cross_entropy(logits, LABELS)

    _, _, x, _, weight, logits = inputs(False)
    exported = torch.export.export(Module(), (x, weight, logits))
    assert "layerzero.gemma_rms_norm" in str(exported.graph) and "layerzero.cross_entropy" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x, weight, logits), Module()(x, weight, logits))


@pytest.mark.req("R-PT-06")
def test_autocast_leaves_the_loss_in_float32_and_the_norm_in_its_own_dtype():
    _, _, x, _, weight, logits = inputs(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lz.cross_entropy(logits, LABELS).dtype is torch.float32
        assert lz.cross_entropy(logits.bfloat16(), LABELS).dtype is torch.float32
        assert lz.gemma_rms_norm(x, weight).dtype is torch.float32
        assert lz.cast(x, torch.float16).dtype is torch.float16

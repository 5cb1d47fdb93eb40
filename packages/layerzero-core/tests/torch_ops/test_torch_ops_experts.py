"""`lz.mlp`, `lz.topk_gate`, `lz.grouped_gemm`, `lz.moe` inside torch: opaque ops, torch.compile, subclasses, vmap."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import layerzero as lz
from layerzero.numerics import assert_close, tolerance
from layerzero.torch_ops.library import opaque_ops

OPS = [made for made in opaque_ops() if made.name in ("mlp", "topk_gate", "grouped_gemm", "moe")]

# torch says so once, on a CPU without bfloat16 instructions
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rand(*shape, grad=True, dtype=torch.float32, scale=0.3):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale
    return made.to(dtype).requires_grad_(grad)


def leaf(tensor):
    """The same numbers and strides, with a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def samples(grad=True, dtype=torch.float32):
    """name -> the opaque op's arguments; every tensor that may have a gradient asks for one."""

    def tensor(*shape):
        return rand(*shape, grad=grad, dtype=dtype)

    ids = torch.tensor([[0, 2], [1, 2], [5, -1]])
    shares = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).requires_grad_(grad)
    usual = (None, None, 1.702, None, False, None)  # biases, alpha, limit, interleaved, backend
    return {
        "mlp": (tensor(2, 3, 8), tensor(32, 8), tensor(8, 16), None, "silu", tensor(32), None, tensor(8), None),
        "mlp split": (tensor(3, 8), tensor(16, 8), tensor(8, 16), tensor(16, 8), "gelu", None, None, None, None),
        "topk_gate": (tensor(5, 12), 3, "sigmoid", True, rand(12, grad=False), 4, 2, 2.5, None),
        "grouped_gemm": (tensor(7, 8), tensor(3, 16, 8), torch.tensor([2, 0, 4]), None),
        "moe": (tensor(3, 8), tensor(3, 16, 8), tensor(3, 8, 8), shares, ids, "silu", 0, *usual),
        "moe strided": (
            leaf(tensor(8, 3).mT), leaf(tensor(3, 8, 16).mT), tensor(3, 8, 8), shares, ids, "relu", 1, *usual,
        ),
    }  # fmt: skip


def op(name):
    return getattr(torch.ops.layerzero, name.split()[0]).default


@pytest.mark.parametrize("name", samples(False))
@pytest.mark.req("R-PT-01")
def test_opcheck(name):
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op(name), samples()[name], test_utils=utils)


@pytest.mark.slow
@pytest.mark.parametrize("name", samples(False))
@pytest.mark.req("R-PT-01")
def test_opcheck_of_traced_gradients(name):
    """Over symbolic shapes, which takes seconds."""
    torch.library.opcheck(op(name), samples()[name], test_utils="test_aot_dispatch_dynamic")


def test_every_op_is_here():
    assert len(OPS) == 4
    assert {o.name for o in OPS} == {name.split()[0] for name in samples(False)}


@pytest.mark.parametrize("name", samples(False))
@pytest.mark.req("R-PT-01")
def test_the_op_is_the_public_call(name):
    args = samples(False)[name]
    head = name.split()[0]
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"layerzero::{head}", key)
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    got, shaped = op(name)(*args), op(name)(*meta)
    for real, fake in zip(*([o] if isinstance(o, torch.Tensor) else o for o in (got, shaped)), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("name", samples(False))
@pytest.mark.req("R-PT-04")
def test_gradients_equal_those_of_plain_torch(name):
    plain = next(o.plain for o in OPS if o.name == name.split()[0])
    args = samples(dtype=torch.float64)[name]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    found = []
    for function in (op(name), plain):
        out = function(*args)
        first = out[0] if isinstance(out, tuple) else out
        slope = torch.arange(first.numel()).view(first.shape).cos()
        found.append((first, torch.autograd.grad((first * slope).sum(), leaves)))
    torch.testing.assert_close(found[0], found[1], check_stride=False)


# -- torch.compile ---------------------------------------------------------------------------------------------
def router(x, gate, gate_up, down, up):
    """A whole layer: router, experts, and a dense block beside them."""
    weights, ids = lz.topk_gate(x @ gate.mT, 2, scoring="sigmoid", num_groups=2, top_groups=1)
    routed = lz.moe(x, gate_up, down, weights, ids, expert_offset=1)
    sizes = torch.tensor([1, x.shape[0] - 2, 0])
    return routed + lz.mlp(x, up, down[0], activation="gelu") + lz.grouped_gemm(x, gate_up[:, :8], sizes)


def inputs(grad, dtype=torch.float32):
    return (
        rand(6, 8, grad=grad, dtype=dtype),
        rand(4, 8, grad=grad, dtype=dtype),
        rand(3, 16, 8, grad=grad, dtype=dtype),
        rand(3, 8, 8, grad=grad, dtype=dtype),
        rand(16, 8, grad=grad, dtype=dtype),
    )


@pytest.mark.req("R-PT-02")
def test_one_graph_of_opaque_ops_with_eager_numbers():
    counter = CompileCounter()
    with torch.no_grad():
        compiled = torch.compile(router, fullgraph=True, backend=counter)
        torch.testing.assert_close(compiled(*inputs(False)), router(*inputs(False)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.req("R-PT-02", "R-PT-04")
def test_one_graph_with_eager_gradients(dtype):
    """In bfloat16 the graph holds torch's grouped product, else the reference."""
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, router):
        leaves = inputs(True, dtype)
        out = function(*leaves)
        found.append((out, torch.autograd.grad(out.square().sum(), leaves)))
    assert_close([found[0][0], *found[0][1]], [found[1][0], *found[1][1]], tolerance("gradient", dtype))


def test_autocast_means_the_same_compiled():
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = compiled(*inputs(True)), router(*inputs(True))
    assert got.dtype == want.dtype
    assert_close(got, want, tolerance("mlp", torch.bfloat16))


# -- subclasses and transforms -----------------------------------------------------------------------------------
def test_fake_tensors_go_through_the_public_functions():
    with FakeTensorMode():
        x = torch.empty(5, 8, dtype=torch.bfloat16)
        weights, ids = lz.topk_gate(torch.empty(5, 6), 2)
        out = lz.moe(x, torch.empty(6, 16, 8).bfloat16(), torch.empty(6, 8, 8).bfloat16(), weights, ids)
        block = lz.mlp(x, torch.empty(4, 8).bfloat16(), torch.empty(3, 4).bfloat16())
        product = lz.grouped_gemm(x, torch.empty(2, 7, 8).bfloat16(), torch.empty(2, dtype=torch.int64))
    assert all(isinstance(item, FakeTensor) for item in (weights, ids, out, block, product))
    assert (weights.shape, weights.dtype, ids.dtype) == ((5, 2), torch.float32, torch.int64)
    assert (out.shape, out.dtype, block.shape, product.shape) == ((5, 8), torch.bfloat16, (5, 3), (5, 7))


@pytest.mark.parametrize("name", ["mlp", "topk_gate", "grouped_gemm", "moe"])
def test_vmap_over_the_first_tensor(name):
    first, *rest = samples(False)[name]
    batch = torch.stack((first, first + 0.5))
    got = torch.vmap(lambda x: op(name)(x, *rest))(batch)
    want = [op(name)(x, *rest) for x in batch]
    pairs = zip(got, zip(*want, strict=True), strict=True) if isinstance(got, tuple) else [(got, want)]
    for left, right in pairs:
        torch.testing.assert_close(left, torch.stack(list(right)))


def test_vmap_and_functional_gradients_over_the_public_functions():
    x, gate, gate_up, down, up = inputs(False)

    def loss(a, w):
        weights, ids = lz.topk_gate(a @ gate.mT, 2)
        return lz.moe(a, w, down, weights, ids).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1))(x, gate_up)
    x.requires_grad_(), gate_up.requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(loss(x, gate_up), (x, gate_up)))
    batch = torch.stack((x, x * 2)).detach()
    each = torch.vmap(lambda a: lz.mlp(a, up, down[0], activation="gelu"))(batch)
    torch.testing.assert_close(each, torch.stack([lz.mlp(a, up, down[0], activation="gelu") for a in batch]))

"""The opaque ops `torch.ops.layerzero.*`: registration, opcheck, fake shapes, gradients, autocast, subclasses, vmap."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import layerzero as lz
from layerzero._ops.signature import PUBLIC, public_form
from layerzero.model.op import Op
from layerzero.op_tables import LATE_OPS
from layerzero.runtime.current import opaque_ops
from layerzero.torch_ops import adopt, library
from layerzero.torch_ops.declared import opaque_of
from layerzero.torch_ops.functions import functions

OPAQUE = {name: opaque_of(PUBLIC[name]) for name in PUBLIC if name not in LATE_OPS}
OPS = [made for found in OPAQUE.values() for made in found if made.name != "linear_quantized"]
ALL_OPS = tuple(op.name for op in OPS)


def rand(*shape, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


def leaf(tensor):
    """The same numbers and strides, with a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def swapped(*tensors):
    return tuple(leaf(t.transpose(1, 2)) for t in tensors)


def angles(seq, half):
    theta = torch.arange(float(seq))[:, None] * torch.logspace(0, -2, half)
    return theta.cos(), theta.sin()


def qkv(grad=True, heads=4, kv_heads=2, seq_q=5, seq_k=5, dim=8):
    return (
        rand(2, heads, seq_q, dim, grad=grad),
        rand(2, kv_heads, seq_k, dim, grad=grad),
        rand(2, kv_heads, seq_k, dim, grad=grad),
    )


def pages(grad=True):
    tables, lens = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    query_lens = torch.tensor([2, 1], dtype=torch.int32)
    cache = (rand(4, 4, 2, 8, grad=grad), rand(4, 4, 2, 8, grad=grad))
    return rand(3, 4, 8, grad=grad), *cache, tables, lens, query_lens, [7, 4], [2, 1]


def samples(grad=True):
    """(op, args) for every op; every tensor that may have a gradient asks for one."""
    q, k, v = qkv(grad)
    x, residual, weight, bias = (
        rand(3, 4, 8, grad=grad),
        rand(3, 4, 8, grad=grad),
        rand(8, grad=grad),
        rand(8, grad=grad),
    )
    cos, sin = angles(5, 4)
    logits = rand(3, 11, grad=grad)
    (transposed,) = swapped(rand(2, 5, 4, 8, grad=grad))
    mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, 0, 1] = False
    codes = lz.quantize(rand(4, 32, grad=False), "int8", granularity="channel")
    packed = lz.quantize(rand(4, 32, grad=False), "nvfp4")
    return [
        ("attention", (q, k, v, None, "none", None, "BHSD", None, None, None, None, None)),
        ("attention", (q, k, v, mask, "none", 0.3, "BHSD", None, None, None, None, None)),
        ("attention", (transposed, k, v, None, "top_left", None, "BHSD", None, None, None, None, None)),
        ("attention", (*swapped(q, k, v), None, "bottom_right", None, "BSHD", [2, 0], 5.0,
                       torch.rand(4), rand(4, grad=grad), None)),
        ("attention", (*(leaf(t[:, 0]) for t in (q, k, v)), None, "none", None, "BHSD", None, None, None, None, None)),
        ("attention_lse", (q, k, v, mask, "none", None, "BHSD", None, None, None, None, None)),
        ("attention_lse", (*swapped(q, k, v), None, "top_left", None, "BSHD", None, None, None,
                           rand(4, grad=grad), None)),
        ("paged_attention", (*pages(grad), None, "NHD", None, None, None, None, True, None, None, None, None, None)),
        ("paged_attention_lse", (*pages(grad), 0.5, "NHD", [3, 0], None, None, rand(4, grad=grad), False, 0.5, None,
                                 None, rand(2, grad=False), None)),
        ("rms_norm", (x, weight, 1e-6, None)),
        ("rms_norm", (x, None, 1e-6, None)),
        ("rms_norm", (leaf(x.transpose(0, 1)), weight, 1e-6, None)),
        ("add_rms_norm", (x, residual, weight, 1e-6, None)),
        ("layer_norm", (x, weight, bias, 1e-5, None)),
        ("rope", (transposed, k, cos, sin, False, "BHSD", None, None)),
        ("rope_query", (q, cos[:, :2], sin[:, :2], True, "BHSD", torch.arange(5), None)),
        ("silu_and_mul", (x, None)),
        ("gelu_and_mul", (x, "tanh", None)),
        ("relu_and_mul", (x, None)),
        ("linear", (x, rand(6, 8, grad=grad), rand(6, grad=grad), "silu", None)),
        ("embedding", (torch.tensor([[1, 0, 3]]), rand(5, 8, grad=grad), None, None)),
        ("embedding_lookup", (torch.tensor([1, 0, 3]), rand(5, 8, grad=grad), 1, None)),
        ("sample_topk", (logits, 1, None, 1.0, None, None)),
        ("sample_topp", (logits, 0.5, None, 1.0, torch.zeros(3), None)),
        ("sample", (logits, None, torch.tensor([1, 1, 1]), 0.9, None, None, None, 1.0, None, None)),
        ("quantize", (rand(4, 32, grad=grad), "int8", "channel", None)),
        ("quantize", (rand(4, 32, grad=grad), "nvfp4", "block", None)),
        ("dequantize", (codes.data, codes.scale.clone().requires_grad_(grad), None, None, "int8", "channel", None,
                        [4, 32], torch.float32, None)),
        ("dequantize", (packed.data, packed.scale, None, packed.tensor_scale, "nvfp4", "block", 16, [4, 32],
                        torch.bfloat16, None)),
    ]  # fmt: skip


# Traced with gradients over symbolic shapes, these take seconds.
LONG = (
    "attention-2", "attention-3", "attention-4", "attention_lse-5", "attention_lse-6", "paged_attention-7",
    "paged_attention_lse-8", "rms_norm-11", "rope_query-15",
)  # fmt: skip


def cases(*, gradients):
    found = []
    for i, (name, _) in enumerate(samples(False)):
        label = f"{name}-{i}"
        marks = [pytest.mark.slow] if gradients and label in LONG else []
        if gradients or label in LONG:
            found.append(pytest.param(name, i, id=label, marks=marks))
    return found


def op(name):
    return getattr(torch.ops.layerzero, name).default


def check(name, args):
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if any(isinstance(item, torch.Tensor) and item.dtype == torch.float8_e4m3fn for item in args):
        utils = utils[1:]  # the schema check multiplies its inputs, which float8 cannot
    torch.library.opcheck(op(name), args, test_utils=utils)


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize(("name", "index"), cases(gradients=True))
def test_opcheck_with_gradients(name, index):
    check(name, samples()[index][1])


@pytest.mark.parametrize(("name", "index"), cases(gradients=False))
def test_opcheck_without_gradients(name, index):
    check(name, samples(False)[index][1])


def test_every_public_op_has_an_opaque_op_and_every_opaque_op_a_sample():
    assert set(OPAQUE) == set(PUBLIC) - set(LATE_OPS)
    assert set(OPAQUE) <= set(ALL_OPS)
    assert {name for name, _ in samples(False)} == set(ALL_OPS)


@pytest.mark.req("R-PT-01")
@pytest.mark.parametrize("name", ALL_OPS)
def test_ops_are_registered_for_cpu_cuda_and_meta(name):
    op(name)
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"layerzero::{name}", key)


@pytest.mark.req("R-PT-01")
def test_meta_tensors_give_meta_results():
    x = torch.empty(2, 3, 8, device="meta", dtype=torch.bfloat16)
    out = torch.ops.layerzero.rms_norm(x, x.new_empty(8), 1e-6)
    assert (out.device.type, out.shape, out.dtype) == ("meta", x.shape, x.dtype)


# -- gradients -------------------------------------------------------------------------------------
def doubles(args):
    return tuple(
        leaf(a.double() if a.dtype is torch.float32 else a) if isinstance(a, torch.Tensor) else a for a in args
    )


@pytest.mark.req("R-PT-04")
@pytest.mark.parametrize(
    "name", [o.name for o in OPS if o.plain is not None and o.name not in ("dequantize", "embedding_lookup")]
)
def test_gradients_equal_those_of_plain_torch(name):
    plain = next(o.plain for o in OPS if o.name == name)
    for args in (doubles(args) for found, args in samples() if found == name):
        inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        results = []
        for function in (op(name), plain):
            out = function(*args)
            outs = out if isinstance(out, tuple) else (out,)
            # every output gets a gradient that differs from place to place; a dead row's log-sum-exp is -inf
            total = sum((o.nan_to_num(neginf=0.0) * torch.arange(o.numel()).view(o.shape).cos()).sum() for o in outs)
            results.append((outs, torch.autograd.grad(total, inputs)))
        torch.testing.assert_close(results[0], results[1], check_stride=False)


def test_a_gradient_of_a_gradient_can_be_taken():
    x, weight = rand(2, 5).double(), rand(5).double()
    x, weight = leaf(x.detach().requires_grad_()), leaf(weight.detach().requires_grad_())
    assert torch.autograd.gradgradcheck(lambda a, b: torch.ops.layerzero.rms_norm(a, b, 1e-6), (x, weight))


@pytest.mark.req("R-PT-05")
def test_embedding_lookup_gives_the_padding_row_no_gradient():
    ids, table = torch.tensor([[2, 0, 2], [1, 1, 4]]), rand(5, 3)
    out = torch.ops.layerzero.embedding_lookup(ids, table, 1)
    assert torch.equal(out, table[ids])
    out.sum().backward()
    assert torch.equal(table.grad[:, 0], torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0]))


def test_ids_and_codes_carry_no_gradient():
    logits = rand(3, 11)
    assert not torch.ops.layerzero.sample_topk(logits, 2, None, 1.0, None).requires_grad
    assert not any(part.requires_grad for part in torch.ops.layerzero.quantize(logits, "int8", "tensor"))


# -- autocast --------------------------------------------------------------------------------------
def test_autocast_casts_where_the_public_op_does():
    q, k, v = qkv(grad=False)
    x, weight = rand(3, 8, grad=False), rand(6, 8, grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pairs = [
            (
                op("attention")(q, k, v, None, "top_left", None, "BHSD", None, None, None),
                lz.attention(q, k, v, is_causal=True),
            ),
            (op("linear")(x, weight, None, None), lz.linear(x, weight)),
            (op("rms_norm")(x, None, 1e-6), lz.rms_norm(x)),
        ]
    assert [got.dtype for got, _ in pairs] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for got, want in pairs:
        torch.testing.assert_close(got, want)


# -- memory order ----------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["sdpa.attention.math", "sdpa.attention.flash_cpu", "reference"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_memory_order_does_not_depend_on_the_kernel(backend, transposed):
    q, k, v = swapped(*(t.detach() for t in qkv())) if transposed else qkv(grad=False)
    layout = "BSHD" if transposed else "BHSD"
    out = op("attention")(q, k, v, None, "none", None, layout, None, None, None, None, backend)
    assert out.stride() == q.stride()


# -- tensor subclasses -----------------------------------------------------------------------------
class Wrapper(torch.Tensor):
    """Holds a tensor, writes down the ops it meets, and computes them on what it holds."""

    seen: list[str] = []  # noqa: RUF012 - shared on purpose

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapper, func(*args, **kwargs))


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


def calls_on(make):
    q, k, v = (make(t) for t in qkv(grad=False))
    x, weight = make(rand(3, 8, grad=False)), rand(8, grad=False)
    return {
        "rms_norm": lambda: lz.rms_norm(x, weight),
        "attention": lambda: lz.attention(q, k, v, is_causal=True),
        "attention_lse": lambda: lz.attention(q, k, v, return_lse=True),
        "rope": lambda: lz.rope(q, k, *angles(5, 4)),
        "rope_query": lambda: lz.rope(q, None, *angles(5, 4)),
        "sample_topk": lambda: lz.sample_topk(x, 1),
        "quantize": lambda: lz.quantize(x, "int8").data,
        "linear": lambda: lz.linear(x, make(rand(6, 8, grad=False))),
    }


@pytest.mark.parametrize("name", list(calls_on(lambda t: t)))
def test_a_wrapper_subclass_meets_the_opaque_op(name):
    Wrapper.seen.clear()
    got = calls_on(Wrapper)[name]()
    assert Wrapper.seen == [f"layerzero.{name}.default"]
    want = calls_on(lambda t: t)[name]()
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for left, right in pairs:
        if right is not None:
            assert type(left) is Wrapper
            torch.testing.assert_close(left.inner, right)


def test_a_plain_subclass_runs_and_keeps_its_type():
    x, weight = rand(3, 8, grad=False), rand(8, grad=False)
    got = lz.rms_norm(x.as_subclass(Named), weight)
    assert type(got) is Named
    torch.testing.assert_close(got.as_subclass(torch.Tensor), lz.rms_norm(x, weight))


def test_a_plain_subclass_has_gradients():
    x, weight = rand(3, 8), rand(8)
    lz.rms_norm(x.as_subclass(Named), weight).sum().backward()
    other_x, other_weight = leaf(x), leaf(weight)
    lz.rms_norm(other_x, other_weight).sum().backward()
    torch.testing.assert_close((x.grad, weight.grad), (other_x.grad, other_weight.grad))


def test_a_subclass_can_be_rotated_in_place():
    q, _, _ = qkv(grad=False)
    cos, sin = angles(5, 4)
    want = lz.rope(q, None, cos, sin)[0]
    named = q.clone().as_subclass(Named)
    got, _ = lz.rope(named, None, cos, sin, inplace=True)
    assert got is named
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want)


def test_dropout_on_a_subclass_is_plain_torch():
    q, k, v = qkv()
    torch.manual_seed(0)
    out = lz.attention(q.as_subclass(Named), k, v, dropout_p=0.5)
    out.sum().backward()
    assert (out != lz.attention(q, k, v)).any()
    assert q.grad is not None


# -- fake tensors and functorch --------------------------------------------------------------------
def test_fake_tensors_go_through_the_public_function():
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, 8).transpose(1, 2)
        kv = torch.empty(2, 4, 5, 8).transpose(1, 2)
        out, lse = lz.attention(q, kv, kv, layout="BSHD", return_lse=True)
        normed = lz.rms_norm(torch.empty(3, 8, dtype=torch.bfloat16), torch.empty(8))
    assert isinstance(out, FakeTensor) and isinstance(normed, FakeTensor)
    assert (out.shape, out.stride(), lse.shape, lse.dtype) == (q.shape, q.stride(), (2, 4, 5), torch.float32)
    assert (normed.shape, normed.dtype) == ((3, 8), torch.bfloat16)


def test_vmap_over_public_functions():
    x, weight = rand(4, 3, 8, grad=False), rand(4, 8, grad=False)
    torch.testing.assert_close(
        torch.vmap(lz.rms_norm)(x, weight), torch.stack([lz.rms_norm(a, b) for a, b in zip(x, weight, strict=True)])
    )
    q, k, v = (torch.stack((t, t + 1)) for t in qkv(grad=False))
    torch.testing.assert_close(
        torch.vmap(lambda a, b, c: lz.attention(a, b, c, is_causal=True), in_dims=(0, 0, None))(q, k, v[0]),
        torch.stack([lz.attention(q[i], k[i], v[0], is_causal=True) for i in range(2)]),
    )


def test_vmap_over_an_opaque_op():
    x, residual = rand(4, 3, 8, grad=False), rand(3, 4, 8, grad=False)
    got = torch.vmap(lambda a, b: torch.ops.layerzero.add_rms_norm(a, b, None, 1e-6), in_dims=(0, 1))(x, residual)
    want = [lz.add_rms_norm(x[i], residual[:, i]) for i in range(4)]
    torch.testing.assert_close(got, tuple(torch.stack(parts) for parts in zip(*want, strict=True)))


def test_functional_gradients_of_public_functions():
    x, weight = rand(3, 8, grad=False), rand(8, grad=False)
    got = torch.func.grad(lambda a, b: lz.rms_norm(a, b).square().sum(), argnums=(0, 1))(x, weight)
    x.requires_grad_(), weight.requires_grad_()
    lz.rms_norm(x, weight).square().sum().backward()
    torch.testing.assert_close(got, (x.grad, weight.grad))


def test_a_plugins_op_that_comes_again_brings_its_own_shapes():
    def lab_repeat(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), dim=-1)

    library.register()
    try:
        for width in (6, 9):
            fake = functools.partial(lambda width, x: x.new_empty((*x.shape[:-1], width)), width)
            adopt(public_form(Op(function=lab_repeat, describe=lambda call: None, fake=fake)))
            assert torch.ops.layerzero.lab_repeat(torch.empty(2, 3, device="meta")).shape == (2, width)
    finally:
        functions._declared.pop("lab_repeat")
        functions._helpers.pop("lab_repeat")
        opaque_ops.pop("lab_repeat")

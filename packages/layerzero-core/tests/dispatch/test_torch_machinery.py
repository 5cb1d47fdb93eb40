"""What torch's own machinery sees of a call: forward-mode AD, tracers, dispatch modes, fakes, counters, profilers.

Each public op is called three times before it is looked at, so that what is looked at is a hot call: by the C form
where layerzero-accel is installed, by the function in Python as well where a test says so.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.errors import KernelExecutionError
from layerzero.runtime.state import state
from layerzero_tune.blocks.block import Block, Ref, Step

_spec = importlib.util.spec_from_file_location("torch_calls", Path(__file__).with_name("torch_calls.py"))
torch_calls = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(torch_calls)
rand, results = torch_calls.rand, torch_calls.results

CALLS = torch_calls.calls()
every_op = pytest.mark.parametrize(("call", "inputs"), [item[1:] for item in CALLS], ids=[item[0] for item in CALLS])


@pytest.fixture(autouse=True)
def _no_breaker_opens():
    yield
    assert not state.health.snapshot().kernels


def heated(call, inputs):
    for _ in range(3):
        call(*inputs)
    return call


class Seen(TorchDispatchMode):
    """The names of all ops that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# -- forward-mode AD -----------------------------------------------------------------------------------------------
def pushed(call, inputs, directions):
    """Results and tangents of a call on dual tensors."""
    with forward_ad.dual_level():
        outs = results(call(*(forward_ad.make_dual(x, v) for x, v in zip(inputs, directions, strict=True))))
        return [forward_ad.unpack_dual(item) for item in outs]


@pytest.mark.fault(1)
@every_op
def test_the_tangent_agrees_with_the_gradient(call, inputs):
    """⟨u, J v⟩ = ⟨Jᵀ u, v⟩: forward mode by the plain formula, reverse mode by the kernel that runs."""
    heated(call, inputs)
    directions = [rand(*x.shape, seed=7) for x in inputs]
    found = pushed(call, inputs, directions)
    assert all(item.tangent is not None for item in found)
    for x, y in zip(results(call(*inputs)), found, strict=True):
        torch.testing.assert_close(y.primal, x, rtol=1e-4, atol=1e-5)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outs = results(call(*leaves))
    weights = [rand(*item.shape, seed=8, dtype=item.dtype) for item in outs]
    grads = torch.autograd.grad(outs, leaves, weights)
    forward = sum((u.double() * y.tangent.double()).sum() for u, y in zip(weights, found, strict=True))
    backward = sum((g.double() * v.double()).sum() for g, v in zip(grads, directions, strict=True))
    torch.testing.assert_close(forward, backward, rtol=1e-4, atol=1e-4)


FORMULAS = {
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w, 1e-6),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5),
    "silu_and_mul": lambda x: F.silu(x[..., :4]) * x[..., 4:],
    "linear": F.linear,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 0, 6])),
    "attention": lambda q, k, v: torch.softmax(q @ k.mT * 8**-0.5, dim=-1) @ v,
}


@pytest.mark.fault(1)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("in_python", [False, True])
def test_the_tangent_is_that_of_the_torch_formula(name, in_python):
    call, inputs = next(item[1:] for item in CALLS if item[0] == name)
    if in_python:
        function = PUBLIC[name].function
        labels = (torch.tensor([1, 0, 6]),) if name == "cross_entropy" else ()
        call = lambda *given: function(*given, *labels)  # noqa: E731 # as those of torch_calls
    heated(call, inputs)
    directions = tuple(rand(*x.shape, seed=9) for x in inputs)
    _, expected = torch.func.jvp(FORMULAS[name], inputs, directions)
    (found,) = pushed(call, inputs, directions)
    torch.testing.assert_close(found.tangent, expected, rtol=1e-4, atol=1e-5)
    _, functional = torch.func.jvp(call, inputs, directions)
    torch.testing.assert_close(functional, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.fault(1)
def test_a_torch_op_and_a_planned_call_keep_the_tangent():
    x, weight = rand(3, 8), rand(8)
    planned = lz.plan("rms_norm", x, weight)
    query = rand(1, 2, 4, 8)
    attending, linear = lz.plan("attention", query, query, query), lz.plan("linear", x, rand(6, 8))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        expected = forward_ad.unpack_dual(F.rms_norm(dual, (8,), weight, 1e-6)).tangent
        for call in (planned, lambda x, w: torch.ops.layerzero.rms_norm(x, w, 1e-6)):
            torch.testing.assert_close(forward_ad.unpack_dual(call(dual, weight)).tangent, expected)
        turned = forward_ad.make_dual(query, torch.ones_like(query))
        assert forward_ad.unpack_dual(attending(turned, turned, turned)).tangent is not None
        assert forward_ad.unpack_dual(linear(dual, rand(6, 8))).tangent is not None
        assert forward_ad.unpack_dual(lz.rms_norm(x, weight)).tangent is None  # no tangent came in


@pytest.mark.fault(1)
def test_a_kernel_that_knows_no_tangent_is_refused_where_nothing_else_may_run():
    x = rand(3, 8)
    if not lz.which("rms_norm", x).startswith("cpu."):
        pytest.skip("layerzero-cpu is not here")
    with forward_ad.dual_level(), pytest.raises(KernelExecutionError) as raised:
        lz.rms_norm(forward_ad.make_dual(x, x), backend="cpu")
    assert raised.value.code == "TRANSFORM_UNSUPPORTED"
    with forward_ad.dual_level():
        out = lz.rms_norm(forward_ad.make_dual(x, x), backend="torch")
        assert forward_ad.unpack_dual(out).tangent is not None


# -- tracers -------------------------------------------------------------------------------------------------------
@pytest.mark.fault(3)
@every_op
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_computes_for_new_inputs(call, inputs):
    """Nothing was baked in, and the tracer has warned of nothing."""
    heated(call, inputs)
    others = tuple(x * 1.5 for x in inputs)
    expected = results(call(*others))
    for traced in (torch.jit.trace(call, inputs), make_fx(call)(*inputs)):
        for mine, theirs in zip(results(traced(*others)), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.fault(3)
@every_op
def test_modes_see_one_op_by_name_and_fakes_stay_fake(call, inputs):
    heated(call, inputs)
    with Seen() as seen:
        out = call(*inputs)
    assert [name for name in seen.names if name.startswith("layerzero.")], seen.names
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = call(*inputs)
    for mine, real in zip(results(fakes), results(out), strict=True):
        assert isinstance(mine, FakeTensor)
        assert (mine.shape, mine.dtype) == (real.shape, real.dtype)


@pytest.mark.fault(3)
def test_draws_and_codes_are_seen_as_well():
    logits, x = rand(2, 16), rand(4, 32)
    with Seen() as seen:
        lz.sample(logits, top_k=3)
        lz.sample_topk(logits, 2)
        lz.sample_topp(logits, 0.9)
        lz.dequantize(lz.quantize(x, "int8"))
    for name in ("sample", "sample_topk", "sample_topp", "quantize", "dequantize"):
        assert f"layerzero.{name}.default" in seen.names


@pytest.mark.fault(3)
def test_a_mode_belongs_to_its_thread():
    x, found = rand(3, 8), []
    heated(lz.rms_norm, (x,))
    with Seen() as seen:
        thread = threading.Thread(target=lambda: found.append(lz.rms_norm(x)))
        thread.start()
        thread.join()
        assert not seen.names
        lz.rms_norm(x)
    assert seen.names == ["layerzero.rms_norm.default"]
    assert found


@pytest.mark.fault(3)
def test_gradients_pass_through_a_mode():
    x, weight = rand(3, 8).requires_grad_(), rand(8).requires_grad_()
    expected = torch.autograd.grad(F.rms_norm(x, (8,), weight, 1e-6).sum(), (x, weight))
    with Seen() as seen:
        found = torch.autograd.grad(lz.rms_norm(x, weight).sum(), (x, weight))
    assert "layerzero.rms_norm.default" in seen.names
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# -- counters and profilers ----------------------------------------------------------------------------------------
def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.fault(3)
def test_flops_are_those_of_the_torch_formula():
    q, k, v = (rand(2, 4, 6, 8, seed=seed) for seed in range(3))
    x, up, down, gate = rand(3, 4, 8), rand(6, 8), rand(8, 6), rand(6, 8)
    with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's on a CPU that its counter knows
        expected = flops(lambda: F.scaled_dot_product_attention(q, k, v))
    assert flops(lambda: lz.attention(q, k, v)) == expected > 0
    turned = [item.transpose(1, 2) for item in (q, k, v)]
    assert flops(lambda: lz.attention(*turned, layout="BSHD", is_causal=True, return_lse=True)) == expected
    assert flops(lambda: lz.linear(x, up, rand(6))) == flops(lambda: F.linear(x, up, rand(6))) > 0
    plain = flops(lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))
    assert flops(lambda: lz.mlp(x, up, down, gate)) == plain > 0
    packed, offsets = rand(12, 4, 8), torch.tensor([0, 6, 12], dtype=torch.int32)
    each = flops(lambda: lz.attention(*(rand(2, 4, 6, 8) for _ in range(3))))
    assert flops(lambda: lz.varlen_attention(packed, packed, packed, offsets, offsets)) == each
    weights, sizes = rand(3, 6, 8), torch.tensor([5, 0, 7])
    tokens = rand(12, 8)
    products = flops(lambda: [tokens[:5] @ weights[0].T, tokens[5:] @ weights[2].T])
    assert flops(lambda: lz.grouped_gemm(tokens, weights, sizes)) == products


@pytest.mark.fault(3)
def test_a_training_step_has_the_flops_of_torchs():
    x, weight = rand(3, 8).requires_grad_(), rand(6, 8).requires_grad_()
    expected = flops(lambda: F.linear(x, weight).sum().backward())
    assert flops(lambda: lz.linear(x, weight).sum().backward()) == expected > 0


@pytest.mark.fault(3)
@pytest.mark.parametrize("in_python", [False, True])
def test_a_profiler_sees_the_call_by_name_and_the_kernel_that_runs_without_it(in_python):
    norm, attend = (PUBLIC[name].function if in_python else getattr(lz, name) for name in ("rms_norm", "attention"))
    x, query = rand(3, 8).requires_grad_(), rand(1, 2, 4, 8)
    heated(norm, (x,)), heated(attend, (query, query, query))
    kind = type(norm(x).grad_fn)
    with torch.autograd.profiler.profile() as found:
        out = norm(x)
        attend(query, query, query)
    assert type(out.grad_fn) is kind
    names = [event.name for event in found.function_events]
    assert names.count("layerzero::rms_norm") == names.count("layerzero::attention") == 1
    with torch.autograd.profiler.profile() as found:
        torch.ops.layerzero.rms_norm(x.detach(), None, 1e-6)
    assert [event.name for event in found.function_events].count("layerzero::rms_norm") == 1


# -- gradients of gradients ------------------------------------------------------------------------------------------
TWICE = ("rms_norm", "rms_norm without a weight", "add_rms_norm", "layer_norm", "gemma_rms_norm", "gemma_add_rms_norm",
         "silu_and_mul", "gelu_and_mul", "relu_and_mul", "rope", "linear", "linear with an activation",
         "cross_entropy")  # fmt: skip


def twice(call, inputs):
    """Gradients of the squares of the gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outs = results(call(*leaves))
    weights = [rand(*item.shape, seed=4) for item in outs]
    first = torch.autograd.grad([(o * o) for o in outs], leaves, weights, create_graph=True)
    return torch.autograd.grad(sum((g * g).sum() for g in first), leaves)


@pytest.mark.fault(8)
@pytest.mark.parametrize("name", TWICE)
def test_a_gradient_of_a_gradient_is_that_of_the_plain_formula(name):
    call, inputs = next(item[1:] for item in CALLS if item[0] == name)
    heated(call, inputs)
    found = twice(call, inputs)
    with lz.scoped(allow=["reference"]):
        expected = twice(call, inputs)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


class Vendor(torch.autograd.Function):
    """A vendor's norm: its backward runs where autograd sees nothing."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)

    @staticmethod
    def backward(ctx, grad):
        x, weight = (item.detach().requires_grad_() for item in ctx.saved_tensors)
        with torch.enable_grad():
            out = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
        return torch.autograd.grad(out, (x, weight), grad.detach())


@pytest.mark.fault(8)
def test_a_vendors_backward_that_cannot_be_derived_again_is_refused_and_not_taken_for_constant(lab):
    lab.use(lab.kernel("vendor.rms_norm.own", lambda x, w, eps: Vendor.apply(x, w), priority=99.0))
    x, w = rand(3, 8, seed=1).requires_grad_(), torch.ones(8, requires_grad=True)
    with lz.scoped(locks={"rms_norm": "vendor.rms_norm.own"}):
        lz.rms_norm(x, w).sum().backward()  # once is what it can do
        grad, x.grad = x.grad, None
        torch.testing.assert_close(grad, torch.autograd.grad(F.rms_norm(x, (8,), w, 1e-6).sum(), x)[0])
        out = (lz.rms_norm(x, w) * x).sum()  # another way to x: nothing but us would notice
        with pytest.raises(KernelExecutionError) as caught:
            torch.autograd.grad(out, x, create_graph=True)
    assert caught.value.code == "DOUBLE_BACKWARD_UNSUPPORTED" and "vendor.rms_norm.own" in str(caught.value)
    assert not state.health.snapshot().kernels

    def penalty(norm):
        (grad,) = torch.autograd.grad((norm(x) * x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    with lz.scoped(prefer=["torch", "reference"]):  # what the hint says
        torch.testing.assert_close(
            penalty(lambda x: lz.rms_norm(x, w)), penalty(lambda x: F.rms_norm(x, (8,), w, 1e-6))
        )


@pytest.mark.fault(3)
@pytest.mark.parametrize("name", ["rms_norm", "attention", "silu_and_mul", "layer_norm", "rope"])
def test_a_trace_before_dispatch_computes_for_new_inputs(name):
    """Hot calls under make_fx(pre_dispatch=True), whose modes have a stack of their own; a default device is none."""
    call, inputs = next(item[1:] for item in CALLS if item[0] == name)
    heated(call, inputs)
    graph = make_fx(lambda *given: results(call(*given)), pre_dispatch=True)(*inputs)
    assert any("layerzero" in str(node.target) for node in graph.graph.nodes)
    others = tuple(rand(*x.shape, seed=77) for x in inputs)
    torch.testing.assert_close(graph(*others), results(call(*others)))
    misses = lz.metrics()["layerzero_misses_total"]
    with torch.device("cpu"):
        call(*inputs)
    assert lz.metrics()["layerzero_misses_total"] == misses  # still hot


@pytest.mark.fault(1)
def test_a_block_plan_refuses_a_tangent_instead_of_losing_it():
    x, w = rand(2, 8, seed=1), torch.ones(8)
    plan = lz.plan_block(
        Block("one", ("x",), (Step("rms_norm", (Ref("x"), Ref("w"), 1e-6), ("out",)),), ("out",)), {"x": x, "w": w}
    )
    with forward_ad.dual_level():
        with pytest.raises(KernelExecutionError) as caught:
            plan(forward_ad.make_dual(x, torch.ones_like(x)))
        plan(x)  # nothing to lose
    assert caught.value.code == "TRANSFORM_UNSUPPORTED"

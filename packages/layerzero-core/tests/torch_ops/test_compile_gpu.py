"""torch.compile on a GPU: torch's kernels written out, foreign ones as ops, norms fused, vetoes as in eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import layerzero as lz
from layerzero._ops.attention import ATTENTION
from layerzero.torch_ops import basis

pytestmark = pytest.mark.gpu

KERNELS = {name: f"aten._scaled_dot_product_{name}_attention.default" for name in ("flash", "efficient", "cudnn")}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    lz.reset()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    lz.reset()


def rand(*shape: int, seed: int = 0, grad: bool = False) -> Any:
    draw = torch.Generator("cuda").manual_seed(seed * 7919 + sum(shape))
    return torch.randn(*shape, generator=draw, device="cuda").to(torch.bfloat16).requires_grad_(grad)


def compiled(function: Any) -> tuple[Any, Any]:
    counter = CompileCounterWithBackend("inductor")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def targets(counter: Any) -> list[str]:
    return [str(node.target) for node in counter.graphs[-1].graph.nodes if node.op == "call_function"]


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "scaled": {"scale": -0.25},
    "mask": {"attn_mask": lambda: rand(96, 101).float() > 0},
    "bias": {"attn_mask": lambda: rand(2, 1, 96, 101)},
}


def given(options: str) -> dict[str, Any]:
    return {name: item() if callable(item) else item for name, item in OPTIONS[options].items()}


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_torch_is_written_out_and_computes_what_it_computes_in_eager(
    name: str, layout: str, options: str
) -> None:
    lengths = (96, 96) if options == "causal" else (96, 101)
    q, k = rand(2, 8, lengths[0], 64), rand(2, 2, lengths[1], 64)
    if layout == "BSHD":
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    words = given(options)

    def run(q: Any, k: Any) -> Any:
        return lz.attention(q, k, k, layout=layout, backend=f"sdpa.attention.{name}", **words)

    if name == "flash" and "attn_mask" in words:  # torch's flash kernel takes none, in a graph or out of it
        with torch.no_grad(), pytest.raises(lz.errors.NoKernelFoundError):
            run(q, k)
        return
    with torch.no_grad():
        want = run(q, k)
        call, counter = compiled(run)
        got = call(q, k)
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)
    found = targets(counter)
    assert KERNELS[name] in found and "layerzero" not in str(found)


@pytest.mark.req("R-PT-04")
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_torch_has_its_own_gradient_in_a_graph(name: str) -> None:
    lz.lock("attention", f"sdpa.attention.{name}")

    def run(q: Any, k: Any, v: Any) -> Any:
        return lz.attention(q, k, v, is_causal=True)

    results = []
    call, counter = compiled(run)
    for function in (call, run):
        # K and V apart: the sum of two gradients that cancel has no digits left in bfloat16.
        inputs = [rand(2, heads, 128, 64, seed=seed, grad=True) for seed, heads in enumerate((8, 2, 2))]
        out = function(*inputs)
        results.append((out, torch.autograd.grad(out.float().square().sum(), inputs)))
    torch.testing.assert_close(results[0], results[1], rtol=3e-2, atol=3e-2)
    assert KERNELS[name] in targets(counter)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 64), (64, 64), (128, 128)])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_torch_refuses_fake_tensors_as_it_refuses_real_ones(
    causal: bool, heads: tuple[int, int], lengths: tuple[int, int], head_dim: int
) -> None:
    """Else a graph would hold a kernel that an eager call is not given."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    world = basis.current_world()
    q, k = rand(2, heads[0], lengths[0], head_dim), rand(2, heads[1], lengths[1], head_dim)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q), mode.from_tensor(k)
    rest = (None, 0.0, causal, None, None, None, None, False)
    question = basis.Question("attention", (fake[0], fake[1], fake[1], *rest), "BHSD", None, False)
    real = basis.describe(ATTENTION, (q, k, k, *rest), "BHSD", None, world)
    assert basis._context(ATTENTION, question, {}, world).vetoed == real.vetoed


@pytest.mark.req("R-PT-02")
def test_a_selected_block_has_its_norms_fused_and_at_most_attention_and_products_opaque() -> None:
    gain, weight = rand(512), rand(512, 512)
    cos, sin = (rand(64, 32, seed=i).float() for i in (1, 2))

    def run(x: Any) -> Any:
        q = lz.linear(lz.rms_norm(x, gain), weight).unflatten(-1, (8, 64))
        q, k = lz.rope(q, q, cos, sin, layout="BSHD")
        out = lz.attention(q, k, k, is_causal=True, layout="BSHD").flatten(-2)
        normed, stream = lz.add_rms_norm(out, x, gain)
        return lz.silu_and_mul(normed), stream

    x = rand(1, 64, 512)
    with torch.no_grad():
        for _ in range(2):
            run(x)
        call, counter = compiled(run)
        for _ in range(3):  # the first is looked up, the others are kept
            torch.testing.assert_close(call(x), run(x), rtol=3e-2, atol=3e-2)
    ops = {word for word in targets(counter) if "layerzero" in word}
    assert ops <= {"layerzero.attention.call", "layerzero.linear.call"}
    for op, args in {"rms_norm": (x, gain), "silu_and_mul": (x,)}.items():
        chosen = lz.which(op, *args, compiled=True)
        assert lz.list_kernels(op) and chosen.split(".")[0] in ("torch", "reference", "inductor")


@pytest.mark.req("R-GRAPH-04")
def test_an_opaque_attention_of_a_compiled_graph_is_captured() -> None:
    def run(q: Any, k: Any) -> Any:
        return lz.attention(q, k, k, is_causal=True) * 2

    call, _ = compiled(run)
    q, k = rand(2, 8, 64, 64), rand(2, 2, 64, 64)
    with torch.no_grad():
        for _ in range(3):
            call(q, k)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(q, k)
        q.copy_(rand(2, 8, 64, 64, seed=5))
        graph.replay()
        torch.testing.assert_close(out, run(q, k), rtol=1.6e-2, atol=1e-2)

"""Liger's kernels on a GPU against the reference in float64, forward and backward, and captured in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.backends.reference import feed_forward, positional
from layerzero.backends.reference import feed_forward as reference_mlp
from layerzero.backends.reference import loss as reference_loss
from layerzero.backends.reference import norm as reference_norm
from layerzero.numerics import Tolerance, assert_close, tolerance

# The vendor warns while it compiles; that is not ours to fail on.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True, scope="module")
def library() -> Any:
    return pytest.importorskip("liger_kernel.ops", reason="liger-kernel is not installed")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def compare(op: str, run: Any, truth: Any, *tensors: torch.Tensor, twice: bool = True, k: int | None = None) -> None:
    bounds = tolerance(op, tensors[0].dtype, k=k)
    before = [item.clone() for item in tensors]
    with torch.no_grad():
        found, expected = as_tuple(run(*tensors)), as_tuple(truth(*(item.double() for item in tensors)))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, bounds)
    mine = [item.clone().requires_grad_() for item in tensors]
    wide = [item.double().requires_grad_() for item in tensors]
    out, right = as_tuple(run(*mine)), as_tuple(truth(*wide))
    weights = [randn(*item.shape, seed=9, dtype=item.dtype) for item in out]
    kept = [item.clone() for item in weights]
    got = torch.autograd.grad(out, mine, weights, retain_graph=twice)
    wanted = torch.autograd.grad(right, wide, [item.double() for item in weights])
    for one, three in zip(got, wanted, strict=True):
        assert_close(one, three, Tolerance(bounds.rtol * 20, bounds.atol * 20))  # the kit's factor for gradients
    if twice:
        again = torch.autograd.grad(out, mine, weights)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "a second backward differs"
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)), "an input was changed"
    assert all(torch.equal(a, b) for a, b in zip(kept, weights, strict=True)), "an incoming gradient was changed"


@pytest.mark.req("R-BK-LG-02")
@pytest.mark.req("R-BK-LG-04")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 4096), (3, 5, 261)])
def test_norms_match_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from layerzero_liger import norm

    truth = reference_norm
    x, residual = (randn(*shape, seed=seed, dtype=dtype) for seed in (0, 1))
    weight, bias = (randn(shape[-1], seed=seed, dtype=dtype) for seed in (2, 3))
    compare("rms_norm", lambda x, w: norm.rms_norm(x, w, 1e-6), lambda x, w: truth.rms_norm(x, w, 1e-6), x, weight)
    compare("rms_norm", lambda x: norm.rms_norm(x, None, 1e-6), lambda x: truth.rms_norm(x, None, 1e-6), x)
    compare(
        "rms_norm",
        lambda x, w: norm.gemma_rms_norm(x, w, 1e-6),
        lambda x, w: truth.gemma_rms_norm(x, w, 1e-6),
        x,
        weight,
    )
    for mine, right in ((norm.add_rms_norm, truth.add_rms_norm), (norm.gemma_add_rms_norm, truth.gemma_add_rms_norm)):
        compare(
            "add_rms_norm",
            lambda x, r, w, f=mine: f(x, r, w, 1e-6),
            lambda x, r, w, f=right: f(x, r, w, 1e-6),
            x,
            residual,
            weight,
        )
    compare(
        "layer_norm",
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: truth.layer_norm(x, w, b, 1e-5),
        x,
        weight,
        bias,
    )


@pytest.mark.req("R-BK-LG-02")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 2048), (1, 640), (2, 3, 250)])
def test_gated_activations_match_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from layerzero_liger import gated

    x = randn(*shape, dtype=dtype)
    compare("silu_and_mul", gated.silu_and_mul, reference_mlp.silu_and_mul, x)
    compare("gelu_and_mul", lambda x: gated.gelu_and_mul(x, "tanh"), lambda x: reference_mlp.gelu_and_mul(x, "tanh"), x)


@pytest.mark.req("R-BK-LG-04", "R-BK-LG-02")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "rotary_dim"), [("BSHD", 128), ("BHSD", 128), ("BSHD", 64)])
def test_rope_matches_the_reference(layout: str, rotary_dim: int, table_dtype: torch.dtype, dtype: torch.dtype) -> None:
    from layerzero_liger import rotary

    q, k = randn(2, 50, 8, 128, dtype=dtype), randn(2, 50, 2, 128, seed=1, dtype=dtype)
    if layout == "BHSD":
        q, k = (item.transpose(1, 2).contiguous() for item in (q, k))
    angles = randn(64, rotary_dim // 2, seed=2)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)

    def truth(q: torch.Tensor, k: torch.Tensor) -> Any:
        return positional.rope(q, k, cos.double(), sin.double(), False, layout, None, False)

    compare("rope", lambda q, k: rotary.rope(q, k, cos, sin, False, layout, None, False), truth, q, k)


@pytest.mark.req("R-BK-LG-02")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", [(None, None, None), (0.1, 30.0, 1e-4)])
def test_cross_entropy_matches_the_reference(options: Any, reduction: str, dtype: torch.dtype) -> None:
    from layerzero_liger import loss

    logits, labels = randn(64, 5000, dtype=dtype) * 3, torch.randint(0, 5000, (64,), device="cuda")
    labels[::7] = -100
    compare(
        "cross_entropy",
        lambda x: loss.cross_entropy(x, labels, -100, *options, reduction, False),
        lambda x: reference_loss.cross_entropy(x, labels, -100, *options, reduction, False),
        logits,
    )


@pytest.mark.req("R-BK-LG-02")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_block_matches_the_reference(dtype: torch.dtype, packed: bool) -> None:
    from layerzero_liger import mlp

    hidden, inner = 256, 384
    x = randn(3, 40, hidden, dtype=dtype) / 4
    gate, up = (randn(inner, hidden, seed=seed, dtype=dtype) / 16 for seed in (1, 2))
    down = randn(hidden, inner, seed=3, dtype=dtype) / 16
    weights = (torch.cat((gate, up)), down) if packed else (up, down, gate)

    def run(function: Any, x: Any, up: Any, down: Any, gate: Any = None) -> Any:
        return function(x, up, down, gate, "silu", None, None, None)

    compare(
        "mlp",
        lambda *t: run(mlp.mlp, *t),
        lambda *t: run(feed_forward.mlp, *t),
        x,
        *weights,
        twice=False,
        k=inner,
    )


def test_the_fused_block_refuses_to_run_backward_twice() -> None:
    """It overwrites what it saved; a second run would be wrong without a word."""
    from layerzero_liger import mlp

    x = randn(4, 64, dtype=torch.bfloat16).requires_grad_()
    up, gate, down = randn(64, 64, dtype=torch.bfloat16), randn(64, 64, dtype=torch.bfloat16), randn(64, 64)
    out = mlp.mlp(x, up, down.to(torch.bfloat16), gate, "silu", None, None, None).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once"):
        out.backward()


def test_captured_calls_can_be_replayed() -> None:
    from layerzero_liger import gated, norm, rotary

    x, residual = randn(64, 1024, dtype=torch.bfloat16), randn(64, 1024, seed=1, dtype=torch.bfloat16)
    weight, bias = (randn(1024, seed=seed, dtype=torch.bfloat16) for seed in (2, 3))
    heads, angles = x.view(1, 64, 8, 128), randn(64, 64, seed=3)
    calls = {
        "rms_norm": lambda: norm.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: norm.add_rms_norm(x, residual, weight, 1e-6)[0],
        "layer_norm": lambda: norm.layer_norm(x, weight, bias, 1e-5),
        "silu_and_mul": lambda: gated.silu_and_mul(x),
        "gelu_and_mul": lambda: gated.gelu_and_mul(x, "tanh"),
        "rope": lambda: rotary.rope(heads, heads, angles.cos(), angles.sin(), False, "BSHD", None, False)[0],
    }
    for name, call in calls.items():
        with torch.no_grad():
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call()
            x.copy_(randn(64, 1024, seed=len(name), dtype=torch.bfloat16))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, call()), name


def test_the_known_answers_are_given() -> None:
    from layerzero_liger.health import self_test

    report = self_test()
    assert report.ok, report.detail

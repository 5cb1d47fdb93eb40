"""QuACK's kernels on a GPU against the reference in float64, forward and backward, and captured in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.backends.reference import loss as reference_loss
from layerzero.backends.reference import norm as reference_norm
from layerzero.backends.reference import positional
from layerzero.numerics import Tolerance, assert_close, tolerance

# The vendor warns while it compiles; that is not ours to fail on.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True, scope="module")
def library() -> Any:
    return pytest.importorskip("quack", reason="quack-kernels is not installed")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def compare(op: str, run: Any, truth: Any, *tensors: torch.Tensor) -> None:
    bounds = tolerance(op, tensors[0].dtype)
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
    got = torch.autograd.grad(out, mine, weights, retain_graph=True)
    again = torch.autograd.grad(out, mine, weights)
    wanted = torch.autograd.grad(right, wide, [item.double() for item in weights])
    for one, two, three in zip(got, again, wanted, strict=True):
        assert_close(one, three, Tolerance(bounds.rtol * 20, bounds.atol * 20))  # the kit's factor for gradients
        assert torch.equal(one, two), "running backward a second time gave another gradient"
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)), "an input was changed"
    assert all(torch.equal(a, b) for a, b in zip(kept, weights, strict=True)), "an incoming gradient was changed"


@pytest.mark.parametrize(
    ("shape", "dtype"), [((16, 4096), torch.bfloat16), ((3, 5, 264), torch.float16), ((33, 1024), torch.float32)]
)
def test_norms_match_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from layerzero_flashattn.quack import norm

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
    compare(
        "layer_norm",
        lambda x, w: norm.layer_norm(x, w, None, 1e-5),
        lambda x, w: truth.layer_norm(x, w, None, 1e-5),
        x,
        weight,
    )


def test_a_float32_weight_and_rows_out_of_a_wider_tensor() -> None:
    from layerzero_flashattn.quack import norm

    wide = randn(32, 3 * 512, dtype=torch.bfloat16)
    weight = randn(512, seed=1)
    with torch.no_grad():
        for part in wide.split(512, dim=-1):
            found = norm.rms_norm(part, weight, 1e-6)
            right = reference_norm.rms_norm(part.double(), weight.double(), 1e-6)
            assert_close(found, right, tolerance("rms_norm", torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("layout", "rotary_dim"), [("BSHD", 128), ("BHSD", 128), ("BSHD", 64)])
def test_rope_matches_the_reference(layout: str, rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    from layerzero_flashattn.quack import rotary

    q, k = randn(2, 100, 8, 128, dtype=dtype), randn(2, 100, 2, 128, seed=1, dtype=dtype)
    if layout == "BHSD":
        q, k = (item.transpose(1, 2).contiguous() for item in (q, k))
    angles = randn(120, rotary_dim // 2, seed=2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def truth(q: torch.Tensor, k: torch.Tensor) -> Any:
        return positional.rope(q, k, cos.double(), sin.double(), interleaved, layout, None, False)

    compare("rope", lambda q, k: rotary.rope(q, k, cos, sin, interleaved, layout, None, False), truth, q, k)
    here_q, here_k = q.clone(), k.clone()
    with torch.no_grad():
        found = rotary.rope(here_q, here_k, cos, sin, interleaved, layout, None, True)
    for out, here, right in zip(found, (here_q, here_k), truth(q.double(), k.double()), strict=True):
        assert out.data_ptr() == here.data_ptr()
        assert_close(here, right, tolerance("rope", dtype))


@pytest.mark.parametrize(("reduction", "dtype"), list(zip(["mean", "none", "sum"], DTYPES, strict=True)))
def test_cross_entropy_matches_the_reference(reduction: str, dtype: torch.dtype) -> None:
    from layerzero_flashattn.quack import loss

    logits, labels = randn(64, 4096, dtype=dtype) * 3, torch.randint(0, 4096, (64,), device="cuda")
    labels[::7] = -100

    def mine(x: torch.Tensor) -> Any:
        return loss.cross_entropy(x, labels, -100, None, None, None, reduction, False)

    compare(
        "cross_entropy",
        mine,
        lambda x: reference_loss.cross_entropy(x, labels, -100, None, None, None, reduction, False),
        logits,
    )
    with torch.no_grad():
        _, lse = loss.cross_entropy(logits, labels, -100, None, None, None, reduction, True)
        assert_close(lse, logits.double().logsumexp(-1), tolerance("cross_entropy", torch.float32))
        nothing = loss.cross_entropy(logits, torch.full_like(labels, -100), -100, None, None, None, "mean", False)
    assert nothing.item() == 0.0


def test_captured_calls_can_be_replayed() -> None:
    from layerzero_flashattn.quack import loss, norm, rotary

    x, residual = randn(64, 1024, dtype=torch.bfloat16), randn(64, 1024, seed=1, dtype=torch.bfloat16)
    weight, bias = (randn(1024, seed=seed, dtype=torch.bfloat16) for seed in (2, 3))
    heads, angles = x.view(1, 64, 8, 128), randn(64, 64, seed=3)
    labels = torch.arange(64, device="cuda")
    calls = {
        "rms_norm": lambda: norm.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: norm.add_rms_norm(x, residual, weight, 1e-6)[0],
        "layer_norm": lambda: norm.layer_norm(x, weight, bias, 1e-5),
        "rope": lambda: rotary.rope(heads, None, angles.cos(), angles.sin(), False, "BSHD", None, False)[0],
        "cross_entropy": lambda: loss.cross_entropy(x, labels, -100, None, None, None, "mean", False),
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
    from layerzero_flashattn.health import self_test

    report = self_test("quack")
    assert report.ok, report.detail


@pytest.mark.parametrize(("rows", "hidden", "vocab"), [(64, 256, 1024), (13, 64, 264)])
def test_head_and_loss_in_one_match_the_reference(rows: int, hidden: int, vocab: int) -> None:
    from layerzero_flashattn.quack import linear_loss

    labels = torch.arange(rows, device="cuda") % vocab
    labels[::5] = -100
    options = (labels, None, -100, None, None, None, "sum")

    def truth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ weight.T, labels, reduction="sum")

    x, weight = randn(rows, hidden, dtype=torch.bfloat16), randn(vocab, hidden, seed=1, dtype=torch.bfloat16)
    compare("gemm", lambda *tensors: linear_loss.linear_cross_entropy(*tensors, *options), truth, x, weight / 16)

"""Every adapter over Liger's real kernels against the reference, forward and backward.

float32 and float16: Triton's interpreter multiplies bfloat16 numbers as if they were integers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.backends.reference import feed_forward as reference_mlp
from layerzero.backends.reference import loss as reference_loss
from layerzero.backends.reference import norm as reference_norm
from layerzero.backends.reference import positional
from layerzero.numerics import Tolerance, assert_close, tolerance
from layerzero_models.linear_loss import linear_cross_entropy as reference_linear_loss

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

from layerzero_liger import gated, linear_loss, loss, norm, rotary  # after the check that the vendor is here

DTYPES = [torch.float32, torch.float16]
SHAPES = [(1, 64), (2, 3, 48)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def compare(op: str, run: Any, truth: Any, *tensors: torch.Tensor) -> None:
    """Forward without a gradient, then gradients of every input; the inputs stay as they were."""
    bounds = tolerance(op, tensors[0].dtype)
    before = [item.clone() for item in tensors]
    with torch.no_grad():
        found, expected = as_tuple(run(*tensors)), as_tuple(truth(*(item.double() for item in tensors)))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, bounds)
    mine = [item.clone().requires_grad_() for item in tensors]
    wide = [item.double().requires_grad_() for item in tensors]
    out, right = as_tuple(run(*mine)), as_tuple(truth(*wide))
    weights = [randn(*item.shape, seed=9).to(item.dtype) for item in out]
    kept = [item.clone() for item in weights]
    got = torch.autograd.grad(out, mine, weights, retain_graph=True)
    again = torch.autograd.grad(out, mine, weights)
    wanted = torch.autograd.grad(right, wide, [item.double() for item in weights])
    for one, two, three in zip(got, again, wanted, strict=True):
        # Sums over rows of products: a gradient carries the rounding of a few more steps than the result.
        assert_close(one, three, Tolerance(bounds.rtol * 8, bounds.atol * 8))
        assert torch.equal(one, two), "running backward a second time gave another gradient"
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)), "an input was changed"
    assert all(torch.equal(a, b) for a, b in zip(kept, weights, strict=True)), "an incoming gradient was changed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_match_the_reference(shape, dtype):
    x, residual = (randn(*shape, seed=seed, dtype=dtype) for seed in (0, 1))
    weight, bias = (randn(shape[-1], seed=seed, dtype=dtype) for seed in (2, 3))
    truth = reference_norm
    compare("rms_norm", lambda x, w: norm.rms_norm(x, w, 1e-6), lambda x, w: truth.rms_norm(x, w, 1e-6), x, weight)
    compare("rms_norm", lambda x: norm.rms_norm(x, None, 1e-6), lambda x: truth.rms_norm(x, None, 1e-6), x)
    compare(
        "rms_norm",
        lambda x, w: norm.gemma_rms_norm(x, w, 1e-6),
        lambda x, w: truth.gemma_rms_norm(x, w, 1e-6),
        x,
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
    for mine, right in ((norm.add_rms_norm, truth.add_rms_norm), (norm.gemma_add_rms_norm, truth.gemma_add_rms_norm)):
        compare(
            "add_rms_norm",
            lambda x, r, w, f=mine: f(x, r, w, 1e-6),
            lambda x, r, w, f=right: f(x, r, w, 1e-6),
            x,
            residual,
            weight,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_activations_match_the_reference(shape, dtype):
    x = randn(*shape, dtype=dtype)
    compare("silu_and_mul", gated.silu_and_mul, reference_mlp.silu_and_mul, x)
    compare(
        "gelu_and_mul",
        lambda x: gated.gelu_and_mul(x, "tanh"),
        lambda x: reference_mlp.gelu_and_mul(x, "tanh"),
        x,
    )


@pytest.mark.parametrize(
    ("layout", "rotary_dim", "table_dtype"),
    [("BHSD", 16, torch.float16), ("BSHD", 16, torch.float32), ("BSHD", 8, torch.float16)],
)
def test_rope_matches_the_reference_and_writes_in_place_only_when_asked(layout, rotary_dim, table_dtype):
    dtype = torch.float16
    q, k = randn(2, 4, 5, 16, dtype=dtype), randn(2, 2, 5, 16, seed=1, dtype=dtype)
    if layout == "BSHD":
        q, k = (item.transpose(1, 2).contiguous() for item in (q, k))
    angles = randn(9, rotary_dim // 2, seed=2)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)

    def truth(q: torch.Tensor, k: torch.Tensor) -> Any:
        return positional.rope(q, k, cos.double(), sin.double(), False, layout, None, False)

    compare("rope", lambda q, k: rotary.rope(q, k, cos, sin, False, layout, None, False), truth, q, k)
    here_q, here_k = q.clone(), k.clone()
    found = rotary.rope(here_q, here_k, cos, sin, False, layout, None, True)
    for out, here, right in zip(found, (here_q, here_k), truth(q.double(), k.double()), strict=True):
        assert out.data_ptr() == here.data_ptr()
        assert_close(here, right, tolerance("rope", dtype))


def test_rope_of_one_head_or_one_token_leaves_its_inputs_alone():
    """Where both layouts are contiguous the library would turn the caller's own tensors."""
    angles = randn(4, 8, seed=2)
    tables = (angles.cos(), angles.sin())
    for shape in ((1, 1, 4, 16), (1, 3, 1, 16)):
        compare(
            "rope",
            lambda q, k: rotary.rope(q, k, *tables, False, "BHSD", None, False),
            lambda q, k: positional.rope(q, k, *(t.double() for t in tables), False, "BHSD", None, False),
            randn(*shape),
            randn(*shape, seed=1),
        )


def test_rope_has_a_gradient_for_its_tables():
    angles = randn(7, 8, seed=2)
    compare(
        "rope",
        lambda q, k, cos, sin: rotary.rope(q, k, cos, sin, False, "BSHD", None, False),
        lambda q, k, cos, sin: positional.rope(q, k, cos, sin, False, "BSHD", None, False),
        randn(2, 5, 4, 24),
        randn(2, 5, 2, 24, seed=1),
        angles.cos(),
        angles.sin(),
    )


@pytest.mark.parametrize(
    ("options", "reduction"),
    [
        ((None, None, None), "mean"),
        ((0.1, None, None), "sum"),
        ((None, 20.0, None), "none"),
        ((None, None, 1e-3), "mean"),
        ((0.1, 20.0, 1e-3), "none"),
    ],
)
def test_cross_entropy_matches_the_reference(options, reduction):
    labels = torch.tensor([[3, 32, -100], [0, -100, 7]])
    for dtype in DTYPES:
        logits = randn(2, 3, 33, dtype=dtype) * 3
        compare(
            "cross_entropy",
            lambda x: loss.cross_entropy(x, labels, -100, *options, reduction, False),
            lambda x: reference_loss.cross_entropy(x, labels, -100, *options, reduction, False),
            logits,
        )
        assert loss.cross_entropy(logits, labels, -100, *options, reduction, False).dtype is torch.float32


def test_a_loss_without_any_row_to_count_is_zero():
    logits, labels = randn(4, 16).requires_grad_(), torch.full((4,), -100)
    found = loss.cross_entropy(logits, labels, -100, None, None, None, "mean", False)
    found.backward()
    assert found.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [(None, None, None), (0.1, None, 1e-3), (0.2, 20.0, None)])
def test_head_and_loss_in_one_match_the_reference(options, reduction):
    labels = torch.tensor([[3, 32, -100], [0, -100, 7]])
    for dtype in DTYPES:
        x, weight, bias = (
            randn(2, 3, 16, dtype=dtype),
            randn(33, 16, seed=1, dtype=dtype),
            randn(33, seed=2, dtype=dtype),
        )
        compare(
            "linear",
            lambda x, w, b: linear_loss.linear_cross_entropy(x, w, labels, b, -100, *options, reduction),
            lambda x, w, b: reference_linear_loss(x, w, labels, b, -100, *options, reduction),
            x, weight, bias,
        )  # fmt: skip


def test_a_head_alone_gets_its_gradient_and_no_row_to_count_gives_zero():
    x, weight, labels = randn(4, 16), randn(33, 16, seed=1), torch.tensor([1, 2, -100, 32])
    mine, wide = (item.requires_grad_() for item in (weight.clone(), weight.double()))
    linear_loss.linear_cross_entropy(x, mine, labels, None, -100, None, None, None, "mean").backward()
    reference_linear_loss(x.double(), wide, labels).backward()
    assert mine.grad is not None and wide.grad is not None
    torch.testing.assert_close(mine.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)
    none = torch.full_like(labels, -100)
    assert linear_loss.linear_cross_entropy(x, weight, none, None, -100, None, None, None, "mean").item() == 0.0


@pytest.mark.parametrize(("at_most", "pieces"), [(1 << 28, 1), (16 * 4096, 4), (1, 64)])
def test_the_logits_come_in_as_few_pieces_as_memory_allows(monkeypatch, at_most, pieces):
    """Each piece adds to the gradient of the whole head; left to itself the library takes a row at a time here."""
    products = []
    real = torch.mm
    monkeypatch.setattr(linear_loss._library.torch, "mm", lambda a, b: products.append(a.shape) or real(a, b))
    monkeypatch.setattr(linear_loss, "_LOGITS", at_most)
    x, weight, labels = randn(64, 8), randn(4096, 8, seed=1), torch.arange(64)
    mine, wide = (item.requires_grad_() for item in (weight.clone(), weight.double()))
    linear_loss.linear_cross_entropy(x, mine, labels, None, -100, None, None, None, "mean").backward()
    assert products == [(4096, 64 // pieces)] * pieces
    reference_linear_loss(x.double(), wide, labels).backward()
    assert mine.grad is not None and wide.grad is not None
    torch.testing.assert_close(mine.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


def test_the_self_test_knows_its_answers():
    from layerzero_liger.health import _errors

    assert max(_errors("cpu")) < 1e-5

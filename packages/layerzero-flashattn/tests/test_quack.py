"""QuACK runs on GPUs only: its adapters meet stand-ins that take exactly what the recorded signatures take."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from layerzero.backends.reference import loss as reference_loss
from layerzero.backends.reference import norm as reference_norm
from layerzero.backends.reference import positional


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms(given, get, out_dtype=None):
    """The library's (out, residual_out, rstd) for rows."""
    assert given.x.ndim == 2 or "prenorm" in vars(given) or get("residual") is None
    weight = None if given.weight is None else given.weight + get("weight_offset", 0.0)
    if get("residual") is None:
        return reference_norm.rms_norm(given.x, weight, given.eps), given.x, None
    return (*reference_norm.add_rms_norm(given.x, given.residual, weight, given.eps), None)


def layer(given, get):
    assert given.x.ndim == 2 and given.weight.dtype is torch.float32
    assert get("bias") is None or given.bias.dtype is torch.float32
    out = reference_norm.layer_norm(given.x, given.weight, get("bias"), given.eps)
    extra = torch.zeros(given.x.shape[0])
    return (out, extra, extra) if get("return_rstd", False) else out


def layer_back(given, get):
    """Gradients of the stand-in's own forward: (dx, dw, db)."""
    x, weight = given.x.detach().requires_grad_(), given.weight.detach().requires_grad_()
    with torch.enable_grad():
        out = reference_norm.layer_norm(x, weight, None, 1e-5)
        grads = torch.autograd.grad(out, (x, weight), given.dout)
    return (*grads, given.dout.sum(0) if get("has_bias", True) else None)


def turned(given, get):
    sin = -given.sin if get("conjugate", False) else given.sin
    out, _ = positional.rope(given.x, None, given.cos, sin, get("interleaved", False), "BSHD", None, False)
    return given.x.copy_(out) if get("inplace", False) else out


def losses(given, get):
    assert given.x.ndim == 2 and given.target.ndim == 1
    loss, lse = reference_loss.cross_entropy(
        given.x, given.target, get("ignore_index", -100), None, None, None, "none", True
    )
    return (loss, lse) if get("return_lse", False) else loss


def fused(given, get):
    """Gradients are multiplied in place, as the library does: a second backward would give others."""
    assert given.x.ndim == 2 and given.x.shape[0] % 8 == 0 and get("reduction") == "sum"
    return Fused.apply(given.x, given.weight, given.target, get("ignore_index", -100))


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, ignore_index):
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(x @ weight.T, target, ignore_index=ignore_index, reduction="sum")
            ctx.kept = torch.autograd.grad(loss, (x, weight))
        return loss.detach()

    @staticmethod
    def backward(ctx, above):
        return (*(grad.mul_(above) for grad in ctx.kept), None, None)


@pytest.fixture
def quack(monkeypatch, library_class):
    """Import an adapter module over the stand-in library."""
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    loaded = []
    for name, functions in {
        "rmsnorm": {
            "rmsnorm": lambda given, get: rms(given, get)[0] if not get("prenorm") else rms(given, get)[:2],
            "rmsnorm_fwd": rms,
            "layernorm_fwd": layer,
            "layernorm_bwd": layer_back,
        },
        "rotary": {"apply_rotary": turned},
        "cross_entropy": {"cross_entropy": losses, "cross_entropy_fwd": losses},
        "linear_cross_entropy": {"chunked_linear_cross_entropy": fused},
    }.items():
        library = library_class("quack.json", f"quack.{name}")
        for function, compute in functions.items():
            library.function(function, compute)
        monkeypatch.setitem(sys.modules, f"quack.{name}", library.module)

    def adapters(name):
        full = f"layerzero_flashattn.quack.{name}"
        sys.modules.pop(full, None)
        loaded.append(full)
        return import_module(full)

    yield adapters
    for full in loaded:
        sys.modules.pop(full, None)


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)])
@pytest.mark.parametrize("grad", [False, True])
def test_norms(quack, shape, grad):
    norm = quack("norm")
    x, residual = (randn(*shape, seed=seed).requires_grad_(grad) for seed in (0, 1))
    weight, bias = randn(16, seed=2), randn(16, seed=3)
    close = torch.testing.assert_close
    close(norm.rms_norm(x, weight, 1e-6), reference_norm.rms_norm(x, weight, 1e-6))
    close(norm.rms_norm(x, None, 1e-6), reference_norm.rms_norm(x, None, 1e-6))
    close(norm.gemma_rms_norm(x, weight, 1e-6), reference_norm.gemma_rms_norm(x, weight, 1e-6))
    for mine, right in (
        (norm.add_rms_norm, reference_norm.add_rms_norm),
        (norm.gemma_add_rms_norm, reference_norm.gemma_add_rms_norm),
    ):
        for a, b in zip(mine(x, residual, weight, 1e-6), right(x, residual, weight, 1e-6), strict=True):
            assert a.shape == x.shape
            close(a, b)
    close(norm.layer_norm(x, weight, bias, 1e-5), reference_norm.layer_norm(x, weight, bias, 1e-5))
    close(norm.layer_norm(x, weight, None, 1e-5), reference_norm.layer_norm(x, weight, None, 1e-5))


def test_layer_norm_has_a_gradient_for_weights_of_another_dtype(quack):
    norm = quack("norm")
    x = randn(4, 16).requires_grad_()
    weight, bias = (randn(16, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in (1, 2))
    norm.layer_norm(x, weight, bias, 1e-5).sum().backward()
    assert (weight.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(bias.grad, torch.full((16,), 4.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_rope(quack, layout, inplace, grad):
    rotary = quack("rotary")
    q, k = randn(2, 4, 6, 8), randn(2, 2, 6, 8, seed=1)
    if layout == "BSHD":
        q, k = (t.transpose(1, 2).contiguous() for t in (q, k))
    angles = randn(10, 4, seed=2)
    expected = positional.rope(q, k, angles.cos(), angles.sin(), False, layout, None, False)
    mine = [(t.clone().requires_grad_() * 1.0) if grad else t.clone() for t in (q, k)]
    found = rotary.rope(*mine, angles.cos(), angles.sin(), False, layout, None, inplace)
    for out, given, right in zip(found, mine, expected, strict=True):
        torch.testing.assert_close(out, right)
        assert (out.data_ptr() == given.data_ptr()) is inplace
    alone, none = rotary.rope(q, None, angles.cos(), angles.sin(), False, layout, None, False)
    torch.testing.assert_close(alone, expected[0])
    assert none is None


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_has_gradients_for_its_inputs_and_its_tables(quack, layout, interleaved):
    rotary = quack("rotary")
    angles = randn(10, 4, seed=2)
    given = [randn(2, 4, 6, 8), randn(2, 4, 6, 8, seed=1), angles.cos(), angles.sin()]
    mine, right = ([item.clone().requires_grad_() for item in given] for _ in range(2))
    found = rotary.rope(*mine, interleaved, layout, None, False)
    expected = positional.rope(*right, interleaved, layout, None, False)
    weights = [randn(2, 4, 6, 8, seed=seed) for seed in (5, 6)]
    got, wanted = torch.autograd.grad(found, mine, weights), torch.autograd.grad(expected, right, weights)
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("grad", [False, True])
def test_cross_entropy(quack, reduction, grad):
    loss = quack("loss")
    logits, labels = randn(2, 3, 11).requires_grad_(grad), torch.tensor([[1, -100, 10], [0, 4, -100]])
    call = (logits, labels, -100, None, None, None, reduction)
    torch.testing.assert_close(loss.cross_entropy(*call, False), reference_loss.cross_entropy(*call, False))
    if not grad:
        for a, b in zip(loss.cross_entropy(*call, True), reference_loss.cross_entropy(*call, True), strict=True):
            torch.testing.assert_close(a, b)
    ignored = loss.cross_entropy(logits, torch.full_like(labels, -100), -100, None, None, None, "mean", False)
    assert ignored.item() == 0.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_head_and_loss_in_one(quack, reduction, wanted):
    """Rows that the library's products cannot take are padded; a graph may be run backward more than once."""
    loss = quack("linear_loss")
    x, weight = (
        item.requires_grad_(need) for item, need in zip((randn(2, 3, 8), randn(16, 8, seed=1)), wanted, strict=True)
    )
    labels = torch.tensor([[1, -100, 10], [0, 4, -100]])
    found = loss.linear_cross_entropy(x, weight, labels, None, -100, None, None, None, reduction)
    right = torch.nn.functional.cross_entropy(
        (x @ weight.T).flatten(0, 1), labels.flatten(), reduction=reduction
    )  # fmt: skip
    torch.testing.assert_close(found, right)
    leaves = [item for item in (x, weight) if item.requires_grad]
    for scale in (1.0, 0.5) if leaves else ():
        got = torch.autograd.grad(found * scale, leaves, retain_graph=True)
        for one, two in zip(got, torch.autograd.grad(right * scale, leaves, retain_graph=True), strict=True):
            torch.testing.assert_close(one, two)
    none = loss.linear_cross_entropy(x, weight, torch.full_like(labels, -100), None, -100, None, None, None, "mean")
    assert none.item() == 0.0

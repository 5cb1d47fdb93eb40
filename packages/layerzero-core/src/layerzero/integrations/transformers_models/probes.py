"""What a part of a model computes, found out by asking it: small random inputs, compared with the formula of an op.

Names and source code of other libraries change; what a part computes on numbers does not lie. A part is patched only
when its own `forward` and the op's formula agree on these inputs, in the part's own dtype and on its own device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["activation_of", "agree", "is_gated_mlp", "norm_of", "rotates_halves"]

# The gated op of an activation: its name, its arguments, and the activation itself.
_GATED: tuple[tuple[str, tuple[str, ...], Callable[[Tensor], Tensor]], ...] = (
    ("silu_and_mul", (), F.silu),
    ("gelu_and_mul", ("none",), F.gelu),
    ("gelu_and_mul", ("tanh",), lambda x: F.gelu(x, approximate="tanh")),
    ("relu_and_mul", (), F.relu),
)


def agree(got: Any, want: Tensor) -> bool:
    """Whether two results are one formula, rounded here and there: this recognises, it does not judge accuracy."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    eps = torch.finfo(got.dtype).eps
    bound = 8 * eps if eps > 1e-5 else 64 * eps
    return torch.allclose(got.double(), want.double(), rtol=bound, atol=bound)


def _draw(*shape: int, like: Tensor) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return made.to(device=like.device, dtype=like.dtype)


@torch.no_grad()
def norm_of(forward: Callable[[Tensor], Any], weight: Tensor, eps: float) -> str | None:
    """ "rms_norm" or "gemma_rms_norm" (weights as distances from one); None for anything else."""
    x = _draw(3, weight.shape[0], like=weight)
    wide = x.float()
    row = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    got = forward(x)
    for op, scale in (("rms_norm", weight.float()), ("gemma_rms_norm", 1.0 + weight.float())):
        if agree(got, (row * scale).to(x.dtype)):
            return op
    return None


@torch.no_grad()
def activation_of(act: Callable[[Tensor], Any], like: Tensor) -> tuple[str, tuple[str, ...], str] | None:
    """(gated op, its arguments, its word in `lz.moe`) of an activation; None for one that no op has."""
    x = torch.linspace(
        -6.0, 6.0, 257, device=like.device
    )  # in float32: two kinds of GELU differ by less than bf16 sees
    got = act(x)
    for op, rest, formula in _GATED:
        want = formula(x)
        if isinstance(got, Tensor) and got.shape == want.shape and bool((got - want).abs().max() < 1e-5):
            word = op.removesuffix("_and_mul") + ("_tanh" if rest == ("tanh",) else "")
            return op, rest, word
    return None


@torch.no_grad()
def rotates_halves(function: Callable[..., Any], device: torch.device) -> bool:
    """Whether an `apply_rotary_pos_emb` turns pairs (i, i + D/2) by tables [B, S, D]."""
    like = torch.zeros((), device=device)
    q, k, angles = _draw(2, 4, 5, 16, like=like), _draw(2, 2, 5, 16, like=like), _draw(2, 5, 8, like=like)
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    try:
        found = function(q, k, cos, sin)
    except Exception:
        return False

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        half = torch.cat((-second, first), -1)
        return x * cos[:, None] + half * sin[:, None]

    return isinstance(found, tuple) and len(found) == 2 and agree(found[0], turned(q)) and agree(found[1], turned(k))


@torch.no_grad()
def is_gated_mlp(module: Any, gate: Any, up: Any, down: Any, act: Callable[[Tensor], Tensor]) -> bool:
    """Whether a module is down(act(gate(x)) * up(x)) when it is not training."""
    if down.weight.dtype is not gate.weight.dtype:
        return False
    x = _draw(3, gate.in_features, like=gate.weight)
    training = [part for part in module.modules() if part.training]
    module.train(False)
    try:
        return agree(module.forward(x), down(act(gate(x)) * up(x)))
    finally:
        for part in training:
            part.training = True

"""What fuzzing calls needs: sizes and tensors by number, other strides and signs, and comparing with a formula.

The calls themselves are in `drawn_ops`. A call holds the tensors whose values count (`tensors`) and two functions of
them: `run`, the public op, and `formula`, plain torch, which is evaluated in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero import env
from layerzero.numerics import assert_close, tolerance

__all__ = [
    "MANY", "Call", "Dice", "agree", "flat", "gradients", "laid_out", "negated", "others", "wanting", "weighted",
    "wide",
]  # fmt: skip

MANY = 100 if env.read().prove else 1  # calls of an op in a situation


class Call(NamedTuple):
    """One drawn call."""

    op: str
    tensors: tuple[Tensor, ...]
    run: Callable[..., Any]
    formula: Callable[..., Any]
    words: dict[str, Any] = {}  # noqa: RUF012 # only to say what was drawn

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in self.tensors)
        return f"{self.op}({shapes}; {self.words})"


# -- tensors -------------------------------------------------------------------------------------------
class Dice(random.Random):
    """A source of sizes and tensors; equal seeds draw equal calls."""

    dtype = torch.float32

    def tensor(self, *shape: int, spread: float = 1.0) -> Tensor:
        make = torch.Generator().manual_seed(self.randrange(1 << 40))
        return (torch.randn(shape, generator=make, dtype=torch.float64) * spread).to(self.dtype)

    def ids(self, below: int, *shape: int) -> Tensor:
        make = torch.Generator().manual_seed(self.randrange(1 << 40))
        return torch.randint(below, shape, generator=make)

    def lead(self, most: int = 3) -> tuple[int, ...]:
        return tuple(self.randint(2, 4) for _ in range(self.randint(1, most)))


def laid_out(dice: random.Random, x: Tensor) -> Tensor:
    """The same numbers with other strides: gaps, a transposed or stepped axis, an odd beginning."""
    kind = dice.choice(["dense", "gaps", "steps", "transposed", "offset"])
    if kind == "gaps":
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    if kind == "steps":
        return x.repeat_interleave(2, -1)[..., ::2]
    if kind == "transposed" and x.ndim > 1:
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    if kind == "offset":
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    return x


def negated(dice: random.Random, x: Tensor) -> Tensor:
    """The same numbers in a view whose memory holds them with the other sign."""
    if x.dtype not in (torch.float32, torch.float64) or dice.random() < 0.5:
        return torch._neg_view(-x)
    return torch.complex(x, -x).conj().imag


# -- comparing -----------------------------------------------------------------------------------------
def flat(found: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [found] if isinstance(found, Tensor) else [item for item in found if item is not None]


def wide(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same numbers in float64, dense and with memory of their own."""
    return tuple(t.detach().to(torch.float64, copy=True).contiguous() for t in tensors)


def agree(call: Call, found: Any, right: Any, *, loosely: float = 1.0) -> None:
    """Hold results against the formula's, within the op's tolerance; `loosely` for sums and derivatives of results."""
    pairs: Iterator[tuple[Tensor, Tensor]] = zip(flat(found), flat(right), strict=True)
    for got, truth in pairs:
        assert got.shape == truth.shape, str(call)
        if not got.is_floating_point():
            assert torch.equal(got, truth.to(got.dtype)), str(call)
            continue
        # The loss is float32, and its logits are rounded to the inputs' dtype, as torch's product does.
        dtype = call.tensors[0].dtype if call.op == "linear_cross_entropy" else got.dtype
        bound = tolerance(call.op, dtype, k=64)
        if call.op in ("cast", "embedding"):
            bound = tolerance("attention", got.dtype)  # exact as a call, not as the sum that a gradient is
        try:
            assert_close(got.detach(), truth.detach(), bound)
        except AssertionError:
            slack = loosely * max(bound.atol, 1e-6) * float(truth.detach().abs().max().clamp_min(1.0))
            if loosely == 1.0 or not bool(((got.double() - truth.double()).abs() <= slack).all()):
                raise AssertionError(f"{call}: {(got.double() - truth.double()).abs().max():.3g} off") from None


# -- other numbers, and derivatives --------------------------------------------------------------------
def others(call: Call) -> tuple[Tensor, ...]:
    """Other numbers of the same shapes, for which the call means the same: what was ranked keeps its order."""
    return tuple(t.detach() * 0.75 for t in call.tensors)


def wanting(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same numbers as leaves that want a gradient."""
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


def weighted(found: Any) -> Tensor:
    """One number of all results, each element with a weight of its own."""
    parts = [item.double() for item in flat(found) if item.is_floating_point()]
    return torch.stack([(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) * p).sum() for p in parts]).sum()


def gradients(function: Callable[..., Any], tensors: tuple[Tensor, ...], **more: Any) -> tuple[Tensor, ...]:
    """The gradient of `weighted` by each tensor; zeros where it does not depend on one."""
    found = torch.autograd.grad(weighted(function(*tensors)), tensors, allow_unused=True, **more)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True))

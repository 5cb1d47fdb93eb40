"""RoPE without the copies of the textbook form: no concatenation of halves, no table of double width.

Both kernels take the canonical arguments of `lz.rope` and compute in float32 (float64 where anything is).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference.positional import halves
from layerzero.model.rotary import token_rows


def _adapter(turn: Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]) -> Callable[..., Any]:
    """`lz.rope` by a function that turns one tensor."""

    def rope(
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        layout: str,
        position_ids: Tensor | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor | None]:
        full = cos.ndim == 3  # [B, S, rotary]: the two elements of a pair have entries of their own
        wide = torch.float64 if torch.float64 in (q.dtype, cos.dtype) else torch.float32
        cos, sin = token_rows((cos.to(wide), sin.to(wide)), q, layout, position_ids)
        return turn(q, cos, sin, full, inplace), None if k is None else turn(k, cos, sin, full, inplace)

    return rope


def _halves(x: Tensor, cos: Tensor, sin: Tensor, full: bool, inplace: bool) -> Tensor:
    half = cos.shape[-1] // 2 if full else cos.shape[-1]
    tables = (cos, sin, cos, sin)
    if full:
        tables = tuple(t.narrow(-1, start, half) for start in (0, half) for t in (cos, sin))  # type: ignore[assignment]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, cos, sin)):
        turned = halves(x, (cos, sin), half, full)  # autograd knows no results written into parts of a tensor
        return x.copy_(turned) if inplace else turned
    cos_one, sin_one, cos_two, sin_two = tables
    out = x if inplace else torch.empty_like(x)
    to_one, to_two = out.narrow(-1, 0, half), out.narrow(-1, half, half)
    one, two = x.narrow(-1, 0, half), x.narrow(-1, half, half)
    if x.dtype == cos.dtype and x.device.type == "cpu":
        if inplace:
            one, two = one.clone(), two.clone()
        torch.mul(one, cos_one, out=to_one).addcmul_(two, sin_one, value=-1)
        torch.mul(two, cos_two, out=to_two).addcmul_(one, sin_two)
    elif x.device.type != "cpu":
        _few_launches((one, two), tables, (to_one, to_two))
    else:
        one, two = one.to(cos.dtype), two.to(cos.dtype)
        to_one.copy_((one * cos_one).addcmul_(two, sin_one, value=-1))
        to_two.copy_((two * cos_two).addcmul_(one, sin_two))
    if not inplace and 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _few_launches(pair: tuple[Tensor, Tensor], tables: tuple[Tensor, ...], to: tuple[Tensor, Tensor]) -> None:
    """Four launches, in place too: torch widens the elements and rounds the results inside them."""
    (one, two), (cos_one, sin_one, cos_two, sin_two) = pair, tables
    first, second = one * cos_one, one * sin_two
    torch.addcmul(first, two, sin_one, value=-1, out=to[0])  # `one` is not read after this
    torch.addcmul(second, two, cos_two, out=to[1])


def _complex(x: Tensor, cos: Tensor, sin: Tensor, full: bool, inplace: bool) -> Tensor:
    rotary = 2 * cos.shape[-1]
    head = x if rotary == x.shape[-1] else x.narrow(-1, 0, rotary)
    pairs = torch.view_as_complex(_even(head.to(cos.dtype).reshape(*head.shape[:-1], -1, 2)))
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    if inplace:
        head.copy_(turned)
        return x
    turned = turned.to(x.dtype)
    return turned if rotary == x.shape[-1] else torch.cat((turned, x.narrow(-1, rotary, x.shape[-1] - rotary)), dim=-1)


def _even(x: Tensor) -> Tensor:
    """The tensor, copied where its pairs cannot be read as complex numbers in place."""
    fits = x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # x.contiguous() may be x itself


# Pairs (i, i + rotary/2): each half is written where it belongs.
rope_halves = _adapter(_halves)
# Pairs (2i, 2i + 1) as complex numbers, turned by one multiplication; tables [S, rotary/2] only.
rope_complex = _adapter(_complex)

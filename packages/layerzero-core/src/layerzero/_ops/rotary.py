"""`lz.xpos`: rotary embedding whose scores decay with the distance."""

from __future__ import annotations

import math
from typing import overload

from torch import Tensor

from layerzero._ops.positional import ROPE, rotary_context
from layerzero._ops.signature import declare, dispatch
from layerzero.errors import invalid
from layerzero.model.context import Context
from layerzero.model.op import Call
from layerzero.model.shapes import turned


@overload
def xpos(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = ..., layout: str = ...,
    position_ids: Tensor | None = ..., scale_base: float = ..., gamma: float = ..., origin: float = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def xpos(
    q: Tensor, k: None, cos: Tensor, sin: Tensor, *, interleaved: bool = ..., layout: str = ...,
    position_ids: Tensor | None = ..., scale_base: float = ..., gamma: float = ..., origin: float = ...,
    backend: str | None = ...,
) -> tuple[Tensor, None]: ...  # fmt: skip


def xpos(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    layout: str = "BHSD",
    position_ids: Tensor | None = None,
    scale_base: float = 512.0,
    gamma: float = 0.4,
    origin: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k as `lz.rope` does, and scale them so that q·k decays with the distance between them (XPos).

    Pair i multiplies q at position n by zeta_i ** ((n - origin) / scale_base) and divides k by the same, with
    zeta_i = (2i / rotary_dim + gamma) / (1 + gamma) < 1. Scores do not depend on `origin`; the numbers do: k grows with
    the position, in float16 past its range after some 4000 positions at origin 0. Put the origin into the middle of the
    context, at the same place for everything that meets in one KV cache.

    Layouts, tables and `position_ids` are those of `lz.rope`. The published models turn pairs interleaved.
    """
    return dispatch(  # type: ignore[no-any-return]
        XPOS, (q, k, cos, sin, interleaved, layout, position_ids, scale_base, gamma, origin), layout, backend
    )


def _describe(call: Call) -> Context:
    scale_base, gamma, origin = call.args[7:]
    for name, value, low in (("scale_base", scale_base, 0.0), ("gamma", gamma, 0.0), ("origin", origin, -math.inf)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < math.inf:
            raise invalid("VALUE_INVALID", f"{name} {value!r}", "a finite number" if low else "a positive number")
    return rotary_context("xpos", call, *call.args[:7])


XPOS = declare(
    function=xpos,
    fake=turned,
    lowered={"k": "may be absent"},
    keeps_order=True,
    output_kind="tensors",
    describe=_describe,
    reference="layerzero.backends.reference.positional:xpos",
    cost=ROPE.cost,
    shapes=ROPE.shapes,
    options=ROPE.options,
    example="layerzero._ops.examples_rows:rotary",
    tolerance="positional",
    growing=("seq_len_q",),
    fusable=True,
)  # fmt: skip

"""`lz.rope` and `lz.alibi_slopes`."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from layerzero._ops.signature import declare, dispatch, expect_below
from layerzero.dispatch import modes
from layerzero.dispatch.bind import twice_in_place
from layerzero.errors import invalid
from layerzero.model.attention import slopes_of_heads
from layerzero.model.checks import context_of, expect_index, expect_rank, expect_tensor
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_devices, check_floating, dtype_name, parse_layout
from layerzero.model.enums import Layout
from layerzero.model.op import Call
from layerzero.model.shapes import overlapping, turned


@overload
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = ..., layout: str = ...,
    position_ids: Tensor | None = ..., inplace: bool = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def rope(
    q: Tensor, k: None, cos: Tensor, sin: Tensor, *, interleaved: bool = ..., layout: str = ...,
    position_ids: Tensor | None = ..., inplace: bool = ..., backend: str | None = ...,
) -> tuple[Tensor, None]: ...  # fmt: skip


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    layout: str = "BHSD",
    position_ids: Tensor | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by position: rotate-half pairs (i, i + D/2), or (2i, 2i + 1) when interleaved.

    cos and sin are tables [S, rotary/2] (one angle a pair; `lz.rope_tables` makes them) or [B, S, rotary]; a rotary
    width below head_dim leaves the rest of each head as it is. `position_ids` [S] or [B, S] picks rows.
    `inplace=True` writes into q and k.
    """
    return dispatch(ROPE, (q, k, cos, sin, interleaved, layout, position_ids, inplace), layout, backend)  # type: ignore[no-any-return]


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The ALiBi slope of each head, float32 [num_heads], as in the paper, for any head count."""
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise invalid("VALUE_INVALID", str(num_heads), "a positive integer", f"num_heads is {num_heads}")
    return slopes_of_heads(num_heads, device)


def _overlaps(tensor: Tensor) -> bool:
    """Whether several elements share memory, as after `expand`."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def rotary_context(
    op: str,
    call: Call,
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    interleaved: bool,
    layout: str,
    position_ids: Any,
    inplace: bool = False,
) -> Context:
    """The Context of an op that turns q and k by position; what does not fit together is refused."""
    q, cos, sin = expect_rank(q, "q", (4,)), expect_tensor(cos, "cos"), expect_tensor(sin, "sin")
    for name, item in (("k", k), ("position_ids", position_ids)):
        if item is not None:
            expect_tensor(item, name)
    check_devices(q=q, k=k, cos=cos, sin=sin, position_ids=position_ids)
    word = check_floating(q, "q")
    order = parse_layout(layout)
    if order not in (Layout.BHSD, Layout.BSHD):
        raise invalid("LAYOUT_UNKNOWN", order.value, "BHSD, BSHD")
    heads_axis, seq_axis = (1, 2) if order is Layout.BHSD else (2, 1)
    batch, dim, seq = q.shape[0], q.shape[3], q.shape[seq_axis]
    if k is not None:
        expect_rank(k, "k", (4,))
        if k.shape[3] != dim or k.shape[seq_axis] != seq or k.shape[0] != batch:
            ours, theirs = str(tuple(q.shape)), str(tuple(k.shape))
            raise invalid("SHAPE_INVALID", theirs, ours, f"q {ours} and k {theirs} may differ in their heads only")
    batched = cos.ndim == 3
    if tuple(cos.shape) != tuple(sin.shape) or cos.ndim not in (2, 3) or (batched and cos.shape[0] not in (1, batch)):
        tables = f"of cos and sin, {tuple(cos.shape)} and {tuple(sin.shape)},"
        raise invalid("SHAPE_INVALID", tables, f"[S, rotary/2] or [{batch} or 1, S, rotary], both alike")
    rotary = cos.shape[-1] * (1 if batched else 2)
    if rotary > dim or rotary % 2 or rotary == 0:
        raise invalid("SHAPE_INVALID", rotary, f"an even rotary width up to {dim}", "the tables are too wide")
    if position_ids is None and cos.shape[-2] < seq:
        rows, hint = cos.shape[-2], "make longer tables: lz.rope_tables(rotary_dim, length)"
        raise invalid("SEQ_LEN_TOO_LONG", seq, rows, f"{seq} tokens, but cos and sin have {rows} rows", hint)
    if position_ids is not None:
        expect_rank(position_ids, "position_ids", (1, 2))
        expect_index(position_ids, "position_ids")
        if position_ids.shape[-1] != seq or (position_ids.ndim == 2 and position_ids.shape[0] not in (1, batch)):
            found, wanted = f"position_ids {tuple(position_ids.shape)}", f"[{seq}] or [{batch} or 1, {seq}]"
            raise invalid("SHAPE_INVALID", found, wanted)
        expect_below(position_ids, "position_ids", cos.shape[-2], code="SEQ_LEN_TOO_LONG")
    if inplace and any(t is not None and _overlaps(t) for t in (q, k)):
        raise invalid("INPLACE_UNSUPPORTED", message="an expanded tensor cannot be rotated in place")
    if inplace and k is not None and (k is q or (modes.plain((q, k)) and overlapping(q, k))):
        raise twice_in_place()
    if inplace and call.needs_grad and any(t is not None and t.requires_grad and t.is_leaf for t in (q, k)):
        raise invalid("INPLACE_UNSUPPORTED", message="a leaf that needs a gradient cannot be rotated in place")
    needs = {
        "interleaved": interleaved,
        "rotate_half": not interleaved,
        "position_ids": position_ids is not None,
        "inplace": inplace,
        "partial_rotary": rotary < dim,
        "batched_tables": batched,
        "no_key": k is None,
        "mixed_tables": dtype_name(cos) != word,
    }
    dims = {
        "batch": batch,
        "num_heads": q.shape[heads_axis],
        "num_kv_heads": k.shape[heads_axis] if k is not None else q.shape[heads_axis],
        "seq_len_q": seq,
        "head_dim": dim,
        "rotary_dim": rotary,
    }
    words = (word,) if k is None else (word, check_floating(k, "k"))
    return context_of(call, op, word, dims, needs, (q,) if k is None else (q, k), dtypes=words, layout=order)


ROPE = declare(
    function=rope,
    fake=turned,
    plain="layerzero.backends.reference.positional:rope_halves",
    lowered={"k": "may be absent"},
    keeps_order=True,
    output_kind="tensors",
    describe=lambda call: rotary_context("rope", call, *call.args),
    reference="layerzero.backends.reference.positional:rope",
    cost=Roofline(
        "2 * element_bytes * batch * seq_len_q * head_dim * (num_heads + num_kv_heads * (1 - no_key)) "
        "+ 4 * seq_len_q * rotary_dim",
        "3 * batch * seq_len_q * rotary_dim * (num_heads + num_kv_heads * (1 - no_key))",
    ),
    shapes={
        "q": "batch,num_heads,seq_len_q,head_dim",
        "k": "batch,num_kv_heads,seq_len_q,head_dim",
        "rotary_dim": "head_dim",
    },
    options=("layout", "interleaved", "rotary_dim"),
    example="layerzero._ops.examples_rows:rotary",
    tolerance="positional",
    growing=("seq_len_q",),
    fusable=True,
    mutates=lambda args: bool(args[7]),
)

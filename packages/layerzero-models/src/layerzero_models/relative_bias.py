"""`lz.relative_bias`: a learned bias by relative position, as a float mask for `lz.attention`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.checks import expect_tensor


def relative_bias(
    table: Tensor,
    q_len: int,
    k_len: int,
    *,
    buckets: str = "t5",
    bidirectional: bool = True,
    max_distance: int = 128,
    q_offset: int | None = None,
) -> Tensor:
    """The bias [1, columns, q_len, k_len] that a table [rows, columns] gives each pair of query and key.

    Pass it to `lz.attention` as `attn_mask`; gradients reach the table. Query i stands at key position i + q_offset,
    by default i + (k_len - q_len), so that a decode step sees the rows that the whole sequence would.

    `buckets="t5"`    one row per bucket of distances, exact up to a half of them and logarithmic from there to
                      `max_distance`; with `bidirectional` the upper half of the rows is for keys after the query,
                      without it every later key counts as distance 0.
    `buckets="clip"`  one row per distance (Shaw), clipped where the table ends: rows -c … c with `bidirectional`,
                      an odd number, else c … 0 steps back.

    A column is usually a head. With head_dim columns the result holds Shaw's vectors: the bias of a query q is
    `einsum("bhid,dij->bhij", q * scale, bias[0])`.
    """
    if not expect_tensor(table, "table").is_floating_point():
        raise invalid("DTYPE_UNSUPPORTED", str(table.dtype), "a floating table")
    if table.ndim != 2 or 0 in table.shape:
        raise invalid("SHAPE_INVALID", str(tuple(table.shape)), "[rows, heads]")
    for name, length in (("q_len", q_len), ("k_len", k_len)):
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise invalid("VALUE_INVALID", f"{name}={length}", "a length of 0 or more")
    if q_offset is not None and (isinstance(q_offset, bool) or not isinstance(q_offset, int)):
        raise invalid("TYPE_INVALID", f"q_offset={q_offset}", "a number or None")
    rows = table.shape[0]
    if buckets == "t5":
        side = rows // 2 if bidirectional else rows
        if side < 2 or (bidirectional and rows % 2):
            limit = "an even number, 4 or more" if bidirectional else "2 or more"
            raise invalid("SHAPE_INVALID", f"{rows} buckets", limit)
        if max_distance <= side // 2:
            raise invalid("VALUE_INVALID", f"max_distance={max_distance}", f"> {side // 2}")
    elif buckets == "clip":
        if bidirectional and rows % 2 == 0:
            raise invalid("SHAPE_INVALID", f"{rows} rows", "an odd number: -c … c")
    else:
        raise invalid("VALUE_INVALID", f"buckets={buckets}", "'t5' or 'clip'")
    shift = k_len - q_len if q_offset is None else q_offset
    query = torch.arange(q_len, device=table.device).unsqueeze(-1) + shift
    ahead = torch.arange(k_len, device=table.device) - query  # how far the key lies after the query
    if buckets == "t5":
        found = _t5_bucket(ahead, rows, bidirectional, max_distance)
    else:
        furthest = (rows - 1) // 2 if bidirectional else rows - 1
        found = ahead.clamp(-furthest, furthest if bidirectional else 0) + furthest
    # Rows picked from the transposed table lie contiguous for each head, as kernels want a bias.
    return table.t().index_select(1, found.flatten()).view(1, table.shape[1], q_len, k_len)


def _t5_bucket(ahead: Tensor, rows: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bucket of each relative position. In float32, like T5 itself: checkpoints depend on how it rounds."""
    side = torch.zeros_like(ahead)
    if bidirectional:
        rows //= 2
        side = (ahead > 0).to(ahead.dtype) * rows
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    exact = rows // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (rows - exact)).to(ahead.dtype)).clamp(max=rows - 1)
    return side + torch.where(distance < exact, distance, far)

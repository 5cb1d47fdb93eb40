"""Grouped attention over torch's flash kernels: one call or two for each group of queries and each sequence.

No score matrix is ever held, forward or backward, so 128K tokens fit. The CPU's kernel knows only the triangle that
starts at the top left; a bottom-right one is cut into the keys before it, which every query sees, and a square. The
two halves are joined by their log-sum-exp, and the backward of each half is given the joined output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.reference.precision import computable
from layerzero.model.attention import upright
from layerzero.model.grouped import GroupedBatch, Segment

_forward_cpu = torch._scaled_dot_product_flash_attention_for_cpu  # as torch.ops.aten has it, some 5 µs sooner
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_forward_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward_cuda = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class _Piece(NamedTuple):
    """Rows of the packed queries, rows of the packed keys, and whether a triangle is cut out of their scores."""

    queries: slice
    keys: slice
    causal: bool


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: GroupedBatch,
    causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Any:
    """Blocked attention of the CPU build, or torch's FlashAttention-2 on CUDA, segment by segment."""
    if scale is not None and scale <= 0:
        query, scale = upright(query, scale)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out, lse = _Grouped.apply(query, key, value, batch, causal, scale)  # type: ignore[no-untyped-call]
        return (out, lse) if return_lse else out
    out, logs, _ = _attended(query, key, value, batch, causal, scale, return_lse)
    return out if logs is None else (out, _shown(logs))


def _pieces(segment: Segment, causal: bool, split: bool) -> Iterator[_Piece]:
    """What a segment asks of the kernel; `split` for one that cannot align a triangle to the bottom right.

    The first queries of a causal segment with more queries than keys see nothing and are left out.
    """
    rows = min(segment.q_len, segment.kv_len) if causal else segment.q_len
    if rows == 0 or segment.kv_len == 0:
        return
    stop_q, stop_k = segment.q_start + segment.q_len, segment.k_start + segment.kv_len
    queries = slice(stop_q - rows, stop_q)
    if not causal or not split:
        yield _Piece(queries, slice(segment.k_start, stop_k), causal)
        return
    if segment.kv_len > rows:
        yield _Piece(queries, slice(segment.k_start, stop_k - rows), False)
    yield _Piece(queries, slice(stop_k - rows, stop_k), True)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float | None, with_lse: bool
) -> tuple[Tensor, Tensor | None, list[tuple[_Piece, tuple[Any, ...]]]]:
    """Output, log-sum-exp [H, total_q] where it is wanted, and what the backward of each piece asks for."""
    q, k, v = computable(query, key, value)
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    out: Tensor | None = None
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide) if with_lse else None
    kept: list[tuple[_Piece, tuple[Any, ...]]] = []
    for segment in batch.segments():
        seen: tuple[Tensor, Tensor] | None = None
        for piece in _pieces(segment, causal, split=not query.is_cuda):
            found, logs, rest = _run(q, k, v, piece, scale)
            kept.append((piece, rest))
            seen = (found, logs) if seen is None else _joined(*seen, found, logs)
        if seen is not None:
            found = seen[0].squeeze(0).transpose(0, 1)
            if found.shape[0] == q.shape[0] and found.is_contiguous():  # all queries are of this segment
                out = found
            else:
                out = q.new_zeros((*q.shape[:2], v.shape[2])) if out is None else out
                out[piece.queries] = found
            if lse is not None:
                lse[:, piece.queries] = seen[1][0]
    if out is None:
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
    return out if out.dtype is query.dtype else out.to(query.dtype), lse, kept


def _shown(lse: Tensor) -> Tensor:
    """The log-sum-exp as it is returned: float32 [total_q, H]."""
    return lse.t().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


class _Grouped(torch.autograd.Function):
    """Forward and backward over all pieces. The log-sum-exp that is returned carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, kept = _attended(query, key, value, batch, causal, scale, True)
        assert lse is not None
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pieces, ctx.scale = kept, scale
        shown = _shown(lse)
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as torch says it of its own attention, whose pieces these are
            raise RuntimeError("derivative for the backward of grouped attention is not implemented")
        *given, lse = ctx.saved_tensors
        dtype = given[0].dtype
        q, k, v, out, grad = computable(*given, grad.contiguous())
        # Prefixes overlap: what several groups and halves give to one key or query is summed wide, rounded once.
        sums = [torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v)]
        for piece, rest in ctx.pieces:  # their gradients, from the whole segment's output and log-sum-exp
            mine, theirs = piece.queries, piece.keys
            parts = ((grad, mine), (q, mine), (k, theirs), (v, theirs), (out, mine))
            args = [_heads_first(tokens, rows) for tokens, rows in parts]
            args.append(lse[:, mine].contiguous().unsqueeze(0))  # CUDA's kernel does not look at its strides
            if q.is_cuda:
                cum_q, cum_k, max_q, max_k, state, unused = rest
                more = (cum_q, cum_k, max_q, max_k, 0.0, piece.causal, state, unused)
                found = _backward_cuda(*args, *more, scale=ctx.scale)
            else:
                found = _backward_cpu(*args, 0.0, piece.causal, scale=ctx.scale)
            for total, part, rows in zip(sums, found, (mine, theirs, theirs), strict=True):
                total[rows] += part[0].transpose(0, 1)
        return (*(total.to(dtype) for total in sums), None, None, None)


def _heads_first(tokens: Tensor, rows: slice) -> Tensor:
    """Some rows of [tokens, H, D] as [1, H, rows, D]."""
    part = tokens if rows.stop - rows.start == tokens.shape[0] else tokens[rows]
    return part.unsqueeze(0).transpose(1, 2)


def _run(
    query: Tensor, key: Tensor, value: Tensor, piece: _Piece, scale: float | None
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output and log-sum-exp of one piece, and what else its backward asks for."""
    q, k, v = _heads_first(query, piece.queries), _heads_first(key, piece.keys), _heads_first(value, piece.keys)
    if not query.is_cuda:
        out, lse = _forward_cpu(q, k, v, 0.0, piece.causal, scale=scale)
        return out, lse, ()
    out, lse, *rest, _ = _forward_cuda(q, k, v, 0.0, piece.causal, False, scale=scale)
    return out, lse, tuple(rest)


def _joined(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmax averages over different keys as one over both."""
    total = torch.logaddexp(lse, more_lse)
    left, right = ((part - total).exp().unsqueeze(-1) for part in (lse, more_lse))
    return (out * left + more * right).to(out.dtype), total

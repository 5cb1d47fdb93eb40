"""torch's attention kernels, each called by its aten op through torch's C++ bindings.

Not by `torch.ops.aten`, whose Python layer takes some 5 to 10 µs more, and never through `sdpa_kernel`: that
context manager costs 14 µs a call and its flags are process-wide, so they would leak into other threads. The aten
ops do not follow autocast and do not check their inputs as `F.scaled_dot_product_attention` does; LayerZero casts
and checks before it comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import upright
from layerzero.model.masks import ChunkMask

_flash_cpu = torch._scaled_dot_product_flash_attention_for_cpu
_flash = torch._scaled_dot_product_flash_attention
_math = torch._scaled_dot_product_attention_math
_INF = float("inf")
_NAN = float("nan")
# Bytes that take as long to copy as a launch takes: of a part of a product.
_LARGE, _LARGE_ON_CPU = 1 << 24, 1 << 16
# With fewer keys than this, torch's kernel for AVX takes a row of nothing but NaN for one that attends nothing.
_FORGETFUL = 16 if "AVX" in torch.backends.cpu.get_cpu_capability() else 0


def flash_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | ChunkMask | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_lse: bool,
) -> Any:
    """Blocked attention of the CPU build; reads GQA keys without expanding them."""
    if attn_mask is not None:
        if isinstance(attn_mask, ChunkMask):

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
                square = q.shape[2] == k.shape[2]
                corner = None if square else lower_right(q, k)
                return flash_cpu(q, k, v, corner, dropout_p, square, scale, None, None, None, return_lse)

            return by_chunk(attend, query, key, value, attn_mask, return_lse)
        if attn_mask.ndim == 3:
            attn_mask = attn_mask.unsqueeze(0)  # the kernel takes 2 or 4 axes
        if query.dtype is torch.float64:
            attn_mask = attn_mask.to(torch.float64)  # beside float64 it reads a float32 mask as garbage
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    out, lse = _flash_cpu(query, key, value, dropout_p, bool(is_causal), attn_mask=attn_mask, scale=scale)
    if key.shape[-2] < _FORGETFUL and _may_be_forgotten(lse):
        lost = query.isnan().any(dim=-1)
        out = out.masked_fill(lost.unsqueeze(-1), _NAN)
        lse = lse.masked_fill(lost, _NAN) if return_lse else lse
    if not return_lse:
        return out
    lse = lse.to(torch.float32)
    if attn_mask is not None:  # the kernel writes 0 for a row that attends nothing
        lse = lse.masked_fill((attn_mask == -_INF).all(dim=-1), -_INF)
    return out, lse


def _may_be_forgotten(lse: Tensor) -> bool:
    """Whether a row was taken for one that attends nothing: its log-sum-exp is 0. Looked at where nothing follows the
    call: one short reduction takes less than what is done about a NaN."""
    if torch.compiler.is_compiling():
        return True
    followed = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    if followed or type(lse) is not Tensor or torch._C._get_tracing_state():
        return True
    return int(torch.count_nonzero(lse)) < lse.numel()


def flash_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: ChunkMask | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_lse: bool,
) -> Any:
    """FlashAttention-2 as built into torch."""
    if attn_mask is not None:  # the only mask it takes is a ChunkMask

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flash_cuda(q, k, v, None, dropout_p, True, scale, None, None, None, return_lse)

        return by_chunk(attend, query, key, value, attn_mask, return_lse)
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    result = _flash(query, key, value, dropout_p, bool(is_causal), False, scale=scale)
    return (result[0], result[1]) if return_lse else result[0]


def fused(
    run: Callable[..., Any],
    more: tuple[bool, ...],
    bias_of: Callable[[Tensor, Tensor, Tensor], Tensor],
    lse_of: Callable[[Tensor, int], Tensor],
) -> Callable[..., Any]:
    """An adapter over a kernel that takes a tensor bias: `bias_of` makes it of a mask, `lse_of` cuts its log-sum-exp.

    Its log-sum-exp is asked for where a gradient will need it.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        window: Any,
        softcap: Any,
        alibi_slopes: Any,
        return_lse: bool,
    ) -> Any:
        derived = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        bias = None if attn_mask is None else bias_of(attn_mask, query, key)
        if scale is not None and scale <= 0.0:
            query, scale = upright(query, scale)
        result = run(query, key, value, bias, return_lse or derived, dropout_p, bool(is_causal), *more, scale=scale)
        return (result[0], lse_of(result[1], query.shape[2])) if return_lse else result[0]

    return attention


def rows_of(lse: Tensor, rows: int) -> Tensor:
    """The memory-efficient kernel pads its log-sum-exp to a multiple of 32 rows."""
    return lse.narrow(-1, 0, rows)


def squeezed(lse: Tensor, rows: int) -> Tensor:
    """cuDNN's log-sum-exp comes with a trailing axis of one."""
    return lse.squeeze(-1) if lse.ndim == 4 else lse


def math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    *_: Any,
) -> Any:
    """The unfused path; takes anything SDPA takes."""
    grouped = query.shape[1] != key.shape[1]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # `F.scaled_dot_product_attention` does this before it calls the op, which itself would add True as 1.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -_INF)
    return _math(query, key, value, attn_mask, dropout_p, bool(is_causal), None, scale=scale, enable_gqa=grouped)[0]


def by_group(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Two batched products and a softmax: what `math` does, without a copy of the keys for every query head."""
    _, _, _, scale, _, _, _, return_lse = rest
    scores = _scores(query, key, scale)
    out = _of_group(torch.softmax(scores, dim=-1), query, value)
    if not return_lse:
        return out
    return out, torch.logsumexp(scores, dim=-1).reshape(query.shape[:3]).to(torch.float32)


def group_attention(query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, scale: float | None) -> Tensor:
    """The same for one query a sequence over keys of which `kept` [B, 1, 1, Sk] are there, at least one of each."""
    scores = _scores(query, key, scale)
    if kept is not None:
        scores = scores.masked_fill(~kept, -_INF)
    return _of_group(torch.softmax(scores, dim=-1), query, value)


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Scaled scores [B, Hkv, group * Sq, Sk]: the queries that share a KV head are the rows of one product."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    factor = (width or 1) ** -0.5 if scale is None else scale
    grouped = (query * factor).reshape(batch, kv_heads, heads // max(1, kv_heads) * rows, width)
    return _product(grouped, key.transpose(2, 3))


def _of_group(weights: Tensor, query: Tensor, value: Tensor) -> Tensor:
    return _product(weights, value).reshape(*query.shape[:3], value.shape[3])


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """[B, H, R, K] times [B, H, K, N].

    `@` copies a matrix whose two first axes are not one in memory; a large one is multiplied part by part instead.
    """
    batch, heads = matrix.shape[:2]
    merged = batch < 2 or heads < 2 or matrix.stride(0) == heads * matrix.stride(1)
    if merged or matrix.nbytes < min(batch, heads) * (_LARGE_ON_CPU if matrix.is_cpu else _LARGE):
        return rows @ matrix
    axis = 0 if batch <= heads else 1
    parts = zip(rows.unbind(axis), matrix.unbind(axis), strict=True)
    return torch.stack([torch.bmm(one, other) for one, other in parts], dim=axis)


def _full_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as an additive bias [B, H, Sq, Sk] of the query's dtype, rows padded to 16 bytes."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, float("-inf"))
    mask = mask.to(query.dtype)
    rows, cols = query.shape[2], key.shape[2]
    mask = mask.expand(query.shape[0], query.shape[1], rows, cols)
    step = 16 // mask.element_size()
    if cols % step or mask.stride(-1) != 1 or mask.stride(-2) % step:
        padded = torch.zeros(*mask.shape[:3], -(-cols // step) * step, dtype=mask.dtype, device=mask.device)
        padded[..., :cols] = mask
        mask = padded[..., :cols]
    return mask


# Its bias must span batch and heads and start rows on 16-byte boundaries, and so must cuDNN's.
efficient_cuda = fused(torch._scaled_dot_product_efficient_attention, (), _full_bias, rows_of)
cudnn_cuda = fused(torch._scaled_dot_product_cudnn_attention, (False,), _full_bias, squeezed)


def by_chunk(
    attend: Callable[[Tensor, Tensor, Tensor], Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: ChunkMask,
    return_lse: bool,
) -> Any:
    """The results of `attend` on each chunk's queries and keys, put together.

    `attend` computes causal attention aligned to the bottom right; it has at least as many keys as queries.
    """
    rows, cols = query.shape[2], key.shape[2]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    if rows > cols:  # the first rows stand before every key
        outs.append(query.new_zeros((*query.shape[:2], rows - cols, value.shape[3])))
        lses.append(query.new_full((*query.shape[:2], rows - cols), -torch.inf, dtype=torch.float32))
    for first, last, start, stop in mask.spans(rows, cols):
        found = attend(query[:, :, first:last], key[:, :, start:stop], value[:, :, start:stop])
        outs.append(found[0] if return_lse else found)
        if return_lse:
            lses.append(found[1])
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return (out, torch.cat(lses, dim=2)) if return_lse else out


def lower_right(query: Tensor, key: Tensor) -> Tensor | None:
    """The causal mask aligned to the bottom right, for kernels that only know the other corner; None for one row."""
    rows, cols = query.shape[2], key.shape[2]
    if rows == 1:
        return None
    full = torch.full((rows, cols), -torch.inf, dtype=query.dtype, device=query.device)
    return full.triu(cols - rows + 1)

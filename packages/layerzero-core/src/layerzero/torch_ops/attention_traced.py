"""What torch.compile traces in place of `lz.attention` (see `traced`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import bias as _bias  # not its names: this may run while that very module is imported

from layerzero.errors import InvalidInputError
from layerzero.model.folding import fold, is_folded, unfold
from layerzero.model.masks import BlockMask, ChunkMask
from layerzero.torch_ops import traced as forms
from layerzero.torch_ops.attention import attend, nested_attention
from layerzero.torch_ops.dynamo import chosen, spelled, write_attention
from layerzero.torch_ops.lowering import CAUSAL, causal_word, pair, sides, written_out
from layerzero.torch_ops.opaque import differentiable, place, recorded


def traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | ChunkMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    *,
    layout: str = "BHSD",
    window: int | Sequence[int] | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Traced for `lz.attention`. Dropout is always traced: its random numbers belong to the graph."""
    if query.is_nested or key.is_nested or value.is_nested:
        first = (query, key, value, attn_mask, dropout_p, is_causal, scale)
        given = (*first, window, softcap, alibi_slopes, return_lse, sinks)
        varlen = forms.call_varlen_attention  # type: ignore[attr-defined] # generated
        return nested_attention(varlen, given, layout, backend)
    number: Any = scale
    if isinstance(number, Tensor):
        scale = number.item()
    if is_folded(query, key, value, layout):
        how, query, key, value, attn_mask = fold(query, key, value, attn_mask)
        found = traced(
            query, key, value, attn_mask, dropout_p, is_causal, scale, layout=layout, window=window, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, return_lse=return_lse, backend=backend,
        )  # fmt: skip
        return unfold(found, how)
    causal = causal_word(is_causal)
    if isinstance(attn_mask, _bias.CausalBias):
        if causal != "none":
            raise InvalidInputError(code="MASK_WITH_CAUSAL", value=causal)
        causal = "bottom_right" if attn_mask.variant == _bias.CausalVariant.LOWER_RIGHT else "top_left"
        attn_mask = None
    mask = written_out(attn_mask, query, key, layout, window)
    around = sides(window)
    rest = (CAUSAL[causal], scale, pair(around), softcap, alibi_slopes, return_lse)
    last = () if sinks is None else (sinks,)
    canonical = (query, key, value, mask, dropout_p, *rest, *last)
    grad = differentiable(backend, query, key, value, mask, alibi_slopes, sinks)
    own = "plain"
    if dropout_p == 0.0 and not (grad and return_lse):  # the fused kernels give no gradient through the log-sum-exp
        own = chosen("attention", canonical, layout, backend, grad)
    if own == "plain":
        return attend(*canonical, layout)
    if own:
        return write_attention(own, canonical)
    args = (query, key, value, mask, causal, scale, layout, around, softcap, alibi_slopes, sinks)
    if return_lse:
        return place(torch.ops.layerzero.attention_lse, *args, backend)
    call = "" if sinks is not None or recorded(query, key, value, mask, alibi_slopes) else spelled()
    if not call:
        return torch.ops.layerzero.attention.default(*args, backend)
    return torch.ops.layerzero.attention.call(query, key, value, mask, alibi_slopes, call)

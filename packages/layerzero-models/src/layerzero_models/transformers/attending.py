"""`lz.attention` in the form transformers calls: `attn_implementation="layerzero"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero import attention as _attention
from layerzero_models.transformers.masking import noted
from layerzero_models.transformers.static_cache import decode

attention: Any = _attention  # its flags are words of transformers here, which no overload has


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [B, H, Sq, D], key and value [B, Hkv, Sk, D] to ([B, Sq, H, D], None).

    Without a mask, one query sees all keys; several are causal where the module is (`is_causal` overrides it), from the
    first key on: with more keys than queries the rest are the empty places of a static cache. `s_aux` [H] are sinks: a
    score of each head that takes part in the softmax and has no value.
    """
    if attention_mask is None and query.shape[2] == 1 and position_bias is None and cache is None and s_aux is None:
        # A decode step, the one call that has no time to lose: nothing is hidden but what lies outside a window.
        window = None
        if sliding_window is not None and key.shape[2] > sliding_window:
            window = (sliding_window - 1, 0)
        out = attention(query, key, value, None, dropout, False, scaling, window=window, softcap=softcap)
        return out.transpose(1, 2).contiguous(), None
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=rest)
    queries, keys = query.shape[2], key.shape[2]
    causal: bool | str = False
    window = None
    if attention_mask is None:
        causal = queries > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and keys > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
            if position_bias is not None:
                position_bias = position_bias[..., :queries]
            keys = queries
        # transformers counts the query's own place
        if sliding_window is not None and keys > sliding_window and (causal or queries == 1):
            window = (sliding_window - 1, 0)
    else:
        note = None if torch.compiler.is_compiling() else noted(attention_mask)
        if note is not None and position_bias is None and s_aux is None:
            if note.used is not None:
                out = decode(query, key, value, note, scaling, softcap) if dropout == 0.0 else None
                if out is not None:
                    return out, None
            elif note.causal is not None and tuple(attention_mask.shape[-2:]) == (queries, keys):
                attention_mask, causal, window = None, note.causal or False, note.window
    if position_bias is not None:
        attention_mask, causal = biased(position_bias, attention_mask, bool(causal), query, key), False
    words = {"window": window, "softcap": softcap, "sinks": s_aux}
    out = attention(query, key, value, attention_mask, dropout, causal, scaling, **words)
    return out.transpose(1, 2).contiguous(), None


def biased(bias: Tensor, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """T5's position bias with whatever may not be attended at minus infinity."""
    out = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask is not None:
        return out.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else out + mask
    if causal:
        later = torch.ones(out.shape[-2:], dtype=torch.bool, device=out.device).triu(1 + key.shape[2] - query.shape[2])
        return out.masked_fill(later, -torch.inf)
    return out

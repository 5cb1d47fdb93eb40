"""Calls of the ops from their contexts: decays below one, keys of length one, steps as a trained model has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gated_delta_rule(draw: Any) -> tuple[Any, ...]:
    """A call of the gated delta rule."""
    return _delta(draw, False)


def kimi_delta_attention(draw: Any) -> tuple[Any, ...]:
    """A call of Kimi's delta attention."""
    return _delta(draw, True)


def _delta(draw: Any, channels: bool) -> tuple[Any, ...]:
    needs = draw.ctx.needs
    rows, tokens, cu_seqlens = _tokens(draw)
    heads, key_dim, value_dim = draw.size("heads"), draw.size("key_dim"), draw.size("value_dim")
    shape = (rows, tokens, draw.size("key_heads"), key_dim)
    key = draw.normal(*shape)
    if "qk_l2norm" not in needs:
        key = torch.nn.functional.normalize(key.float(), dim=-1).to(key.dtype)
    other = _other(draw)
    g = torch.nn.functional.logsigmoid(draw.normal(rows, tokens, heads, *((key_dim,) if channels else ())).float() + 3)
    beta = draw.normal(rows, tokens, heads).float().sigmoid().to(draw.dtype())
    state = _state(draw, draw.size("batch"), heads, key_dim, value_dim)
    value = draw.leaf(draw.normal(rows, tokens, heads, value_dim))
    tensors = (draw.main(*shape), draw.leaf(key), value, draw.leaf(g.to(other)), draw.leaf(beta))
    return (*tensors, state, cu_seqlens, None, "qk_l2norm" in needs)


def mamba2_scan(draw: Any) -> tuple[Any, ...]:
    """A call of the scan of Mamba-2."""
    needs = draw.ctx.needs
    rows, tokens, cu_seqlens = _tokens(draw)
    heads, groups, size = draw.size("heads"), draw.size("groups"), draw.size("state_size")
    x = draw.main(rows, tokens, heads, draw.size("head_dim"))
    dt, bias, skip = draw.normal(rows, tokens, heads), draw.normal(heads, scale=0.1) - 2, draw.normal(heads)
    A = (-torch.exp(draw.normal(heads, scale=0.5).float())).to(_other(draw))
    B, C = (draw.leaf(draw.normal(rows, tokens, groups, size, scale=size**-0.5)) for _ in range(2))
    state = _state(draw, draw.size("batch"), heads, draw.size("head_dim"), size)
    D = draw.leaf(skip) if "skip" in needs else None
    tensors = (x, draw.leaf(dt), draw.leaf(A), B, C, D, draw.leaf(bias))
    return (*tensors, state, cu_seqlens, True, 0.0, None)


def causal_conv1d(draw: Any) -> tuple[Any, ...]:
    """A call of the causal convolution."""
    needs = draw.ctx.needs
    rows, tokens, cu_seqlens = _tokens(draw)
    channels, width = draw.size("channels"), draw.size("width")
    x = draw.main(rows, channels, tokens)
    weight = draw.leaf(draw.normal(channels, width, scale=width**-0.5).to(_other(draw)))
    bias = draw.leaf(draw.normal(channels, scale=0.1)) if "bias" in needs else None
    state = None
    if "initial_state" in needs:
        state = draw.leaf(draw.normal(draw.size("batch"), channels, draw.size("state_len")))
    return x, weight, bias, state, cu_seqlens, "silu" if "silu" in needs else None


def _tokens(draw: Any) -> tuple[int, int, Tensor | None]:
    """Rows, tokens of a row, and the offsets of sequences of different lengths where they are packed."""
    batch, tokens = draw.size("batch"), draw.size("seq_len")
    if "varlen" not in draw.ctx.needs:
        return batch, tokens, None
    cuts = [tokens * i * i // (batch * batch) for i in range(batch + 1)]
    return 1, tokens, torch.tensor(cuts, dtype=draw.index("int64"), device=draw.device)


def _other(draw: Any) -> torch.dtype:
    """The dtype of what may be of another one than the main tensor."""
    main: torch.dtype = draw.dtype()
    if "mixed_weight" not in draw.ctx.needs:
        return main
    return torch.float32 if main is not torch.float32 else torch.bfloat16


def _state(draw: Any, *shape: int) -> Tensor | None:
    if "initial_state" not in draw.ctx.needs:
        return None
    state: Tensor = draw.leaf(draw.normal(*shape, scale=0.5))
    return state

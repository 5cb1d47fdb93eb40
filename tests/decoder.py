"""A small decoder layer: its tensors, and its result in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero_tune.blocks.block import decoder_layer

HEADS, KV, WIDTH, HIDDEN, INNER = 4, 2, 16, 64, 96


def layer(tokens: int = 6, batch: int = 2, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(dtype)

    angles = torch.arange(tokens)[:, None] * torch.linspace(1, 0.1, WIDTH // 2)
    q, kv = HEADS * WIDTH, KV * WIDTH
    return {
        "x": normal(batch, tokens, HIDDEN), "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype),
        "ln1": 1 + normal(HIDDEN, scale=0.1), "ln2": 1 + normal(HIDDEN, scale=0.1),
        "wq": normal(q, HIDDEN, scale=0.1), "wk": normal(kv, HIDDEN, scale=0.1), "wv": normal(kv, HIDDEN, scale=0.1),
        "wo": normal(HIDDEN, q, scale=0.1), "w_gate": normal(INNER, HIDDEN, scale=0.1),
        "w_up": normal(INNER, HIDDEN, scale=0.1), "w_down": normal(HIDDEN, INNER, scale=0.1), **changes,
    }  # fmt: skip


def truth(t: dict[str, Tensor]) -> Tensor:
    """The layer in plain PyTorch, in float64."""
    t = {name: item.double() for name, item in t.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def heads(x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, WIDTH)).transpose(1, 2)

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * t["cos"] - b * t["sin"], b * t["cos"] + a * t["sin"]), -1)

    normed = norm(t["x"], t["ln1"])
    q, k, v = (normed @ t[name].T + t.get(f"b{name[1]}", 0.0) for name in ("wq", "wk", "wv"))
    q, k, v = turn(heads(q, HEADS)), turn(heads(k, KV)), heads(v, KV)
    k, v = (item.repeat_interleave(HEADS // KV, 1) for item in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    stream = t["x"] + mixed @ t["wo"].T
    normed = norm(stream, t["ln2"])
    return stream + (F.silu(normed @ t["w_gate"].T) * (normed @ t["w_up"].T)) @ t["w_down"].T


def inputs(t: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return t["x"], t["cos"], t["sin"]


BLOCK = decoder_layer(HEADS, KV)

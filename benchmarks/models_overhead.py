"""What a patched model's calls cost beyond their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import interleaved

__all__ = ["overheads"]


def overheads(model: Any) -> dict[str, float]:
    """µs of each kind of call of a patched Llama beyond its kernel, the kernels being empty."""
    from layerzero.runtime.current import now
    from layerzero_models.transformers import parts, quick

    device = model.device
    layer = model.model.layers[0]
    norm, after = layer.input_layernorm, layer.post_attention_layernorm
    x, residual = (torch.randn(1, 1, 512, device=device) for _ in range(2))
    q, k = (torch.randn(1, 1, heads, 64, device=device).transpose(1, 2) for heads in (8, 2))
    cos, sin = (torch.randn(1, 1, 64, device=device) for _ in range(2))
    v = torch.randn(1, 2, 1, 64, device=device)
    wide = torch.randn(1, 1, 2816, device=device)
    attn = layer.self_attn
    from transformers import AttentionInterface

    attention = AttentionInterface()[attn.config._attn_implementation]
    calls: dict[str, Callable[[], Any]] = {
        "norm": lambda: norm.forward(x),
        "add + norm": lambda: parts.add_norm(after, x, residual),
        "rope": lambda: quick.rotate(q, k, cos, sin),
        "gated activation": lambda: quick.activate("silu_and_mul", wide, ()),
        "attention": lambda: attention(attn, q, k, v, None, scaling=0.125),
    }
    if "forward" in vars(attn.o_proj):  # linear layers are patched where there is a kernel for them
        calls["linear"] = lambda: attn.o_proj.forward(x)
    # What transformers' own attention function does around its kernel is no cost of the patch.
    floors = {"attention": lambda: q.transpose(1, 2).contiguous()}
    for call in calls.values():
        call()
    world, before = now.world, {}
    outs: dict[str, Any] = {"attention": q}
    try:
        for key, bound in world.hot.items():
            before[key] = bound.run
            found = outs.get(key[0], x)
            bound.run = lambda *args, found=found: found
        contestants = {"empty": _nothing, **calls, **{f"{name} floor": call for name, call in floors.items()}}
        medians = interleaved(contestants, rounds=300, batch=40)
    finally:
        for key, run in before.items():
            world.hot[key].run = run
    return {name: round((medians[name] - medians.get(f"{name} floor", medians["empty"])) / 1e3, 3) for name in calls}


def _nothing() -> None:
    pass

"""A transformers model under `lz.patch`, with every op it calls named and watched, for the length of a block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero_verify.caller import Caller

__all__ = ["applied", "watched"]

_NAME = "layerzero_verify"
# op -> the stage it computes; a norm, product or embedding is the stage of its module
_STAGES = {"attention": "attn_out", "rope": "q_rope", "linear": "linear", "embedding": "embedding"}

Observer = Callable[[str, Tensor], None]


@contextmanager
def applied(model: Any, call: Caller, observe: Observer | None = None) -> Iterator[None]:
    """Within the block the model computes as `lz.patch` makes it, each op through `call`.

    `observe` hears of attention's inputs and output; then every part is an op of its own, so that hooks see each.
    """
    from layerzero_models.transformers.redirect import redirected  # of the extra `models`

    names = {id(module): name for name, module in model.named_modules()}

    def run(op: str, *args: Any, **kwargs: Any) -> Any:
        name = _part(names)
        stage = _STAGES.get(op) or ("norm" if op.endswith("norm") else "swiglu_out")
        out = call(f"{name} {stage}", op, *args, **kwargs)
        if observe is not None and op == "attention":
            for word, value in (("q_rope", args[0]), ("k_rope", args[1]), ("attn_out", out.transpose(1, 2))):
                observe(f"{name} {word}", value)
        return out

    with redirected(run):
        lz.patch(model, everything=True, joined=observe is None)
        try:
            yield
        finally:
            lz.unpatch(model)


def _part(names: Mapping[int, str]) -> str:
    """The part of the model whose code calls an op: the nearest frame that works for one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        for word in ("self", "module"):
            name = names.get(id(frame.f_locals.get(word)))
            if name is not None:
                return name
        frame = frame.f_back
    return ""


@contextmanager
def watched(model: Any, observe: Observer) -> Iterator[None]:
    """Within the block the unmodified model runs as always; `observe` hears of attention's inputs and output."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    before = model.config._attn_implementation
    names = {id(module): name for name, module in model.named_modules()}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        out = eager(module, query, key, value, *args, **kwargs)
        for word, seen in (("q_rope", query), ("k_rope", key), ("attn_out", out[0])):
            observe(f"{names.get(id(module), '')} {word}", seen)
        return out

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        """The whole mask, as the eager function adds it."""
        found = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        if found is None:
            return None
        return torch.zeros_like(found, dtype=kwargs.get("dtype", torch.float32)).masked_fill(~found, -1e30)

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)

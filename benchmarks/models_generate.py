"""`generate()` itself, stock against patched: whether greedy tokens are the same, and tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["generate_case"]

Timed = Callable[[dict[str, Any], Callable[[], None], int, float], dict[str, Any]]


def generate_case(
    stock: Any, patched: Any, ids: torch.Tensor, new: int, timed: Timed, sync: Callable[[], None], seconds: float
) -> dict[str, Any]:
    """Greedy tokens after a prompt, whole calls of `generate` timed; ms and tokens a second count new tokens."""

    def written(model: Any) -> torch.Tensor:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return found[:, ids.shape[1] :]

    tokens = {name: written(model) for name, model in (("stock", stock), ("patched", patched))}
    same = tokens["stock"] == tokens["patched"]
    # Where two tokens are as probable as each other but for rounding, one choice parts the texts for good.
    agree = int(same.long().cumprod(-1).sum(-1).min())
    contestants = {
        name: (lambda model=model: written(model), _nothing) for name, model in (("stock", stock), ("patched", patched))
    }
    found = timed(contestants, sync, new, seconds)
    found["tokens_per_s"] = {name: round(ids.shape[0] / ms * 1e3, 1) for name, ms in found["ms"].items()}
    identical = bool(same.all())
    return {"batch": ids.shape[0], "prompt": ids.shape[1], "new": new, "identical": identical, "agree": agree, **found}


def _nothing() -> None:
    pass

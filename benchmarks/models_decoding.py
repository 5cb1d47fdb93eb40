"""Decode loops over the caches of transformers, and where the time of a step goes."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import torch

__all__ = ["Decoding", "Graphed", "shares"]

# parts of a step by the words of the built-in functions that do its work, ours and torch's
_PARTS = {
    "linear": ("linear", "matmul"),
    "attention": ("attention",),
    "norm": ("norm", "rsqrt", "pow", "mean"),
    "rope": ("rope", "neg", "cos", "sin"),
    "activation": ("silu", "gelu", "and_mul"),
    "cache": ("cat",),
    "choice": ("argmax", "sample", "topk", "sort", "multinomial"),
    "views": ("view", "transpose", "reshape", "split", "contiguous", "unsqueeze", "expand", "empty"),
}


class Decoding:
    """A loop over a dynamic cache; `steps` tokens, then back to the context it began with."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        from transformers import DynamicCache

        self.model, self.context = model, ids.shape[1]
        self.cache = DynamicCache(config=model.config)
        out = model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.logits = out.logits[:, -1].float()
        self.first = out.logits[:, -1:].argmax(-1)

    def run(self, steps: int) -> None:
        token = self.first
        for _ in range(steps):
            out = self.model(token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[..., : self.context, :], layer.values[..., : self.context, :]


class Graphed:
    """The decode step over a static cache, captured once and replayed."""

    def __init__(self, model: Any, ids: torch.Tensor, room: int) -> None:
        from transformers import StaticCache

        self.context = ids.shape[1]
        self.cache = StaticCache(config=model.config, max_cache_len=self.context + room)
        out = model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token = out.logits[:, -1:].argmax(-1)
        self.first = self.token.clone()
        self.place = torch.full((ids.shape[0], 1), self.context, dtype=torch.long, device=ids.device)

        def step() -> None:
            made = model(
                self.token, past_key_values=self.cache, position_ids=self.place, use_cache=True, logits_to_keep=1
            )
            self.logits = made.logits
            self.token.copy_(made.logits[:, -1:].argmax(-1))
            self.place.add_(1)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.rewind()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()
        self.rewind()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.graph.replay()

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
        self.token.copy_(self.first)
        self.place.fill_(self.context)


def shares(loop: Decoding, steps: int) -> dict[str, float]:
    """Per cent of a step by part, as cProfile sees it: functions of Python weigh more than they do without it."""
    loop.run(2)
    loop.rewind()
    profile = cProfile.Profile()
    profile.runcall(loop.run, steps)
    loop.rewind()
    found = dict.fromkeys([*_PARTS, "other torch", "Python"], 0.0)
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found[_part(name) if file == "~" else "Python"] += own
    whole = sum(found.values())
    return {name: round(100.0 * own / whole, 1) for name, own in found.items()}


def _part(name: str) -> str:
    quoted = name.split("'")  # "<method 'argmax' of 'torch._C.TensorBase' objects>" or "<built-in method torch.cat>"
    word = quoted[1] if len(quoted) > 2 else name.rpartition(".")[2]
    return next((part for part, words in _PARTS.items() if any(item in word for item in words)), "other torch")

"""Attention of one layer over vLLM's KV cache by the ops of LayerZero; knows vLLM's shapes, imports nothing of vLLM.

A layer's KV cache is [blocks, kv heads, page, 2 * head_dim]. On a CPU the block of a head holds its keys and then its
values, so that a page of either is contiguous; on CUDA every token holds its key and then its value, as vLLM's own
kernels read and write it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero_vllm.choice import LayerKind, Phase


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a layer that are the same at every call."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As the ops take them; a window of W tokens is the query's own and the W - 1 before it."""
        window = None if self.window is None else (self.window - 1, 0)
        return {
            "scale": self.scale,
            "window": window,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, kv heads, page, head_dim] of a cache packed as on a CPU."""
    blocks, heads, page, twice = kv_cache.shape
    both = kv_cache.view(blocks, heads, 2 * page, twice // 2)
    return both[:, :, :page], both[:, :, page:]


def interleaved(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, kv heads, page, head_dim] of a cache packed as on CUDA."""
    keys, values = kv_cache.chunk(2, dim=-1)
    return keys, values


def write(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Put new tokens [tokens, kv heads, head_dim] into their slots of a CPU's cache; slot -1 is padding."""
    if not slots.numel():
        return
    blocks, heads, page, twice = kv_cache.shape
    flat = kv_cache.view(blocks * heads * 2 * page, twice // 2)
    kept, rows = _rows(slots, heads, page)
    for part, there in ((key, rows), (value, rows + page)):
        new = part[: slots.shape[0]] if kept is None else part[kept]
        flat.index_copy_(0, there, new.reshape(-1, twice // 2))


# Where the tokens of the newest step go is the same for all layers of a KV-cache group: (slots, heads, page), answer.
_newest: tuple[tuple[Any, ...], tuple[Tensor | None, Tensor]] | None = None


def forget() -> None:
    """A new step begins: vLLM may write other slots into the tensor it gave before."""
    global _newest
    _newest = None


def _rows(slots: Tensor, heads: int, page: int) -> tuple[Tensor | None, Tensor]:
    """Which tokens are written (None: all), and the rows of their keys by token and head; values are a page behind."""
    global _newest
    if _newest is not None and _newest[0][0] is slots and _newest[0][1:] == (heads, page):
        return _newest[1]
    kept = None if int(slots.min()) >= 0 else (slots >= 0).nonzero().squeeze(1)
    real = slots if kept is None else slots[kept]
    block = torch.div(real, page, rounding_mode="floor")
    first = block * (heads * 2 * page) + (real - block * page)
    rows = (first.unsqueeze(1) + torch.arange(heads) * (2 * page)).reshape(-1)
    _newest = ((slots, heads, page), (kept, rows))
    return kept, rows


def batch_of(block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> Any:
    """The `lz.paged_batch` of vLLM's metadata: it is made once a step and shared by all layers of a KV-cache group."""
    query_lens = query_start_loc.diff().to(block_table.dtype)
    seq_lens = seq_lens.to(block_table.dtype)
    new = query_lens.tolist()
    if all(count == 1 for count in new):
        return lz.paged_batch(block_table, seq_lens, host_lens=seq_lens.tolist())
    return lz.paged_batch(block_table, seq_lens, query_lens=query_lens, host_lens=(seq_lens.tolist(), new))


def attend(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    batch: Any,
    settings: Settings,
    causal: bool = True,
    kernel: str | None = None,
) -> Tensor:
    """Attention of packed queries [tokens, heads, head_dim] over the pages of their sequences, by one kernel or any."""
    options = settings.options if kernel is None else {**settings.options, "backend": kernel}
    found: Tensor = lz.paged_attention(query, *caches, batch, layout="HND", is_causal=causal, **options)
    return found


@dataclass(frozen=True, slots=True)
class Example:
    """A drawn batch of one phase: what a layer is called with, all cached tokens, and vLLM's metadata of it."""

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    new: Tensor
    cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


def example(kind: LayerKind, phase: Phase, dtype: torch.dtype) -> Example:
    """A batch of this phase; `new` are the places, in keys, values and slots, of the tokens that this step adds."""
    device, page = kind.device, kind.block_size
    generator = torch.Generator(device=device).manual_seed(0)
    pages = -(-phase.context // page)
    tokens = torch.arange(phase.batch * phase.context, device=device)
    sequence, position = tokens // phase.context, tokens % phase.context

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return Example(
        query=drawn(phase.batch * phase.query, kind.num_heads, kind.head_dim),
        keys=drawn(len(tokens), kind.num_kv_heads, kind.head_dim),
        values=drawn(len(tokens), kind.num_kv_heads, kind.head_dim),
        slots=sequence * pages * page + position,
        new=tokens[position >= phase.context - phase.query],
        cache=torch.zeros(phase.batch * pages, kind.num_kv_heads, page, 2 * kind.head_dim, dtype=dtype, device=device),
        block_table=torch.arange(phase.batch * pages, dtype=torch.int32, device=device).view(phase.batch, pages),
        query_start_loc=torch.arange(phase.batch + 1, dtype=torch.int32, device=device) * phase.query,
        seq_lens=torch.full((phase.batch,), phase.context, dtype=torch.int32, device=device),
    )


def agrees(one: Tensor, other: Tensor) -> bool:
    """Whether two results of one batch differ by no more than kernels of this dtype do that add in another order."""
    limit = {torch.float32: 1e-4}.get(one.dtype, 3e-2)
    return bool(torch.isfinite(one).all()) and bool(torch.allclose(one.float(), other.float(), rtol=limit, atol=limit))


def race(ways: Mapping[str, Sequence[Callable[[], Any]]], seconds: float = 0.1) -> dict[str, float]:
    """Microseconds of a call by each way: in turns; the least of each call counts, which other load spoils last.

    A way with several calls, as of layers whose weights are not to come from a cache, counts by their mean. A race that
    is decided ends early: what takes long is not run longer than it takes to see who loses.
    """
    best = {name: [float("inf")] * len(calls) for name, calls in ways.items()}
    end, means = time.perf_counter() + seconds, dict[str, float]()
    for rounds in range(200):  # the first one warms up
        for place in range(len(next(iter(ways.values())))):
            for name, calls in ways.items():
                begin = time.perf_counter()
                calls[place]()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                best[name][place] = min(best[name][place], (time.perf_counter() - begin) * 1e6)
        means = {name: sum(found) / len(found) for name, found in best.items()}
        decided = max(means.values()) >= (2 if rounds > 1 else 8) * min(means.values())
        if rounds and (decided or (rounds >= 4 and time.perf_counter() > end)):
            break
    return means

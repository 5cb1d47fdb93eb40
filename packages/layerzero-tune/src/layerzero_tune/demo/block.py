"""The Llama-shaped block of `lz demo`, written once and run with any set of ops.

`forward` takes the ops as an argument: `layerzero` itself, `PlainTorch` (what one would write by hand), or a
`Recorder` around either. So the comparison runs the same model code twice, and only the ops differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero.json_form import Plain
from layerzero.model.kv_cache import PagedBatch

SEED = 20
TOP_K = 40
TOP_P = 0.9


@dataclass(frozen=True, slots=True)
class Sizes(Plain):
    """How large the block is. The prompt ends shortly before a power of two, so that decoding crosses a bucket."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    prompt: int
    decode_steps: int
    page: int = 16

    @property
    def longest(self) -> int:
        return self.prompt + self.decode_steps


def sizes_for(device_type: str, *, quick: bool) -> Sizes:
    """Modest on a CPU, Llama-1B-like on an accelerator, tiny when quick."""
    if quick:
        return Sizes(128, 4, 2, 32, 256, 512, prompt=28, decode_steps=8)
    if device_type == "cpu":
        return Sizes(768, 12, 4, 64, 2048, 8192, prompt=120, decode_steps=32)
    return Sizes(2048, 32, 8, 64, 8192, 32_000, prompt=1000, decode_steps=48)


def weights_for(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> SimpleNamespace:
    """All tensors of the model: one block, an embedding and a head. Random, from a fixed seed.

    They are drawn on the CPU, so that every device gets the same ones.
    """
    generator = torch.Generator().manual_seed(SEED)

    def matrix(rows: int, columns: int, scale: float | None = None) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn * (1 / math.sqrt(columns) if scale is None else scale)).to(device, dtype)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(sizes.hidden, generator=generator)).to(device, dtype)

    half = torch.arange(sizes.head_dim // 2) / (sizes.head_dim // 2)
    angles = torch.outer(torch.arange(sizes.longest), 10_000.0**-half)
    rows = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    return SimpleNamespace(
        embed=matrix(sizes.vocab, sizes.hidden, 1.0),
        norm_attention=norm(),
        qkv=matrix(rows, sizes.hidden),
        out=matrix(sizes.hidden, sizes.heads * sizes.head_dim),
        norm_mlp=norm(),
        gate_up=matrix(2 * sizes.ffn, sizes.hidden),
        down=matrix(sizes.hidden, sizes.ffn),
        norm_out=norm(),
        head=matrix(sizes.vocab, sizes.hidden, 2 / math.sqrt(sizes.hidden)),
        cos=angles.cos().to(device, dtype),
        sin=angles.sin().to(device, dtype),
    )


class KVCache:
    """The same keys and values twice: one tensor that grows, and pages of fixed size in shuffled order."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.length = 0
        self.page = sizes.page
        blocks = math.ceil(sizes.longest / sizes.page)
        empty = torch.zeros(1, sizes.kv_heads, 0, sizes.head_dim, device=device, dtype=dtype)
        self.keys, self.values = empty, empty
        shape = (blocks, sizes.page, sizes.kv_heads, sizes.head_dim)
        self.key_pages = torch.zeros(shape, device=device, dtype=dtype)
        self.value_pages = torch.zeros(shape, device=device, dtype=dtype)
        # A real server hands out whichever page is free, so the pages of one sequence lie scattered.
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(SEED))
        self.block_tables = order.to(device=device, dtype=torch.int32).unsqueeze(0)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens [1, Hkv, S, D] to both forms."""
        start, self.length = self.length, self.length + key.shape[2]
        self.keys = torch.cat((self.keys, key), dim=2)
        self.values = torch.cat((self.values, value), dim=2)
        places = torch.arange(start, self.length, device=key.device)
        pages, slots = self.block_tables[0, places // self.page].long(), places % self.page
        self.key_pages[pages, slots] = key[0].transpose(0, 1)
        self.value_pages[pages, slots] = value[0].transpose(0, 1)

    def batch(self) -> PagedBatch:
        lens = torch.tensor([self.length], dtype=torch.int32, device=self.keys.device)
        return lz.paged_batch(self.block_tables, lens, host_lens=[self.length])


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass gives: the next token, and the attention of a decode step computed in two ways."""

    token: Tensor
    dense: Tensor | None = None
    paged: Tensor | None = None


def forward(
    ops: Any, weights: SimpleNamespace, sizes: Sizes, cache: KVCache, ids: Tensor, generator: torch.Generator
) -> Output:
    """One pass over ids [1, S]: prefill into an empty cache, or one decode step (S = 1) over a filled one."""
    decode = cache.length > 0
    tokens = ids.shape[1]
    stream = ops.embedding(ids, weights.embed)
    hidden = ops.rms_norm(stream, weights.norm_attention)

    heads = ops.linear(hidden, weights.qkv).view(1, tokens, -1, sizes.head_dim).transpose(1, 2)
    query, key, value = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
    positions = torch.arange(cache.length, cache.length + 1, device=ids.device) if decode else None
    query, key = ops.rope(query, key, weights.cos, weights.sin, position_ids=positions)
    cache.append(key, value)

    # A single new token may look at every key, so only the prefill needs the causal mask.
    attended = ops.attention(query, cache.keys, cache.values, is_causal=not decode)
    dense, paged = None, None
    if decode:
        dense = attended
        paged = ops.paged_attention(query[:, :, 0], cache.key_pages, cache.value_pages, cache.batch())
        attended = paged.unsqueeze(2)  # goes on with the paged result, as a server would

    hidden = ops.linear(attended.transpose(1, 2).reshape(1, tokens, -1), weights.out)
    hidden, stream = ops.add_rms_norm(hidden, stream, weights.norm_mlp)

    hidden = ops.linear(hidden, weights.gate_up)
    hidden = ops.silu_and_mul(hidden)
    hidden = ops.linear(hidden, weights.down)
    hidden, stream = ops.add_rms_norm(hidden, stream, weights.norm_out)

    logits = ops.linear(hidden[:, -1], weights.head)
    if decode:
        token = ops.sample_topp(logits, TOP_P, generator=generator)
    else:
        token = ops.sample_topk(logits, TOP_K, generator=generator)
    return Output(token, dense, paged)


class Model:
    """The block with its weights and its prompt on one device."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.weights = weights_for(sizes, device, dtype)
        drawn = torch.randint(sizes.vocab, (1, sizes.prompt), generator=torch.Generator().manual_seed(SEED))
        self.prompt = drawn.to(device)

    def cache(self) -> KVCache:
        return KVCache(self.sizes, self.device, self.dtype)

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(SEED)

    def run(self, ops: Any, cache: KVCache, ids: Tensor, generator: torch.Generator) -> Output:
        return forward(ops, self.weights, self.sizes, cache, ids, generator)

    def prefill(self, ops: Any) -> Output:
        return self.run(ops, self.cache(), self.prompt, self.generator())

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op, kept to be explained, checked and timed afterwards."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """Stands in for `layerzero` in `forward`: passes every call on and keeps it."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.calls: list[Call] = []

    def __getattr__(self, op: str) -> Callable[..., Any]:
        function = getattr(self._ops, op)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            self.calls.append(Call(op, args, kwargs))
            return out

        return call


class PlainTorch:
    """The ops as a careful user writes them with torch alone: its fused functions where it has them."""

    @staticmethod
    def embedding(ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(ids, weight)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return F.rms_norm(stream, (stream.shape[-1],), weight, eps), stream

    @staticmethod
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    @staticmethod
    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def rope(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rotate-half form most model files carry."""
        rows = slice(0, q.shape[2]) if position_ids is None else position_ids
        cos, sin = torch.cat((cos[rows],) * 2, dim=-1), torch.cat((sin[rows],) * 2, dim=-1)

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-second, first), dim=-1) * sin

        return turn(q), turn(k)

    @staticmethod
    def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """`F.scaled_dot_product_attention`, which picks one of torch's own kernels."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    @staticmethod
    def paged_attention(query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: PagedBatch) -> Tensor:
        """torch has no paged attention: gather each sequence's pages, then SDPA."""
        rows = []
        for row, length in enumerate(batch.context_lens_host):
            pages = batch.block_tables[row]
            key, value = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (key_pages, value_pages))
            rows.append(
                F.scaled_dot_product_attention(
                    query[row : row + 1].transpose(0, 1).unsqueeze(0), key[None], value[None], enable_gqa=True
                )
            )
        return torch.cat(rows).squeeze(2)

    @staticmethod
    def sample_topk(logits: Tensor, k: int, *, generator: torch.Generator) -> Tensor:
        values, ids = logits.topk(k, dim=-1)
        return ids.gather(1, torch.multinomial(values.softmax(dim=-1), 1, generator=generator)).squeeze(1)

    @staticmethod
    def sample_topp(logits: Tensor, p: float, *, generator: torch.Generator) -> Tensor:
        values, ids = logits.sort(dim=-1, descending=True)
        probs = values.softmax(dim=-1)
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= p, 0.0)
        return ids.gather(1, torch.multinomial(probs, 1, generator=generator)).squeeze(1)

"""Attention and linear layers: decode over dense and paged caches, prefill, and weights in bf16, INT8 and INT4.

What is read is drawn in several copies, visited in turn, so that it comes from memory and not from a cache: in a model,
other layers have been there in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from cpu_case import Asked, Call, Case, Goal, staggered

import layerzero as lz
from layerzero_cpu.attention import attention
from layerzero_cpu.library import native
from layerzero_cpu.linear import linear, quantized
from layerzero_cpu.paged import paged_attention

WORDS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
COLD = 160 << 20  # bytes visited before one of them is met again
HEADS, KV_HEADS, DIM = 32, 8, 128


def turns(run: Callable[[Any], Any], copies: Sequence[Any]) -> Call:
    """Each call takes the next copy."""
    order = staggered(copies)
    return lambda: run(next(order))


def copies_of(draw: Callable[[], Any], nbytes: int) -> list[Any]:
    """As many as it takes until one has left the cache: one drawn, which takes long, the others copied from it."""
    first = draw()
    return [first, *(_copied(first) for _ in range(max(2, min(12, -(-COLD // nbytes))) - 1))]


def _copied(item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple(tensor.clone() for tensor in item)
    return item.clone() if isinstance(item, torch.Tensor) else replace(item, data=item.data.clone())


def read(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        native.read(tensor)


def _decode(batch: int, keys: int, dtype: torch.dtype) -> Case:
    def make() -> dict[str, Call | Asked]:
        shape = (batch, KV_HEADS, keys, DIM)
        q = torch.randn(batch, HEADS, 1, DIM).to(dtype)
        nbytes = 2 * batch * KV_HEADS * keys * DIM * q.element_size()
        kv = copies_of(lambda: (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)), nbytes)
        folded = q.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
        return {
            "eager": turns(lambda p: F.scaled_dot_product_attention(q, *p, enable_gqa=True), kv),
            "folded sdpa": turns(lambda p: F.scaled_dot_product_attention(folded, *p), kv),
            "direct": turns(lambda p: attention(q, *p, None, 0.0, False, None, None, None, None, False), kv),
            "lz": Asked("attention", [(q, *p) for p in kv]),
            "floor": turns(lambda p: read(*p), kv),
        }

    goal = {torch.bfloat16: (Goal("floor", 0.65),), torch.float32: (Goal("floor", 0.72),)}.get(dtype, ())
    return Case("decode", f"decode B{batch} Sk{keys} {WORDS[dtype]}", make, goal)


def _paged(batch: int, keys: int, page: int, layout: str) -> Case:
    def make() -> dict[str, Call | Asked]:
        blocks = batch * keys // page
        shape = (blocks, page, KV_HEADS, DIM) if layout == "NHD" else (blocks, KV_HEADS, page, DIM)
        table = torch.randperm(blocks).view(batch, -1).to(torch.int32)
        plan = lz.paged_batch(table, torch.full((batch,), keys, dtype=torch.int32))
        q = torch.randn(batch, HEADS, DIM).bfloat16()
        nbytes = 4 * blocks * page * KV_HEADS * DIM
        kv = copies_of(lambda: (torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()), nbytes)

        def gathered(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            seqs = [t[table.long()] for t in pair]
            if layout == "HND":
                seqs = [t.transpose(2, 3) for t in seqs]
            k, v = (t.flatten(1, 2).transpose(1, 2) for t in seqs)
            return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

        return {
            "eager": turns(gathered, kv),
            "direct": turns(lambda p: paged_attention(q, *p, plan, None, None, None, None, False, layout), kv),
            "lz": Asked("paged_attention", [(q, *p, plan) for p in kv], {"layout": layout}),
            "floor": turns(lambda p: read(*p), kv),
        }

    return Case("paged", f"paged decode B{batch} Sk{keys} page {page} {layout} bf16", make, (Goal("floor", 0.5),))


def _prefill(length: int, dtype: torch.dtype, goals: tuple[Goal, ...]) -> Case:
    def make() -> dict[str, Call | Asked]:
        q = torch.randn(1, HEADS, length, DIM).to(dtype)
        k, v = (torch.randn(1, KV_HEADS, length, DIM).to(dtype) for _ in range(2))
        return {
            "eager": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            "direct": lambda: attention(q, k, v, None, 0.0, True, None, None, None, None, False),
            "lz": Asked("attention", [(q, k, v)], {"is_causal": True}),
        }

    return Case("prefill", f"prefill causal S{length} {WORDS[dtype]}", make, goals)


def drawn() -> torch.Tensor:
    """A weight as models have them: results are as large as inputs, which is what tolerances are made for."""
    return torch.randn(4096, 4096) / 64.0


def _linear(rows: int, dtype: torch.dtype, goals: tuple[Goal, ...]) -> Case:
    def make() -> dict[str, Call | Asked]:
        x = torch.randn(rows, 4096).to(dtype)
        weights = copies_of(lambda: drawn().to(dtype), 4096 * 4096 * x.element_size())
        return {
            "eager": turns(lambda w: F.linear(x, w), weights),
            "direct": turns(lambda w: linear(x, w, None, None), weights),
            "lz": Asked("linear", [(x, w) for w in weights]),
            "floor": turns(lambda w: read(w), weights),
        }

    return Case("linear", f"linear 4096² M{rows} {WORDS[dtype]}", make, goals)


def _coded(fmt: str, granularity: str) -> Any:
    """Codes whose scales bfloat16 can hold, so that kernels which keep them in 16 bits compute the same."""
    made = lz.quantize(drawn(), fmt, granularity=granularity)
    return replace(made, scale=made.scale.bfloat16().float())


def _codes(rows: int, fmt: str, goals: tuple[Goal, ...]) -> Case:
    def make() -> dict[str, Call | Asked]:
        x = torch.randn(rows, 4096).bfloat16()
        plain = copies_of(lambda: drawn().bfloat16(), 2 * 4096 * 4096)
        granularity = "channel" if fmt == "int8" else "block"
        weights = copies_of(lambda: _coded(fmt, granularity), 4096 * 4096)
        return {
            "eager": turns(lambda w: F.linear(x, w), plain),  # bf16: what the codes replace
            "torch codes": turns(lambda w: lz.linear(x, w, backend="torch"), weights),
            "direct": turns(lambda w: quantized(x, w, None, None), weights),
            "lz": Asked("linear", [(x, w) for w in weights]),
            "floor": turns(lambda w: read(w.data), weights),
        }

    return Case("linear", f"linear 4096² M{rows} {fmt} (eager: bf16)", make, goals)


def _all() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for batch, keys in ((1, 2048), (1, 8192), (4, 2048), (16, 2048)):
            yield _decode(batch, keys, dtype)
    yield _decode(1, 2048, torch.float16)
    for page, layout in ((16, "NHD"), (32, "NHD"), (32, "HND"), (128, "HND")):
        yield _paged(8, 2048, page, layout)
    yield _prefill(512, torch.bfloat16, ())
    yield _prefill(2048, torch.bfloat16, (Goal("eager", 1.3),))
    yield _prefill(512, torch.float32, ())
    yield _linear(1, torch.bfloat16, (Goal("floor", 0.9),))
    yield _linear(1, torch.float32, ())
    # Without bf16 instructions torch falls back to a product that takes seconds for one layer.
    several = torch.bfloat16 if "avx512_bf16" in native.isas_here() else torch.float32
    for rows in (4, 16, 128):
        yield _linear(rows, several, ())
    yield _codes(1, "int8", (Goal("eager", 2.5),))
    yield _codes(1, "int4", (Goal("eager", 4.0),))
    if several is torch.bfloat16:
        yield _codes(16, "int8", ())
        yield _codes(16, "int4", ())


def cases() -> list[Case]:
    """Every case of this page."""
    return list(_all())

"""Attention over dense and paged caches, and linear layers, drawn at random; the truth is the reference in float64."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from calls_rows import FLOATS, ODD, drawn
from torch import Tensor

from layerzero.backends.reference import attention as plain
from layerzero.backends.reference import feed_forward as plain_linear
from layerzero.backends.reference import varlen as plain_paged
from layerzero.backends.reference.quantize import quantize
from layerzero.model.kv_cache import make_paged_batch
from layerzero.model.quant import QuantScheme
from layerzero.numerics import assert_close, tolerance
from layerzero_cpu import attention, linear, paged

DIMS = (1, 3, 8, 16, 24, 32, 40, 64, 72, 100, 128, 136, 256)


def wide(*items: Any) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in items)


def options(dice: random.Random, batch: int, heads: int) -> tuple[Any, ...]:
    """Scale, window, softcap and slopes."""
    slopes = dice.choice((None, None, torch.rand(heads), torch.rand(batch, heads)))
    window = dice.choice((None, None, (dice.randrange(-1, 9), dice.randrange(-1, 9))))
    return dice.choice((None, 0.2, -0.3, 0.0)), window, dice.choice((None, None, 9.0)), slopes


def tempered(q: Tensor, scale: float | None, slopes: Tensor | None, keys: int) -> tuple[Tensor, Tensor | None]:
    """Queries and slopes, smaller where they would make scores that float32 cannot hold to the tolerance.

    Half a place of a score of 24 is 1e-6, a sum of 256 products errs by ten of them, and the exponential passes them on
    whole; of a slope times 200 places it is 8e-6. The reference computed in float32 misses 1e-5 there as well.
    """
    if q.dtype is not torch.float32:
        return q, slopes
    spread = abs(1.0 if scale is None else scale * math.sqrt(q.shape[-1]))
    q = q * (3.0 / spread) if spread > 3.0 else q
    return q, slopes * min(1.0, 16.0 / max(1, keys)) if slopes is not None else None


def attend(dice: random.Random) -> int:
    dtype, batch, kv_heads, group = (
        dice.choice(FLOATS),
        dice.choice((0, 1, 2)),
        dice.choice((1, 2, 3)),
        dice.choice((1, 2, 3, 4, 8)),
    )
    queries, keys = dice.choice((0, 1, 1, 1, 2, 5, 20, 70)), dice.choice((0, 1, 2, *ODD))
    dim, heads = dice.choice(DIMS), kv_heads * group
    dim_v = dim if dice.random() < 0.8 else dice.choice(DIMS)
    q = drawn(dice, batch, heads, queries, dim, dtype=dtype)
    k = drawn(dice, batch, kv_heads, keys, dim, dtype=dtype)
    v = drawn(dice, batch, kv_heads, keys, dim_v, dtype=dtype)
    causal: Any = dice.choice((False, True, "bottom_right"))
    mask = None
    if not causal and dice.random() < 0.5:
        sizes = [dice.choice((1, full)) for full in (batch, heads, queries, keys)]
        mask = torch.rand(sizes) > 0.3
        if dice.random() < 0.5:
            mask = torch.randn(sizes).to(dtype).masked_fill(~mask, -math.inf)
    scale, window, softcap, slopes = options(dice, batch, heads)
    q, slopes = tempered(q, scale, slopes, keys)
    args = (mask, 0.0, causal, scale, window, softcap, slopes, True)
    got, lse = attention.attention(q, k, v, *args)
    right, right_lse = plain.attention(*wide(q, k, v, *args))
    assert_close(got, right.to(dtype), tolerance("attention", dtype))
    torch.testing.assert_close(lse, right_lse, rtol=1e-4, atol=1e-4)
    return 1


def pages(dice: random.Random) -> int:
    dtype, kv_heads, group, page = (
        dice.choice(FLOATS),
        dice.choice((1, 2)),
        dice.choice((1, 2, 4, 5)),
        dice.choice((1, 3, 16, 32, 128)),
    )
    batch, layout, dim = dice.choice((1, 2, 4)), dice.choice(("NHD", "HND")), dice.choice(DIMS)
    lengths = [dice.choice((0, 1, 1, 1, 4, 40)) for _ in range(batch)]
    contexts = [max(1, n + dice.choice((0, 1, 17, 100))) for n in lengths]
    width = max(-(-n // page) for n in contexts)
    blocks, heads = width * batch + 1, kv_heads * group
    shape = (blocks, page, kv_heads, dim) if layout == "NHD" else (blocks, kv_heads, page, dim)
    index = dice.choice((torch.int32, torch.int64))
    table = torch.randperm(blocks)[: width * batch].view(batch, width).to(index)
    plan = make_paged_batch(table, torch.tensor(contexts, dtype=index), torch.tensor(lengths, dtype=index))
    q, k, v = (drawn(dice, *size, dtype=dtype) for size in ((sum(lengths), heads, dim), shape, shape))
    scale, window, softcap, slopes = options(dice, batch, heads)
    q, slopes = tempered(q, scale, slopes, max(contexts))
    args = (plan, scale, window, softcap, slopes, True, layout)
    got, lse = paged.paged_attention(q, k, v, *args)
    right, right_lse = plain_paged.paged_attention(
        *wide(q, k, v), plan, scale, window, softcap, *wide(slopes), True, layout
    )
    assert_close(got, right.to(dtype), tolerance("paged_attention", dtype))
    torch.testing.assert_close(lse, right_lse.to(torch.float32), rtol=1e-4, atol=1e-4)
    return 1


def products(dice: random.Random) -> int:
    dtype, rows, outputs = (
        dice.choice(FLOATS),
        dice.choice((0, 1, 1, 2, 5, 9, 33)),
        dice.choice((0, 1, 3, 31, 32, 33, 70)),
    )
    act, fmt = dice.choice((None, None, *plain_linear.ACTIVATIONS)), dice.choice(("plain", "int8", "int4"))
    granularity, block = dice.choice(("tensor", "channel", "block")), dice.choice((2, 6, 32, 64, 128, 256, 512))
    width = dice.choice(ODD) * (1 if fmt == "plain" else 2)
    if fmt != "plain" and granularity == "block":
        width = block * dice.choice((1, 2, 3))
    x, bias = drawn(dice, rows, width, dtype=dtype), dice.choice((None, torch.randn(outputs).to(dtype)))
    if fmt == "plain":
        weight: Any = drawn(dice, outputs, width, dtype=dtype)
        got = linear.linear(x, weight, bias, act)
    else:
        if outputs == 0:
            return 0
        scheme = QuantScheme(fmt, granularity, block if granularity == "block" else None, dice.random() < 0.5)
        weight = quantize(torch.randn(outputs, width).to(dtype), scheme)
        got = linear.quantized(x, weight, bias, act)
    right = plain_linear.linear(*wide(x, weight, bias), act)
    assert_close(got, right.to(dtype), tolerance("linear", dtype, k=width))
    return 1


CASES = {"attention": attend, "paged": pages, "linear": products}

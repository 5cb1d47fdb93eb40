"""`moe` in four launches, six for many tokens: order by expert, product and gate, product back, weighted sum.

What is called `fixed` has tiles that do not depend on how many rows there are: a row's bits do not either. A linear
layer is one expert with all rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from layerzero_triton.config import (
    FIXED_EXPERTS,
    ExpertsConfig,
    experts_config,
    fixed_linear_config,
    next_power,
    unit_of,
)
from layerzero_triton.kernels import experts as device
from layerzero_triton.kernels.launch import Launcher, assembling
from layerzero_triton.linear import coded

_route, _count, _tabulate = Launcher(device.route), Launcher(device.count), Launcher(device.tabulate)
_arrange, _product, _combine = Launcher(device.arrange), Launcher(device.product), Launcher(device.combine)

_FEW = 256  # slots that one program puts in order
_CHUNK = 256


def moe(
    x: Tensor, gate_up: Any, down: Any, shares: Tensor, ids: Tensor, *options: Any, config: ExpertsConfig | None = None
) -> Tensor:
    """Canonical arguments of `moe`, weights plain, in INT8, FP8 or MXFP4; `config` is for measuring."""
    activation, expert_offset, gate_up_bias, down_bias, alpha, limit, interleaved = options
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    experts, inner = down.shape[0], down.shape[2]
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens or not hidden:
        return out
    slots = tokens * top_k
    chosen = config or experts_config(slots, experts)
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, shares = ids.contiguous(), shares.contiguous()
    order, ends, tiles = _ordered(ids, slots, experts, expert_offset, chosen.block_m)
    most = min(slots, -(-slots // chosen.block_m) + experts)  # tiles there can be

    rows = gate_up.shape[1]
    gate = "none" if rows == inner else "turns" if interleaved else "halves"
    middle = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
    first = (x, gate_up, gate_up_bias, order, ends, tiles, middle)
    _multiply(first, most, top_k, alpha, limit, activation, gate, True, chosen.block_m, *chosen.first)
    # Not rounded before they are added: with biases a rounded slot can take a small sum out of its bounds.
    results = torch.empty((slots, hidden), dtype=torch.float32, device=x.device)
    second = (middle, down, down_bias, order, ends, tiles, results)
    _multiply(second, most, top_k, 0.0, None, "none", "none", False, chosen.block_m, *chosen.second)

    block, unit = min(1024, next_power(hidden)), unit_of(hidden)
    numbers = (hidden // unit, experts, expert_offset)
    _combine((tokens, -(-hidden // block), 1), (results, ids, shares, out), numbers, (top_k, block, unit))
    return out


def fixed_moe(*args: Any) -> Tensor:
    """`moe` with one height of tiles for any number of tokens."""
    return moe(*args, config=FIXED_EXPERTS)


def fixed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, gate: str = "none", dtype: Any = None
) -> Tensor:
    """Canonical arguments of `linear`; with a gate the weight holds it and up, see `kernels.experts.product`."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    rows, width = flat.shape[0], weight.shape[0] // (1 if gate == "none" else 2)
    out = x.new_empty((*x.shape[:-1], width), dtype=dtype)
    if not out.numel():
        return out
    height, *tile = fixed_linear_config(rows)
    tables = _straight(rows, height, x.device)
    given = (flat, weight[None], None if bias is None else bias[None], *tables, out)
    words = activation or "none"
    _multiply(given, -(-rows // height), 1, 0.0, None, words, gate, activation is not None, height, *tile)
    return out


def fixed_mlp(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None, activation: str, *biases: Any
) -> Tensor:
    """Canonical arguments of `mlp`: its products by `fixed_linear`; what lies between them is rounded once."""
    up_bias, gate_bias, down_bias = biases
    if gate_weight is None:
        gate = "none" if up_weight.shape[0] == down_weight.shape[1] else "halves"
        inner = fixed_linear(x, up_weight, up_bias, activation, gate)
    else:
        inner = fixed_linear(x, gate_weight, gate_bias, activation, dtype=torch.float32)
        inner = inner.mul_(fixed_linear(x, up_weight, up_bias, None, dtype=torch.float32)).to(x.dtype)
    return fixed_linear(inner, down_weight, down_bias, None)


@functools.lru_cache(maxsize=1024)
def _straight(rows: int, block_m: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What `_ordered` gives for one expert that has all rows."""
    count = -(-rows // block_m)
    tiles = torch.zeros((count + 1, 2), dtype=torch.int32)
    tiles[0, 0] = count
    tiles[1:, 1] = torch.arange(0, rows, block_m, dtype=torch.int32)
    order = torch.arange(rows, dtype=torch.int32, device=device)
    return order, torch.tensor([rows], dtype=torch.int32).to(device), tiles.flatten().to(device)


def _ordered(ids: Tensor, slots: int, experts: int, offset: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """The slots by expert, where each expert's end, and the tiles of rows."""
    bins = max(16, next_power(experts))
    chunks = -(-slots // _CHUNK)
    few = slots <= _FEW
    most = min(slots, -(-slots // block_m) + experts)
    sizes = (slots, bins, bins, 2 + 2 * most, 0 if few else chunks * bins)
    together = torch.empty(sum(-(-size // 4) * 4 for size in sizes), dtype=torch.int32, device=ids.device)
    parts, at = [], 0
    for size in sizes:
        parts.append(together[at : at + size])
        at += -(-size // 4) * 4  # aligned to 16 bytes
    order, starts, ends, tiles, counts = parts
    numbers = (slots, experts, offset)
    if few:
        _route((1, 1, 1), (ids, order, starts, ends, tiles), numbers, (max(16, next_power(slots)), block_m, bins), 4)
        return order, ends, tiles
    _count((chunks, 1, 1), (ids, counts), numbers, (_CHUNK, bins), 4)
    held = max(1, min(next_power(chunks), 8192 // bins))
    _tabulate((1, 1, 1), (counts, starts, ends, tiles), (chunks, experts), (held, block_m, bins), 8)
    _arrange((chunks, 1, 1), (ids, order, starts, counts), numbers, (_CHUNK, bins), 8)
    return order, ends, tiles


def _multiply(
    tensors: tuple[Any, ...], most: int, top_k: int, alpha: float, limit: float | None, activation: str, gate: str,
    first: bool, block_m: int, block_n: int, block_k: int, warps: int, stages: int,
) -> None:  # fmt: skip
    x, given, bias, *rest = tensors
    n, k = given.shape[1:]
    weights, scale, codes, per = given, None, "none", 0
    if not isinstance(given, Tensor):
        weights, scale, codes, per = coded(given)
    if weights.stride(2) != 1 and weights.stride(1) != 1:
        weights = weights.contiguous()
    bias = None if bias is None else bias.contiguous()
    w_e, w_n, w_k = weights.stride()
    along_k = w_k == 1
    unit, n_unit = unit_of(w_e, w_n if along_k else w_k, x.stride(0), k), unit_of(n)
    _product(
        (most * -(-n // block_n), 1, 1),
        (x, weights, scale, bias, *rest),
        (n // n_unit, *(size // unit for size in (k, x.stride(0), w_e, w_n, w_k)), top_k, alpha, limit or 0.0),
        (
            block_m, block_n, block_k, k % block_k == 0, n % block_n == 0, unit, n_unit, along_k, bias is not None,
            activation, gate, limit is not None, first, codes, per, assembling(),
        ),
        warps,
        stages,
    )  # fmt: skip

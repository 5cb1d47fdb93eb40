"""Sampling one token a row of logits without a sort. Canonical arguments of `sample`, `sample_topk`, `sample_topp`.

A small top-k given as a number is sampled from a shortlist, in two launches; anything else by searching thresholds.

Same tokens as the reference for the same generator state: one uniform float64 a row is drawn as it draws it, the same
tokens are kept, and the draw walks them in the order of their ids. Nothing waits for the device.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero_triton.config import SHORTLISTS, ShortlistConfig, next_power, shortlist_config, unit_of
from layerzero_triton.kernels import sampling as device
from layerzero_triton.kernels import shortlist as few
from layerzero_triton.kernels.launch import Launcher, Plan, collecting, prepare, remember, sm_count

Param = float | Tensor

_heads = Launcher(device.heads)
_count = Launcher(device.count)
_weigh = Launcher(device.weigh)
_choose = Launcher(device.choose)
_draw = Launcher(device.draw)
_peaks = Launcher(few.peaks)
_shortlist = Launcher(few.shortlist)
_known: set[Any] = set()
_plans: dict[Any, _Launches] = {}


@dataclass(frozen=True, slots=True)
class _Launches:
    """The two launches of a shortlist, and how many numbers lie between them."""

    peaks: Plan
    draw: Plan
    best: int
    room: int


def sample_topk(logits: Tensor, k: int | Tensor, temperature: Param, generator: torch.Generator | None) -> Tensor:
    """Draw from the k likeliest tokens of each row."""
    return sample(logits, k, None, None, temperature, generator)


def sample_topp(logits: Tensor, p: Param, temperature: Param, generator: torch.Generator | None) -> Tensor:
    """Draw from the smallest set of likeliest tokens whose probabilities reach p."""
    return sample(logits, None, p, None, temperature, generator)


def sample(
    logits: Tensor,
    top_k: int | Tensor | None,
    top_p: Param | None,
    min_p: Param | None,
    temperature: Param,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw with all filters at once. None, and top_k <= 0, leave a filter out. Returns int64 [B]."""
    if not isinstance(temperature, Tensor) and temperature <= 0:
        ids = logits.argmax(dim=-1, keepdim=True)  # takes a NaN for the largest
        return torch.where(logits.gather(-1, ids) > -math.inf, ids, -1).squeeze(-1)
    rows = logits.shape[0]
    place = logits.device if generator is None else generator.device
    uniform = torch.rand((rows, 1), generator=generator, device=place, dtype=torch.float64).to(logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _run(logits, top_k, top_p, min_p, temperature, uniform, out)
    return out


def _run(
    logits: Tensor, top_k: int | Tensor | None, top_p: Param | None, min_p: Param | None, temperature: Param,
    uniform: Tensor, out: Tensor, tile: int | None = None,
) -> None:  # fmt: skip
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if isinstance(top_k, int) and not 0 < top_k < vocab:
        top_k = None
    if not isinstance(top_p, Tensor) and top_p is not None and top_p >= 1:
        top_p = None
    if isinstance(top_k, int) and tile is None:
        rest = (top_p, min_p, temperature, uniform, out)
        # Everything the two launches are made of, and every dtype.
        key = (
            logits.shape, logits.stride(0), logits.dtype, logits.get_device(), top_k,
            *[value if value is None else isinstance(value, Tensor) for value in rest[:3]],
        )  # fmt: skip
        plan = _plans.get(key)
        if plan is None:
            config = shortlist_config(rows, vocab, top_k, sm_count(logits.device))
            if config is not None:
                _prepared(logits, rest)
                plan = remember(_plans, key, _planned(logits, *rest[:3], config))
        if plan is not None:
            _from_shortlist(logits, top_k, *rest, plan)
            return
    bits = 32 if logits.dtype is torch.float32 else 16
    tile = tile or min(4096, next_power(vocab))
    tiles = -(-vocab // tile)
    block = next_power(tiles)
    # room: heads, masses of choose [rows, tiles] each; masses of weigh, twice [rows, tiles, 16]; goals [rows];
    # masses before min-p [rows, tiles]. counts: first places, ties [rows, tiles]; digits, twice [rows, tiles, 256].
    room = torch.empty(rows * tiles * 35 + rows, dtype=torch.float64, device=logits.device)
    counts = torch.empty(rows * tiles * (2 if top_k is None else 514), dtype=torch.int32, device=logits.device)
    digits_k = 0 if top_k is None else bits // 8
    digits_p = 0 if top_p is None else bits // 4
    edge_slot = digits_k
    state = torch.empty((digits_k + digits_p + 2) * rows * 2, dtype=torch.int64, device=logits.device)
    sizes = (rows, tiles, vocab, logits.stride(0))
    k_rows, k = _whole(top_k, logits)
    p_rows, p = _real(top_p, logits)
    m_rows, least = _real(min_p, logits)
    t_rows, warmth = _real(temperature, logits)
    grid = (rows, tiles, 1)
    warps = max(1, min(8, tile // 256))
    _heads(grid, (logits, room, counts), sizes, (tile,), warps)
    for index in range(digits_k):
        shift = bits - 8 * (index + 1)
        constants = (tile, block, bits, index == 0, k_rows is not None)
        _count(grid, (logits, counts, state, k_rows), (*sizes, k, index, shift), constants, warps)
    slot = edge_slot
    for index in range(digits_p):
        slot = edge_slot + 1 + index
        _weigh(
            grid,
            (logits, room, counts, state, k_rows, p_rows, t_rows),
            (*sizes, k, p, warmth, digits_k - 1, edge_slot, slot, bits - 4 * (index + 1)),
            (
                tile, block, bits, min(index, 2), digits_k > 0, k_rows is not None, p_rows is not None,
                t_rows is not None,
            ),
            warps,
        )  # fmt: skip
    end = slot + 1
    _choose(
        grid,
        (logits, room, counts, state, k_rows, p_rows, m_rows, t_rows),
        (*sizes, k, p, least, warmth, digits_k - 1, edge_slot, slot, end),
        (
            tile, block, bits, digits_k > 0, digits_p > 0, min_p is not None, k_rows is not None, p_rows is not None,
            m_rows is not None, t_rows is not None,
        ),
        warps,
    )  # fmt: skip
    _draw(
        (rows, 1, 1),
        (logits, room, counts, state, p_rows, m_rows, t_rows, uniform, out),
        (*sizes, p, least, warmth, end),
        (
            tile, block, bits, digits_p > 0, min_p is not None, p_rows is not None, m_rows is not None,
            t_rows is not None,
        ),
        warps,
    )  # fmt: skip


def _prepared(logits: Tensor, rest: tuple[Any, ...]) -> None:
    """Compile what other batch sizes and top-k of the same vocabulary need."""
    vocab = logits.shape[1]
    kinds = tuple([value is None or isinstance(value, Tensor) for value in rest[:3]])
    given = tuple([value is None for value in rest[:2]])
    key = (logits.dtype, vocab, logits.get_device(), unit_of(logits.stride(0), vocab), kinds, given)
    if key in _known:
        return
    _known.add(key)
    sms = sm_count(logits.device)
    with collecting() as launches:
        for k in (room for room in (1, *(room + 1 for room in SHORTLISTS)) if room < vocab):
            for rows in (1, 1 << 20):
                config = shortlist_config(rows, vocab, k, sms)
                if config is not None:
                    _from_shortlist(logits, k, *rest, _planned(logits, *rest[:3], config))
    prepare(launches, logits.device)


def _planned(
    logits: Tensor, top_p: Param | None, min_p: Param | None, temperature: Param, config: ShortlistConfig
) -> _Launches:
    """0 < top_k < vocab, and rows of logits without gaps; `config` apart for measuring."""
    rows, vocab = logits.shape
    step = logits.stride(0)
    unit = unit_of(step, vocab)
    groups = -(-vocab // config.group)
    sizes = (groups, vocab // unit, step // unit)
    each_row = tuple([isinstance(value, Tensor) for value in (top_p, min_p, temperature)])
    return _Launches(
        Plan((rows, -(-groups // config.many), 1), sizes, (config.group, config.many, unit), config.peak_warps),
        Plan(
            (rows, 1, 1),
            sizes,
            (
                config.group, next_power(groups), config.slots, config.broad, unit, top_p is not None,
                min_p is not None, *each_row,
            ),
            config.warps,
        ),
        rows * groups,
        rows * 3 * config.slots,
    )  # fmt: skip


def _from_shortlist(
    logits: Tensor, top_k: int, top_p: Param | None, min_p: Param | None, temperature: Param, uniform: Tensor,
    out: Tensor, plan: _Launches,
) -> None:  # fmt: skip
    best = torch.empty(plan.best, dtype=torch.int32, device=logits.device)
    room = torch.empty(plan.room, dtype=torch.int32, device=logits.device)
    p_rows, p = _real(top_p, logits)
    m_rows, least = _real(min_p, logits)
    t_rows, warmth = _real(temperature, logits)
    _peaks.go(plan.peaks, (logits, best))
    _shortlist.go(plan.draw, (logits, best, room, p_rows, m_rows, t_rows, uniform, out), (top_k, p, least, warmth))


def _whole(value: Any, like: Tensor) -> tuple[Tensor | None, int]:
    if isinstance(value, Tensor):
        return value.to(device=like.device, dtype=torch.int64).contiguous(), 0
    return None, int(value or 0)


def _real(value: Any, like: Tensor) -> tuple[Tensor | None, int]:
    """A parameter as a tensor of one a row, or the bits of its float64: Triton passes Python floats as float32."""
    if isinstance(value, Tensor):
        return value.to(device=like.device, dtype=torch.float64).contiguous(), 0
    return None, struct.unpack("<q", struct.pack("<d", float(value or 0.0)))[0]

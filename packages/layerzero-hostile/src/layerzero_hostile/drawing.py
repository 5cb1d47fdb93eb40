"""Calls that no kit has: other sizes, one number changed, a NaN, and ones large enough for their time to tell."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.model.context import Context
from layerzero.tuning.truth import computed
from layerzero_verify.kernels import Bench
from layerzero_verify.testing.cases import Case, fit

_FIELDS = {item.name for item in fields(Context) if item.init}
_OTHER_CASES = 4  # of other groups of the kit, with fresh numbers
_RANDOM = frozenset({"dropout", "sampling", "speculation"})
# Operations a second that no device exceeds: at most so many a cycle, of a core or of a streaming multiprocessor.
_CORE_HZ, _CORE_OPS = 6.0e9, 64.0
_SM_HZ, _SM_OPS = 3.0e9, {"float64": 512.0, "float32": 1024.0}
_SM_NARROW = 32768.0
_LEAST_S = 4e-3  # a floor below it is not told from the way to the other process
_LARGEST = 1 << 25  # bytes of arguments of such a call
# Sizes that may grow by themselves, and how far ahead of the others: long sums make more work than results.
_FREE = {"batch": 1, "rows": 1, "tokens": 1, "n": 1, "seq_len_q": 1, "seq_len_k": 2, "k": 8}


def sizes_of(case: Case) -> dict[str, int]:
    """The sizes that a case names."""
    return {name: n for name, n in case.given.items() if type(n) is int and name not in _FIELDS}


def resized(case: Case, chance: random.Random, *, grow: bool) -> Case | None:
    """The case with some of its sizes drawn anew, or all and larger; None where it has none, or none is different."""
    sizes = sizes_of(case)
    if not sizes:
        return None
    some = sorted(sizes) if grow else chance.sample(sorted(sizes), k=chance.randint(1, len(sizes)))
    least = {name: sizes[name] + 1 if grow else max(1, sizes[name] // 2) for name in some}
    drawn = {name: fit(case.spec, name, chance.randint(least[name], 2 * sizes[name] + 3)) for name in some}
    return None if drawn.items() <= sizes.items() else replace(case, given={**case.given, **drawn}, label="fresh sizes")


def other_cases(bench: Bench, plain: Case, chance: random.Random) -> list[Case]:
    """Some cases of the kit for what else the kernel declares."""
    found = [
        case
        for group in bench.groups()
        if group.name not in _RANDOM
        for case in list(bench.cases(group))[:1]
        if case.id != plain.id
    ]
    return chance.sample(found, k=min(_OTHER_CASES, len(found)))


def _edited(
    args: tuple[Any, ...], chance: random.Random, change: Callable[[Tensor], float], turn: int | None = None
) -> tuple[Any, ...]:
    places = [place for place, item in enumerate(args) if computed(item) and item.numel()]
    if not places or len(places) <= (turn or 0):
        raise ValueError("nothing to change")
    tensor = args[chance.choice(places[:2]) if turn is None else places[turn]]
    index = tuple(chance.randrange(n) for n in tensor.shape)
    tensor[index] = change(tensor[index])
    return args


def altered(turn: int, args: tuple[Any, ...], chance: random.Random) -> tuple[Any, ...]:
    """The same arguments with one number of one tensor changed, at a place that nobody can guess."""
    return _edited(args, chance, lambda before: -3.0 * float(before) + 2.0, turn)


def nan_in(args: tuple[Any, ...], chance: random.Random) -> tuple[Any, ...]:
    """The same arguments with one NaN in the first tensor."""
    return _edited(args, chance, lambda _: float("nan"))


# -- the roofline -----------------------------------------------------------------------------------------------------
def _peak(device: torch.device, dtype: str) -> float | None:
    """Operations a second that the device cannot exceed; None where this is not known."""
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        return count * _SM_HZ * _SM_OPS.get(dtype, _SM_NARROW)
    if device.type == "cpu" and dtype in ("float32", "float64"):  # units for narrow dtypes differ too much
        return len(os.sched_getaffinity(0)) * _CORE_HZ * _CORE_OPS
    return None


def least_seconds(bench: Bench, args: tuple[Any, ...]) -> float:
    """The time that the operations of a call take at the very least; 0 where nobody knows them."""
    ctx = bench.described(args)
    cost = getattr(bench.op, "cost", None)
    peak = _peak(bench.device, ctx.dtype)
    if cost is None or peak is None or ctx.quant_format is not None:
        return 0.0
    return float(cost(ctx).flops) / peak


def larger(bench: Bench, plain: Case, accepted: Callable[[Case], bool]) -> Case | None:
    """A call of few bytes whose operations take a while; None where the op moves more than it computes."""
    case = plain
    for _ in range(24):
        args = case.arguments(bench.device, 1)
        floor = least_seconds(bench, args)
        if floor >= _LEAST_S:
            return case
        if (
            floor == 0.0
            or sum(item.numel() * item.element_size() for item in args if isinstance(item, Tensor)) > _LARGEST
        ):
            return None
        sizes = sizes_of(case)
        name = min((name for name in _FREE if name in sizes), key=lambda name: sizes[name] / _FREE[name], default="")
        if not name:
            return None
        grown = fit(case.spec, name, 2 * sizes[name])
        case = replace(case, given={**case.given, name: grown}, label="large")
        if grown == sizes[name] or not accepted(case):
            return None
    return None

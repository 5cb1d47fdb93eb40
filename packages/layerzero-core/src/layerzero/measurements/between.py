"""From measured calls to a call between them: a roofline through all, bent to the nearest.

The roofline of a kernel is the longest of its bytes over the bandwidth it reached, its operations over the rate it
reached, and its shortest time. Measured ratios to torch's own code are interpolated by inverse distance over the
logarithms of the sizes, and follow the ratio of two rooflines half the way: that tells calls that were left out better
than all of it or nothing. Far from every measured call the roofline stands alone. Pure functions of numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

FARTHEST = 8.0
"""Octaves: from measured calls further away nothing is interpolated."""
_NEIGHBOURS = 4
_SOFTENING = 0.25  # octaves: a call measured twice is not believed absolutely
_CLOSE = 1.0  # octaves up to which the first calls of a kernel speak that is newer than the others
_OTHER_DTYPE = 1.0  # octaves between float16 and bfloat16
_ONE_QUERY = 4.0  # octaves between a decode step and a call with more queries
_FOLLOWED = 0.5  # how far ratios follow the rooflines between measured calls
_WIDE, _WIDER = 7.0, 1.5  # beyond 128 numbers a head other code runs: so many octaves away
_SIDE_BY_SIDE = {"batch", "num_kv_heads", "num_heads", "seq_len_q", "seq_len_k"}
_RELATIVE = (("num_heads", "num_kv_heads"), ("head_dim_v", "head_dim"), ("tokens", "batch"))
_REACHED = 0.9  # the quantile of measured rates that counts as reached; one lucky call does not


class Point(NamedTuple):
    """One measured call: its sizes, dtype and cost, torch's time, and the kernels' times as multiples of that."""

    sizes: tuple[int, ...]
    dtype: str
    bytes: float
    flops: float
    base_us: float
    ratios: Mapping[str, float]
    source: tuple[str, str, str] = ("", "", "")  # device, commit and torch
    noise: float = 0.0
    apart: float = 0.0  # octaves, where it is of another kind than the calls that are told from it


class Estimate(NamedTuple):
    """What is expected of one kernel; `near` is False where the roofline speaks alone."""

    ratio: float
    base_us: float
    nearest: Point
    octaves: float
    near: bool


def _place(axes: Sequence[str], sizes: Sequence[int]) -> tuple[float, ...]:
    """Sizes on the scale that distances are measured on. Kernels of attention run the heads of all sequences side by
    side, so these count together; sizes that follow from others by what they differ; decode steps are far away. Tiles
    depend on the width of a head and the heads of a group, so these count more."""
    logs = {axis: math.log2(max(size, 1)) for axis, size in zip(axes, sizes, strict=True)}
    if logs.keys() >= _SIDE_BY_SIDE:
        for axis, other in _RELATIVE:
            if axis in logs:
                logs[axis] -= logs[other]
        logs["batch"] += logs.pop("num_kv_heads")
        logs.pop("num_blocks", None)  # how many pages lie unused says nothing of a call
        logs["steps"] = _ONE_QUERY * (logs["seq_len_q"] == 0.0)
        logs["wide"] = _WIDER * (logs["head_dim"] > _WIDE)
        logs |= {"num_heads": 1.5 * logs["num_heads"], "head_dim": 2.0 * logs["head_dim"]}
    elif "rotary_dim" in logs:  # RoPE: tokens of all sequences, with the heads of a token in one row
        width, tokens = logs["head_dim"], logs["batch"] + logs["seq_len_q"]
        return tokens, 0.75 * (logs["num_heads"] + width), width, logs["rotary_dim"] - width
    return tuple(logs.values())


class Kind:
    """The measured calls of one kind, which differ in their sizes alone (and float16 from bfloat16)."""

    def __init__(self, points: Sequence[Point], axes: Sequence[str]) -> None:
        self.points, self._axes = tuple(points), axes
        self._places = [_place(axes, point.sizes) for point in self.points]
        self._reached = cache(self._rates)

    def estimates(
        self, names: Sequence[str], sizes: Sequence[int], dtype: str, cost: tuple[float, float], near: bool = True
    ) -> dict[str, Estimate]:
        """What is expected of those kernels that were measured; with `near` False by their rooflines alone."""
        here, points = _place(self._axes, sizes), self.points
        order = sorted((self._distance(index, here, dtype), index) for index in range(len(points)))
        base_us, found = self._roofline("", *cost), {}
        for name in names:
            own = list(islice((pair for pair in order if name in points[pair[1]].ratios), _NEIGHBOURS))
            few = len(own) < _NEIGHBOURS  # no roofline goes through so few calls: nearby their ratios count as they are
            if not own or (few and own[0][0] > _CLOSE and len(points) >= _NEIGHBOURS):
                continue
            (far, first), ratio = own[0], self._roofline(name, *cost) / base_us
            bent = near and (few or far <= FARTHEST)
            if bent:
                weights = [(distance + _SOFTENING) ** -2 for distance, _ in own]
                followed = 0.0 if few else _FOLLOWED
                bends = [self._bend(name, at, followed) for _, at in own]
                ratio = ratio**followed * math.exp(sum(map(operator.mul, weights, bends)) / sum(weights))
            found[name] = Estimate(ratio, base_us, points[first], far, bent)
        return found

    def _distance(self, index: int, here: Sequence[float], dtype: str) -> float:
        point = self.points[index]
        return math.hypot(math.dist(self._places[index], here), point.apart, _OTHER_DTYPE * (point.dtype != dtype))

    def _bend(self, name: str, index: int, followed: float) -> float:
        """The logarithm of what a measured ratio is over that of the rooflines, as far as that is followed."""
        point = self.points[index]
        straight = self._roofline(name, point.bytes, point.flops) / self._roofline("", point.bytes, point.flops)
        return math.log(point.ratios[name] / straight**followed)

    def _roofline(self, name: str, moved: float, flops: float) -> float:
        """µs of a kernel, or of torch's own code (""), for so many bytes and operations."""
        bandwidth, speed, least = self._reached(name)
        return max(least, moved / bandwidth if bandwidth else 0.0, flops / speed if speed else 0.0)

    def _rates(self, name: str) -> tuple[float, float, float]:
        """Bytes and operations per µs that were reached, and the shortest time."""
        known = [point for point in self.points if not name or name in point.ratios]
        times = [(point, point.base_us * point.ratios.get(name, 1.0)) for point in known]
        return (
            _quantile([point.bytes / us for point, us in times], _REACHED),
            _quantile([point.flops / us for point, us in times], _REACHED),
            _quantile([us for _, us in times], 1.0 - _REACHED),
        )


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]

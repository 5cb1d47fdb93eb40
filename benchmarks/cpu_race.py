"""A race of a few calls tells whether tuning could change a choice; tuning takes seconds where calls are large."""

from __future__ import annotations

import time

from cpu_case import Asked, Call

import layerzero as lz

__all__ = ["CLEAR", "contested"]

CLEAR = 1.7  # times as fast as every other kernel in the race: far more than a median of many calls could differ by
UNFIT = ("reference.", "inductor.")  # what others are held against; what would have to be compiled first


def contested(asked: Asked) -> str:
    """A kernel that might be the best in the place of the chosen one; empty where there is none."""
    chosen, *others = lz.explain(asked.op, *asked.args, **asked.options).decision.ranking
    best = _quickest(asked.call(backend=chosen))
    for other in others:
        if not other.startswith(UNFIT) and _quickest(asked.call(backend=other)) < CLEAR * best:
            return str(other)
    return ""


def _quickest(call: Call) -> float:
    """The least of four calls; of fewer where they are long."""
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
        if taken[-1] > 0.3:
            break
    return min(taken)

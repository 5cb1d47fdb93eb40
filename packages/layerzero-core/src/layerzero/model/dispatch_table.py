"""The dispatch table as a value: for each op, which kernel serves which bucket of calls, decided beforehand.

A table belongs to one machine, one set of kernels and one policy, all three named inside it. Sizes that vary from
call to call fall into buckets, whose upper ends the table lists for each op and axis; every other property of a call
is matched exactly. `find` is a dictionary lookup: no kernel is examined, none is scored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from layerzero.model.context import Context
from layerzero.model.situation import Situation, situation

__all__ = ["DispatchTable", "Hardware", "PlanEntry", "bucket_sizes", "situation"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine a table was made on. `signature` decides; the rest is for people: `threads` of torch, for one, which
    times on a CPU were taken with."""

    signature: str
    device: str
    driver: str | None = None
    torch: str | None = None
    backends: tuple[tuple[str, str], ...] = ()
    threads: int | None = None

    def __str__(self) -> str:
        parts = [self.device, f"torch {self.torch}"]
        if self.threads:
            parts.append(f"{self.threads} thread{'s' if self.threads > 1 else ''}")
        if self.driver:
            parts.append(f"driver {self.driver}")
        return ", ".join([*parts, *(f"{name} {version}" for name, version in self.backends)])


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One decision: calls of `op` in this situation with these sizes run `kernel_id`.

    sizes      axis -> upper end of its bucket, or the exact size where the table has no buckets for the axis;
               by name, as `when` is
    median_us  measured time, `error` its largest deviation from the reference; None where nothing was measured
    artifacts  what has to be compiled for it before it is fast
    busy       others used the machine while its time was taken
    """

    op: str
    when: Situation
    sizes: tuple[tuple[str, int], ...]
    kernel_id: str
    median_us: float | None = None
    error: float | None = None
    artifacts: tuple[str, ...] = ()
    busy: bool = False


def bucket_sizes(ctx: Context, buckets: Mapping[str, tuple[int, ...]]) -> tuple[tuple[str, int], ...] | None:
    """The sizes of a call with each bucketed one at the end of its bucket; None beyond the last bucket."""
    sizes = []
    for axis, size in ctx.dims:
        ends = buckets.get(axis)
        if ends:
            place = bisect_left(ends, size)
            if place == len(ends):
                return None
            size = ends[place]
        sizes.append((axis, size))
    return tuple(sorted(sizes))


@dataclass(frozen=True, eq=False)
class DispatchTable:
    """A solved table. `content_hash` covers everything but itself."""

    hardware: Hardware
    policy_hash: str
    kernels: Mapping[str, str]
    buckets: Mapping[str, Mapping[str, tuple[int, ...]]]
    entries: tuple[PlanEntry, ...]
    model_id: str = ""
    content_hash: str = field(default="", compare=False)
    signature: str | None = field(default=None, compare=False)

    @cached_property
    def _index(self) -> dict[tuple[str, Situation, tuple[tuple[str, int], ...]], PlanEntry]:
        return {(entry.op, entry.when, entry.sizes): entry for entry in self.entries}

    def edges(self, op: str, axis: str) -> tuple[int, ...]:
        """Upper ends of the buckets of an axis, ascending; empty where the axis is matched exactly."""
        return self.buckets.get(op, {}).get(axis, ())

    @cached_property
    def find(self) -> Callable[[Context], PlanEntry | None]:
        """The entry for a call, None when the table has no such bucket. Asked before: a dictionary lookup."""
        return lru_cache(maxsize=4096)(self._find)

    def _find(self, ctx: Context) -> PlanEntry | None:
        sizes = bucket_sizes(ctx, self.buckets.get(ctx.op, {}))
        return None if sizes is None else self._index.get((ctx.op, situation(ctx), sizes))

"""What happens off the hot path, with its time: cold calls, selections, compiles, failovers, tuning.

A place that does one of these things says so with `observed` (a function) or `tell` (something already over). Each
kind has a histogram, which is always kept: a cold call takes a thousand times longer than counting it. Sinks (traces,
spans) hear of whole trees: a selection inside a cold call is handed over after it, with its parent known.

Hot calls are counted by kernel (`KernelCounters`) for almost nothing: a hit already asks its entry's guard, and a
counter can be that guard, a bound method of `itertools.count`, which is C, takes no lock, and is exact from any number
of threads under the interpreter's lock. Switching counting on or off swaps the World, so every kernel is bound anew.
Calls of a plan (`lz.plan`) and of a compiled graph ask no guard and are not counted.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from layerzero.errors import from_outside
from layerzero.forking import fresh_lock, in_child

Guard = Callable[[], Any]


def counter_value(counter: Any) -> int:
    """What the next count would be; itertools offers no other way to look without counting."""
    return int(repr(counter)[len("count(") : -1])


class KernelCounters:
    """Calls by (op, kernel). One counter each, shared by every entry of that kernel, so that there are few."""

    def __init__(self) -> None:
        self._hits: dict[tuple[str, str], Any] = {}
        self._cold: dict[tuple[str, str], Any] = {}

    def guard(self, op: str, kernel_id: str, guard: Guard | None) -> Guard:
        """The guard to bind with: the given one first, so that only calls that pass are counted."""
        # From 1 on, since a guard must be true.
        count: Guard = self._hits.setdefault((op, kernel_id), itertools.count(1)).__next__
        if guard is None:
            return count
        return lambda: guard() and count()

    def cold(self, op: str, kernel_id: str) -> None:
        next(self._cold.setdefault((op, kernel_id), itertools.count()))

    def hits(self) -> dict[tuple[str, str], int]:
        return {key: counter_value(counter) - 1 for key, counter in list(self._hits.items())}

    def calls(self) -> dict[tuple[str, str], int]:
        found = self.hits()
        for key, counter in list(self._cold.items()):
            found[key] = found.get(key, 0) + counter_value(counter)
        return found


class Histogram:
    """Counts of durations in fixed buckets, from 10 µs to 5 minutes."""

    BOUNDS = (
        1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
        10.0, 30.0, 60.0, 300.0,
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = fresh_lock()
        self.reset()

    def reset(self) -> None:
        self._counts = [0] * (len(self.BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(self.BOUNDS, seconds)] += 1
            self._sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def read(self) -> tuple[list[int], float]:
        """Counts up to each bound and beyond the last, adding up; and the sum of all durations."""
        with self._lock:
            return list(itertools.accumulate(self._counts)), self._sum

    def quantile(self, share: float) -> float | None:
        """The bound below which this share of the durations lies; None before the first."""
        counts, _ = self.read()
        if not counts[-1]:
            return None
        place = bisect.bisect_left(counts, share * counts[-1])
        return self.BOUNDS[place] if place < len(self.BOUNDS) else math.inf


P = ParamSpec("P")
R = TypeVar("R")

KINDS = ("dispatch", "select", "compile", "load", "failover", "tune", "agree")
"""Kinds of event; what is counted of each, the metric `layerzero_KIND_seconds` says (`telemetry.metrics`)."""

_log = logging.getLogger("layerzero.telemetry")


class Event(NamedTuple):
    """One thing that happened. Times in ns: `start` of the wall clock, `duration` of a steady one."""

    kind: str
    start: int
    duration: int
    attributes: Mapping[str, Any] = MappingProxyType({})
    error: str = ""
    thread: int = 0
    number: int = 0
    parent: int = 0

    @property
    def end(self) -> int:
        return self.start + self.duration


Sink = Callable[[tuple[Event, ...]], None]
"""Takes a whole tree, the outermost event first."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.open: list[int] = []
        self.done: list[Event] = []


class Events:
    """The process's events: histograms, and the sinks that want to hear of them."""

    def __init__(self) -> None:
        self.histograms = {kind: Histogram() for kind in KINDS}
        self._sinks: list[Sink] = []
        self._numbers = itertools.count(1)
        self._here = _Local()

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Hand every tree of events to `sink`; returns the way to stop it. One that raises is logged and kept."""
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink)

    def begin(self) -> int:
        """An event begins in this thread; what is told before its end lies inside it."""
        number = next(self._numbers)
        self._here.open.append(number)
        return number

    def end(self, number: int, kind: str, duration: int, attributes: Mapping[str, Any], error: str = "") -> None:
        here = self._here
        while here.open and here.open.pop() != number:
            pass  # one that was begun inside and never ended
        self.histograms[kind].add(duration / 1e9)
        if not self._sinks:
            here.done.clear()
            return
        parent = here.open[-1] if here.open else 0
        start = time.time_ns() - duration
        made = Event(kind, start, duration, attributes, error, threading.get_native_id(), number, parent)
        here.done.append(made)
        if not here.open:
            tree, here.done = tuple(reversed(here.done)), []
            for sink in tuple(self._sinks):
                try:
                    sink(tree)
                except Exception as problem:
                    if from_outside(problem):
                        raise
                    _log.exception("a telemetry sink raised")

    def tell(self, kind: str, duration: float = 0.0, error: str = "", **attributes: Any) -> None:
        """Something that is over already, and took `duration` seconds."""
        self.end(self.begin(), kind, int(duration * 1e9), attributes, error)

    def reset(self) -> None:
        """Forget the counts; sinks stay. For tests."""
        for histogram in self.histograms.values():
            histogram.reset()

    def after_fork(self) -> None:
        """Nothing is half told in a forked child."""
        self._here = _Local()


events = Events()
in_child(events.after_fork)


def details(**values: Any) -> dict[str, Any]:
    """The `extra=` of a log call that carries these values; `layerzero.telemetry.logs` writes them out."""
    return {"layerzero": values}


def observed(
    kind: str, words: Callable[[tuple[Any, ...], Any], Mapping[str, Any]]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make each call of a function an event; `words(args, result)` are its attributes, asked only if somebody listens.

    A call that raises is an event with an error, and the result is None then.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            number, started = events.begin(), time.perf_counter_ns()
            out: Any = None
            error = ""
            try:
                out = function(*args, **kwargs)
                return out  # type: ignore[no-any-return]
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"[:300]
                raise
            finally:
                took = time.perf_counter_ns() - started
                events.end(number, kind, took, words(args, out) if events._sinks else {}, error)

        return run

    return declare

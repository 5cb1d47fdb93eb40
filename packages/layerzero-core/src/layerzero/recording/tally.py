"""Recording traffic: which calls really occur, how often, with which strides.

While a `Tally` is in force every World owns a hot table that counts its hits, so a hot call costs one count more and
nothing else changes; without one there is no trace of it. Contexts are described where they are described anyway, on
the cold path. Calls of a plan (`lz.plan`) and of a compiled graph do not look into the table and are not counted.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layerzero.telemetry.events import counter_value

if TYPE_CHECKING:
    from layerzero.dispatch.bind import Bound
    from layerzero.env import Env
    from layerzero.model.context import Context

_log = logging.getLogger("layerzero.recording")
_found = dict.get
_NEVER = itertools.repeat(0)


class CountingTable(dict[Any, Any]):
    """A hot table whose hits are counted by the entry they find."""

    __slots__ = ()

    def get(self, key: Any, default: Any = None) -> Any:
        entry = _found(self, key)
        if entry is None:
            return default
        # A count is one step of the interpreter: exact from any number of threads, and cheaper than an addition.
        next(entry.calls or _NEVER)
        return entry


class Tally:
    """Contexts met and how often. `flush` is called with the finished tally when the process ends."""

    def __init__(self, flush: Callable[[Tally], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._entries: list[tuple[Context, Sequence[Any], Any]] = []
        self._once: dict[Context, list[Any]] = {}
        self._flush = flush
        if flush is not None:
            atexit.register(self.close)

    def table(self) -> CountingTable:
        return CountingTable()

    def met(
        self, hot: dict[Any, Any], keys: tuple[Any, Any], ctx: Context, bound: Bound, args: tuple[Any, ...]
    ) -> None:
        """A call was described, on the cold path; what was made hot for it is counted under its context."""
        strides = strides_of(args)
        counter: Any = None
        for key in keys:
            if key is not None and dict.get(hot, key) is bound:
                counter = itertools.count() if counter is None else counter
                hot[key] = replace(bound, calls=counter)
        with self._lock:
            if counter is not None:
                next(counter)
                self._entries.append((ctx, strides, counter))
            else:
                self._once.setdefault(ctx, [strides, 0])[1] += 1

    def counts(self) -> dict[Context, tuple[int, Sequence[Any]]]:
        """How often each context occurred, and the strides of its first call."""
        found: dict[Context, tuple[int, Sequence[Any]]] = {}
        with self._lock:
            hot = [(ctx, strides, counter_value(counter)) for ctx, strides, counter in self._entries]
            for ctx, strides, count in (*hot, *((ctx, *seen) for ctx, seen in self._once.items())):
                before = found.get(ctx, (0, strides))
                found[ctx] = (before[0] + count, before[1])
        return found

    def close(self) -> None:
        """Hand the tally over, once. What goes wrong is said: a process must not fail because it was watched."""
        flush, self._flush = self._flush, None
        if flush is None:
            return
        atexit.unregister(self.close)
        try:
            flush(self)
        except Exception as error:
            _log.warning("the recorded calls could not be written: %s", error)


def strides_of(args: Sequence[Any]) -> list[list[int] | None]:
    """The strides of the tensors among arguments, None for anything else: what `build(strides=...)` takes."""
    from torch import Tensor

    return [list(item.stride()) if isinstance(item, Tensor) else None for item in args]


def tally_from(settings: Env) -> Tally | None:
    """The tally LAYERZERO_RECORD asks for; None when it asks for none."""
    path = settings.record
    if path is None:
        return None

    def write(tally: Tally) -> None:
        from layerzero.recording.traffic import Traffic, add_to_file

        add_to_file(Traffic.of(tally), path)

    return Tally(write)

"""Events as a Chrome trace, the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from layerzero.telemetry.events import Event


class Trace:
    """The newest events, up to a limit; a sink for `Events.subscribe`."""

    def __init__(self, limit: int = 100_000) -> None:
        self._events: deque[Event] = deque(maxlen=limit)

    def __call__(self, tree: tuple[Event, ...]) -> None:
        self._events.extend(tree)

    @property
    def events(self) -> tuple[Event, ...]:
        """What was kept, in the order in which it ended."""
        return tuple(self._events)

    def to_json(self) -> dict[str, Any]:
        return chrome_trace(self.events)


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """A trace in the JSON object format: complete events ("X"), one track per thread, times in µs of the wall clock."""
    rows: list[dict[str, Any]] = []
    threads: set[int] = set()
    pid = os.getpid()
    for event in events:
        threads.add(event.thread)
        args = {key: _plain(value) for key, value in event.attributes.items()}
        if event.error:
            args["error"] = event.error
        args |= {"event": event.number, **({"inside": event.parent} if event.parent else {})}
        # What the reader of a track wants to see first: "select rms_norm".
        about = event.attributes.get("op") or event.attributes.get("kernel")
        name, kind = f"{event.kind} {about}" if about else event.kind, f"layerzero,{event.kind}"
        when = {"ts": event.start / 1e3, "dur": event.duration / 1e3, "pid": pid, "tid": event.thread}
        rows.append({"name": name, "cat": kind, "ph": "X", **when, "args": args})
    rows.sort(key=lambda row: (row["ts"], -row["dur"]))
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    title = os.path.basename(sys.argv[0]) or "python"
    meta = [_meta(pid, 0, "process_name", f"layerzero: {title}")]
    meta += [_meta(pid, tid, "thread_name", names.get(tid, f"thread {tid}")) for tid in sorted(threads)]
    return {"traceEvents": [*meta, *rows], "displayTimeUnit": "ms"}


def _meta(pid: int, tid: int, name: str, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": value}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)

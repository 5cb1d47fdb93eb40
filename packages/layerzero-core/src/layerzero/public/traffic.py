"""`lz.record`: the calls that occur; and the calls that a recording, a model or a file describes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerzero import companions
from layerzero.errors import InvalidInputError, invalid
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.recording.tally import Tally
from layerzero.recording.traffic import Recorded, Traffic, add_to_file, read_mapping
from layerzero.recording.traffic import load as load_traffic
from layerzero.runtime.state import state


class Recording:
    """What `lz.record()` gives: `traffic` holds the calls so far, all of them once the block has ended."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    @property
    def traffic(self) -> Traffic:
        return Traffic.of(self._tally)


_recording = threading.Lock()


@contextmanager
def record(path: str | os.PathLike[str] | None = None) -> Iterator[Recording]:
    """Count the calls of ops that occur inside the block, in every thread: contexts, strides, how often.

    `path` names a file to which they are added when the block ends; `lz.tune(path)` and `lz.solve(path)` read it.
    LAYERZERO_RECORD=file does the same for a whole process. One recording at a time; a nested one is refused.
    """
    if not _recording.acquire(blocking=False):
        raise invalid("VALUE_INVALID", "lz.record()", "one at a time", "traffic is being recorded already")
    before, tally = state.tally, Tally()
    try:
        _ = state.world
        state.record(tally)
        yield Recording(tally)
    finally:
        state.record(before)
        _recording.release()
        if path is not None:
            add_to_file(Traffic.of(tally), path)


def calls_of(source: Any, *, device: DeviceSpec | None = None) -> list[tuple[str, Recorded]]:
    """Named calls from whatever describes them.

    Traffic, a traffic file, a grid file (.toml), a model folder or config.json, a configuration as a mapping, or
    contexts. Calls for other kinds of devices than `device` are left out.
    """
    found = list(_calls(source, device))
    if device is not None:
        found = [item for item in found if item[1].context.device.device_type == device.device_type]
    return found


def _calls(source: Any, device: DeviceSpec | None) -> Iterator[tuple[str, Recorded]]:
    if isinstance(source, Recording):
        source = source.traffic
    if isinstance(source, Traffic):
        for item in source.calls:
            yield _name(item.context), item
    elif isinstance(source, Mapping):
        yield from _calls(companions.part("model-calls")(source, device=device), device)
    elif isinstance(source, (str, os.PathLike)):
        yield from _calls_of_file(Path(source), device)
    elif isinstance(source, Context):
        yield _name(source), Recorded(source)
    elif isinstance(source, Iterable):
        for item in source:
            if isinstance(item, Recorded):
                yield _name(item.context), item
            elif isinstance(item, Context):
                yield _name(item), Recorded(item)
            else:
                raise _unknown(item)
    else:
        raise _unknown(source)


def _unknown(item: Any) -> InvalidInputError:
    return InvalidInputError(
        code="TYPE_INVALID", value=type(item).__name__,
        limit="traffic, a file of it, a grid file, a model configuration, or contexts",
    )  # fmt: skip


def _calls_of_file(path: Path, device: DeviceSpec | None) -> Iterator[tuple[str, Recorded]]:
    if path.suffix == ".toml":
        yield from companions.part("grid-files")(path, device)
        return
    data = read_mapping(path)
    recorded = not path.is_dir() and path.name != "config.json" and ("format" in data or "calls" in data)
    yield from _calls(load_traffic(path) if recorded else data, device)


def _name(ctx: Context) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in ctx.dims)
    return f"{ctx.op} {ctx.dtype} {sizes}"

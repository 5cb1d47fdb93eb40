"""`lz.record`: the calls that occur; `lz.warmup`: ready for those that a recording, a model or a file describes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerzero import companions
from layerzero.dispatch import compiling as jit
from layerzero.errors import invalid
from layerzero.forking import fresh_lock
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.recording.tally import Tally
from layerzero.recording.traffic import Recorded, Traffic, add_to_file, read_mapping
from layerzero.recording.traffic import load as load_traffic
from layerzero.runtime.state import state
from layerzero.startup.warm import Manifest, Warmup, config_hash, is_manifest, mark_critical, warm


class Recording:
    """What `lz.record()` gives: `traffic` holds the calls so far, all of them once the block has ended."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    @property
    def traffic(self) -> Traffic:
        return Traffic.of(self._tally)


_recording = fresh_lock()


@contextmanager
def record(path: str | os.PathLike[str] | None = None) -> Iterator[Recording]:
    """Count the calls of ops that occur inside the block, in every thread: contexts, strides, how often.

    `path` names a file to which they are added when the block ends; `lz.tune(path)` and `lz.solve(path)` read it.
    LAYERZERO_RECORD=file does the same for a whole process. One recording at a time; a nested one is refused.
    """
    if not _recording.acquire(blocking=False):
        raise invalid(
            "VALUE_INVALID", "lz.record()", "one at a time", "lz.record(): traffic is recorded already, one at a time"
        )
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
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.suffix == ".toml":
            yield from companions.part("grid-files")(path, device)
            return
        data = read_mapping(path)
        recorded = not path.is_dir() and path.name != "config.json" and ("format" in data or "calls" in data)
        source = load_traffic(path) if recorded else data
    if isinstance(source, Mapping):
        yield from _calls(companions.part("model-calls")(source, device=device), device)
        return
    if isinstance(source, Recording):
        source = source.traffic
    found = source.calls if isinstance(source, Traffic) else source
    for item in found if isinstance(found, Iterable) else (found,):
        call = Recorded(item) if isinstance(item, Context) else item
        if not isinstance(call, Recorded):
            expected = "traffic, a file of it, a grid file, a model configuration, or contexts"
            raise invalid("TYPE_INVALID", type(item).__name__, expected)
        ctx = call.context
        yield f"{ctx.op} {ctx.dtype} {' '.join(f'{name}={size}' for name, size in ctx.dims)}", call


def manifest(source: Any, *, config: Any = None) -> Manifest:
    """The calls to be ready for, critical ones marked.

    `source` is a manifest file, traffic that `lz.record` wrote, a model folder or config.json, a configuration as a
    mapping, or contexts. Of recorded traffic the calls that make up nine tenths are critical, of a model's its decode
    steps; in a manifest file the marks are the author's. `config` checks that the manifest was made from that
    configuration.
    """
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    if isinstance(source, Manifest):
        made = source
    elif path is not None and is_manifest(path):
        made = Manifest.load(path)
    else:
        model, made_from = "", ""
        if isinstance(source, Mapping) or (path is not None and (path.is_dir() or path.name == "config.json")):
            found = _config(source)
            made_from = config_hash(found)
            model = str(found.get("_name_or_path") or found.get("model_type") or "")
        made = Manifest(mark_critical(call for _, call in calls_of(source)), model, made_from)
    if config is not None:
        made.require(_config(config))
    return made


def _config(source: Any) -> dict[str, Any]:
    return dict(source) if isinstance(source, Mapping) else read_mapping(source)


def warmup(
    source: Any,
    *,
    config: Any = None,
    kernels: str | Sequence[str] = (),
    timeout: float | None = None,
    workers: int | None = None,
    background: bool = True,
    retry: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Warmup:
    """Compile, load and bind what these calls need; returns when the critical ones are ready.

    source      see `layerzero.public.traffic.manifest`: manifest, traffic, model configuration or contexts
    config      configuration the manifest must have been made from
    kernels     globs of further kernels to compile, whatever selection thinks of them
    timeout     seconds to wait for critical kernels; those that are late are left to the fallback and go on compiling
    workers     kernels compiled at a time
    background  False: wait for the rest as well
    retry       try again what could not be compiled before
    progress    called with (done, all) while artifacts get ready

    Afterwards requests for these calls compile nothing. The result says what was compiled, what failed and why;
    `result.wait()` waits for the background.
    """
    if timeout is not None and not timeout >= 0:
        raise invalid("VALUE_INVALID", f"timeout={timeout}", "seconds, 0 or more")
    if workers is not None and workers < 1:
        raise invalid("VALUE_INVALID", f"workers={workers}", "1 or more")
    _ = state.world
    if retry:
        jit.forget_failures()
    named = (kernels,) if isinstance(kernels, str) else tuple(kernels)
    items = manifest(source, config=config).items
    result = warm(items, kernels=named, timeout_s=timeout, workers=workers, told=progress)
    if not background:
        result.wait()
        jit.publish()
    return result

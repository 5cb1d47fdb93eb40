"""`lz.observe`, `lz.metrics`, `lz.structured_logs`: how a running process is seen from outside.

Nothing here runs unless somebody looks: counters and histograms exist anyway, gauges are read from the World.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from layerzero.companions import part
from layerzero.errors import ConfigurationError, InvalidInputError
from layerzero.files import write_whole
from layerzero.forking import fresh_lock
from layerzero.health.breaker import BreakerPhase
from layerzero.runtime.state import state
from layerzero.selection.world import World
from layerzero.telemetry.events import KINDS, KernelCounters, events
from layerzero.telemetry.logs import JsonFormatter, RedactingFormatter, Redactor
from layerzero.telemetry.metrics import Family, family, histogram
from layerzero.version import __version__

_PHASES = {BreakerPhase.CLOSED: 0, BreakerPhase.HALF_OPEN: 1, BreakerPhase.OPEN: 2}
_lock = fresh_lock()
_users = 0
counters = KernelCounters()  # one for the life of the process: a metric that counts never falls


def count_calls(on: bool) -> None:
    """Count calls by kernel from now on, or no longer; each switching on wants its switching off.

    The World is swapped, so that every kernel is bound anew with or without its counter.
    """
    global _users
    with _lock:
        before = _users > 0
        _users = max(0, _users + (1 if on else -1))
        after = _users > 0
        if before is after:
            return
        with state.changing():
            state.counting = counters if after else None
            if state.loaded:
                state.publish()


def families() -> list[Family]:
    """Every metric of the catalogue that has something to say here."""
    return [*_counted(), *(_loaded(state.world) if state.loaded else ())]


def _counted() -> Iterator[Family]:
    torch = sys.modules.get("torch")
    labels = {
        "version": __version__,
        "torch": str(getattr(torch, "__version__", "")),
        "python": sys.version.split()[0],
    }
    yield family("layerzero_info", (labels, 1))
    yield family("layerzero_counting", state.counting is not None)
    calls = counters.calls()
    rows = [({"op": op, "kernel": kernel}, count) for (op, kernel), count in sorted(calls.items())]
    yield family("layerzero_kernel_calls_total", *rows)
    total = sum(calls.values())
    if total:
        yield family("layerzero_hot_hit_ratio", sum(counters.hits().values()) / total)
    numbers = state.counters.to_json()
    yield family("layerzero_bucketed_hits_total", numbers["bucketed_hits"])
    yield family("layerzero_world_swaps_total", numbers["swaps"])
    for name in ("misses", "selections", "followed", "binds", "failovers", "long_loads"):
        yield family(f"layerzero_{name}_total", numbers[name])
    stats = state.cache.stats()
    yield family("layerzero_selection_cache_entries", stats.entries)
    yield family("layerzero_selection_cache_hits_total", stats.hits)
    yield family("layerzero_selection_cache_misses_total", stats.misses)
    for kind in KINDS:
        yield histogram(f"layerzero_{kind}_seconds", events.histograms[kind])


def _loaded(world: World) -> Iterator[Family]:
    yield family("layerzero_hot_entries", len(world.hot))
    yield family("layerzero_kernels", len(world.registry))
    found = {**world.registry.backends, **world.enclosed}
    rows = [({"backend": name}, float(spec.available)) for name, spec in sorted(found.items())]
    yield family("layerzero_backend_available", *rows)
    health = state.health.snapshot()
    breakers = [
        ({"kind": kind, "name": name}, _PHASES[breaker.phase])
        for kind, named in (("backend", health.backends), ("kernel", health.kernels))
        for name, breaker in sorted(named.items())
    ]
    yield family("layerzero_breaker_state", *breakers)
    yield family("layerzero_quarantined", *(({"kernel": name}, 1) for name in sorted(health.quarantined)))
    yield family("layerzero_unbindable", *(({"kernel": name}, 1) for name in sorted(world.unbindable)))
    states = {"ready": len(world.ready), "failed": len(world.uncompilable)}
    states["pending"] = 0 if state.compiler is None else state.compiler.busy
    yield family("layerzero_jit_artifacts", *(({"state": word}, count) for word, count in states.items()))
    last = state.warmup
    if last is not None:
        told = {"asked": last.calls, "bound": last.bound, "failed": len(last.failed), "waiting": last.waiting}
        yield family("layerzero_warmup_calls", *(({"state": word}, count) for word, count in told.items()))
    if world.ranks is not None:
        yield family("layerzero_ranks", world.ranks.size)
        yield family("layerzero_rank_disagreements_total", world.ranks.disagreements)


class Observation(ExitStack):
    """What `lz.observe` started; `stop()` or the end of its `with` block ends it."""

    def __init__(self) -> None:
        super().__init__()
        self._exporter: Any = None
        self._trace: Any = None

    @property
    def where(self) -> str | None:
        """Address or file of the metrics; None when they are not exported."""
        where: str | None = None if self._exporter is None else self._exporter.where
        return where

    def families(self) -> list[Family]:
        return families()

    def calls(self) -> dict[tuple[str, str], int]:
        """Calls by (op, kernel id), counted since the process first counted."""
        return counters.calls()

    def trace(self) -> dict[str, Any]:
        if self._trace is None:
            raise InvalidInputError("nothing is traced", code="VALUE_INVALID", value="trace=None", limit="trace=True")
        found: dict[str, Any] = self._trace.to_json()
        return found

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace so far; Perfetto (ui.perfetto.dev) opens it."""
        write_whole(Path(path), json.dumps(self.trace()))

    def stop(self) -> None:
        """End it; a second time does nothing."""
        self.close()


def observe(
    *,
    counters: bool = True,
    metrics: str | os.PathLike[str] | int | None = None,
    interval: float = 2.0,
    trace: bool | str | os.PathLike[str] = False,
    spans: bool | Any = False,
    registry: Any = None,
) -> Observation:
    """Collect metrics, traces or spans of this process until `stop()`; also a context manager.

    counters  count calls by kernel (about 50 ns a call; nothing is paid while no observation counts)
    metrics   a port (`9464`, `"host:9464"`; 0: any free one) that Prometheus can scrape, or a file that is rewritten
              every `interval` seconds (`.prom`: text, else JSON); `lz top` reads both
    trace     keep what happens off the hot path for a Chrome trace; a path: write it there at the end
    spans     OpenTelemetry spans for the same events; True: the program's tracer provider, else a tracer
    registry  a registry of prometheus_client to add the metrics to (True: the client's own)

    Cold calls, selections, compiles, failovers and tuning are traced; a hot call never is. All but `counters` need
    layerzero-tune.
    """
    made = Observation()
    try:
        if trace:
            made._trace = sink = part("telemetry.trace")()
            if not isinstance(trace, bool):
                made.callback(made.save_trace, trace)
            made.callback(events.subscribe(sink))
        if spans:
            made.callback(events.subscribe(part("telemetry.spans")(None if spans is True else spans)))
        if counters:
            count_calls(True)
            made.callback(count_calls, False)
        if registry is not None and registry is not False:
            made.callback(part("telemetry.registry")(families, None if registry is True else registry))
        if metrics is not None:
            made._exporter = part("telemetry.metrics")(metrics, families, interval=interval)
            made.callback(made._exporter.close)
    except BaseException:
        made.stop()
        raise
    return made


def metrics() -> dict[str, Any]:
    """Every metric of this process by name: a number, or a list of labels with numbers. Kernels are counted only while
    an observation counts them (`lz.observe`); everything else always is."""
    found: dict[str, Any] = {}
    for item in families():
        if item.kind == "histogram":
            parts = {sample.name.removeprefix(item.name)[1:]: sample.value for sample in item.samples}
            found[item.name] = {"count": parts["count"], "sum": parts["sum"]}
        elif len(item.samples) == 1 and not item.samples[0].labels:
            found[item.name] = item.samples[0].value
        else:
            found[item.name] = [{**dict(sample.labels), "value": sample.value} for sample in item.samples]
    return found


def structured_logs(
    target: str | os.PathLike[str] | IO[str] | None = None,
    *,
    level: str | int = "INFO",
    json: bool = True,
    redact: bool | Iterable[str] = False,
) -> Callable[[], None]:
    """Write LayerZero's log records to a stream (default: stderr) or file; returns the way to stop.

    One JSON object a line, with op, kernel_id, reasons and costs where there are any; `json=False`: plain text.
    `redact` leaves out what looks like a secret (tokens, passwords, keys); a list of regular expressions adds to that.
    At level INFO every selection is logged, once.
    """
    if isinstance(redact, (str, bytes)):
        raise InvalidInputError(code="TYPE_INVALID", value="redact: str", limit="True, or a list of expressions")
    redactor = Redactor(() if redact is True else redact) if redact else None
    chosen = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if not isinstance(chosen, int) or isinstance(chosen, bool):
        raise InvalidInputError(code="VALUE_INVALID", value=f"level={level!r}", limit="DEBUG, INFO, WARNING or ERROR")
    handler = _handler(target)
    words = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    redacted = words if redactor is None else RedactingFormatter(words, redactor)
    handler.setFormatter(JsonFormatter(redactor) if json else redacted)
    handler.setLevel(chosen)
    logger = logging.getLogger("layerzero")
    before = logger.level
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > chosen:
        logger.setLevel(chosen)

    def stop() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()

    return stop


def _handler(target: str | os.PathLike[str] | IO[str] | None) -> logging.Handler:
    if target is None or hasattr(target, "write"):
        return logging.StreamHandler(sys.stderr if target is None else target)  # type: ignore[arg-type]
    try:
        return logging.FileHandler(os.fspath(target), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the log cannot be written to {target}: {error.strerror}", value=str(target), limit="a file in a folder"
        ) from None


def from_environment(settings: Any) -> None:
    """What LAYERZERO_METRICS, LAYERZERO_TRACE, LAYERZERO_LOG and LAYERZERO_REDACT ask for, for the whole process."""
    if settings.log is not None:
        patterns = True if settings.redact == ("1",) else settings.redact or False
        where = None if settings.log in ("json", "text") else settings.log
        structured_logs(where, json=settings.log != "text", redact=patterns)
    if settings.metrics is not None or settings.trace is not None:
        made = observe(counters=settings.metrics is not None, metrics=settings.metrics, trace=settings.trace or False)
        atexit.register(made.stop)

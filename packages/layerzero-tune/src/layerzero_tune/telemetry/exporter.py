"""Telemetry for other programs: metrics at an HTTP port, in a file or a Prometheus registry, events as spans.

`"9464"`, `":9464"` and `"host:9464"` are ports (on this machine only, unless a host is named); anything else is a file,
rewritten whole every few seconds: text for a name that ends in `.prom`, as node_exporter's textfile collector reads it,
else JSON. `lz top` reads all of them. A process with a registry of prometheus_client registers the metrics there.

A cold call is an OpenTelemetry span, with its selection, compile and failover inside, made when its tree of events is
complete, with the times measured then: it costs nothing while the call runs. Its parent is the span the program has
open around the call. Hot calls have no events, and so no spans.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from layerzero.errors import BackendNotAvailableError, ConfigurationError
from layerzero.files import write_whole
from layerzero.telemetry.events import Event
from layerzero.telemetry.metrics import CONTENT_TYPE, Family, text
from layerzero.version import __version__
from layerzero_tune.telemetry.reading import PORT

_log = logging.getLogger("layerzero.telemetry")

Families = Callable[[], Iterable[Family]]


def snapshot(families: Iterable[Family]) -> dict[str, Any]:
    """The metrics as JSON, with the process and the moment."""
    return {
        "format": "layerzero-metrics-1",
        "time": time.time(),
        "pid": os.getpid(),
        "metrics": [item.to_json() for item in families],
    }


def export(where: str | os.PathLike[str] | int, families: Families, *, interval: float = 2.0) -> Exporter:
    """Begin to export; `close()` ends it. Raises ConfigurationError where nothing can listen or be written."""
    word = str(where) if isinstance(where, int) and not isinstance(where, bool) else os.fspath(where)  # type: ignore[arg-type]
    found = PORT.fullmatch(word)
    if found is None:
        return FileExporter(Path(word).expanduser(), families, interval)
    host = (found["host"] or "127.0.0.1").strip("[]")
    return HttpExporter(host, int(found["port"]), families)


class HttpExporter:
    """Answers GET /metrics (text) and GET /metrics.json in a daemon thread."""

    def __init__(self, host: str, port: int, families: Families) -> None:
        handler = type("Handler", (_Handler,), {"families": staticmethod(families)})
        kind = _Server6 if ":" in host else ThreadingHTTPServer
        try:
            self._server = kind((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"metrics cannot be offered at {host}:{port}: {error}", value=f"{host}:{port}", limit="a free port",
                hint="name another port, or 0 for any free one",
            ) from None  # fmt: skip
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="layerzero-metrics", daemon=True)
        self._thread.start()

    @property
    def where(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    families: Families
    timeout = 10  # a client that says nothing must not hold a thread
    server_version, sys_version = "layerzero", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            if path in ("/metrics", "/"):
                self._answer(200, CONTENT_TYPE, text(self.families()))
            elif path == "/metrics.json":
                self._answer(200, "application/json", json.dumps(snapshot(self.families())))
            else:
                self._answer(404, "text/plain; charset=utf-8", "/metrics or /metrics.json\n")
        except (BrokenPipeError, ConnectionError, TimeoutError):
            pass  # the reader has gone
        except Exception:
            _log.exception("the metrics could not be read")
            self._answer(500, "text/plain; charset=utf-8", "see the log\n")

    def _answer(self, code: int, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not news."""


class FileExporter:
    """Rewrites a file every `interval` seconds, and once more at the end."""

    def __init__(self, path: Path, families: Families, interval: float = 2.0) -> None:
        self.path, self._families, self._interval = path, families, max(0.05, interval)
        self._stop = threading.Event()
        self._failed = False
        try:
            self.write()
        except OSError as error:
            raise ConfigurationError(
                f"metrics cannot be written to {path}: {error.strerror}", value=str(path), limit="a file in a folder"
            ) from None
        self._thread = threading.Thread(target=self._run, name="layerzero-metrics", daemon=True)
        self._thread.start()

    @property
    def where(self) -> str:
        return str(self.path)

    def write(self) -> None:
        found = list(self._families())
        write_whole(self.path, text(found) if self.path.suffix == ".prom" else json.dumps(snapshot(found)))

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._try()

    def _try(self) -> None:
        try:
            self.write()
            self._failed = False
        except Exception as error:
            if not self._failed:  # a full disk is said once, and the next time there is room the file is there again
                _log.warning("the metrics cannot be written to %s: %s", self.path, error)
            self._failed = True

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._try()


Exporter = HttpExporter | FileExporter


# -- libraries a program has already -------------------------------------------------------------
def _missing(what: str, package: str) -> BackendNotAvailableError:
    hint = "pip install 'layerzero-tune[telemetry]'"
    return BackendNotAvailableError(what, code="BACKEND_NOT_INSTALLED", value=package, hint=hint)


class Collector:
    """Reads the families when Prometheus scrapes; nothing is counted twice and nothing is counted for it."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import Metric

        for item in self._families():
            # The client adds the suffix of a counter itself.
            name = item.name.removesuffix("_total") if item.kind == "counter" else item.name
            metric = Metric(name, item.help, item.kind)
            for sample in item.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def register(families: Families, registry: Any = None) -> Callable[[], None]:
    """Add the collector to a registry (default: the client's own); returns the way to take it out again."""
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise _missing("metrics for prometheus_client need it", "prometheus-client") from error
    where = REGISTRY if registry is None else registry
    collector = Collector(families)
    where.register(collector)
    return lambda: where.unregister(collector)


class Spans:
    """A sink that hands trees of events to a tracer (default: that of the program's tracer provider)."""

    def __init__(self, tracer: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise _missing("spans need OpenTelemetry", "opentelemetry-api") from error
        self._trace = trace
        self._tracer = trace.get_tracer("layerzero", __version__) if tracer is None else tracer

    def __call__(self, tree: tuple[Event, ...]) -> None:
        made: dict[int, Any] = {}
        for event in tree:
            parent = made.get(event.parent)
            context = None if parent is None else self._trace.set_span_in_context(parent)
            told = {f"layerzero.{key}": _plain(value) for key, value in event.attributes.items()}
            name = f"layerzero.{event.kind}"
            span = self._tracer.start_span(name, context=context, start_time=event.start, attributes=told)
            made[event.number] = span
            if event.error:
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.error))
        for event in reversed(tree):
            made[event.number].end(end_time=event.end)


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value)

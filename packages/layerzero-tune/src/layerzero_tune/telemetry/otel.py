"""Events as OpenTelemetry spans: a cold call is a span, with its selection, compile and failover inside.

A span is made when its tree is complete, with the times measured then: it costs nothing while the call runs. Its parent
is the span the program has open around the call. Hot calls have no events, and so no spans.
"""

from __future__ import annotations

from typing import Any

from layerzero.errors import BackendNotAvailableError
from layerzero.telemetry.events import Event
from layerzero.version import __version__


class Spans:
    """A sink that hands trees of events to a tracer (default: that of the program's tracer provider)."""

    def __init__(self, tracer: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise BackendNotAvailableError(
                "spans need OpenTelemetry", code="BACKEND_NOT_INSTALLED", value="opentelemetry-api",
                hint="pip install 'layerzero-tune[telemetry]'",
            ) from error  # fmt: skip
        self._trace = trace
        self._tracer = trace.get_tracer("layerzero", __version__) if tracer is None else tracer

    def __call__(self, tree: tuple[Event, ...]) -> None:
        """Make the spans of one tree, the outermost first."""
        made: dict[int, Any] = {}
        for event in tree:
            parent = made.get(event.parent)
            context = None if parent is None else self._trace.set_span_in_context(parent)
            span = self._tracer.start_span(
                f"layerzero.{event.kind}",
                context=context,
                start_time=event.start,
                attributes={f"layerzero.{key}": _plain(value) for key, value in event.attributes.items()},
            )
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

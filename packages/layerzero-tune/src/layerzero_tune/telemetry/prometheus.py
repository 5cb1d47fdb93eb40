"""The metrics as a collector of prometheus_client, for a process that has a registry of its own already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from layerzero.errors import BackendNotAvailableError
from layerzero.telemetry.metrics import Family


class Collector:
    """Reads the families when Prometheus scrapes; nothing is counted twice and nothing is counted for it."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        """prometheus_client's own values."""
        from prometheus_client.metrics_core import Metric

        for item in self._families():
            # The client adds the suffix of a counter itself.
            name = item.name.removesuffix("_total") if item.kind == "counter" else item.name
            metric = Metric(name, item.help, item.kind)
            for sample in item.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def register(families: Callable[[], Iterable[Family]], registry: Any = None) -> Callable[[], None]:
    """Add the collector to a registry (default: the client's own); returns the way to take it out again."""
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise BackendNotAvailableError(
            "metrics for prometheus_client need it", code="BACKEND_NOT_INSTALLED", value="prometheus-client",
            hint="pip install 'layerzero-tune[telemetry]'",
        ) from error  # fmt: skip
    where = REGISTRY if registry is None else registry
    collector = Collector(families)
    where.register(collector)
    return lambda: where.unregister(collector)

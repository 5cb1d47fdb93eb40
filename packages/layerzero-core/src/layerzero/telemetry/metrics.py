"""Metrics as values: families of samples, and the text form that Prometheus reads.

No library is needed for any of it; layerzero-tune offers them on a port, in a file or to prometheus_client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from layerzero.telemetry.events import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

CATALOGUE: Final[Mapping[str, tuple[str, str]]] = {
    "layerzero_info": ("gauge", "versions, as labels of a constant 1"),
    "layerzero_kernel_calls_total": ("counter", "calls by kernel, while counting is on"),
    "layerzero_counting": ("gauge", "1 while calls are counted"),
    "layerzero_hot_hit_ratio": ("gauge", "share of counted calls that were hot"),
    "layerzero_hot_entries": ("gauge", "entries of the hot table"),
    "layerzero_bucketed_hits_total": ("counter", "calls found by the bucket of their sizes"),
    "layerzero_misses_total": ("counter", "calls that were not hot"),
    "layerzero_selections_total": ("counter", "decisions made by selecting"),
    "layerzero_followed_total": ("counter", "decisions taken from a dispatch table"),
    "layerzero_binds_total": ("counter", "kernels bound"),
    "layerzero_failovers_total": ("counter", "calls that another kernel had to finish"),
    "layerzero_world_swaps_total": ("counter", "times policy, health, measurements or kernels changed"),
    "layerzero_selection_cache_entries": ("gauge", "entries of the selection cache"),
    "layerzero_selection_cache_hits_total": ("counter", "lookups in the selection cache that found a decision"),
    "layerzero_selection_cache_misses_total": ("counter", "lookups in the selection cache that found none"),
    "layerzero_dispatch_seconds": ("histogram", "time of calls that were not hot, the kernel's own included"),
    "layerzero_select_seconds": ("histogram", "time of selections"),
    "layerzero_compile_seconds": ("histogram", "time of compiles"),
    "layerzero_load_seconds": ("histogram", "time of loading what another process has compiled"),
    "layerzero_long_loads_total": ("counter", "such loads of more than 20 ms"),
    "layerzero_failover_seconds": ("histogram", "time from a kernel's error to another one's result"),
    "layerzero_tune_seconds": ("histogram", "time of measuring the kernels of one call"),
    "layerzero_agree_seconds": ("histogram", "time of agreements between ranks"),
    "layerzero_kernels": ("gauge", "kernels registered"),
    "layerzero_backend_available": ("gauge", "1 when the backend can be used here"),
    "layerzero_breaker_state": ("gauge", "0 closed, 1 half-open, 2 open; healthy ones without a past are not listed"),
    "layerzero_quarantined": ("gauge", "1 for each kernel in quarantine"),
    "layerzero_unbindable": ("gauge", "1 for each kernel whose adapter cannot be imported"),
    "layerzero_jit_artifacts": ("gauge", "compiled artifacts by state: ready, failed, pending"),
    "layerzero_warmup_calls": ("gauge", "calls of the last warm-up by state: asked, bound, failed, waiting"),
    "layerzero_ranks": ("gauge", "ranks of the agreement in force"),
    "layerzero_rank_disagreements_total": ("counter", "choices in which this rank could not follow the others"),
}
"""Every metric there is: name → kind and help. A dashboard may name these and no others."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number. `name` is that of the family, with a suffix for the parts of a histogram."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one metric."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        rows = [{"name": s.name, "labels": dict(s.labels), "value": s.value} for s in self.samples]
        return {"name": self.name, "kind": self.kind, "help": self.help, "samples": rows}


def family(name: str, *values: tuple[Mapping[str, str], float] | float) -> Family:
    """A metric of the catalogue with its values, each a number or (labels, number)."""
    kind, words = CATALOGUE[name]
    samples = []
    for item in values:
        labels, value = item if isinstance(item, tuple) else ({}, item)
        samples.append(Sample(name, tuple(sorted(labels.items())), float(value)))
    return Family(name, kind, words, tuple(samples))


def histogram(name: str, counted: Histogram) -> Family:
    """A metric of the catalogue from what was counted."""
    kind, words = CATALOGUE[name]
    counts, total = counted.read()
    bounds = [*(_number(bound) for bound in counted.BOUNDS), "+Inf"]
    samples = [Sample(f"{name}_bucket", (("le", le),), n) for le, n in zip(bounds, counts, strict=True)]
    samples += [Sample(f"{name}_sum", (), total), Sample(f"{name}_count", (), counts[-1])]
    return Family(name, kind, words, tuple(samples))


def text(families: Iterable[Family]) -> str:
    """The exposition text, format 0.0.4."""
    lines: list[str] = []
    for item in families:
        lines.append(f"# HELP {item.name} {_escaped(item.help, quotes=False)}")
        lines.append(f"# TYPE {item.name} {item.kind}")
        for sample in item.samples:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels)
            lines.append(f"{sample.name}{'{' + labels + '}' if labels else ''} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _escaped(value: str, *, quotes: bool = True) -> str:
    value = value.replace("\\", "\\\\").replace("\n", "\\n")
    return value.replace('"', '\\"') if quotes else value


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return repr(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))

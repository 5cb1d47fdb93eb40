"""The gates of a release: figures inside their limits, no open P0 or P1, nothing wrong that was right before.

    python -m tools.gates                 every figure with a limit and how it stands; the ledger; a fresh `lz verify`
    python -m tools.gates --no-verify     the first two alone, which read files only
    python -m tools.gates --report FILE   all three, with a report of `lz verify --json` instead of a fresh run

A waiver in benchmarks/waivers.toml names a file and figures (globs), how far outside their limit they may be, and why.
It never covers more than it says. The other two gates are tools/known_issues.py and tools/regressions.py.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools import regressions
from tools.known_issues import Ledger
from tools.requirements_doc import ROOT

__all__ = ["Figure", "Waiver", "figures", "judged", "main", "performance", "waivers"]

RESULTS = ROOT / "benchmarks" / "results"
WAIVERS = ROOT / "benchmarks" / "waivers.toml"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and its limit. `over` is how many times outside it is; at most 1 when it is inside."""

    file: str
    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def over(self) -> float:
        """Value against limit, so that above 1 is outside."""
        worse, better = (self.limit, self.value) if self.at_least else (self.value, self.limit)
        return worse / better if better > 0 else float("inf") if worse > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Waiver:
    """Figures that may be outside, how far, and why."""

    file: str
    figures: str
    up_to: float
    why: str

    def covers(self, figure: Figure) -> bool:
        """Whether it speaks of this figure, and far enough."""
        named = fnmatchcase(figure.file, self.file) and fnmatchcase(figure.name, self.figures)
        return named and figure.over <= self.up_to


def waivers(path: Path = WAIVERS) -> list[Waiver]:
    """The waivers in force; one without a reason is an error."""
    found = [Waiver(**item) for item in tomllib.loads(path.read_text(encoding="utf-8")).get("waiver", ())]
    for item in found:
        if len(item.why.split()) < 5 or not item.up_to > 1:
            raise ValueError(f"{path.name}: the waiver of {item.figures} in {item.file} gives no reason or no bound")
    return found


def figures(folder: Path = RESULTS) -> Iterator[Figure]:
    """Every figure of the kept results that has a limit beside it."""
    for path in sorted(folder.glob("*/*.json")):
        data, name = json.loads(path.read_bytes()), f"{path.parent.name}/{path.name}"
        yield from (Figure(name, *row) for row in _rows(data))


def _rows(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    limits, values = data.get("limits"), data.get("figures")
    if isinstance(limits, dict) and isinstance(values, dict):
        for key, limit in limits.items():
            if isinstance(values.get(key), (int, float)) and isinstance(limit, (int, float)):
                yield key, float(values[key]), float(limit)
    for key, item in (data.get("targets") or {}).items() if isinstance(data.get("targets"), dict) else ():
        if isinstance(item, dict) and isinstance(item.get("value"), (int, float)):
            low = "at_least" in item
            yield key, float(item["value"]), float(item["at_least" if low else "at_most"]), low
    if data.get("benchmark") == "telemetry":
        for key, item in data["calls"].items():
            yield f"counting {key}", max(0.0, float(item["cost_ns"])), float(data["target_ns"])
    elif data.get("benchmark") == "ranks":
        yield "agree", float(data["agree"]["max_s"]), float(data["agree"]["target_s"])
    elif data.get("benchmark") == "soak":
        yield "memory drift", max(0.0, float(data["rss_drift"])), 0.01


def judged(found: Sequence[Figure], allowed: Sequence[Waiver]) -> list[tuple[Figure, Waiver | None]]:
    """Figures outside their limit, each with the waiver that covers it, or None."""
    outside = [figure for figure in found if figure.over > 1]
    return [(figure, next((item for item in allowed if item.covers(figure)), None)) for figure in outside]


def main(argv: Sequence[str] = ()) -> int:
    """Print how every gate stands; 1 when one fails."""
    bad = performance()
    ledger = Ledger.read()
    for item in ledger.blocking:
        print(f"OPEN    {item.severity} {item.id}: {item.what}")
    print(f"issues: {len(ledger.open)} open, {len(ledger.blocking)} of them P0 or P1")
    wrong = 0 if "--no-verify" in argv else regressions.main(argv)
    return 1 if bad or ledger.blocking or wrong else 0


def performance() -> int:
    """Print how every figure stands; how many are outside without a waiver."""
    found, allowed = list(figures()), waivers()
    verdicts = dict(judged(found, allowed))
    bad = 0
    for figure in found:
        waiver = verdicts.get(figure)
        word = "ok" if figure.over <= 1 else "waived" if waiver is not None else "OUTSIDE"
        bad += word == "OUTSIDE"
        why = f"  ({waiver.why})" if waiver is not None else ""
        sign = ">=" if figure.at_least else "<="
        print(f"{word:8}{figure.file:40}{figure.name:48}{figure.value:12.4g} {sign} {figure.limit:g}{why}")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

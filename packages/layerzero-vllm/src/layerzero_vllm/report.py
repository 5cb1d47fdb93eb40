"""What each worker chose and how it fares, as a JSON file of its own that `lz vllm explain` reads.

The files lie in LAYERZERO_VLLM_REPORTS, by default a folder of the user's cache. A worker writes its file when the
choices are made, at the first step of each kind, when a kernel changes its health, and about every ten seconds of use.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.files import user_cache, write_whole

FOLDER = "LAYERZERO_VLLM_REPORTS"
FORMAT = 1
PERIOD_S = 10.0


def folder() -> Path:
    """Where the workers of this user write."""
    named = os.environ.get(FOLDER, "").strip()
    return Path(named) if named else user_cache("vllm")


@dataclass
class Report:
    """One worker's report; `changed` writes at once, `step` now and then."""

    rank: int = 0
    world_size: int = 1
    model: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)
    linears: list[dict[str, Any]] = field(default_factory=list)
    experts: list[dict[str, Any]] = field(default_factory=list)
    norms: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    _written: float = field(default=0.0, repr=False)
    _blocked: tuple[str, ...] = field(default=(), repr=False)

    def step(self, phase: str) -> None:
        """Count a step; write where it is the first of its kind, a kernel's health has changed, or the file is old."""
        self.steps[phase] += 1
        old = time.monotonic() - self._written > PERIOD_S
        if old or self.steps[phase] == 1 or tuple(breakers()) != self._blocked:
            self.changed()

    def changed(self) -> None:
        """Write the file anew; a full disk is no reason to stop serving."""
        self._written, open_now = time.monotonic(), breakers()
        self._blocked = tuple(open_now)
        head = {"format": FORMAT, "engine": os.getppid(), "pid": os.getpid(), "updated": time.time()}
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        data = {**head, **public, "breakers": open_now}
        try:
            write_whole(folder() / f"worker-{os.getpid()}.json", json.dumps(data, indent=1) + "\n")
        except OSError as error:
            import logging

            logging.getLogger("layerzero.vllm").warning("the report cannot be written: %s", error)


def breakers() -> dict[str, str]:
    """Kernels and backends that are set aside in this process, with the error that did it."""
    from layerzero.runtime.state import state

    if not state.loaded:
        return {}
    health = state.world.health
    both = {**health.kernels, **health.backends}
    return {name: f"{breaker.phase.value}: {breaker.last_error}" for name, breaker in both.items() if breaker.blocks}


def read(where: Path) -> list[dict[str, Any]]:
    """Every report of a folder, oldest first; a file that is no report is left out."""
    found = []
    for file in where.glob("worker-*.json"):
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(data, dict) and data.get("format") == FORMAT:
            found.append(data)
    return sorted(found, key=lambda data: (data["updated"], data["rank"]))


def newest(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers of the engine that wrote last, by rank."""
    if not reports:
        return []
    engine = reports[-1]["engine"]
    return sorted((one for one in reports if one["engine"] == engine), key=lambda one: one["rank"])

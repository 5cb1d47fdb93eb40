"""What keeps a long measurement whole: what is done already, and how the time is shared by its stages."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["SHARES", "STAGES", "Budget", "Kept"]

SHARES = {"tune": 0.46, "cases": 0.20, "random": 0.14, "again": 0.20, "graph": 0.06}  # tuning also compiles
STAGES = tuple(SHARES)


class Kept:
    """What is done already: one line of JSON a record, the first one saying what was measured."""

    def __init__(self, folder: Path, header: dict[str, Any], *, fresh: bool) -> None:
        self.folder, self._path = folder, folder / "done.jsonl"
        self.records: dict[tuple[str, str], dict[str, Any]] = {}
        lines = self._path.read_text().split("\n") if self._path.exists() and not fresh else []
        found = [item for line in lines if (item := _parsed(line)) is not None]
        if found and found[0] == header:
            self.records = {(item["stage"], item["name"]): item for item in found[1:]}
            return
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.is_file():
                old.unlink()
        self._add(header)

    def put(self, stage: str, name: str, record: dict[str, Any]) -> None:
        item = {**record, "stage": stage, "name": name}
        self._add(item)
        self.records[stage, name] = item

    def of(self, stage: str) -> list[dict[str, Any]]:
        return [item for (found, _), item in self.records.items() if found == stage]

    def _add(self, item: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(item) + "\n")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:  # torn: the run was killed while it wrote
        return None
    return found if isinstance(found, dict) else None


class Budget:
    """Seconds for everything; each stage may use its share of what is left, by weight of the stages to come."""

    def __init__(self, seconds: float, stages: Sequence[str]) -> None:
        self._end = time.monotonic() + seconds
        self._stages = list(stages)

    def for_stage(self, stage: str) -> float:
        rest = self._stages[self._stages.index(stage) :]
        left = max(0.0, self._end - time.monotonic())
        return left * SHARES[stage] / sum(SHARES[name] for name in rest)

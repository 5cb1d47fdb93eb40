"""A tuning run over many calls: in what order, what is done already, when to stop, who does what.

What a call costs is written to the database as soon as it is known, then a line is added to the journal beside it. A
run that was killed goes on where it stopped when the same one is asked for again; a finished one leaves no journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.errors import LayerZeroError
from layerzero.measurements.believed import NOISE
from layerzero.model.context import Context
from layerzero.perfdb.bucket import bucket_of
from layerzero.perfdb.measurement import Measurement
from layerzero.perfdb.store import PerfDB
from layerzero.recording.traffic import Recorded, context_to_json, volume
from layerzero.runtime.state import state
from layerzero_tune.ranks import Ranks
from layerzero_tune.trial import Trial, trial

__all__ = ["Outcome", "Progress", "Tuned", "distinct", "tune_calls"]

_SECONDS, _SECONDS_ON_A_GPU = 2.0, 0.3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call of a tuning run: its trial, or why there is none."""

    name: str
    recorded: Recorded
    trial: Trial | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        base = {"name": self.name, "count": self.recorded.count}
        if self.trial is not None:
            return {**base, **self.trial.to_json()}
        return {**base, "op": self.recorded.context.op, "sizes": dict(self.recorded.context.dims), "skipped": self.why}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a tuning run stands: how many calls are done of how many, what is next, and how long the rest may take."""

    done: int
    total: int
    name: str
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a tuning run.

    outcomes  every call that was looked at, `resumed` those an earlier, interrupted tuning run had done,
    left      those the budget did not reach
    """

    path: str
    outcomes: tuple[Outcome, ...] = ()
    resumed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    seconds: float = 0.0
    ranks: int = 1
    rows: int = field(default=0)

    @property
    def winners(self) -> dict[str, str]:
        """Kernel id by the name of the call."""
        return {item.name: item.trial.winner for item in self.outcomes if item.trial is not None}

    @property
    def skipped(self) -> dict[str, str]:
        """Calls that could not be measured, with the reason."""
        return {item.name: item.why for item in self.outcomes if item.trial is None}

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {
            "database": self.path,
            "seconds": round(self.seconds, 2),
            "ranks": self.ranks,
            "rows": self.rows,
            "resumed": list(self.resumed),
            "left": list(self.left),
            "calls": [item.to_json() for item in self.outcomes],
        }


def tune_calls(
    calls: Iterable[tuple[str, Recorded]],
    db: PerfDB,
    *,
    budget: float | None = None,
    seconds: float | None = None,
    seed: int = 0,
    noise: float = NOISE,
    fresh: bool = False,
    jit: str = "block",
    ranks: Ranks | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Tune calls, the most frequent first, into a database.

    budget    seconds for the whole tuning run; a call that was begun is finished
    seconds   of timing for one call, at most; where it is not given two on a CPU, and a third of one on a GPU, whose
              events time the device alone
    fresh     forget what an interrupted tuning run has done
    jit       "off" leaves out kernels that would have to be compiled first
    """
    begin = time.monotonic()
    group = Ranks() if ranks is None else ranks
    ordered = distinct(calls)
    share = group.share(ordered)
    journal = _Journal(db.path, [*ordered, (f"seed {seed} rank {group.rank} of {group.size}", None)], fresh=fresh)
    todo = [item for item in share if item[0] not in journal.done]
    resumed = tuple(name for name, _ in share if name in journal.done)
    outcomes: list[Outcome] = []
    rows: list[Measurement] = []
    for number, (name, recorded) in enumerate(todo):
        spent = time.monotonic() - begin
        if budget is not None and spent >= budget:
            break
        if progress is not None:
            each = spent / number if number else None
            wait = None if each is None else each * (len(todo) - number)
            if budget is not None:
                wait = budget - spent if wait is None else min(wait, budget - spent)
            progress(Progress(number, len(todo), name, wait))
        outcome = _one(name, recorded, seconds=seconds, seed=seed, noise=noise, jit=jit)
        if outcome.trial is not None:
            db.put(outcome.trial.rows)
            rows.extend(outcome.trial.rows)
        journal.add(name)
        outcomes.append(outcome)
    if progress is not None:
        progress(Progress(len(outcomes), len(todo), "", 0.0))
    left = tuple(name for name, _ in todo[len(outcomes) :])
    everything = group.gathered((outcomes, resumed, left, rows))
    if group.size > 1 and group.local_rank == 0:
        # One file for all ranks of this machine: what ranks of other machines found comes in here.
        db.put([row for place, part in enumerate(everything) if place != group.rank for row in part[3]])
    if not left:
        journal.finish()
    place = {name: number for number, (name, _) in enumerate(ordered)}
    merged = sorted((item for part in everything for item in part[0]), key=lambda item: place[item.name])
    return Tuned(
        str(db.path),
        tuple(merged),
        tuple(name for part in everything for name in part[1]),
        tuple(name for part in everything for name in part[2]),
        time.monotonic() - begin,
        group.size,
        sum(len(part[3]) for part in everything),
    )


def _one(name: str, recorded: Recorded, *, seconds: float | None, seed: int, noise: float, jit: str) -> Outcome:
    if seconds is None:
        seconds = _SECONDS if recorded.context.device.device_type == "cpu" else _SECONDS_ON_A_GPU
    try:
        found = trial(recorded.context, seed=seed, strides=recorded.strides, seconds=seconds, noise=noise, jit=jit)
    except LayerZeroError as error:
        return Outcome(name, recorded, why=str(error))
    return Outcome(name, recorded, found)


def distinct(calls: Iterable[tuple[str, Recorded]]) -> list[tuple[str, Recorded]]:
    """One call of each bucket: two sizes of one bucket would write the same row.

    The most frequent come first, of equally frequent ones the largest: libraries keep buffers that grow with the calls
    they meet; torch's attention on a CPU takes a seventh longer for a small call as long as it has met no large one.
    """
    found: dict[str, tuple[str, Recorded]] = {}
    counts: dict[str, int] = {}
    for name, recorded in calls:
        key = f"{recorded.context.op} {recorded.context.device.device_type} {_bucket(recorded.context)}"
        counts[key] = counts.get(key, 0) + recorded.count
        before = found.get(key)
        if before is None or recorded.count > before[1].count:
            found[key] = (name, recorded)
    names: dict[str, int] = {}
    unique = []
    order = sorted((-counts[key], -volume(recorded.context), name, key) for key, (name, recorded) in found.items())
    for *_, name, key in order:
        names[name] = names.get(name, 0) + 1
        unique.append((name if names[name] == 1 else f"{name} ({names[name]})", found[key][1]))
    return unique


def _bucket(ctx: Context) -> str:
    spec = state.world.ops.get(ctx.op)
    return bucket_of(ctx, () if spec is None else spec.growing)


class _Journal:
    """Which calls of this very tuning run are done. One line each, on disk before the next call begins."""

    def __init__(self, db: Path, calls: Sequence[tuple[str, Recorded | None]], *, fresh: bool) -> None:
        text = json.dumps([[name, None if item is None else context_to_json(item.context)] for name, item in calls])
        mark = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._path = db.with_name(f".{db.name}.tuning-{mark}")
        if fresh:
            self.finish()
        self.done = self._read()

    def _read(self) -> set[str]:
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return set()
        found = set()
        for line in lines:  # the last one may be torn: the process was killed while it wrote
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found.add(str(json.loads(line)["done"]))
        return found

    def add(self, name: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            # A line of its own even after a torn one.
            file.write("\n" + json.dumps({"done": name}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

"""A tuning run over many calls: in what order, what is done already, when to stop, who does what.

Under torchrun (RANK and WORLD_SIZE are set) each rank tunes its share on its own device, and all end with the same
merged result: through a process group of the host backend, gloo, the program's own where it has one.

What a call costs is written to the database as soon as it is known, then a line is added to the journal beside it. A
run that was killed goes on where it stopped when the same one is asked for again; a finished one leaves no journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from layerzero.errors import LayerZeroError
from layerzero.json_form import plain
from layerzero.perfdb.measurement import Measurement, bucket_of
from layerzero.perfdb.store import PerfDB
from layerzero.recording.traffic import Recorded, context_to_json, volume
from layerzero.runtime.state import state
from layerzero_tune.ahead import Ahead
from layerzero_tune.timing.race import free_device_memory
from layerzero_tune.trial import Trial, trial

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that work together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _group: Any = None
    _own: bool = False

    @staticmethod
    def of_process() -> Ranks:
        """From the environment that torchrun sets, or from the group that the program has joined already."""
        if not dist.is_available():
            return Ranks()
        local = int(os.environ.get("LOCAL_RANK", "0") or 0)
        if dist.is_initialized():
            size = dist.get_world_size()
            # What carries Python objects: the program's own group on the CPU, else one beside it.
            group = None if size == 1 or dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            return Ranks(dist.get_rank(), size, local, group) if size > 1 else Ranks()
        if int(os.environ.get("WORLD_SIZE", "1") or 1) < 2 or "RANK" not in os.environ:
            return Ranks()
        dist.init_process_group("gloo")
        return Ranks(dist.get_rank(), dist.get_world_size(), local, None, True)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of a list that all ranks hold: every size-th, so that each gets large and small ones."""
        return list(items[self.rank :: self.size])

    def gathered(self, mine: Item) -> list[Item]:
        """What every rank found, in the order of ranks, on all of them."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def close(self) -> None:
        if self._own:
            dist.destroy_process_group()


COMPILE_S = 90.0  # that kernels may compile, where nothing is said: a tuning run takes two minutes at most
_SECONDS, _SECONDS_ON_A_GPU, _SAMPLES = 2.0, {True: 0.3, False: 0.1}, {True: 12, False: 6}  # thorough or not


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call of a tuning run: its trial, or why there is none."""

    name: str
    recorded: Recorded
    trial: Trial | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        base = {"name": self.name, "count": self.recorded.count}
        if self.trial is not None:
            return {**base, **self.trial.to_json()}
        return {**base, "op": self.recorded.context.op, "sizes": dict(self.recorded.context.dims), "skipped": self.why}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a tuning run stands: how many calls are done of how many, what is next, and how long the rest may take.

    compiling  kernels that are being compiled now, `to_compile` how many are not done; a `name` is empty while a run
               waits for them
    """

    done: int
    total: int
    name: str
    seconds_left: float | None
    compiling: tuple[str, ...] = ()
    to_compile: int = 0


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a tuning run.

    outcomes  every call that was looked at, `resumed` those an earlier, interrupted tuning run had done,
    left      those the budget did not reach
    chosen    the kernel that each call has now, by its name
    """

    path: str
    outcomes: tuple[Outcome, ...] = ()
    resumed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    seconds: float = 0.0
    ranks: int = 1
    rows: int = 0
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def winners(self) -> dict[str, str]:
        return {item.name: item.trial.winner for item in self.outcomes if item.trial is not None}

    @property
    def skipped(self) -> dict[str, str]:
        return {item.name: item.why for item in self.outcomes if item.trial is None}

    @property
    def changed(self) -> dict[str, tuple[str, str]]:
        """Calls for which another kernel is chosen now than before: both."""
        before = {item.name: item.trial.before for item in self.outcomes if item.trial is not None}
        return {name: (before[name], now) for name, now in self.chosen.items() if before[name] != now}

    @property
    def against_torch(self) -> float | None:
        """How many times faster than torch's own code the choices are, in geometric mean; None where it has none."""
        ratios = []
        for item in self.outcomes:
            if item.trial is not None and item.trial.torch is not None:
                times = item.trial.times.get(self.chosen.get(item.name, "")) or item.trial.times[item.trial.choice]
                ratios.append(item.trial.torch.median_us / times.median_us)
        return statistics.geometric_mean(ratios) if ratios else None

    def to_json(self) -> dict[str, Any]:
        return {
            "database": self.path,
            "seconds": round(self.seconds, 2),
            **{name: plain(getattr(self, name)) for name in ("ranks", "rows", "resumed", "left", "changed")},
            "against_torch": None if self.against_torch is None else round(self.against_torch, 3),
            "calls": plain(self.outcomes),
        }


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a tuning run: `tuned` holds what was done, which is kept; the same run goes on from there."""

    def __init__(self, tuned: Tuned) -> None:
        super().__init__(f"{len(tuned.outcomes)} calls are done, {len(tuned.left)} are left")
        self.tuned = tuned


def tune_calls(
    calls: Iterable[tuple[str, Recorded]],
    db: PerfDB,
    *,
    budget: float | None = None,
    seconds: float | None = None,
    seed: int = 0,
    fresh: bool = False,
    jit: str = "block",
    compile_seconds: float | None = None,
    thorough: bool = True,
    ranks: Ranks | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Tune calls, the most frequent first, into a database; options that `lz.tune` has too are explained there.

    budget    seconds for the whole tuning run; a call that was begun is finished
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
    waiting, racing = list(todo), 0.0
    ahead: Ahead | None = None

    def tell(name: str = "") -> None:
        _hear_interrupts()
        if progress is None:
            return
        each = racing / len(outcomes) if outcomes else None
        left = None if each is None else each * (len(waiting) + bool(name))
        if ahead is not None and ahead.left:
            rest = ahead.seconds_left  # of races that have not begun only the compilers are known
            left = rest if left is None or rest is None else left + rest if ahead.on_cpu else max(left, rest)
        if budget is not None:
            rest = budget - (time.monotonic() - begin)
            left = rest if left is None else min(left, rest)
        under_way = ((), 0) if ahead is None else (ahead.compiling, ahead.left)
        progress(Progress(len(outcomes), len(todo), name, left, *under_way))

    try:
        if jit == "block":
            limits = [item for item in (compile_seconds, None if budget is None else budget / 2) if item is not None]
            ahead = Ahead(todo, thorough=thorough, limit_s=min(limits, default=None))
        while waiting:
            number = 0 if ahead is None else ahead.next([name for name, _ in waiting], tell)
            if budget is not None and time.monotonic() - begin >= budget:
                break
            name, recorded = waiting.pop(number)
            tell(name)
            free_device_memory()
            started = time.monotonic()
            late: frozenset[str] = frozenset()
            if ahead is not None:
                ahead.load(name, recorded)
                late = ahead.late(name, recorded)
            on_cpu = recorded.context.device.device_type == "cpu"
            try:
                found = trial(
                    recorded.context, strides=recorded.strides, least=_SAMPLES[thorough or on_cpu], thorough=thorough,
                    seconds=seconds or (_SECONDS if on_cpu else _SECONDS_ON_A_GPU[thorough]), seed=seed, jit=jit,
                    compile_until=None if compile_seconds is None else begin + compile_seconds, late=late,
                )  # fmt: skip
            except LayerZeroError as error:
                outcomes.append(Outcome(name, recorded, why=str(error)))
            else:
                db.put(found.rows)
                rows.extend(found.rows)
                outcomes.append(Outcome(name, recorded, found))
            journal.add(name)
            racing += time.monotonic() - started
    except KeyboardInterrupt as error:
        done = {item.name for item in outcomes}
        left = tuple(name for name, _ in todo if name not in done)
        spent = time.monotonic() - begin
        tuned = Tuned(str(db.path), tuple(outcomes), resumed, left, spent, group.size, len(rows))
        raise Interrupted(tuned) from error
    finally:
        if ahead is not None:
            ahead.close()
    if progress is not None:
        progress(Progress(len(outcomes), len(todo), "", 0.0))
    left = tuple(name for name, _ in waiting)
    everything = group.gathered((outcomes, resumed, left, rows))
    if group.size > 1 and group.local_rank == 0:
        # One file for all ranks of this machine: what ranks of other machines found comes in here.
        db.put([row for place, part in enumerate(everything) if place != group.rank for row in part[3]])
    if not left:
        journal.finish()
    place = {name: number for number, (name, _) in enumerate(ordered)}
    merged = sorted((item for part in everything for item in part[0]), key=lambda item: place[item.name])
    done_before = tuple(name for part in everything for name in part[1])
    not_done = tuple(name for part in everything for name in part[2])
    count, spent = sum(len(part[3]) for part in everything), time.monotonic() - begin
    return Tuned(str(db.path), tuple(merged), done_before, not_done, spent, group.size, count)


def _hear_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt: a compiler inside this process (NVRTC, of cuDNN and others) puts a handler of
    its own in the place of Python's, which ends the process at once."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def distinct(calls: Iterable[tuple[str, Recorded]]) -> list[tuple[str, Recorded]]:
    """One call of each bucket: two sizes of one bucket would write the same row.

    The most frequent come first, of equally frequent ones the largest: libraries keep buffers that grow with the calls
    they meet; torch's attention on a CPU takes a seventh longer for a small call as long as it has met no large one.
    """
    found: dict[str, tuple[str, Recorded]] = {}
    counts: Counter[str] = Counter()
    for name, recorded in calls:
        ctx = recorded.context
        spec = state.world.ops.get(ctx.op)
        key = f"{ctx.op} {ctx.device.device_type} {bucket_of(ctx, () if spec is None else spec.growing)}"
        counts[key] += recorded.count
        before = found.get(key)
        if before is None or recorded.count > before[1].count:
            found[key] = (name, recorded)
    names: Counter[str] = Counter()
    unique = []
    order = sorted((-counts[key], -volume(recorded.context), name, key) for key, (name, recorded) in found.items())
    for *_, name, key in order:
        names[name] += 1
        unique.append((name if names[name] == 1 else f"{name} ({names[name]})", found[key][1]))
    return unique


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

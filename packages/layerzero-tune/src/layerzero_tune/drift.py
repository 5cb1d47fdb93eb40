"""Is what was measured still true? A kernel may be fast in tuning and slow later: heat, a neighbour, an update.

`drifted` times the kernels of some measured calls again and says which no longer take what the database says.
`Watcher` does it beside the program, one call at a time, when the policy asks for it (`perfdb.drift_s`). Neither
touches the hot path. What has drifted is measured anew, all kernels of its call, and selection sees the new times.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from layerzero.dispatch.run import decide
from layerzero.errors import LayerZeroError
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.perfdb.measurement import Measurement
from layerzero.perfdb.store import PerfDB
from layerzero.reasons import Reason, reason
from layerzero.runtime.state import state
from layerzero_tune.rows import stored_row
from layerzero_tune.trial import Trial, trial

_log = logging.getLogger("layerzero.tuning")

SLOWER = 1.25  # a kernel that takes so many times what it took has drifted
_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Drift:
    """A measured call whose time has moved, in µs, and the trial that replaced it."""

    context: Context
    kernel_id: str
    before_us: float
    now_us: float
    retuned: Trial

    @property
    def reason(self) -> Reason:
        return reason("PERF_DRIFTED", round(self.now_us, 1), round(self.before_us, 1), detail=self.kernel_id)

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.context.op,
            "sizes": dict(self.context.dims),
            "kernel_id": self.kernel_id,
            "before_us": round(self.before_us, 3),
            "now_us": round(self.now_us, 3),
            "retuned": self.retuned.to_json(),
        }


def drifted(
    contexts: Iterable[Context], db: PerfDB, *, slower: float = SLOWER, seconds: float = _SECONDS, jit: str = "block"
) -> Iterator[Drift]:
    """Time the chosen kernel of each measured call again; yield those that have become slower (or faster) by a factor.

    A call that was never measured here is looked at where measurements of other machines chose for it: it is yielded
    where the kernel takes longer than torch's own code and, by that factor, than was expected of it.
    Nobody waits for a quieter moment: it is a look beside a program that serves, and the next one comes.
    Every kernel of such a call is measured anew and written to the database; `jit="off"` leaves out those that would
    have to be compiled first.
    """
    for ctx in contexts:
        found, decision = _measured(ctx, db)
        # Expected of it is a time over torch's, where times of other machines chose it.
        expected = decision.winner.expected if decision is not None and decision.chosen else None
        if decision is None or (found is None and expected is None):
            continue
        kernel_id = decision.chosen
        try:
            again = trial(ctx, seconds=seconds, only=frozenset({kernel_id}), jit=jit, patient=False)
        except LayerZeroError as error:
            _log.info("%s cannot be timed again: %s", kernel_id, error)
            continue
        now = again.times[kernel_id].median_us if kernel_id in again.times else float("inf")
        if found is not None:
            before = found.median_us
            steady = before / slower <= now <= before * slower
        else:
            torch_us = now if again.torch is None else again.torch.median_us
            before = (1.0 if expected is None else expected.ratio) * torch_us
            steady = now <= max(before * slower, torch_us)
        if steady:
            continue
        new = trial(ctx, seconds=max(1.0, seconds), jit=jit, patient=False)
        db.put(new.rows)
        yield Drift(ctx, kernel_id, before, now, new)


def _measured(ctx: Context, db: PerfDB) -> tuple[Measurement | None, Decision | None]:
    """The row behind the kernel that runs such a call now, None where it was not measured here; and the decision."""
    world = state.world
    spec = world.ops.get(ctx.op)
    if spec is None:
        return None, None
    decision = decide(spec, ctx, world)
    return stored_row(world, ctx, decision.chosen, db), decision


class Watcher:
    """A thread that looks at one measured call of the running program every so often."""

    def __init__(self, every_s: float, db: Callable[[], PerfDB | None], *, auto: bool = False) -> None:
        self.every_s, self.auto, self._db = every_s, auto, db
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="layerzero-drift", daemon=True)
        self._pid = os.getpid()
        self._turn = 0
        self.found: list[Drift] = []
        self._tried: set[Context] = set()

    def start(self) -> Watcher:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self.alive and self._thread is not threading.current_thread():
            self._thread.join(timeout=0.1)  # a thread in the middle of a timing ends by itself

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    def look(self) -> Drift | None:
        """Look at the next call now; what a turn of the thread does."""
        db = self._db()
        contexts = list(dict.fromkeys(entry.decision.context for entry in list(state.world.hot.values())))
        if db is None or not contexts:
            return None
        self._turn += 1
        ctx = contexts[self._turn % len(contexts)]
        if self.auto:
            untried = (item for item in contexts if item not in self._tried)
            unknown = next((item for item in untried if _measured(item, db)[0] is None), None)
            if unknown is not None:
                self._tried.add(unknown)
                least = state.world.policy.setting("perfdb.tune_samples")
                db.put(trial(unknown, seconds=_SECONDS, least=least, jit="off", patient=False).rows)
                state.remeasured()
                return None
        for drift in drifted([ctx], db, jit="off"):  # a compiler has no place beside a program that serves
            self.found.append(drift)
            _log.warning("%s", drift.reason)
            state.remeasured()
            return drift
        return None

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            try:
                self.look()
            except Exception:
                _log.exception("the look at measured times failed")


_watcher: list[Watcher] = []


def watcher(every_s: float | None, db: Callable[[], PerfDB | None], *, auto: bool = False) -> Watcher | None:
    """The process's one watcher: started, kept when nothing about it changes, or (None, 0) stopped."""
    if _watcher and every_s and (_watcher[0].every_s, _watcher[0].auto) == (every_s, auto) and _watcher[0].alive:
        return _watcher[0]
    while _watcher:
        _watcher.pop().stop()
    if not every_s:
        return None
    _watcher.append(Watcher(every_s, db, auto=auto).start())
    return _watcher[0]

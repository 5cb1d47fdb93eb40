"""Kernels compiled ahead of the races of a tuning run: as many at a time as there are cores.

What has a `compiler` is compiled by processes of their own (`layerzero.isolation.compilers`), what can be compiled only
where the device is by threads of this one meanwhile. A call may be raced as soon as its own kernels are ready: on a GPU
beside the processes that go on compiling, which take only what processor time is left over; on a CPU, whose cores are
what is timed, once they are all done. Nothing is loaded and nothing is compiled in this process beside a race. After a
limit calls are raced without what is not ready (`late`), which goes on being compiled until this process ends.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from layerzero import env
from layerzero.dispatch import compiling as jit
from layerzero.dispatch.beside import compiles_elsewhere, have_compiled, load, order_for
from layerzero.errors import LayerZeroError
from layerzero.jit.queue import Queue
from layerzero.model.artifact import Artifact
from layerzero.model.context import Context
from layerzero.reasons import Reason
from layerzero.recording.traffic import Recorded
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero.selection.filter import artifact_for
from layerzero.selection.world import measurement_settings
from layerzero.startup.warm import Item, each_once, warm
from layerzero.tuning.inputs import build
from layerzero_tune.ruled_out import ruled_out

_MOST_THREADS = 8  # of compilers in this process
_LOOK_S = 0.1
_helpers: Queue | None = None


def _queue(workers: int) -> Queue:
    """Threads that wait for the compilers in other processes."""
    global _helpers
    if _helpers is None:
        _helpers = Queue(workers, jit.queue().timeout_s, lambda artifact: None)
    _helpers.workers = workers
    return _helpers


class Ahead:
    """What the calls of a tuning run lack. `next` says which call may be raced now."""

    def __init__(self, calls: Sequence[tuple[str, Recorded]], *, thorough: bool, limit_s: float | None = None) -> None:
        """Begin to compile; after `limit_s` nothing more is begun, and on a GPU nothing more is waited for."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        given = env.read().jit_workers
        self._until = None if limit_s is None else time.monotonic() + limit_s
        self._workers, self._began = given or cores, state.generation
        self._queue = _queue(self._workers)
        self._elsewhere: dict[str, dict[Artifact, str]] = {}  # kernels by artifact, of each call
        self._found: dict[Artifact, jit.Made | Reason | None] = {}
        self._now: dict[Artifact, str] = {}
        self._dropped: frozenset[Artifact] = frozenset()  # of those compiled here: not begun before the limit
        self.on_cpu = any(recorded.context.device.device_type == "cpu" for _, recorded in calls)
        self._counts = (0, 0)  # artifacts that are compiled here: done, all
        self._here: dict[Context, list[str]] = {}
        for name, recorded in calls:
            try:
                self._elsewhere[name] = self._ordered(recorded, thorough)
            except LayerZeroError:  # the trial of the call will say it
                self._elsewhere[name] = {}
        threads = given or min(_MOST_THREADS, cores // 2)
        args = (self._compile_here, calls, threads, limit_s)
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=args, name="layerzero-ahead", daemon=True)
        if threads > 1 and any(self._here.values()):
            self._counts = (0, sum(map(len, self._here.values())))
            self._thread.start()

    def _ordered(self, recorded: Recorded, thorough: bool) -> dict[Artifact, str]:
        """Have compiled elsewhere what a call lacks and can be; the rest of it is left to this process."""
        world, ctx = state.world, recorded.context
        measuring = measurement_settings(world)
        out = {} if thorough else ruled_out(ctx, world, measuring)
        kernels = measuring.registry.kernels
        names = [
            name
            for name in select(ctx, measuring).ranking
            if name not in out and kernels[name].jit and artifact_for(kernels[name], ctx, world) not in world.ready
        ]
        if not ctx.needs_grad:
            names = each_once(names, measuring)
        self._here[ctx] = [name for name in names if not compiles_elsewhere(kernels[name])]
        able = [name for name in names if compiles_elsewhere(kernels[name])]
        found: dict[Artifact, str] = {}
        args = self._args(recorded) if able else None
        for name in able:
            artifact = artifact_for(kernels[name], ctx, world)
            order = None if args is None else order_for(world.ops[ctx.op], ctx, kernels[name], args, world)
            if order is None:
                self._here[ctx].append(name)
                continue
            found[artifact] = name
            self._queue.submit(artifact, partial(self._ask, name, artifact, order), timed=False)
        return found

    @staticmethod
    def _args(recorded: Recorded) -> tuple[object, ...] | None:
        try:
            return build(recorded.context, seed=0, strides=recorded.strides).args
        except (LayerZeroError, MemoryError, RuntimeError):  # the trial of the call will say it
            return None

    def _ask(self, name: str, artifact: Artifact, order: str) -> None:
        self._now[artifact] = name
        try:
            self._found[artifact] = have_compiled(order, artifact, self._began)
        finally:
            self._found.setdefault(artifact, None)
            del self._now[artifact]

    def _compile_here(self, calls: Sequence[tuple[str, Recorded]], threads: int, limit_s: float | None) -> None:
        def told(done: int, total: int) -> None:
            self._counts = (done, total)

        queue = jit.queue()
        before = queue.workers
        items = [Item(recorded.context, True, recorded.strides) for _, recorded in calls]
        try:
            lacking = {item.context: self._here.get(item.context, []) for item in items}
            late = warm(items, kernels=lacking.__getitem__, timeout_s=limit_s, workers=threads, told=told).unready
        finally:
            queue.workers = before
        if late:
            queue.drop_waiting()
            queue.wait(item.artifact for item in late)  # what is begun cannot be ended, and must not disturb a race
            self._dropped = frozenset(item.artifact for item in late) - state.world.ready

    @property
    def compiling(self) -> tuple[str, ...]:
        here: set[str] = set()
        if self._thread.is_alive() and state.warmup is not None:
            done = {item.artifact for item in tuple(state.warmup.outcomes)}
            here = {kernel_id for kernel_id, _ in set(state.warmup.asked) - done}
        return tuple(sorted({*tuple(self._now.values()), *here}))

    @property
    def left(self) -> int:
        """Artifacts that are being compiled or wait for it."""
        done, every = self._counts if self._thread.is_alive() else (0, 0)
        return len(self._under_way()) + every - done

    @property
    def seconds_left(self) -> float | None:
        """How long the rest may take, by what the others took; None while none is done."""
        took = [found.seconds for found in tuple(self._found.values()) if isinstance(found, jit.Made)]
        if not self.left:
            return 0.0
        rest = None if self._until is None else max(0.0, self._until - time.monotonic())
        if not took:
            return rest
        guess = sum(took) / len(took) * self.left / self._workers
        return guess if rest is None else min(guess, rest)

    def next(self, names: Sequence[str], tick: Callable[[], None]) -> int:
        """Wait until one of these calls may be raced; which, the first where several may. Its kernels are loaded."""
        while True:
            over = self._until is not None and time.monotonic() > self._until
            if over:
                self._queue.drop_waiting()
            left = self._under_way()
            if not self._thread.is_alive() and not (left and self.on_cpu):
                for number, name in enumerate(names):
                    if over or not left & self._elsewhere[name].keys():
                        return number
            tick()
            if left:
                self._queue.wait(left, _LOOK_S)
            else:
                self._thread.join(_LOOK_S)

    def late(self, name: str, recorded: Recorded) -> frozenset[str]:
        """Kernels that a call is raced without: they were not compiled in time."""
        world, ctx = state.world, recorded.context
        here = self._here.get(ctx, []) if self._dropped else []
        dropped = {
            kernel for kernel in here if artifact_for(world.registry.kernels[kernel], ctx, world) in self._dropped
        }
        return frozenset(dropped | {kernel for key, kernel in self._elsewhere[name].items() if key not in self._found})

    def load(self, name: str, recorded: Recorded) -> None:
        lacking = {
            kernel_id: found
            for artifact, kernel_id in self._elsewhere[name].items()
            if artifact not in state.world.ready and isinstance(found := self._found.get(artifact), jit.Made)
        }
        args = self._args(recorded) if lacking else None
        if args is None:
            return
        ctx = recorded.context
        for kernel_id, found in lacking.items():
            load(state.world.ops[ctx.op], ctx, kernel_id, args, self._began, found, paced=False)
        jit.publish()

    def _under_way(self) -> frozenset[Artifact]:
        return self._queue.wait([artifact for own in self._elsewhere.values() for artifact in own], 0.0)

    def close(self) -> None:
        self._queue.drop_waiting()
        if self._thread.is_alive():
            jit.queue().drop_waiting()

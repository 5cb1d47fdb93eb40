"""Compiling beside the requests: a bounded number of threads, urgent artifacts first, each artifact once.

Most threads wait for a compiler in a process of its own (`layerzero.isolation.compilers`). Kernels that can be compiled
only here do so in the thread: those compilers leave Python (nvcc, ptxas, ninja, g++ run as processes) or are C++ that
releases the interpreter. Some have one caller at a time: of jobs that are equally urgent, one of the backend with the
fewest under way goes first, so that the others do not stand in its line. A compile in the thread that takes too long
cannot be ended from outside; it loses its place, so that the others go on, and its artifact counts as soon as it is
done after all. At its end a process waits for what is being compiled: an interpreter that ends a thread inside a C++
compiler is aborted.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from layerzero.forking import in_child
from layerzero.model.artifact import Artifact, words_of

_log = logging.getLogger("layerzero.jit")
MAX_WAITING = 1_024
AT_EXIT_S = 30.0


@dataclass(eq=False)
class Job:
    """One artifact to compile, urgent ones first, by `work`; `timed` ones are late after the queue's limit."""

    urgent: bool
    number: int
    artifact: Artifact
    work: Callable[[], object]
    timed: bool = True
    left: bool = False  # whether it has given its place back
    timer: threading.Timer | None = None

    @property
    def backend(self) -> str:
        return self.artifact[0].partition(".")[0]


class Queue:
    """Jobs waiting and running. `on_late` hears of an artifact that took longer than the limit."""

    def __init__(self, workers: int, timeout_s: float, on_late: Callable[[Artifact], None]) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self._on_late = on_late
        self._count = itertools.count()
        self._start()
        in_child(self._start)
        atexit.register(self.close)

    def _start(self) -> None:
        """Empty, with fresh locks: at the beginning, and in a forked child, where the threads are gone."""
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._known: dict[Artifact, Job] = {}  # waiting or running, and not forgotten
        self._begun: list[Job] = []  # those that hold a place
        self._threads: set[threading.Thread] = set()  # also of those that are late
        self._closed = False

    def submit(
        self, artifact: Artifact, work: Callable[[], object], *, urgent: bool = False, timed: bool = True
    ) -> bool:
        """Compile an artifact when a worker is free; False when it is under way already or too many wait."""
        with self._changed:
            if artifact in self._known or len(self._waiting) >= MAX_WAITING or self._closed:
                return False
            self._known[artifact] = job = Job(urgent, next(self._count), artifact, work, timed)
            self._waiting.append(job)
            self._advance()
            return True

    def holds(self, artifact: Artifact) -> bool:
        return artifact in self._known

    def wait(self, artifacts: Iterable[Artifact] | None = None, timeout_s: float | None = None) -> frozenset[Artifact]:
        """Wait until these are done (None: all, forgotten ones too); those under way after the time are returned."""
        asked = None if artifacts is None else frozenset(artifacts)

        def left() -> frozenset[Artifact]:
            if asked is None:
                return frozenset(self._known) | {job.artifact for job in self._begun}
            return asked & self._known.keys()

        with self._changed:
            self._changed.wait_for(lambda: not left(), timeout_s)
            return left()

    @property
    def busy(self) -> int:
        return len(self._known)

    def drop_waiting(self) -> None:
        with self._changed:
            for job in self._waiting:
                del self._known[job.artifact]
            self._waiting.clear()
            self._changed.notify_all()

    def forget(self) -> None:
        """Begin nothing that waits; what is running keeps its place, and its artifact may be asked for anew."""
        with self._changed:
            self._waiting.clear()
            self._known.clear()
            self._changed.notify_all()

    def close(self, patience_s: float = AT_EXIT_S) -> None:
        """Begin nothing more, and wait so long for what is running."""
        with self._changed:
            self._closed = True
            running = list(self._threads)
        self.drop_waiting()
        deadline = time.monotonic() + patience_s
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread for thread in running if thread.is_alive()]
        if left:
            _log.warning(
                "%d compilations are not done after %.0f s; the process ends inside them", len(left), patience_s
            )

    # -- inside ----------------------------------------------------------------------------------
    def _advance(self) -> None:
        """Begin jobs while there are free places. The lock is held."""
        while self._waiting and len(self._begun) < self.workers:
            running = Counter(job.backend for job in self._begun)
            job = min(self._waiting, key=lambda job: (not job.urgent, running[job.backend], job.number))
            self._waiting.remove(job)
            self._begun.append(job)
            thread = threading.Thread(target=self._run, args=(job,), name="layerzero-jit", daemon=True)
            self._threads.add(thread)
            thread.start()
            if job.timed:
                job.timer = threading.Timer(self.timeout_s, self._late, args=(job,))
                job.timer.daemon = True
                job.timer.start()

    def _run(self, job: Job) -> None:
        try:
            job.work()
        except Exception:
            _log.exception("compiling %s", words_of(job.artifact))
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                if not job.left:
                    self._leave(job)

    def _late(self, job: Job) -> None:
        with self._changed:
            if job.left:
                return
            forgotten = self._known.get(job.artifact) is not job
            self._leave(job)
        if not forgotten:
            self._on_late(job.artifact)

    def _leave(self, job: Job) -> None:
        """Give the place back. The lock is held."""
        job.left = True
        if job.timer is not None:
            job.timer.cancel()
        self._begun.remove(job)
        if self._known.get(job.artifact) is job:
            del self._known[job.artifact]
        self._advance()
        self._changed.notify_all()

"""Soak: a process under full load for as long as asked, with faults and changes all the while, and nothing may grow.

    python -m tools.soak --minutes 30 --json build/prove/soak.json

Threads call ops with sizes that repeat, grow and jump; another changes the policy, explains, plans, observes and stops
observing; one kernel raises now and then, so its breaker must open, and close again. Counted all the while: resident
memory, tensors, file descriptors, threads, shared memory. After a warm-up the trend of the memory over the rest must be
within 1 %, and nothing else may have grown at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import machine
from tools.req_plugin import current_commit

__all__ = ["Breaker", "Gate", "Sample", "Soak", "drift", "judge", "main", "sample"]

MAX_DRIFT = 0.01
WARM = 0.25  # share of the run that is warm-up
KERNEL = "soak.rms_norm.shaky"
RAISES = 0.0002  # of the calls of that kernel
PATIENCE_S = 30.0  # many times the cooldown: a breaker that is open for so long stays open
LOOKS = 12  # after the warm-up: caches still fill in the first seconds, so fewer looks say nothing about growth


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds at one moment."""

    at: float
    calls: int
    rss: int
    tensors: int
    descriptors: int
    threads: int
    shared: int


def sample(at: float, calls: int) -> Sample:
    """Look at this process. Garbage is collected first: what is still there is held by somebody."""
    import torch

    gc.collect()
    tensors = sum(1 for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    shared = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line or "/dev/shm/" in line:
            low, _, high = line.split()[0].partition("-")
            shared += int(high, 16) - int(low, 16)
    return Sample(
        at, calls, pages * os.sysconf("SC_PAGE_SIZE"), tensors, len(os.listdir("/proc/self/fd")), _threads(), shared,
    )  # fmt: skip


def _threads() -> int:
    """Threads that stay. The timer of a breaker that waits to try again is none of them, if it is the only one."""
    found = []
    for _ in range(3):  # a self test lives for a moment
        timers = sum(isinstance(item, threading.Timer) for item in threading.enumerate())
        found.append(threading.active_count() - min(timers, 1))
        time.sleep(0.05)
    return min(found)


def drift(values: Sequence[float]) -> float:
    """How much a series rises from its beginning to its end, as a share of its median: the trend, not the noise.

    The median of the slopes of all pairs (Theil and Sen): one value that stands out does not move it.
    """
    if len(values) < 3:
        return 0.0
    slopes = [(values[j] - values[i]) / (j - i) for i in range(len(values)) for j in range(i + 1, len(values))]
    middle = statistics.median(values)
    return statistics.median(slopes) * (len(values) - 1) / middle if middle else 0.0


def judge(samples: Sequence[Sample], max_drift: float = MAX_DRIFT) -> dict[str, Any]:
    """Figures over the time after the warm-up, and what is wrong with them, in words."""
    last = samples[-1].at
    warm = [item for item in samples if item.at >= WARM * last] or list(samples[-1:])
    rss, judged = drift([item.rss for item in warm]), len(warm) >= LOOKS
    problems = []
    if judged and rss > max_drift:
        problems.append(f"resident memory rises by {rss:.2%}, allowed {max_drift:.0%}")
    figures: dict[str, Any] = {
        "growth_judged": judged, "rss_drift": rss, "rss_mb": [warm[0].rss >> 20, warm[-1].rss >> 20],
    }  # fmt: skip
    for name in ("tensors", "descriptors", "threads", "shared"):
        values = [getattr(item, name) for item in warm]
        third = max(1, len(values) // 3)
        # A call under way holds a few; what is leaked is there at every later look.
        before, after = max(values[:third]), min(values[-third:])
        figures[name] = [values[0], values[-1]]
        if judged and after > before:
            problems.append(f"{name} rose from {before} to {after}")
    figures["problems"] = problems
    return figures


class Gate:
    """Where the threads of the load stand while the process is looked at: a look waits until all of them are here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open, self._here = True, 0

    def passed(self) -> None:
        """Go on at once, or when the look is over."""
        with self._changed:
            self._here += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open)
            self._here -= 1

    def close(self, threads: Callable[[], int], stop: threading.Event) -> None:
        """Hold the threads up, and wait until as many as `threads` says stand here, or the load is over."""
        with self._changed:
            self._open = False
            while self._here < threads() and not stop.is_set():
                self._changed.wait(0.1)  # a thread that ended tells nobody

    def open(self) -> None:
        """Let them go on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


@dataclass
class Breaker:
    """What the breaker of a kernel does, as the registry of health tells it (`HealthRegistry.subscribe`)."""

    kernel_id: str = KERNEL
    opened: int = 0
    closed: int = 0
    since: float | None = None  # when it opened, while it has not closed again
    _version: int = -1
    _lock: Any = field(default_factory=threading.Lock)

    def heard(self, health: Any) -> None:
        """Hear of a change; two threads may tell at once, and the older of the two says nothing new."""
        with self._lock:
            phase = health.state(self.kernel_id).phase
            if health.version <= self._version:
                return
            self._version = health.version
            if phase == "open" and self.since is None:
                self.opened, self.since = self.opened + 1, time.monotonic()
            elif phase == "closed" and self.since is not None:
                self.closed, self.since = self.closed + 1, None

    def problems(self, faults: int, now: float) -> list[str]:
        """What is wrong with it at the end, in words."""
        if faults and not self.opened:
            return [f"{faults} faults and no breaker opened"]
        late = 0.0 if self.since is None else now - self.since
        return [f"a breaker has not closed for {late:.0f} s"] if late > PATIENCE_S else []


# -- the load ----------------------------------------------------------------------------------------------------
@dataclass
class Soak:
    """The threads that make the load, and what they counted."""

    seconds: float
    workers: int = 2
    seed: int = 1
    raises: float = RAISES
    calls: int = 0
    faults: int = 0
    changes: int = 0
    errors: list[str] = field(default_factory=list)
    breaker: Breaker = field(default_factory=Breaker)

    def run(self, look_every: float, told: Callable[[Sample], None]) -> list[Sample]:
        """Load until the time is over; samples are taken while every worker stands between two rounds of calls."""
        stop, gate = threading.Event(), Gate()
        counts = [0] * self.workers
        self._install()
        jobs = [lambda n=n: self._work(n, counts, stop, gate) for n in range(self.workers)]
        jobs.append(lambda: self._change(stop, gate))
        threads = [threading.Thread(target=self._guarded, args=(job, stop), daemon=True) for job in jobs]
        samples: list[Sample] = []
        started = time.monotonic()
        for thread in threads:
            thread.start()
        while not stop.wait(max(0.0, min(look_every, started + self.seconds - time.monotonic()))):
            gate.close(lambda: sum(thread.is_alive() for thread in threads), stop)
            self.calls = sum(counts)
            samples.append(sample(time.monotonic() - started, self.calls))
            told(samples[-1])
            gate.open()
            if time.monotonic() - started >= self.seconds:
                break
        stop.set()
        gate.open()
        for thread in threads:
            thread.join(30)
            if thread.is_alive():
                self.errors.append("a thread does not end")
        self.calls = sum(counts)
        return samples or [sample(time.monotonic() - started, self.calls)]  # it ended before the first look

    def _guarded(self, job: Callable[[], None], stop: threading.Event) -> None:
        try:
            job()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            logging.exception("the load ended")
            stop.set()

    def _install(self) -> None:
        """A kernel ahead of the others that raises now and then, and a breaker that forgives soon."""
        from dataclasses import replace

        import layerzero as lz
        from layerzero.backends.reference.norm import rms_norm
        from layerzero.runtime.state import state

        lz.reset()
        # A small cache: what may fill up is full before the warm-up is over.
        lz.configure(breaker={"failures": 1, "cooldown_s": 0.5, "successes": 2}, cache={"max_entries": 200})
        chance = random.Random(self.seed)

        def shaky(*args: Any) -> Any:
            if chance.random() < self.raises:
                self.faults += 1
                raise RuntimeError("injected")
            return rms_norm(*args)

        globals()["shaky"] = shaky  # where the adapter is looked for
        registry = state.world.registry
        plain = registry.kernels["reference.rms_norm.plain"]
        kernel = replace(plain, kernel_id=KERNEL, backend="soak", function="tools.soak:shaky", priority=1e6)
        state.publish(registry=registry.add([kernel]))
        state.health.subscribe(self.breaker.heard)

    def _work(self, number: int, counts: list[int], stop: threading.Event, gate: Gate) -> None:
        import torch

        import layerzero as lz

        chance = random.Random(self.seed * 1_000 + number)
        torch.manual_seed(number)
        weight = torch.nn.Parameter(torch.ones(64))
        cache = [torch.randn(1, 2, 256, 16) for _ in range(2)]
        query = torch.randn(1, 2, 1, 16)
        matrix = torch.randn(48, 64)
        rows = [torch.randn(n, 64) for n in (1, 2, 3, 5, 8, 13, 21, 34)]
        step = 1

        def around() -> None:
            """One round; what it made is gone when it returns."""
            nonlocal step
            for _ in range(50):
                x = rows[chance.randrange(len(rows))]
                y = lz.rms_norm(x, weight)
                lz.linear(y, matrix)
                step = step % 255 + 1
                lz.attention(query, cache[0][:, :, :step], cache[1][:, :, :step])
                lz.silu_and_mul(torch.cat((x, x), -1)) if chance.random() < 0.2 else lz.layer_norm(x, weight)
                counts[number] += 4
            if chance.random() < 0.2:  # sizes that the cache has forgotten again: the cold path, all the while
                odd = torch.randn(chance.randrange(1, 500), 8 * chance.randrange(1, 64))
                lz.rms_norm(odd, torch.ones(odd.shape[1]))
                counts[number] += 1

        with torch.no_grad():
            while not stop.is_set():
                gate.passed()
                around()

    def _change(self, stop: threading.Event, gate: Gate) -> None:
        import torch

        import layerzero as lz

        chance, x, w = random.Random(self.seed + 7), torch.ones(4, 64), torch.ones(64)
        changes: list[Callable[[], Any]] = [
            lambda: lz.configure(prefer=[chance.choice(("reference", "torch", "sdpa"))]),
            lambda: lz.configure(expires_in=0.2, avoid=["torch"]),
            lambda: str(lz.explain("rms_norm", x, w)),
            lambda: lz.plan("rms_norm", x, w)(x, w),
            lambda: lz.observe(trace=True).stop(),
            lambda: self._scoped(lz, x, w),
            lambda: lz.metrics(),
            lambda: lz.list_kernels(),
        ]
        while not stop.wait(0.25):
            gate.passed()
            chance.choice(changes)()
            self.changes += 1

    @staticmethod
    def _scoped(lz: Any, x: Any, w: Any) -> None:
        with lz.scoped(deny=["torch"]), lz.prefer("reference"):
            lz.rms_norm(x, w)
        with lz.disabled():
            lz.rms_norm(x, w)


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print what was found, 1 when something grew or broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=max(1, min(4, os.cpu_count() or 1)))
    parser.add_argument("--looks", type=int, default=60, help="samples to take")
    parser.add_argument("--max-drift", type=float, default=MAX_DRIFT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raises", type=float, default=RAISES, help="share of the calls of one kernel that raise")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    logging.getLogger("layerzero").setLevel(logging.CRITICAL)  # every injected fault would be an error in the log
    soak = Soak(args.minutes * 60, args.workers, args.seed, args.raises)

    def told(item: Sample) -> None:
        print(
            f"{item.at:8.1f} s  {item.calls:12d} calls  {item.rss / 2**20:8.1f} MiB  {item.tensors} tensors  "
            f"{item.descriptors} descriptors  {item.threads} threads  {item.shared} shared", flush=True,
        )  # fmt: skip

    samples = soak.run(soak.seconds / args.looks, told)
    import layerzero as lz

    found = judge(samples, args.max_drift)
    found["problems"] += soak.errors + soak.breaker.problems(soak.faults, time.monotonic())
    if not soak.faults and soak.calls > 100_000:
        found["problems"].append("no fault was injected")
    figures = {
        "benchmark": "soak", "command": f"make prove NAME=soak MINUTES={args.minutes:g}", "commit": current_commit(),
        "machine": machine(), "minutes": args.minutes, "workers": args.workers,
        "calls": soak.calls, "calls_per_s": round(soak.calls / max(1e-9, samples[-1].at)), "changes": soak.changes,
        "faults": soak.faults, "opened": soak.breaker.opened, "closed": soak.breaker.closed,
        "failovers": lz.metrics()["layerzero_failovers_total"],
        "swaps": lz.metrics()["layerzero_world_swaps_total"], **found,
        "samples": [asdict(item) for item in samples],
    }  # fmt: skip
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({key: value for key, value in figures.items() if key != "samples"}))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.modules["tools.soak"] = sys.modules["__main__"]  # the kernel's adapter is found by this name
    sys.exit(main())

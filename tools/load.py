"""Many threads calling one op while policies change and kernels fail: errors, stale choices and latencies are counted.

The kernels here compute nothing: each gives a tensor of its own, so that every result names the kernel that made it,
and what is timed is dispatch. A choice is stale when a kernel gave a result although it was denied for the whole of
the call.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state

__all__ = ["Load", "Outcome"]

_MODULE = "layerzero_load_kernels"
_numbers = itertools.count()
_NAMES = tuple(f"load{index}.rms_norm.tagged" for index in range(4))


@dataclass
class Outcome:
    """What the threads saw. Latencies are of every `every`-th call, in ns, by thread."""

    calls: int = 0
    swaps: int = 0
    failures: int = 0
    stale: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    latencies: list[int] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """A percentile of the latencies in µs."""
        found = sorted(self.latencies)
        return found[min(len(found) - 1, int(share * len(found)))] / 1e3 if found else 0.0


class Load:
    """Four tagged kernels of rms_norm in a World of their own; `run` has threads call them."""

    def __init__(self) -> None:
        self.tags = {name: torch.full((1,), float(index)) for index, name in enumerate(_NAMES)}
        self.failing: set[str] = set()
        self.failures = itertools.count()
        self._counted = 0
        module = sys.modules.setdefault(_MODULE, ModuleType(_MODULE))
        specs = []
        for index, name in enumerate(_NAMES):
            function = f"tagged{next(_numbers)}"  # a path of its own: what is imported once is never imported again
            setattr(module, function, self._kernel(name))
            specs.append(
                KernelSpec(
                    kernel_id=name, op="rms_norm", backend=name.partition(".")[0], version="1", priority=90.0 - index,
                    function=f"{_MODULE}:{function}", platforms=frozenset({Platform.CPU}),
                    dtypes=frozenset({"float32"}), features=frozenset({"no_weight", "mixed_weight"}),
                )
            )  # fmt: skip
        lz.reset()
        lz.configure(breaker={"cooldown_s": 0.05})
        state.use(load_plugins(entry_points=()).registry.add(specs))

    def _kernel(self, name: str) -> Callable[..., Tensor]:
        tag, failing, failures = self.tags[name], self.failing, self.failures

        def tagged(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            if name in failing:
                next(failures)
                raise RuntimeError(f"{name} was told to fail")
            return tag

        return tagged

    def run(
        self,
        threads: int,
        calls: int,
        *,
        change_every_s: float = 0.02,
        every: int = 16,
        quiet: bool = False,
        least_swaps: int = 0,
    ) -> Outcome:
        """Each thread makes so many calls. `quiet`: no policy changes and no failures.

        `least_swaps`: nobody makes its last call before there were so many changes, however slow the machine is.
        """
        outcome = Outcome()
        shapes = [(torch.ones(rows, 8), torch.ones(8)) for rows in (1, 2, 5, 9)]
        names = {id(tag): name for name, tag in self.tags.items()}
        # The kernel that is denied and since which change: replaced whole, compared by identity.
        denied: list[tuple[str, int]] = [("", 0)]
        done = [0] * threads
        stale = [0] * threads
        times = [array("q") for _ in range(threads)]
        begun, enough = threading.Barrier(threads + 1), threading.Event()

        def call(index: int) -> None:
            order, clock, mine = random.Random(index), time.perf_counter_ns, times[index]
            picks = [shapes[order.randrange(len(shapes))] for _ in range(256)]
            function = lz.rms_norm
            try:
                begun.wait()
                for number in range(calls):
                    x, w = picks[number & 255]
                    if number == calls - 1:
                        enough.wait()
                    before = denied[0]
                    if number % every:
                        out = function(x, w)
                    else:
                        start = clock()
                        out = function(x, w)
                        mine.append(clock() - start)
                    if denied[0] is before and before[0] and names.get(id(out)) == before[0]:
                        stale[index] += 1
                    done[index] += 1
            except BaseException as error:
                outcome.errors.append(f"{type(error).__name__}: {error}"[:300])

        pool = [threading.Thread(target=call, args=(index,)) for index in range(threads)]
        for thread in pool:
            thread.start()
        begun.wait()
        started = time.monotonic()
        while any(thread.is_alive() for thread in pool):
            if not quiet:
                outcome.swaps += self._change(outcome.swaps, denied)
            if quiet or outcome.swaps >= least_swaps:
                enough.set()
            pool[outcome.swaps % threads].join(change_every_s)
        outcome.seconds = time.monotonic() - started
        for thread in pool:
            thread.join()
        outcome.calls, outcome.stale = sum(done), sum(stale)
        count = next(self.failures)
        outcome.failures, self._counted = count - self._counted, count + 1
        outcome.latencies = [ns for part in times for ns in part]
        self.failing.clear()
        return outcome

    def _change(self, number: int, denied: list[tuple[str, int]]) -> int:
        """One change: deny another kernel, or let one fail for a moment and heal."""
        name = _NAMES[number % len(_NAMES)]
        if number % 3 == 2:
            best = _NAMES[1] if denied[0][0] == _NAMES[0] else _NAMES[0]
            self.failing.add(best)
            time.sleep(0.005)
            self.failing.discard(best)
            return 1
        denied[0] = ("", number)  # while the change is under way nothing is claimed
        lz.configure(deny=[name])
        denied[0] = (name, number)
        return 1

    @staticmethod
    def end() -> Any:
        """Back to a World without these kernels."""
        lz.reset()

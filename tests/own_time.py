"""Time for tests of tuning: it passes as the work of this thread does, and as kernels of the test say.

What other processes take from the machine does not count, so that who is faster is a fact and not luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero_tune.timing import clock, race

_said = [0]


def spend(seconds: float) -> None:
    """Let so much time pass, at once."""
    _said[0] += int(seconds * 1e9)


def now_ns() -> int:
    """The clock of the races."""
    return time.thread_time_ns() + _said[0]


def taking(seconds: float, compute: Callable[..., Any]) -> Any:
    """A kernel that computes and then lets time pass; how much may be changed in its `state`."""
    state = {"seconds": seconds}

    def kernel(*args: Any) -> Any:
        out = compute(*args)
        spend(state["seconds"])
        return out

    kernel.state = state  # type: ignore[attr-defined]
    return kernel


def use_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every race of this test go by that clock."""
    own = SimpleNamespace(perf_counter_ns=now_ns, perf_counter=lambda: now_ns() / 1e9)
    for module in (clock, race):
        monkeypatch.setattr(module, "time", own)

"""Every test here needs the compiled library; a machine without a compiler skips them by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.accel import accelerator
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state
from layerzero_accel.functions import KINDS


@pytest.fixture
def native() -> Any:
    """The library; skipped where there is no compiler to have made it with, or it was left aside."""
    if accelerator.native is None:
        compiler = any(shutil.which(name) for name in ("gcc", "clang", "cc"))
        if compiler and accelerator.wanted is not False:
            pytest.fail(f"there is a compiler, but no library: {accelerator.why}")
        pytest.skip("layerzero-accel is off, or was never compiled")
    return accelerator.native


@pytest.fixture
def fresh(native: Any) -> Iterator[Any]:
    """The library in a process that has met nothing, with the kernels of the core only."""
    lz.reset()
    state.use(load_plugins(entry_points=()).registry)
    yield native
    lz.reset()


class Pair:
    """A public function in C and the same in Python, and how calls of the first were answered."""

    def __init__(self, native: Any, name: str) -> None:
        self.native = native
        self.c: Callable[..., Any] = getattr(lz, name)
        self.python: Callable[..., Any] = PUBLIC[name].function
        assert self.c is not self.python and name in KINDS

    def hits(self, *args: Any, **kwargs: Any) -> int:
        """How many of four equal calls were answered by the table in C."""
        before = self.native.counts()
        for _ in range(4):
            self.c(*args, **kwargs)
        after = self.native.counts()
        return after["exact"] + after["bucketed"] - before["exact"] - before["bucketed"]


@pytest.fixture
def pair(fresh: Any) -> Callable[[str], Pair]:
    """Makes the pair of an op."""
    return lambda name: Pair(fresh, name)

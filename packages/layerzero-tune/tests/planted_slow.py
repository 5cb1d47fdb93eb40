"""Compilers that take their time and write down when: imported by the processes that compile, by name.

A compiler is done when as many have begun as MEET says, whoever they are and wherever they run; after a minute it goes
on without them. Where a file GATE exists it waits until that is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.plugin import CompileOrder, NeedsDevice


def folder() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])


def _note(word: str, what: str) -> None:
    with open(folder() / "notes", "a", encoding="utf-8") as file:
        file.write(f"{word} {what} {os.getpid()}\n")


def notes() -> list[tuple[str, str, int]]:
    """What was written: begin or end, of which artifact, in which process; in the order in which it happened."""
    file = folder() / "notes"
    found = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(word, what, int(pid)) for word, what, pid in found]


def _compile(what: str, meet: int) -> None:
    artifact = folder() / f"{what}.compiled"
    if artifact.exists():
        return
    _note("begin", what)
    end = time.monotonic() + 60.0
    while time.monotonic() < end and sum(word == "begin" for word, *_ in notes()) < meet:
        time.sleep(0.01)
    while (folder() / f"{what}.gate").exists():
        time.sleep(0.01)
    _note("end", what)
    artifact.touch()


def elsewhere(order: CompileOrder) -> None:
    """The `compiler` of the kernels below."""
    _compile(f"{order.function.partition(':')[2]}_{order.args[0].shape[-1]}", int(os.environ.get("MEET", "1")))


def needs_device(order: CompileOrder) -> None:
    raise NeedsDevice("it is tuned where it runs")


def _normed(name: str, x: Tensor, weight: Tensor, eps: float, meet: int = 1) -> Tensor:
    _compile(f"{name}_{x.shape[-1]}", meet)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed("one", x, weight, eps)


def two(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed("two", x, weight, eps)


def here(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compiled only where the device is."""
    return _normed("here", x, weight, eps, int(os.environ.get("MEET", "1")))


def hijack(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compiled here, by a library that takes SIGINT for itself and ends the process then."""
    c = ctypes.CDLL(None)
    c.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ends = ctypes.cast(c._exit, ctypes.c_void_p)
    c.signal(signal.SIGINT, ends)
    now, end = (ctypes.c_void_p * 32)(), time.monotonic() + 60.0
    while time.monotonic() < end:  # until somebody takes it back
        c.sigaction(signal.SIGINT, None, now)
        if now[0] != ends.value:
            break
        time.sleep(0.01)
    return _normed("hijack", x, weight, eps)


def told(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Its compiler is asked, and says that it needs the device."""
    return _normed("told", x, weight, eps)


def stuck(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Does not come back from a call of 64."""
    if x.shape[-1] == 64:
        (folder() / "stuck").touch()
        time.sleep(1000)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def kernels(*names: str) -> list[Any]:
    """Specs of these."""
    from layerzero.model.enums import Platform
    from layerzero.model.kernel import KernelSpec

    compilers = {"here": "device", "hijack": "device", "told": "planted_slow:needs_device", "stuck": None}
    return [
        KernelSpec(
            f"lab.rms_norm.{name}", "rms_norm", "lab", f"planted_slow:{name}", jit=name != "stuck", jit_key=("hidden",),
            priority=90.0, platforms=frozenset({Platform.CPU}), dtypes=frozenset({"float32"}), deterministic=True,
            compiler=compilers.get(name, "planted_slow:elsewhere"),
        )
        for name in names
    ]  # fmt: skip


def main() -> None:
    """`lz tune` in a process that has the kernels named by PLANTED."""
    from layerzero.isolation import process
    from layerzero.jit import cache
    from layerzero.runtime.state import state
    from layerzero_cli import main as cli
    from layerzero_tune.timing import baselines

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as in a job of the background
    baselines.CALLING_US = 1e12  # how fast the kernels are is no matter here
    process._step_back = lambda pid: None
    cache.prepare()
    torch.set_num_threads(1)
    registry = state.world.registry
    others = [name for name, kernel in registry.kernels.items() if kernel.backend != "reference"]
    state.publish(registry=registry.without(kernels=others).add(kernels(*os.environ["PLANTED"].split())))
    cli()


if __name__ == "__main__":
    main()

"""What binding gives for an isolated kernel, and the children of this process by their settings."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import BackendNotAvailableError
from layerzero.forking import fresh_lock, in_child
from layerzero.isolation.process import Settings
from layerzero.isolation.wire import ChildError, IsolationFault
from layerzero.isolation.worker import Worker
from layerzero.model.kernel import KernelSpec
from layerzero.reasons import reason
from layerzero.selection.world import World

_MOST = 8

_lock = fresh_lock()
_workers: dict[Settings, Worker] = {}


def settings_for(backend: str, world: World) -> Settings:
    """How the World's policy and the backend itself want it isolated."""
    return Settings.of(backend, world.policy.isolation_entry(backend), world.registry.backends.get(backend))


def worker_for(settings: Settings) -> Worker:
    """The one child with these settings; of too many, those used longest ago are closed."""
    with _lock:
        found = _workers.pop(settings, None) or Worker(settings)
        _workers[settings] = found
        surplus = [_workers.pop(old) for old in list(_workers)[:-_MOST]]
    for worker in surplus:
        worker.close(wait=False)
    return found


def workers() -> tuple[Worker, ...]:
    """Those that were asked for in this process."""
    return tuple(_workers.values())


def isolated(kernel: KernelSpec, world: World, *, rng: bool) -> Callable[..., Any]:
    """A callable that runs the kernel in its child. The adapter is imported there now, so that binding fails here.

    A kernel that draws random numbers gets a seed drawn from this process's generator: the same seed here gives the
    same numbers there.
    """
    worker = worker_for(settings_for(kernel.backend, world))
    try:
        worker.load(kernel.function)
    except ChildError as error:
        why = reason("ISOLATION_IMPORT_FAILED", error.reason.value)
        raise BackendNotAvailableError(f"{kernel.kernel_id}: {why.message}", reasons=(why,)) from error
    except IsolationFault:
        pass  # it may start next time: the call itself will say so, and its breaker decides how long to wait
    function = kernel.function

    def run(*args: Any, **kwargs: Any) -> Any:
        return worker.call(function, args, kwargs, _seed(args) if rng else None)

    return run


def _seed(args: tuple[Any, ...]) -> int:
    tensor = next((item for item in args if isinstance(item, Tensor)), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    return int(torch.randint(2**31, (1,), device=device).item())


def close_all() -> None:
    """End every child of this process: at exit, and between tests."""
    with _lock:
        known = list(_workers.values())
        _workers.clear()
    for worker in known:
        worker.close(wait=False)


def _after_fork() -> None:
    known = list(_workers.values())
    _workers.clear()
    for worker in known:
        worker.after_fork()


atexit.register(close_all)
in_child(_after_fork)

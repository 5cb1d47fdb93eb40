"""`lz.configure`, `lz.lock`, `lz.prefer` and their kin: how users say what they want."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from layerzero.errors import ConfigurationError, DispatchTableError, UnknownNameError, nearest
from layerzero.forking import fresh_lock
from layerzero.model.config import Policy
from layerzero.model.kernel import KernelSpec
from layerzero.policy.layers import Level, PolicyLayer
from layerzero.runtime.policies import entered, policies
from layerzero.runtime.state import scope, state


def configure(*, expires_in: float | None = None, **settings: Any) -> Policy:
    """Set policy from code; a second call replaces the settings it names and keeps the rest.

    Settings are those of the policy file: locks, allow, deny, prefer, avoid, boosts, strict_mode,
    allow_adaptation, deterministic, memory_headroom_mb, breaker, cache, ... With `expires_in` the settings of
    this call expire after so many seconds. `lz.configure()` alone returns the policy in force.
    """
    if expires_in is not None:
        if isinstance(expires_in, bool) or not isinstance(expires_in, (int, float)) or not 0 < expires_in < math.inf:
            raise ConfigurationError(
                f"expires_in is {expires_in!r}", value=str(expires_in), limit="a positive number of seconds"
            )
        layer = PolicyLayer.of(Level.PROGRAMMATIC, source="lz.configure", **settings)
        policies.put(f"timeboxed {time.monotonic_ns()}", layer.until(time.monotonic() + expires_in))
    elif settings:
        with _writing:
            wanted = {**_given, **settings}
            policies.put("configure", PolicyLayer.of(Level.PROGRAMMATIC, source="lz.configure", **wanted))
            _given.update(settings)  # only now: settings that were refused must not come back with the next call
    return get_config()


_given: dict[str, Any] = {}
_writing = fresh_lock(threading.RLock)


def get_config() -> Policy:
    """The policy in force here: files, environment, code and the scopes this call is inside of."""
    active = scope.get()
    return policies.merged(active.layers if active is not None else ())


def load_config(path: str | Path, *, watch: bool = False) -> Policy:
    """Take the policy from a YAML or TOML file, in place of files found before.

    With `watch=True`, `lz.reload_config()` picks up later changes; a bad new file keeps the old policy.
    """
    policies.load(path, watch=watch)
    return get_config()


def reload_config() -> bool:
    """Look at the watched file once; True when a changed policy was taken."""
    return policies.poll()


def use_table(path: str | os.PathLike[str] | None) -> None:
    """Follow the dispatch table in this file from now on; None goes back to selecting at run time.

    A table that does not hold here (another machine, policy or kernel version) is refused with the reason.
    """
    if path is None:
        state.obey(None)
        return
    from layerzero.device.probe import probe_devices
    from layerzero.selection.engine import objections
    from layerzero.tables.file import load_table

    table, world = load_table(path), state.world
    wrong = [objections(table, world, device) for device in probe_devices()]
    if wrong and all(wrong):
        least = min(wrong, key=len)
        raise DispatchTableError(reasons=least)
    state.obey(table, os.fspath(path))


def lock(op: str, kernel_id: str) -> None:
    """Always run this kernel for this op; what it cannot serve raises LockedKernelError (or falls back: on_fault)."""
    world = state.world
    if op not in world.ops and "*" not in op:
        near = ", ".join(nearest(op, world.ops) or sorted(world.ops)[:8])
        raise UnknownNameError(f"unknown op {op!r}", code="OP_UNKNOWN", value=op, limit=near)
    kernel = world.registry.get(kernel_id)
    if "*" not in op:
        must_compute(kernel, op)
    with _writing:
        _locks[op] = kernel_id
        _publish_locks()


def unlock(op: str | None = None) -> None:
    """Lift a lock set with `lz.lock`, or all of them."""
    with _writing:
        for name in [*_locks] if op is None else [op]:
            _locks.pop(name, None)
        _publish_locks()


def get_locks() -> dict[str, str]:
    """Every lock in force here: op (or pattern) to kernel id."""
    return dict(get_config().locks_by_op())


_locks: dict[str, str] = {}


def _publish_locks() -> None:
    layer = PolicyLayer.of(Level.PROGRAMMATIC, source="lz.lock", locks=dict(_locks)) if _locks else None
    policies.put("locks", layer)


def scoped(**settings: Any) -> AbstractContextManager[object]:
    """Run a block under other settings; takes what `lz.configure` takes. Only this thread or task sees them."""
    return entered(PolicyLayer.of(Level.CONTEXT, source="lz.scoped", **settings))


def prefer(*patterns: str) -> AbstractContextManager[object]:
    """Prefer backends or kernels (globs) inside the block."""
    return entered(PolicyLayer.of(Level.CONTEXT, source="lz.prefer", prefer=patterns))


def disabled() -> AbstractContextManager[object]:
    """Inside the block only the fallbacks run: plain PyTorch, for comparison or in an emergency."""
    return entered(PolicyLayer.of(Level.CONTEXT, source="lz.disabled", enabled=False))


def reset() -> None:
    """Forget all settings, locks, health and plugins; the next call starts from environment and files."""
    _given.clear()
    _locks.clear()
    policies.reset()
    state.reset()


def must_compute(kernel: KernelSpec, op: str) -> None:
    """Raise unless a kernel is one of this op."""
    if kernel.op != op:
        message = f"{kernel.kernel_id} computes {kernel.op}, not {op}"
        raise UnknownNameError(message, code="KERNEL_UNKNOWN", value=kernel.kernel_id, limit=f"a kernel of {op}")

"""The policy layers of the process, and how they become the World's policy.

Order of strength: call > context manager > programmatic > environment > file; deny adds up over all of them.

A context manager is a `Scope` in a ContextVar, and a Scope is a memoised World. A call inside a scope reads that one;
when the base World is swapped, the scope derives a new one at its next use, so it can never keep a stale choice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from layerzero import env
from layerzero.forking import fresh_lock, in_child
from layerzero.model.config import Policy
from layerzero.policy.layers import PolicyLayer, from_env, merge, next_expiry
from layerzero.runtime.state import scope, settled, state
from layerzero.runtime.timers import timers

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable
    from layerzero.policy.load import FileWatch
    from layerzero.selection.world import World


class Policies:
    """Layers by source. Changing one merges again and swaps the World."""

    def __init__(self) -> None:
        self._lock: threading.RLock = fresh_lock(threading.RLock)
        self._files: tuple[PolicyLayer, ...] | None = None
        self._env: PolicyLayer | None = None
        self._set: dict[str, PolicyLayer] = {}
        self._watch: FileWatch | None = None
        self.last_error: Exception | None = None

    def merged(self, scoped: tuple[PolicyLayer, ...] = ()) -> Policy:
        """The policy of all layers, with those of a scope on top."""
        with self._lock:
            layers = (*self.base(), *self._set.values(), *scoped)
        return merge(layers, now=time.monotonic())

    def base(self) -> tuple[PolicyLayer, ...]:
        """Layers of files and environment, read once."""
        with self._lock:
            if self._env is None:
                self._env = from_env(env.read(os.environ))
            if self._files is None:
                from layerzero.policy.load import load_discovered

                self._files = tuple(load_discovered(env.read(os.environ)))
            return (*self._files, self._env)

    def put(self, name: str, layer: PolicyLayer | None) -> None:
        """Set, replace or (None) remove a programmatic layer, and publish. An invalid result changes nothing."""
        with self._lock:
            before = dict(self._set)
            self._set.pop(name, None)
            if layer is not None:
                self._set[name] = layer
            try:
                self.merged()
            except Exception:
                self._set = before
                raise
        self.publish()

    def load(self, path: str | Path, *, watch: bool = False) -> None:
        """Read a policy file in place of any found before; with `watch` later `poll` calls reload it."""
        from layerzero.policy.load import FileWatch

        watched = FileWatch(Path(path))
        with self._lock:
            self._files = (watched.layer,)
            self._watch = watched if watch else None
        self.publish()

    def poll(self) -> bool:
        """Reload a watched file if it changed. A bad new file keeps the old policy and is kept in `last_error`."""
        with self._lock:
            if self._watch is None:
                return False
            outcome = self._watch.poll()
            self.last_error = outcome.error
            if not outcome.changed:
                return False
            self._files = (outcome.layer,)
        self.publish()
        return True

    def publish(self) -> None:
        """Swap the World's policy, forget timeboxes that are over, and arm the clock for the next one."""
        state.refresh_policy()
        with self._lock:
            now = time.monotonic()
            self._set = {name: layer for name, layer in self._set.items() if not layer.expired(now)}
            deadline = next_expiry(layer for layer in (*self.base(), *self._set.values()) if not layer.expired(now))
        if deadline is None:
            timers.cancel("policy")
        else:
            timers.after("policy", deadline - now, self.publish)

    def reset(self) -> None:
        """Forget every layer and read environment and files again at the next use. For tests."""
        with self._lock:
            self._files, self._env, self._watch = None, None, None
            self._set.clear()
            self.last_error = None
        timers.cancel("policy")


def _in_child() -> None:
    """The thread that would end a timebox is not in a forked child: arm the clock there."""
    if next_expiry(policies._set.values()) is not None:
        policies.publish()


policies = Policies()
in_child(_in_child)


@dataclass(slots=True, eq=False)
class Scope:
    """A stack of policy layers above the programmatic ones, and the World that follows from them."""

    layers: tuple[PolicyLayer, ...]
    # Obeyed inside the scope instead of the World's own; None: that one.
    table: DispatchTable | None = None
    # (base, derived) in one slot: tasks and threads may share a scope, and must never see half of a pair.
    _derived: tuple[World | None, World | None] = field(default=(None, None), init=False)

    def world(self) -> World:
        base = state.world
        known, world = self._derived
        if known is base and world is not None:
            return world
        tables = {} if self.table is None else {"table": self.table}
        policy = policies.merged(self.layers) if self.layers else base.policy
        derived = settled(base.changed(policy=policy, **tables))
        self._derived = (base, derived)
        return derived


@dataclass(slots=True, eq=False)
class _Open:
    """One block that is open: what it adds, and the scopes that were in force when it began, outside and inside."""

    adds: Callable[[Scope | None], Scope]
    before: Scope | None
    inner: Scope


# The blocks that are open here, outermost first.
_open: ContextVar[tuple[_Open, ...]] = ContextVar("layerzero_open_scopes", default=())


@contextmanager
def _block(adds: Callable[[Scope | None], Scope]) -> Iterator[Scope]:
    """Run a block in a scope of its own; one that ends before a block inside it takes only itself away."""
    before = scope.get()
    mine = _Open(adds, before, adds(before))
    _open.set((*_open.get(), mine))
    scope.set(mine.inner)
    try:
        yield mine.inner
    finally:
        blocks = _open.get()
        if mine in blocks:  # else it was begun in another context, which this one knows nothing of
            place = blocks.index(mine)
            kept, later = blocks[:place], blocks[place + 1 :]
            now = mine.before
            for item in later:
                item.before, now = now, item.adds(now)
                item.inner = now
            _open.set((*kept, *later))
            scope.set(now)


def entered(layer: PolicyLayer) -> AbstractContextManager[Scope]:
    """Run a block under one more policy layer."""

    def adds(outer: Scope | None) -> Scope:
        if outer is None:
            return Scope((layer,))
        return Scope((*outer.layers, layer), outer.table)

    return _block(adds)


_SURROUNDINGS = 16  # scopes that are remembered of one table
# (layers of the scope around, table) -> the scope: its World, and with it the hot table, outlives one block.
_by_table: WeakKeyDictionary[DispatchTable, dict[tuple[PolicyLayer, ...], Scope]] = WeakKeyDictionary()


def under_table(table: DispatchTable) -> AbstractContextManager[Scope]:
    """Run a block under a dispatch table. The same table in the same surroundings finds its World again, still hot."""

    def adds(outer: Scope | None) -> Scope:
        layers = outer.layers if outer is not None else ()
        known = _by_table.setdefault(table, {})
        inner = known.get(layers)
        if inner is None:
            if len(known) >= _SURROUNDINGS:
                known.clear()
            inner = known[layers] = Scope(layers, table)
        return inner

    return _block(adds)

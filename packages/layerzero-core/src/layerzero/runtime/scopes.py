"""Policy scopes: a context manager is a Scope in a ContextVar, and a Scope is a memoised World.

The hot path of a call inside a scope reads the scope's own World; when the base World is swapped, the scope
derives a new one at its next use, so a scope can never keep a stale choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from layerzero.policy.layers import PolicyLayer
from layerzero.runtime.pressure import pressure
from layerzero.runtime.state import scope, state

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable
    from layerzero.selection.world import World


class Scope:
    """A stack of policy layers above the programmatic ones, and the World that follows from them."""

    __slots__ = ("_derived", "layers", "table")

    def __init__(self, layers: tuple[PolicyLayer, ...], table: DispatchTable | None = None) -> None:
        self.layers = layers
        # Obeyed inside the scope instead of the World's own; None: that one.
        self.table = table
        # (base, derived) in one slot: tasks and threads may share a scope, and must never see half of a pair.
        self._derived: tuple[World | None, World | None] = (None, None)

    def world(self) -> World:
        base = state.world
        known, world = self._derived
        if known is base and world is not None:
            return world
        from layerzero.runtime.policies import policies

        tables = {} if self.table is None else {"table": self.table}
        policy = policies.merged(self.layers) if self.layers else base.policy
        derived = base.changed(policy=policy, **tables)
        if derived.policy.backend_isolation or derived.enclosed:
            from layerzero.runtime.isolated_backends import with_enclosures

            derived = with_enclosures(derived)
        if derived.policy.memory_headroom_mb is not None:
            derived = pressure.with_memory(derived)
        self._derived = (base, derived)
        return derived


class _Open:
    """One block that is open: what it adds, and the scope that was in force when it began."""

    __slots__ = ("adds", "before", "inner")

    def __init__(self, adds: Callable[[Scope | None], Scope]) -> None:
        self.adds = adds
        self.before = scope.get()
        self.inner = adds(self.before)


# The blocks that are open here, outermost first.
_open: ContextVar[tuple[_Open, ...]] = ContextVar("layerzero_open_scopes", default=())


@contextmanager
def _block(adds: Callable[[Scope | None], Scope]) -> Iterator[Scope]:
    """Run a block in a scope of its own; one that ends before a block inside it takes only itself away."""
    mine = _Open(adds)
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


_SURROUNDINGS = 16

"""Policy scopes: a context manager is a Scope in a ContextVar, and a Scope is a memoised World.

The hot path of a call inside a scope reads the scope's own World; when the base World is swapped, the scope
derives a new one at its next use, so a scope can never keep a stale choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from layerzero.policy.layers import PolicyLayer
from layerzero.runtime.state import scope, state

if TYPE_CHECKING:
    from layerzero.selection.world import World

__all__ = ["Scope", "entered"]


class Scope:
    """A stack of policy layers above the programmatic ones, and the World that follows from them."""

    __slots__ = ("_derived", "layers")

    def __init__(self, layers: tuple[PolicyLayer, ...]) -> None:
        self.layers = layers
        # (base, derived) in one slot: tasks and threads may share a scope, and must never see half of a pair.
        self._derived: tuple[World | None, World | None] = (None, None)

    def world(self) -> World:
        """The World of this scope for the current base World."""
        base = state.world
        known, world = self._derived
        if known is base and world is not None:
            return world
        from layerzero.runtime.policies import policies

        derived = base.changed(policy=policies.merged(self.layers))
        self._derived = (base, derived)
        return derived


@contextmanager
def entered(layer: PolicyLayer) -> Iterator[Scope]:
    """Run a block under one more policy layer."""
    outer = scope.get()
    inner = Scope((*(outer.layers if outer is not None else ()), layer))
    token = scope.set(inner)
    try:
        yield inner
    finally:
        scope.reset(token)

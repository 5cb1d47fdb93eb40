"""Settings that go with one model's calls, where several models take turns in one loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from layerzero.policy.layers import Level, PolicyLayer
from layerzero.runtime.current import scope
from layerzero.runtime.scopes import Scope

__all__ = ["Role"]


class Role:
    """What `lz.scoped(**settings)` is to a block, made to be entered thousands of times.

    `lz.scoped` derives a new World at each entry, with an empty hot table. A role keeps its World from entry to entry,
    so that its calls stay hot; it has a table of its own, so that no choice made in one role is ever found in another.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self.settings = dict(settings)
        layer = PolicyLayer.of(Level.CONTEXT, source=f"role {name}", **self.settings)
        self._layer = layer
        # (scope around it, own scope) in one slot: threads may share a role, and must never see half of a pair.
        self._known: tuple[Scope | None, Scope] | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make calls under this role's settings, on top of those of the scope around."""
        outer = scope.get()
        known = self._known
        if known is None or known[0] is not outer:
            known = (outer, Scope((*(outer.layers if outer is not None else ()), self._layer)))
            self._known = known
        token = scope.set(known[1])
        try:
            yield
        finally:
            scope.reset(token)

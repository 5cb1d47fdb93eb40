"""The public functions by name, filled by `install`: they live on the floor above, which nothing here may import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.model.op import Op

__all__ = ["functions"]


class _Functions:
    """Looks a function up when it is called for: a late op is not imported before."""

    def __init__(self) -> None:
        self._public: Mapping[str, Any] = {}
        self._helpers: dict[str, Callable[..., Any]] = {}
        # Ops whose place in torch follows from their declaration. Looked up when a graph runs: a plugin may come again.
        self.declared: dict[str, Op] = {}
        # The C forms that stand in the public namespace in their place; they are traced alike.
        self.accelerated: dict[str, Callable[..., Any]] = {}

    def fill(self, public: Mapping[str, Any], helpers: Iterable[Callable[..., Any]]) -> None:
        """Take the ops and the helper functions that are not ops."""
        self._public = public
        self._helpers = {helper.__name__: helper for helper in helpers}

    def accelerate(self, found: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Take C forms of some functions; returns all there are."""
        self.accelerated.update(found)
        return self.accelerated

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Take the function of a plugin's op; a plugin that is loaded again replaces it."""
        self._helpers[name] = function

    def __getitem__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._helpers[name] if name in self._helpers else self._public[name].function
        return found

    def fastest(self, name: str) -> Callable[..., Any]:
        """The C form of a function where there is one: what a call from below costs least."""
        return self.accelerated.get(name) or self[name]


functions = _Functions()

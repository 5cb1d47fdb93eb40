"""The public functions by name, filled by `install`: they live on the floor above, which nothing here may import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.model.op import Op


class _Functions:
    """Looks a function up when it is called for: a late op is not imported before."""

    def __init__(self) -> None:
        self._public: Mapping[str, Any] = {}
        self._helpers: dict[str, Callable[..., Any]] = {}
        # The ops of plugins that torch knows. Looked up when a graph runs: a plugin may come again.
        self._declared: dict[str, Op] = {}
        # The C forms that stand in the public namespace in their place; they are traced alike.
        self.accelerated: dict[str, Callable[..., Any]] = {}

    def fill(self, public: Mapping[str, Any], helpers: Iterable[Callable[..., Any]]) -> None:
        self._public = public
        self._helpers |= {helper.__name__: helper for helper in helpers}

    def accelerate(self, found: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        self.accelerated.update(found)
        return self.accelerated

    def add(self, op: Op) -> None:
        """Take a plugin's op; a plugin that is loaded again replaces it."""
        self._helpers[op.op_id] = op.function
        if op.fake is not None:
            self._declared[op.op_id] = op

    def op(self, name: str) -> Op:
        found: Op = self._declared[name] if name in self._declared else self._public[name]
        return found

    def ops(self) -> list[Op]:
        """All ops that torch knows: those that say what their results are shaped like."""
        return [*(op for op in self._public.values() if op.fake is not None), *self._declared.values()]

    def __getitem__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._helpers[name] if name in self._helpers else self._public[name].function
        return found

    def fastest(self, name: str) -> Callable[..., Any]:
        """The C form of a function where there is one: what a call from below costs least."""
        return self.accelerated.get(name) or self[name]


functions = _Functions()

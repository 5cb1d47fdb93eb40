"""What a hot call reads: the current World, the active scope, the table of built-in ops. Nothing heavy is imported.

`layerzero.runtime.state` fills these; they live apart so that `import layerzero` costs little.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.model.op import OperationSpec
    from layerzero.runtime.scopes import Scope

__all__ = ["Unloaded", "builtin_op", "builtin_ops", "now", "scope"]

scope: ContextVar[Scope | None] = ContextVar("layerzero_scope", default=None)


class Unloaded:
    """Stands in for the World until the first cold call; nothing is ever hot in it."""

    hot: Mapping[Any, Any] = MappingProxyType({})


class _Now:
    """The World hot calls read. Replaced by `Runtime`, under its lock; read without one."""

    __slots__ = ("world",)

    def __init__(self) -> None:
        self.world: Any = Unloaded


now = _Now()
builtin_ops: dict[str, OperationSpec] = {}


def builtin_op(spec: OperationSpec) -> OperationSpec:
    """Make an op known to every World built from now on; called once per op at import."""
    builtin_ops[spec.op_id] = spec
    return spec

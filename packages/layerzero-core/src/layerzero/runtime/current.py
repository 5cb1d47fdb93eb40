"""What a hot call reads: the current World, the active scope, the table of built-in ops. Nothing heavy is imported.

`layerzero.runtime.state` fills these; they live apart so that `import layerzero` costs little.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layerzero.op_tables import LATE_OPS, LateTable

if TYPE_CHECKING:
    from layerzero.model.op import Op
    from layerzero.runtime.policies import Scope

scope: ContextVar[Scope | None] = ContextVar("layerzero_scope", default=None)


class Unloaded:
    """Stands in for the World until the first cold call; nothing is ever hot in it."""

    hot: Mapping[Any, Any] = MappingProxyType({})
    memo: Mapping[Any, Any] = MappingProxyType({})


class _Now:
    """The World hot calls read. Replaced by `Runtime`, under its lock; read without one."""

    __slots__ = ("bucketed_hits", "last_bucketed", "world")

    def __init__(self) -> None:
        self.world: Any = Unloaded
        self.bucketed_hits = 0  # calls found by their bucket
        self.last_bucketed: Any = None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Load or time without the garbage collector: a full collection walks all of torch's objects and outlasts both."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


now = _Now()
builtin_ops: LateTable[Op] = LateTable(LATE_OPS)
# op -> callable (canonical args, layout, backend) that hands tensor subclasses to one torch.library op
opaque_ops: dict[str, Callable[[tuple[Any, ...], str | None, str | None], Any]] = {}

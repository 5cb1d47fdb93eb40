"""A rehearsal: calls select as they will inside the capture, from one World that nobody else can change meanwhile.

Outside of a capture a call may take a kernel that is not safe in one. Were the warm-up to run that, the capture would
meet its own kernels for the first time, and their first call allocates, compiles or synchronises. So while a rehearsal
lasts every call on the device is described as captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from layerzero.dispatch.modes import rehearsed
from layerzero.dispatch.run import current_world
from layerzero.json_form import Plain
from layerzero.reasons import Reason
from layerzero.runtime.current import scope
from layerzero.runtime.state import state

if TYPE_CHECKING:
    from layerzero.dispatch.bind import Bound
    from layerzero.model.context import Context
    from layerzero.selection.world import World


class Seen(NamedTuple):
    """One call of an op: its context, the kernel bound for it, and its arguments (the first time it is met)."""

    context: Context
    bound: Bound
    args: tuple[Any, ...]


class Watch:
    """Stands where a World keeps its tally and writes down every call that is selected."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._known: set[tuple[Context, str]] = set()

    def table(self) -> dict[Any, Any]:
        """The hot table of a World under watch. Captured calls are never made hot, so all of them come by."""
        return {}

    def met(
        self, hot: dict[Any, Any], keys: tuple[Any, Any], ctx: Context, bound: Bound, args: tuple[Any, ...]
    ) -> None:
        """A call was selected and is about to run. Arguments of the like are kept once: they hold memory."""
        key = (ctx, bound.kernel_id)
        self.seen.append(Seen(ctx, bound, () if key in self._known else args))
        self._known.add(key)

    def take(self) -> tuple[Seen, ...]:
        found, self.seen = tuple(self.seen), []
        return found


class Pinned:
    """A scope whose World stays: what is published meanwhile is for the calls of others.

    One thing still comes in: that a kernel's adapter cannot be imported is found out by trying.
    """

    __slots__ = ("_unbindable", "_world", "layers", "table")

    def __init__(self, base: World, watch: Watch, refused: Mapping[str, Reason]) -> None:
        active = scope.get()
        self.layers = () if active is None else active.layers
        self.table = None if active is None else active.table
        self._unbindable = state.world.unbindable
        self._world = base.changed(tally=watch, unbindable=MappingProxyType({**base.unbindable, **refused}))

    def world(self) -> World:
        found = state.world.unbindable
        if found is not self._unbindable:
            self._unbindable = found
            self._world = self._world.changed(unbindable=MappingProxyType({**found, **self._world.unbindable}))
        return self._world


@contextmanager
def rehearsal(watch: Watch, refused: Mapping[str, Reason] | None = None, *, kind: str = "cuda") -> Iterator[World]:
    """Select as in a capture on devices of this kind, without the refused kernels, until the block ends."""
    pinned = Pinned(current_world(), watch, refused or {})
    token = scope.set(pinned)  # type: ignore[arg-type] # a Scope is what has layers, a table and a World
    seen = rehearsed.set(rehearsed.get() | {kind})
    try:
        yield pinned.world()
    finally:
        rehearsed.reset(seen)
        scope.reset(token)


@dataclass(frozen=True)
class CaptureReport(Plain):
    """The result of `lz.validate_graph_capture`, and the `report` of a captured call.

    kernels       (op, kernel id) of each LayerZero call in the graph, in order
    refused       kernels that were tried and may not stand in a graph, with the reason
    reasons       why there is no graph; empty when `ok`
    warmups       how often the function ran on the capture's stream beforehand
    initialised   libraries that were made ready on that stream
    memory_delta  bytes by which the device's reserved memory grew during the last capture
    dummy         whether a dummy capture came first
    replays       replays whose results were compared with the function itself
    """

    ok: bool
    kernels: tuple[tuple[str, str], ...] = ()
    refused: Mapping[str, Reason] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    warmups: int = 0
    initialised: tuple[str, ...] = ()
    memory_delta: int = 0
    dummy: bool = False
    replays: int = 0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"graph capture: {'ok' if self.ok else 'refused'}"]
        lines += [f"  {item}" for item in self.reasons]
        lines += [f"  {op}: {kernel_id}" for op, kernel_id in self.kernels]
        lines += [f"  refused {kernel_id}: {why}" for kernel_id, why in self.refused.items()]
        ready = ", ".join(self.initialised) or "nothing"
        lines.append(
            f"  {self.warmups} warm-up runs, {ready} initialised, {'a' if self.dummy else 'no'} dummy capture, "
            f"memory {self.memory_delta:+d} bytes, {self.replays} replays compared"
        )
        return "\n".join(lines)

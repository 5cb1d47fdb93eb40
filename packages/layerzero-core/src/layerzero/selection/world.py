"""Everything a selection may depend on besides the call, as one value.

A World is never changed: new policy, health, measurements or kernels make a new World. Each World owns
its hot table, so swapping the World drops every cached choice at once and no stale one can survive.

Sizes that change from call to call are put into buckets, so that a decode loop stays hot. A bucket ends at every power
of two and wherever any kernel's declared limit or any policy rule could change its mind. Inside one bucket every
constraint therefore gives the same answer, and a decision made for one length holds for all of them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layerzero.health.breaker import Health
from layerzero.model.artifact import Artifact
from layerzero.model.config import Policy
from layerzero.model.context import Context
from layerzero.model.decision import Bucket, Expectation
from layerzero.model.kernel import BackendSpec, KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.model.situation import draws
from layerzero.policy.rules import has_exact, thresholds
from layerzero.reasons import Reason
from layerzero.registry.kernels import KernelRegistry

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_POWERS = tuple(2**i for i in range(48))  # beyond any axis: every length has a bucket


@dataclass(frozen=True)
class Measurements:
    """Measured medians in µs. `lookup(kernel_id, ctx)` gives None for what was never measured.

    `notes(ctx)` says what was found for a call and not believed, for reports; `refused(kernel_id, ctx)` which kernels
    failed the comparison with the reference there: those are rejected.
    """

    lookup: Callable[[str, Context], float | None] = lambda kernel_id, ctx: None
    fingerprint: str = ""
    noise: float = 0.02
    notes: Callable[[Context], tuple[Reason, ...]] = lambda ctx: ()
    # Why a kernel may not run a call: it was wrong, or raised, when it was to be measured. None: nothing is known.
    refused: Callable[[str, Context], Reason | None] | None = None
    # What measurements of other machines say of kernels, by id, and which were not believed. None: there are none.
    expected: Callable[[Context, Sequence[str]], tuple[Mapping[str, Expectation], tuple[Reason, ...]]] | None = None


@dataclass(frozen=True)
class Proofs:
    """What is known of kernels before their first answer.

    `of(kernel, ctx)` says in words by what a kernel is proven for such calls, None where it is not; `grouped` leaves
    out what only this process knows: ranks that choose alike count that when all of them have it.
    """

    of: Callable[[KernelSpec, Context, bool], str | None]
    fingerprint: str = ""


@dataclass(frozen=True, eq=False)
class World:
    """Registry, ops, policy, health, measurements, memory and dispatch table, read by `select` and `follow`."""

    registry: KernelRegistry
    ops: Mapping[str, OperationSpec]
    policy: Policy = field(default_factory=Policy)
    health: Health = field(default_factory=Health)
    measurements: Measurements = field(default_factory=Measurements)
    # By what kernels are proven; None: whoever made this World vouches for them all.
    proofs: Proofs | None = None
    # Free bytes, or free bytes by device ("cpu", "cuda:0"); None: memory plays no part.
    free_memory: int | Mapping[str, int] | None = None
    # Decisions made beforehand (`lz solve`), obeyed where they hold.
    table: DispatchTable | None = None
    # Kernels that could not be bound (missing adapter, failed vendor import), with the reason.
    unbindable: Mapping[str, Reason] = field(default_factory=lambda: _NOTHING)
    # Backends that run in a process of their own, as that process finds them.
    enclosed: Mapping[str, BackendSpec] = field(default_factory=lambda: _NOTHING)
    # Compiled artifacts that exist here; a `jit` kernel without its own is rejected. And those that could not be made.
    ready: frozenset[Artifact] = frozenset()
    uncompilable: Mapping[Any, Reason] = field(default_factory=lambda: _NOTHING)
    # Canaries whose trial is over: "" was promoted, anything else says why it failed.
    trials: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    # What the ranks of a distributed run agreed on (`lz.agree`); None where there is one process.
    ranks: Any = field(default=None, repr=False)
    # Counts calls while traffic is recorded (`lz.record`); None otherwise.
    tally: Any = field(default=None, repr=False)
    # hot key -> bound kernel; owned by this World, never shared.
    hot: dict[Any, Any] = field(default_factory=dict, repr=False)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Equal fingerprints select equally; part of the selection cache's key."""
        parts = (
            self.registry.capabilities_hash,
            self.policy.policy_hash,
            self.health.fingerprint,
            self.measurements.fingerprint,
            "" if self.measurements.expected is None else "shipped",  # their content is that of the packages
            str(sorted(self.free_memory.items()) if isinstance(self.free_memory, Mapping) else self.free_memory),
            "" if self.table is None else self.table.content_hash,
            repr(sorted((name, item.code.value) for name, item in self.unbindable.items())),
            repr(sorted((name, spec.available, spec.vendor_version) for name, spec in self.enclosed.items())),
            repr(sorted(self.ready)) if self.ready else "",
            repr(sorted(map(repr, self.uncompilable))) if self.uncompilable else "",
            "" if self.ranks is None else self.ranks.fingerprint,
            "" if self.proofs is None else self.proofs.fingerprint,
            repr(sorted(self.trials.items())) if self.trials else "",
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]

    def changed(self, **new: Any) -> World:
        """A new World with some parts replaced and an empty hot table."""
        tally = new.get("tally", self.tally)
        return replace(self, **new, hot={} if tally is None else tally.table(), memo={})


def measurement_settings(world: World, *, jit: str = "block") -> World:
    """The World to measure in: what may not run may not, but no wish, lock, table or earlier time has a say.

    With `jit="off"` kernels that are not compiled yet stay out.
    """
    before = world.policy
    policy = Policy(
        allow=before.allow,
        deny=before.deny,
        rules=tuple(replace(rule, prefer=(), avoid=(), boosts=(), lock=None) for rule in before.rules),
        strict_mode=before.strict_mode,
        allow_adaptation=before.allow_adaptation,
        backend_isolation=before.backend_isolation,
        jit=jit,
    )
    return world.changed(policy=policy, measurements=Measurements(), table=None, tally=None)


def unchecked(spec: OperationSpec, kernel: KernelSpec, ctx: Context, world: World) -> bool:
    """Whether a kernel's answer to such a call has to be checked before it is used. An op's fallback defines it."""
    return world.proofs is not None and kernel.kernel_id != spec.fallback_id and unproven(kernel, ctx, world)


def unproven(kernel: KernelSpec, ctx: Context, world: World) -> bool:
    """Whether nothing vouches for a kernel here: no kit, no check, no measurement with its error."""
    if world.proofs is None or world.policy.on_first_use == "off":
        return False
    grouped = world.ranks is not None
    if world.proofs.of(kernel, ctx, grouped) is not None:
        return False
    return grouped or world.measurements.lookup(kernel.kernel_id, ctx) is None


def closed(ctx: Context) -> bool:
    """Where nothing can be checked: inside a capture or a compiled graph, and where numbers are drawn."""
    return ctx.capturing or "graph" in ctx.needs or draws(ctx)


def boundaries(world: World, op: str, axis: str) -> tuple[int, ...] | None:
    """Last values of the buckets of an axis, ascending; None when the axis must be keyed exactly."""
    key = (op, axis)
    if key not in world.memo:
        kernels = world.registry.by_op(op)
        if has_exact(world.policy, op, axis) or any(kernel.exact(axis) for kernel in kernels):
            world.memo[key] = None
        else:
            cuts = {cut for kernel in kernels for cut in kernel.cuts(axis)}
            cuts.update(thresholds(world.policy, op, axis))
            if world.table is not None:
                cuts.update(world.table.edges(op, axis))
            world.memo[key] = tuple(sorted({0, *_POWERS, *(cut for cut in cuts if cut > 0)}))
    return world.memo[key]  # type: ignore[no-any-return]


def find(edges: Sequence[int] | None, value: int) -> tuple[int, int]:
    """The bucket (low, high) that holds a value; exact axes give (value, value)."""
    if edges is None or value > edges[-1]:
        return value, value
    index = bisect_left(edges, value)
    low = edges[index - 1] + 1 if index else value
    return low, edges[index]


def bucketed(world: World, ctx: Context, growing: Sequence[str]) -> tuple[Context, tuple[Bucket, ...]]:
    """The context with each growing size replaced by the end of its bucket, and the buckets."""
    found: list[Bucket] = []
    sizes = dict(ctx.dims)
    for axis in growing:
        if axis in sizes:
            low, high = find(boundaries(world, ctx.op, axis), sizes[axis])
            found.append(Bucket(axis, low, high))
            sizes[axis] = high
    return replace(ctx, dims=tuple(sizes.items())), tuple(found)

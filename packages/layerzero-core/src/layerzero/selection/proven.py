"""Whether the first answer of a kernel to such a call has to be checked before it is used."""

from __future__ import annotations

from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.model.proof import draws, kind_of
from layerzero.reasons import Reason, reason
from layerzero.selection.world import World


def unchecked(spec: OperationSpec, kernel: KernelSpec, ctx: Context, world: World) -> bool:
    """Whether a kernel's answer to such a call has to be checked before it is used. An op's fallback defines it."""
    return world.proofs is not None and kernel.kernel_id != spec.fallback_id and unproven(kernel, ctx, world)


def unproven(kernel: KernelSpec, ctx: Context, world: World) -> bool:
    """Whether nothing vouches for a kernel here: no kit, no check, no measurement with its error."""
    return proof(kernel, ctx, world) is None


def proof(kernel: KernelSpec, ctx: Context, world: World) -> str | None:
    """By what a kernel is proven for such calls, in words; None where it is not."""
    if world.proofs is None or world.policy.on_first_use == "off":
        return "not asked for"
    grouped = world.ranks is not None
    found = world.proofs.of(kernel, ctx, grouped)
    if found is None and not grouped and world.measurements.lookup(kernel.kernel_id, ctx) is not None:
        return "measured"
    return found


def closed(ctx: Context) -> bool:
    """Where nothing can be checked: inside a capture or a compiled graph, and where numbers are drawn."""
    return ctx.capturing or "graph" in ctx.needs or draws(ctx)


def objection(kernel: KernelSpec, ctx: Context, world: World) -> Reason | None:
    """FIRST_USE_UNCHECKED where a kernel without proof may not even be tried."""
    return reason("FIRST_USE_UNCHECKED", kind_of(ctx)) if unproven(kernel, ctx, world) else None

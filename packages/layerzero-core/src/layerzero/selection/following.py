"""Obeying a dispatch table: the decision it holds for a call, or the reason why it holds none.

Nothing is selected here. The one kernel that the table names is checked against the call, so that a table which
outlived its world costs speed and never a wrong result.
"""

from __future__ import annotations

from layerzero.device.signature import environment_signature
from layerzero.model.context import Context
from layerzero.model.decision import Candidate, Decision, Trace
from layerzero.model.device import DeviceSpec
from layerzero.model.dispatch_table import DispatchTable
from layerzero.model.op import OperationSpec
from layerzero.policy.rules import judge
from layerzero.reasons import Reason, reason
from layerzero.selection.buckets import bucketed
from layerzero.selection.engine import VALUES, select
from layerzero.selection.filter import examine, is_empty
from layerzero.selection.world import World


def objections(table: DispatchTable, world: World, device: DeviceSpec) -> list[Reason]:
    """Why a table as a whole does not hold here: another machine, another policy, other kernels."""
    found = []
    signature = environment_signature(device)
    if table.hardware.signature != signature:
        here = f"{device.name or device.device_type} ({signature})"
        found.append(reason("PLAN_HARDWARE_MISMATCH", here, str(table.hardware)))
    if table.policy_hash != world.policy.policy_hash:
        found.append(reason("PLAN_POLICY_MISMATCH", world.policy.policy_hash[:12], table.policy_hash[:12]))
    for kernel_id, version in table.kernels.items():
        kernel = world.registry.kernels.get(kernel_id)
        here = "not registered" if kernel is None else kernel.version
        if here != version:
            found.append(reason("PLAN_KERNEL_CHANGED", f"{kernel_id} {here}", version))
    return found


def _standing(table: DispatchTable, world: World, device: DeviceSpec) -> list[Reason]:
    key = ("table", device)
    if key not in world.memo:
        world.memo[key] = objections(table, world, device)
    return world.memo[key]  # type: ignore[no-any-return]


def follow(spec: OperationSpec, ctx: Context, world: World) -> Decision | Reason | None:
    """The table's decision for a call; the reason why there is none; None where no table is in force or asked."""
    table = world.table
    if table is None or ctx.backend is not None or ctx.batch_invariant or is_empty(ctx):
        return None
    wrong = _standing(table, world, ctx.device)
    if wrong:
        return wrong[0]
    canonical, buckets = bucketed(world, ctx, spec.growing)
    entry = table.find(canonical)
    if entry is None:
        return reason("PLAN_BUCKET_MISS", ", ".join(f"{name}={size}" for name, size in ctx.dims))
    judged = judge(world.policy, ctx.op, lambda name: None if name in VALUES else canonical.get(name))
    standing = examine(canonical, world, judged, spec.fallback_id, None, only=entry.kernel_id)
    if not standing or standing[0].reasons:
        why = standing[0].reasons[0] if standing else reason("KERNEL_UNKNOWN", entry.kernel_id, "")
        return reason("PLAN_KERNEL_REFUSED", entry.kernel_id, detail=str(why))
    kernel, transforms = standing[0].kernel, standing[0].transforms
    return Decision(
        op=ctx.op,
        context=canonical,
        chosen=kernel.kernel_id,
        candidates=Trace(lambda: _written(entry.kernel_id, entry.median_us, ctx, world)),
        steps=((kernel.kernel_id, transforms),),
        fused_ops=kernel.fuses,
        notes=(*ctx.notes, reason("PLAN_FOLLOWED", table.content_hash[:12])),
        fingerprint=world.fingerprint,
        policy_hash=world.policy.policy_hash,
        buckets=buckets,
    )


def _written(chosen: str, median_us: float | None, ctx: Context, world: World) -> tuple[Candidate, ...]:
    """What selection would have said of each kernel, the table's own first."""
    others = select(ctx, world.changed(table=None)).candidates
    mine = next(item for item in others if item.kernel_id == chosen)
    followed = Candidate(
        chosen, mine.backend, True, mine.score, median_us if median_us is not None else mine.measured_us,
        (reason("PLAN_FOLLOWED", world.table.content_hash[:12] if world.table else ""),), mine.transforms,
        mine.score_parts, expected=mine.expected,
    )  # fmt: skip
    return (followed, *(item for item in others if item.kernel_id != chosen))

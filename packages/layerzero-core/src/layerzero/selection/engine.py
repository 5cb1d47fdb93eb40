"""The selection itself: candidates in, Decision out. A pure function of (Context, World)."""

from __future__ import annotations

from layerzero.errors import (
    CudaGraphUnsafeError,
    LayerZeroError,
    LockedKernelError,
    NoKernelFoundError,
    UnknownNameError,
)
from layerzero.model.context import Context
from layerzero.model.decision import Bucket, Candidate, Decision
from layerzero.policy.rules import judge
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.selection.buckets import bucketed
from layerzero.selection.filter import Filtered, examine
from layerzero.selection.score import rank, score
from layerzero.selection.world import World

__all__ = ["refuse", "select"]


def select(ctx: Context, world: World) -> Decision:
    """Choose the kernel for a context, with a verdict on every candidate.

    Nothing acceptable gives a Decision with an empty `chosen` and a `refusal`; `refuse` turns that
    into the exception a caller should see.
    """
    spec = world.ops.get(ctx.op)
    if spec is None:
        raise UnknownNameError(code="OP_UNKNOWN", value=ctx.op, limit=", ".join(sorted(world.ops)))
    canonical, buckets = bucketed(world, ctx, spec.elastic)
    judged = judge(world.policy, ctx.op, canonical.get)
    standing = [examine(kernel, canonical, world, judged, spec.fallback_id) for kernel in world.registry.by_op(ctx.op)]
    fallback_id = spec.fallback_id
    fitting = [item for item in standing if not item.reasons]
    if not world.policy.fallback_enabled:
        fitting = [item for item in fitting if item.kernel.kernel_id != fallback_id]
    accepted = _scored(fitting, canonical, world)
    locked = judged.locked_to
    if locked is not None and world.policy.on_fault == "fallback":
        # The lock leads the ranking; the rest stand by in case it fails.
        accepted.sort(key=lambda item: item.kernel_id != locked)
    rejected = [_rejected(item) for item in standing if item.reasons or item not in fitting]
    chosen = accepted[0].kernel_id if accepted else ""
    return _decision(canonical, world, chosen, accepted, rejected, buckets, locked, fallback_id)


def _scored(fitting: list[Filtered], ctx: Context, world: World) -> list[Candidate]:
    times = {item.kernel.kernel_id: world.measurements.lookup(item.kernel.kernel_id, ctx) for item in fitting}
    known = [value for value in times.values() if value is not None]
    fastest = min(known) if known else None
    found = []
    for item in fitting:
        measured = times[item.kernel.kernel_id]
        points = score(item.kernel, item.bonus, measured, fastest, item.transforms, world.measurements.noise)
        notes: tuple[Reason, ...] = ()
        if item.transforms:
            notes = (reason("ADAPTED", [step.name for step in item.transforms]),)
        found.append(
            Candidate(
                item.kernel.kernel_id,
                item.kernel.backend,
                True,
                points.total,
                measured,
                notes,
                item.transforms,
                points.parts,
            )
        )
    found.sort(key=lambda item: rank(item.score or 0.0, item.kernel_id))
    if len(found) > 1:
        best = found[0].score
        found[1:] = [_outscored(item, best or 0.0) for item in found[1:]]
    return found


def _outscored(item: Candidate, best: float) -> Candidate:
    gap = best - (item.score or 0.0)
    flip = f"{gap:.1f} points behind: lz.prefer or a boost of that size would choose it"
    lost = reason("OUTSCORED", round(item.score or 0.0, 3), round(best, 3))
    return Candidate(
        item.kernel_id,
        item.backend,
        True,
        item.score,
        item.measured_us,
        (*item.reasons, lost),
        item.transforms,
        item.score_parts,
        flip,
    )


def _rejected(item: Filtered) -> Candidate:
    reasons = item.reasons or (reason("POLICY_DISABLED", detail="fallback_enabled is false"),)
    if len(reasons) == 1:
        flip = reasons[0].hint
    else:
        flip = f"{len(reasons)} things would have to change, first: {reasons[0].hint}"
    return Candidate(item.kernel.kernel_id, item.kernel.backend, False, None, None, reasons, item.transforms, (), flip)


def _decision(
    ctx: Context,
    world: World,
    chosen: str,
    accepted: list[Candidate],
    rejected: list[Candidate],
    buckets: tuple[Bucket, ...],
    locked: str | None,
    fallback_id: str,
) -> Decision:
    refusal: Reason | None = None
    notes: list[Reason] = list(ctx.notes)
    if not chosen:
        refusal = _refusal(ctx, locked, rejected)
    is_fallback = chosen == fallback_id and len(accepted) == 1 and bool(rejected)
    if is_fallback:
        notes.append(reason("FALLBACK_USED"))
    kernel = world.registry.kernels.get(chosen)
    return Decision(
        op=ctx.op,
        context=ctx,
        chosen=chosen,
        candidates=(*accepted, *sorted(rejected, key=lambda item: (len(item.reasons), item.kernel_id))),
        is_fallback=is_fallback,
        locked=locked is not None and locked == chosen,
        fused_ops=kernel.fuses if kernel is not None else (),
        notes=tuple(notes),
        fingerprint=world.fingerprint,
        policy_hash=world.policy.policy_hash,
        buckets=buckets,
        refusal=refusal,
    )


def _refusal(ctx: Context, locked: str | None, rejected: list[Candidate]) -> Reason:
    if locked is not None:
        why = next((item.reasons for item in rejected if item.kernel_id == locked), ())
        detail = "; ".join(str(item) for item in why) or "it is not registered"
        return reason("LOCKED_KERNEL_UNAVAILABLE", locked, detail=detail)
    if ctx.capturing and any(r.code is ReasonCode.CUDA_GRAPH_UNSAFE for item in rejected for r in item.reasons):
        return reason("CUDA_GRAPH_UNSAFE", ctx.op)
    return reason("NO_KERNEL", ctx.op)


def refuse(decision: Decision) -> LayerZeroError:
    """The exception for a decision that chose nothing; its reasons name every candidate's first objection."""
    assert decision.refusal is not None
    objections = [item for candidate in decision.candidates for item in candidate.reasons[:1]]
    lines = "".join(f"\n  {c.kernel_id}: {'; '.join(str(r) for r in c.reasons)}" for c in decision.candidates)
    kinds: dict[ReasonCode, type[LayerZeroError]] = {
        ReasonCode.LOCKED_KERNEL_UNAVAILABLE: LockedKernelError,
        ReasonCode.CUDA_GRAPH_UNSAFE: CudaGraphUnsafeError,
    }
    kind = kinds.get(decision.refusal.code, NoKernelFoundError)
    return kind(f"{decision.refusal.message}{lines}", reasons=(decision.refusal, *objections))

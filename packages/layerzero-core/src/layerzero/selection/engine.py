"""The selection itself: candidates in, Decision out. A pure function of (Context, World).

`follow` obeys a dispatch table instead: nothing is selected, the one kernel that the table names is checked against the
call, so that a table which outlived its world costs speed and never a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from layerzero.device.signature import environment_signature
from layerzero.errors import (
    CudaGraphUnsafeError,
    LayerZeroError,
    LockedKernelError,
    NoKernelFoundError,
    UnknownNameError,
    did_you_mean,
)
from layerzero.model.context import Context
from layerzero.model.decision import Bucket, Candidate, Decision, Expectation, Trace, Transform
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.model.situation import kind_of
from layerzero.policy.rules import judge
from layerzero.reasons import Reason, ReasonCategory, ReasonCode, reason
from layerzero.selection.filter import Filtered, examine, is_empty
from layerzero.selection.memory import estimate
from layerzero.selection.score import UNMEASURED_STEP, Expected, by_expectation, measured_part, rank, score
from layerzero.selection.transforms import ISOLATED
from layerzero.selection.world import Proofs, World, bucketed

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable

# Fields of a Context that are values, not metadata: no key holds them, so no rule may look at them.
VALUES = frozenset({"scale", "dropout_p", "notes"})
_ON_TOP = ("contiguous", "aligned_copy", "cast:mixed", ISOLATED)  # steps that no kind of call says


def select(ctx: Context, world: World) -> Decision:
    """Choose the kernel for a context, with a verdict on every candidate.

    Nothing acceptable gives a Decision with an empty `chosen` and a `refusal`; `refuse` turns that
    into the exception a caller should see.
    """
    spec = world.ops.get(ctx.op)
    if spec is None:
        hint = did_you_mean(ctx.op, world.ops, "install the package that brings it")
        raise UnknownNameError(code="OP_UNKNOWN", value=ctx.op, hint=hint)
    canonical, buckets = bucketed(world, ctx, spec.growing)
    judged = judge(world.policy, ctx.op, lambda name: None if name in VALUES else canonical.get(name))
    locked = _lock(judged.locked_to, canonical, world)
    standing = _without_refused(examine(canonical, world, judged, locked), canonical, world)
    told, doubts = _expected(standing, canonical, world, buckets)
    ranked = _ranked(standing, canonical, world, locked, told)
    chosen = ranked[0].kernel_id if ranked else ""
    notes: tuple[Reason, ...] = (*ctx.notes, *world.measurements.notes(canonical), *doubts)
    is_fallback = chosen == spec.fallback_id and len(ranked) == 1 and len(standing) > 1 and not is_empty(canonical)
    if is_fallback:
        notes = (*notes, reason("FALLBACK_USED"))
    winner = world.registry.kernels.get(chosen)
    # Written out late, and never with the World itself: a decision that is kept must not keep its hot table.
    proofs = None if world.proofs is None or world.policy.on_first_use == "off" else world.proofs
    return Decision(
        op=ctx.op,
        context=canonical,
        chosen=chosen,
        candidates=Trace(lambda: _written(ranked, standing, canonical, locked, proofs)),
        steps=tuple((item.kernel_id, item.transforms) for item in ranked),
        is_fallback=is_fallback,
        locked=locked is not None and locked == chosen,
        fused_ops=winner.fuses if winner is not None else (),
        notes=notes,
        fingerprint=world.fingerprint,
        policy_hash=world.policy.policy_hash,
        buckets=buckets,
        refusal=None if chosen else _refusal(canonical, locked, standing),
        pending=_pending(ranked, standing, canonical, world, locked, told, _NOT_READY),
        shadow=_pending(ranked, standing, canonical, world, locked, told, _SHADOW),
    )


def _lock(locked: str | None, ctx: Context, world: World) -> str | None:
    """The kernel the op is locked to; disabling, or a call's own `backend=` asking for something else, is stronger."""
    if locked is None or is_empty(ctx) or not world.policy.enabled:
        return None
    if ctx.backend is None or ctx.backend == locked:
        return locked
    kernel = world.registry.kernels.get(locked)
    return locked if kernel is not None and kernel.backend == ctx.backend else None


def _without_refused(standing: list[Filtered], ctx: Context, world: World) -> list[Filtered]:
    """Kernels that were wrong for such a call when tuned are rejected; the reference is what they differ from."""
    refused, fallback_id = world.measurements.refused, world.ops[ctx.op].fallback_id
    if refused is None:
        return standing
    for place, item in enumerate(standing):
        if not item.reasons and item.kernel.kernel_id != fallback_id and (why := refused(item.kernel.kernel_id, ctx)):
            standing[place] = item._replace(reasons=(why,))
    return standing


class _Ranked(NamedTuple):
    kernel_id: str
    backend: str
    score: float
    parts: tuple[tuple[str, float], ...]
    measured_us: float | None
    transforms: tuple[Transform, ...]
    preferred: int
    expected: Expectation | None


def _expected(
    standing: list[Filtered], ctx: Context, world: World, buckets: tuple[Bucket, ...]
) -> tuple[Mapping[str, Expectation], tuple[Reason, ...]]:
    """What other machines measured says, in the middle of each bucket, of kernels none of which was measured here."""
    ask, lookup = world.measurements.expected, world.measurements.lookup
    if ask is None or is_empty(ctx):
        return {}, ()
    waiting = [item for item in standing if all(why.code in _LACKING for why in item.reasons)]
    names = [item.kernel.kernel_id for item in waiting]
    if len(names) < 2 or any(lookup(item.kernel.kernel_id, ctx) is not None for item in waiting if not item.reasons):
        return {}, ()
    middle = {bucket.name: math.isqrt(bucket.low * (bucket.high or bucket.low)) for bucket in buckets}
    return ask(replace(ctx, dims=tuple((dict(ctx.dims) | middle).items())), names)


def _ranked(
    standing: list[Filtered], ctx: Context, world: World, locked: str | None, told: Mapping[str, Expectation]
) -> list[_Ranked]:
    """Accepted kernels, best first."""
    fitting = [item for item in standing if not item.reasons]
    if not world.policy.fallback_enabled and not is_empty(ctx):
        fitting = [item for item in fitting if item.kernel.kernel_id != world.ops[ctx.op].fallback_id]
    lookup, noise, fixed = world.measurements.lookup, world.measurements.noise, ctx.batch_invariant
    # Another kernel for another size would give a row other bits: then priorities alone decide, whatever is faster.
    times = [None if fixed else lookup(item.kernel.kernel_id, ctx) for item in fitting]
    told = {} if fixed else told
    known = [value for value in times if value is not None]
    fastest = min(known) if known else None
    # Where there are measurements they decide, not the authors' expectations: all measured kernels start level.
    level, below = 0.0, math.inf
    if known:
        level = max(item.kernel.priority for item, t in zip(fitting, times, strict=True) if t is not None)
        # What an author expects of a kernel never outranks what was measured of another.
        below = level + min(measured_part(t, fastest, noise) for t in known) - UNMEASURED_STEP
        told = {}
    unsure = max([noise, *(found.noise for found in told.values())])
    places = by_expectation([_place(item, ctx, told) for item in fitting], unsure) if told else {}
    found: list[_Ranked] = []
    for item, measured in zip(fitting, times, strict=True):
        kernel = item.kernel
        expected = told.get(kernel.kernel_id)
        if kernel.kernel_id in places:
            priority, part = places[kernel.kernel_id]
            total, parts = score(priority, item.bonus, None, None, () if expected else item.transforms, noise, part)
        else:
            expected_of = kernel.priority if fixed else kernel.prior(ctx)
            priority = min(expected_of, below) if measured is None else level
            total, parts = score(priority, item.bonus, measured, fastest, () if fixed else item.transforms, noise)
        found.append(
            _Ranked(kernel.kernel_id, kernel.backend, total, parts, measured, item.transforms, item.preferred, expected)
        )
    found.sort(key=lambda entry: rank(entry.score, entry.kernel_id, entry.preferred))
    if locked is not None and world.policy.on_fault == "fallback":
        # The lock leads the ranking; the rest stand by in case it fails.
        found.sort(key=lambda item: item.kernel_id != locked)
    return found


def _place(item: Filtered, ctx: Context, told: Mapping[str, Expectation]) -> Expected:
    kernel, found = item.kernel, told.get(item.kernel.kernel_id)
    ratio = None
    if found is not None:
        # What a kind of call needs was measured with the kernel; what strides and addresses need comes on top.
        copies = sum(step.cost_us for step in item.transforms if step.name.startswith(_ON_TOP))
        ratio = found.ratio + copies / found.base_us
    return Expected(kernel.kernel_id, kernel.backend, kernel.prior(ctx), ratio)


def _pending(
    ranked: list[_Ranked],
    standing: list[Filtered],
    ctx: Context,
    world: World,
    locked: str | None,
    told: Mapping[str, Expectation],
    lacking: frozenset[ReasonCode],
) -> tuple[str, ...]:
    """Kernels that only lack one thing (their artifact, a promotion) and would come before the chosen, best first."""
    waiting = {item.kernel.kernel_id for item in standing if len(item.reasons) == 1 and item.reasons[0].code in lacking}
    if not waiting:
        return ()
    lookup = world.measurements.lookup
    if ranked and not any(
        item.preferred
        or item.kernel.priority + item.bonus > ranked[0].score
        or lookup(item.kernel.kernel_id, ctx) is not None
        or item.kernel.kernel_id in told
        for item in standing
        if item.kernel.kernel_id in waiting
    ):
        return ()
    # Behind a lock only the locked kernel counts: the others carry POLICY_LOCKED_OUT as well.
    if_ready = [item._replace(reasons=()) if item.kernel.kernel_id in waiting else item for item in standing]
    order = [item.kernel_id for item in _ranked(if_ready, ctx, world, locked, told)]
    before = order[: order.index(ranked[0].kernel_id)] if ranked else order
    return tuple(kernel_id for kernel_id in before if kernel_id in waiting)


_NOT_READY = frozenset({ReasonCode.JIT_NOT_READY, ReasonCode.JIT_NEEDS_DEVICE})
_SHADOW = frozenset({ReasonCode.CANARY_SHADOW})
_LACKING = _NOT_READY | _SHADOW


def _written(
    ranked: list[_Ranked],
    standing: list[Filtered],
    ctx: Context,
    locked: str | None,
    proofs: Proofs | None = None,
) -> tuple[Candidate, ...]:
    """Every verdict in words: accepted ones by rank, then the rejected, those with fewest objections first."""
    accepted = {item.kernel_id for item in ranked}
    takes = {item.kernel.kernel_id: estimate(item.kernel, ctx, item.transforms) for item in standing}
    rejected = [_rejected(item) for item in standing if item.kernel.kernel_id not in accepted]
    rejected.sort(key=lambda item: (len(item.reasons), item.kernel_id))
    written = (*(_accepted(item, ranked[0], locked) for item in ranked), *rejected)
    kernels = {item.kernel.kernel_id: item.kernel for item in standing}
    return tuple(
        replace(
            item if proofs is None else _proven(item, kernels[item.kernel_id], ctx, proofs),
            memory=(takes[item.kernel_id].workspace, takes[item.kernel_id].temporaries),
        )
        for item in written
    )


def _proven(item: Candidate, kernel: KernelSpec, ctx: Context, proofs: Proofs) -> Candidate:
    """The verdict with what vouches for the kernel; an accepted one that has nothing is checked when it runs."""
    found = proofs.of(kernel, ctx, False) or ("measured" if item.measured_us is not None else "")
    if found or not item.accepted:
        return replace(item, proof=found)
    return replace(item, reasons=(*item.reasons, reason("FIRST_USE_UNCHECKED", kind_of(ctx))))


def _accepted(item: _Ranked, best: _Ranked, locked: str | None) -> Candidate:
    reasons: tuple[Reason, ...] = ()
    flip = ""
    steps = [step.name for step in item.transforms if step.name != ISOLATED]
    if steps:
        reasons = (reason("ADAPTED", steps),)
    if len(steps) < len(item.transforms):
        reasons = (*reasons, reason("ISOLATED", item.backend))
    if item is not best:
        why, how = "", f'lz.prefer("{item.kernel_id}") would choose it'
        if best.kernel_id == locked:
            why, how = "the op is locked to another", "a lock on it, where the other was set, would choose it"
        elif best.preferred > item.preferred:
            why = "the policy prefers another"
        reasons = (*reasons, reason("OUTSCORED", round(item.score, 3), round(best.score, 3), detail=why))
        flip = f"{why or f'{best.score - item.score:.1f} points behind'}: {how}"
    return Candidate(
        item.kernel_id, item.backend, True, item.score, item.measured_us, reasons, item.transforms, item.parts, flip,
        preferred=item.preferred, expected=item.expected,
    )  # fmt: skip


def _rejected(item: Filtered) -> Candidate:
    reasons = item.reasons or (reason("POLICY_DISABLED", detail="fallback_enabled is false"),)
    if not item.reasons:
        flip = "set fallback_enabled: true"
    elif len(reasons) == 1:
        flip = reasons[0].hint
    else:
        flip = f"{len(reasons)} things would have to change, first: {reasons[0].hint}"
    return Candidate(item.kernel.kernel_id, item.kernel.backend, False, None, None, reasons, item.transforms, (), flip)


def _refusal(ctx: Context, locked: str | None, standing: list[Filtered]) -> Reason:
    if locked is not None:
        why = next((item.reasons for item in standing if item.kernel.kernel_id == locked), ())
        detail = "; ".join(str(item) for item in why) or "it is not registered"
        return reason("LOCKED_KERNEL_UNAVAILABLE", locked, detail=detail)
    if ctx.capturing and any(r.category is ReasonCategory.GRAPH for item in standing for r in item.reasons):
        return reason("CUDA_GRAPH_UNSAFE", ctx.op)
    return reason("NO_KERNEL", ctx.op)


def refuse(decision: Decision) -> LayerZeroError:
    """The exception for a decision that chose nothing; its reasons name every candidate's first objection."""
    assert decision.refusal is not None
    objections = [item for candidate in decision.candidates for item in candidate.reasons[:1]]
    asked = [c for c in decision.candidates if all(r.code is not ReasonCode.BACKEND_NOT_REQUESTED for r in c.reasons)]
    shown = asked or decision.candidates  # with backend=... the kernels of that backend alone
    lines = "".join(f"\n  {c.kernel_id}: {'; '.join(str(r) for r in c.reasons)}" for c in shown)
    named: tuple[type[LayerZeroError], ...] = (LockedKernelError, CudaGraphUnsafeError)
    kind = next((kind for kind in named if kind.default_code == decision.refusal.code), NoKernelFoundError)
    hints = {c.reasons[0].hint for c in shown if c.reasons}
    hint = hints.pop() if len(hints) == 1 and kind is NoKernelFoundError else None
    return kind(f"{decision.refusal.message}{lines}", reasons=(decision.refusal, *objections), hint=hint)


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


def follow(spec: OperationSpec, ctx: Context, world: World) -> Decision | Reason | None:
    """The table's decision for a call; the reason why there is none; None where no table is in force or asked."""
    table = world.table
    if table is None or ctx.backend is not None or ctx.batch_invariant or is_empty(ctx):
        return None
    wrong: list[Reason] | None = world.memo.get(("table", ctx.device))
    if wrong is None:
        wrong = world.memo["table", ctx.device] = objections(table, world, ctx.device)
    if wrong:
        return wrong[0]
    canonical, buckets = bucketed(world, ctx, spec.growing)
    entry = table.find(canonical)
    if entry is None:
        return reason("PLAN_BUCKET_MISS", ", ".join(f"{name}={size}" for name, size in ctx.dims))
    judged = judge(world.policy, ctx.op, lambda name: None if name in VALUES else canonical.get(name))
    standing = examine(canonical, world, judged, None, only=entry.kernel_id)
    if not standing or standing[0].reasons:
        why = standing[0].reasons[0] if standing else reason("KERNEL_UNKNOWN", entry.kernel_id, "")
        return reason("PLAN_KERNEL_REFUSED", entry.kernel_id, detail=str(why))
    kernel, transforms = standing[0].kernel, standing[0].transforms
    return Decision(
        op=ctx.op,
        context=canonical,
        chosen=kernel.kernel_id,
        candidates=Trace(lambda: _with_the_rest(entry.kernel_id, entry.median_us, ctx, world)),
        steps=((kernel.kernel_id, transforms),),
        fused_ops=kernel.fuses,
        notes=(*ctx.notes, reason("PLAN_FOLLOWED", table.content_hash[:12])),
        fingerprint=world.fingerprint,
        policy_hash=world.policy.policy_hash,
        buckets=buckets,
    )


def _with_the_rest(chosen: str, median_us: float | None, ctx: Context, world: World) -> tuple[Candidate, ...]:
    """What selection would have said of each kernel, the table's own first."""
    others = select(ctx, world.changed(table=None)).candidates
    mine = next(item for item in others if item.kernel_id == chosen)
    followed = Candidate(
        chosen, mine.backend, True, mine.score, median_us if median_us is not None else mine.measured_us,
        (reason("PLAN_FOLLOWED", world.table.content_hash[:12] if world.table else ""),), mine.transforms,
        mine.score_parts, expected=mine.expected,
    )  # fmt: skip
    return (followed, *(item for item in others if item.kernel_id != chosen))

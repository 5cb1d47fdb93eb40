"""The choice inside a compiled graph: a foreign kernel stands there only where it was measured to win there.

A compiler fuses what it can look into with what stands around it, replays it without a launch, and so saves reading and
writing tensors once more; a vendor's kernel is one opaque call that it has to keep whole. So the best kernel that can
be written out is taken in place of an opaque one that ranks higher, unless the caller, the policy or a solved table
asks for that one, or measurements say that it wins inside a graph. Times of eager calls say so as far as launches have
no part in them. An op that only moves memory (`Op.fusable`) has to win clearly, over its compiled form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from layerzero.model.decision import SHIPPED, Candidate, Decision, Trace
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.model.situation import kind_of
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.selection.world import World, unproven

# Of an op that only moves memory an opaque kernel wins clearly where it takes less than half of what the compiled form
# takes by itself: fused, that form saves up to one reading and one writing of what is between.
_CLEARLY = 2.0
# Whose measurements are those of the compiled form by itself.
_COMPILED = "inductor"
# µs: below, an eager call on a GPU may be nothing but its launch, which a replayed graph does not pay.
_LAUNCH_US = 50.0
# µs that a graph on a CPU pays for each opaque op: 27 on a Neoverse N1.
_CROSSING_US = 30.0
# What compilers do not fuse is not written out by a kernel that its author means as a last resort.
_USUAL = 10.0


def in_graph(decision: Decision, world: World, open_to: Callable[[KernelSpec], bool]) -> Decision:
    """The decision for a call inside a compiled graph; `open_to` tells the kernels that can be written out.

    Says in its notes what came of it: FUSED_IN_GRAPH, or OPAQUE_IN_GRAPH with the reason.
    """
    kernels = world.registry.kernels
    if world.proofs is not None:
        decision = _checked(decision, world)
    first = kernels.get(decision.chosen)
    if first is None or open_to(first):
        return decision
    fused = bool(getattr(world.ops[decision.op], "fusable", False))
    others = [kernels[name] for name in decision.ranking[1:] if name in kernels]
    written = [kernel for kernel in others if open_to(kernel) and (fused or kernel.priority >= _USUAL)]
    if asker := asked(decision, written[0].kernel_id if written else ""):
        return _opaque(decision, asker)
    if not written:
        return _opaque(decision, "no other kernel that fits can be written out")
    instead = written[0]
    if fused:
        rivals = [k.kernel_id for k in world.registry.by_op(decision.op) if k.backend == _COMPILED]
        times = _in_graphs(decision, world, first, rivals)
        wins = times is not None and times[0] * _CLEARLY < times[1]
    else:
        rivals = [kernel.kernel_id for kernel in written]
        times = _in_graphs(decision, world, first, rivals) or _elsewhere(decision, first, rivals)
        wins = times is not None and times[0] * (1.0 + world.measurements.noise) < times[1]
    if wins and times is not None:
        return _opaque(decision, f"measured {times[0]:.1f} µs, compiled by itself {times[1]:.1f} µs")
    return _moved(decision, first, instead)


def asked(decision: Decision, instead: str) -> str:
    """Who asks for the chosen kernel where another could stand in the graph instead; "" where nobody does."""
    if decision.context.backend is not None:
        return "the call asks for it"
    if decision.locked:
        return "locked"
    if any(note.code is ReasonCode.PLAN_FOLLOWED for note in decision.notes):
        return "the dispatch table names it"
    if instead and _wanted(decision, decision.chosen) > _wanted(decision, instead):
        return "the policy prefers it"
    return ""


def _checked(decision: Decision, world: World) -> Decision:
    """The decision without kernels that nothing vouches for: a graph cannot check their first answer."""
    kernels, ctx = world.registry.kernels, decision.context
    out = [
        name for name, _ in decision.steps
        if name in kernels and name != world.ops[decision.op].fallback_id and unproven(kernels[name], ctx, world)
    ]  # fmt: skip
    if not out:
        return decision
    why = reason("FIRST_USE_UNCHECKED", kind_of(ctx))
    steps = tuple(step for step in decision.steps if step[0] not in out)
    before = decision.candidates

    def written() -> tuple[Candidate, ...]:
        kept = sorted((item for item in before if item.kernel_id not in out), key=lambda item: not item.accepted)
        gone = [replace(item, accepted=False, score=None, reasons=(why,), flip=why.hint) for item in before
                if item.kernel_id in out]  # fmt: skip
        return (*kept, *gone)

    chosen = steps[0][0] if steps else ""
    winner = kernels.get(chosen)
    return replace(
        decision,
        chosen=chosen,
        candidates=Trace(written),
        steps=steps,
        fused_ops=() if winner is None else winner.fuses,
        locked=decision.locked and bool(chosen),
        refusal=decision.refusal if chosen else reason("NO_KERNEL", decision.op, detail=str(why)),
        notes=(*decision.notes, why),
    )


def _in_graphs(
    decision: Decision, world: World, first: KernelSpec, rivals: Sequence[str]
) -> tuple[float, float] | None:
    """The opaque kernel's µs and those of the best rival; on a GPU as measured in CUDA graphs, without launches."""
    lookup, ctx = world.measurements.lookup, decision.context
    on_cpu = ctx.device.platform is Platform.CPU
    if not on_cpu:
        ctx = replace(ctx, capturing=True)
    fused = bool(getattr(world.ops[decision.op], "fusable", False))
    crossing = _CROSSING_US if on_cpu and not fused else 0.0
    return _race(lambda name: lookup(name, ctx), first, rivals, crossing)


def _elsewhere(decision: Decision, first: KernelSpec, rivals: Sequence[str]) -> tuple[float, float] | None:
    """The same by eager calls, here or on a machine like this one, where the launch cannot have decided."""
    on_cpu = decision.context.device.platform is Platform.CPU
    found = _race(lambda name: _eager(decision, name), first, rivals, _CROSSING_US if on_cpu else 0.0)
    return found if on_cpu or found is None or found[0] >= _LAUNCH_US else None


def _race(
    time_of: Callable[[str], float | None], first: KernelSpec, rivals: Sequence[str], crossing: float
) -> tuple[float, float] | None:
    own, known = time_of(first.kernel_id), [time for name in rivals if (time := time_of(name)) is not None]
    return None if own is None or not known else (own + crossing, min(known))


def _eager(decision: Decision, kernel_id: str) -> float | None:
    found = decision.candidate(kernel_id)
    expected = found.expected
    if found.measured_us is not None or expected is None or expected.source != SHIPPED:
        return found.measured_us
    return expected.ratio * expected.base_us


def _wanted(decision: Decision, kernel_id: str) -> tuple[int, float]:
    """How much the policy wants a kernel: its preference, then what it adds to the score."""
    found = decision.candidate(kernel_id)
    return found.preferred, dict(found.score_parts).get("policy", 0.0)


def _opaque(decision: Decision, why: str) -> Decision:
    return replace(decision, notes=(*decision.notes, reason("OPAQUE_IN_GRAPH", decision.chosen, detail=why)))


def _moved(decision: Decision, first: KernelSpec, instead: KernelSpec) -> Decision:
    """The decision with another of its accepted kernels at the head."""
    said = reason("FUSED_IN_GRAPH", instead.kernel_id, first.kernel_id)
    return replace(
        decision,
        chosen=instead.kernel_id,
        candidates=Trace(lambda: _led_by(decision, instead.kernel_id, said)),
        steps=tuple(sorted(decision.steps, key=lambda step: step[0] != instead.kernel_id)),
        fused_ops=instead.fuses,
        notes=(*decision.notes, said),
        is_fallback=False,
        pending=(),  # a graph starts no compile
        shadow=(),
    )


def _led_by(decision: Decision, kernel_id: str, said: Reason) -> tuple[Candidate, ...]:
    head = decision.candidate(kernel_id)
    kept = tuple(item for item in head.reasons if item.code is not ReasonCode.OUTSCORED)
    led = replace(head, reasons=(*kept, said), flip="")
    return (led, *(item for item in decision.candidates if item.kernel_id != kernel_id))

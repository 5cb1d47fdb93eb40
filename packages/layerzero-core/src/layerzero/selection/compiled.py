"""The choice inside a compiled graph: an op that only moves memory is worth more written out than as one fast launch.

A compiler fuses a norm, a rotation or a gated activation that it can look into with what stands around it, and so
saves reading and writing the tensor once more; a vendor's kernel is one opaque call that it has to keep whole. So for
these ops (`Op.fusable`) the best kernel that can be written out is taken in place of an opaque one that ranks higher,
unless the caller, the policy or a solved table asks for that one, or measurements say that it wins clearly. Attention,
products and all else that computes more than it moves keeps the choice of eager calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from layerzero.model.decision import Candidate, Decision, Trace
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.model.proof import kind_of
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.selection.proven import unproven
from layerzero.selection.world import World

__all__ = ["in_graph"]

# An opaque kernel wins clearly where it takes less than half of what the compiled form takes by itself: fused, that
# form saves up to one reading and one writing of what is between.
_CLEARLY = 2.0
# Whose measurements are those of the compiled form by itself.
_COMPILED = "inductor"


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
    if not getattr(world.ops[decision.op], "fusable", False):
        return _opaque(decision, "an op that compilers do not fuse")
    if decision.context.backend is not None:
        return _opaque(decision, "the call asks for it")
    if decision.locked:
        return _opaque(decision, "locked")
    if any(note.code is ReasonCode.PLAN_FOLLOWED for note in decision.notes):
        return _opaque(decision, "the dispatch table names it")
    others = [kernels[name] for name in decision.ranking[1:] if name in kernels]
    instead = next((kernel for kernel in others if open_to(kernel)), None)
    if instead is None:
        return _opaque(decision, "no other kernel that fits can be written out")
    if _wanted(decision, first.kernel_id) > _wanted(decision, instead.kernel_id):
        return _opaque(decision, "the policy prefers it")
    times = _measured(decision, world, first)
    if times is not None and times[0] * _CLEARLY < times[1]:
        return _opaque(decision, f"measured {times[0]:.1f} µs, compiled by itself {times[1]:.1f} µs")
    return _moved(decision, first, instead)


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


def _measured(decision: Decision, world: World, first: KernelSpec) -> tuple[float, float] | None:
    """The opaque kernel's µs and those of the compiled form; on a GPU as measured in CUDA graphs, without launches."""
    lookup, ctx = world.measurements.lookup, decision.context
    if ctx.device.platform is not Platform.CPU:
        ctx = replace(ctx, capturing=True)
    own = lookup(first.kernel_id, ctx)
    rivals = [k.kernel_id for k in world.registry.by_op(decision.op) if k.backend == _COMPILED]
    known = [time for name in rivals if (time := lookup(name, ctx)) is not None]
    return None if own is None or not known else (own, min(known))


def _wanted(decision: Decision, kernel_id: str) -> tuple[int, float]:
    """How much the policy wants a kernel: its preference, then what it adds to the score."""
    found = decision.candidate(kernel_id)
    return found.preferred, dict(found.score_parts).get("policy", 0.0)


def _opaque(decision: Decision, why: str) -> Decision:
    return replace(decision, notes=(*decision.notes, reason("OPAQUE_IN_GRAPH", decision.chosen, detail=why)))


def _moved(decision: Decision, first: KernelSpec, instead: KernelSpec) -> Decision:
    """The decision with another of its accepted kernels at the head."""
    said = reason("FUSED_IN_GRAPH", instead.kernel_id, first.kernel_id)
    head = [step for step in decision.steps if step[0] == instead.kernel_id]
    rest = [step for step in decision.steps if step[0] != instead.kernel_id]
    return replace(
        decision,
        chosen=instead.kernel_id,
        candidates=Trace(lambda: _led_by(decision, instead.kernel_id, said)),
        steps=(*head, *rest),
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

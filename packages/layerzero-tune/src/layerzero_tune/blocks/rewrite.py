"""Other ways to compute a stretch of a block: fused ops, packed projections, other memory layouts.

Each rule looks at the steps from a position on and gives stretches of steps with the same results. Which of them is
taken is a matter of time, so nothing here prefers any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from layerzero_tune.blocks.block import Block, Ref, Step


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that stand for `length` steps of the block; `rule` says why, "" for the block's own."""

    steps: tuple[Step, ...]
    length: int
    rule: str = ""


Rule = Callable[[Block, int, Mapping[str, Any]], Iterator[Stretch]]


def stretches(block: Block, position: int, weights: Mapping[str, Any]) -> Iterator[Stretch]:
    """Every way to go on from a position, the block's own step first."""
    yield Stretch((block.steps[position],), 1)
    for rule in _RULES:
        yield from rule(block, position, weights)


def _add_norm(block: Block, at: int, weights: Mapping[str, Any]) -> Iterator[Stretch]:
    """add, rms_norm → add_rms_norm, which gives the sum as well."""
    pair = block.steps[at : at + 2]
    if [step.op for step in pair] != ["add", "rms_norm"]:
        return
    add, norm = pair
    if norm.args[0] != Ref(add.outputs[0]):
        return
    fused = Step("add_rms_norm", (*add.args, *norm.args[1:]), (norm.outputs[0], add.outputs[0]))
    yield Stretch((fused,), 2, "add and norm in one")


def _packed_linears(block: Block, at: int, weights: Mapping[str, Any]) -> Iterator[Stretch]:
    """Several linears of one input → one linear over the weights below each other, its result cut into views."""
    run: list[Step] = []
    for step in block.steps[at:]:
        if step.op != "linear" or step.args[0] != block.steps[at].args[0] or step.args[3] is not None:
            break
        run.append(step)
    if len(run) < 2 or not _plain_weights(run, weights):
        return
    biases = [weights.get(step.args[2].name) if isinstance(step.args[2], Ref) else None for step in run]
    if any(item is not None for item in biases) and any(item is None for item in biases):
        return
    name = "_".join(step.args[1].name for step in run)
    sizes = tuple(int(weights[step.args[1].name].shape[0]) for step in run)
    steps = [Step("pack", tuple(step.args[1] for step in run), (f"packed_{name}",))]
    bias: Ref | None = None
    if biases[0] is not None:
        bias = Ref(f"packed_bias_{name}")
        steps.append(Step("pack", tuple(step.args[2] for step in run), (bias.name,)))
    whole = f"flat_{name}"
    steps.append(Step("linear", (run[0].args[0], Ref(f"packed_{name}"), bias, None), (whole,)))
    steps.append(Step("split", (Ref(whole), sizes), tuple(step.outputs[0] for step in run)))
    yield Stretch(tuple(steps), len(run), "one projection instead of " + str(len(run)))


def _plain_weights(run: list[Step], weights: Mapping[str, Any]) -> bool:
    found = [weights.get(step.args[1].name) if isinstance(step.args[1], Ref) else None for step in run]
    return all(isinstance(item, Tensor) and item.ndim == 2 and not item.requires_grad for item in found)


_GATED = {"silu": "silu_and_mul", "relu": "relu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_and_mul"}


def _feed_forward(block: Block, at: int, weights: Mapping[str, Any]) -> Iterator[Stretch]:
    """linear, linear, gate, linear → mlp; or one linear, the gated activation as an op, linear."""
    four = block.steps[at : at + 4]
    if [step.op for step in four] != ["linear", "linear", "gate", "linear"]:
        return
    gate, up, act, down = four
    chained = act.args[:2] == (Ref(gate.outputs[0]), Ref(up.outputs[0])) and down.args[0] == Ref(act.outputs[0])
    inner = {gate.outputs[0], up.outputs[0], act.outputs[0]}
    plain = gate.args[0] == up.args[0] and all(step.args[2:] == (None, None) for step in (gate, up, down))
    if not chained or not plain or inner & set(block.live(at + 4)):  # what is asked for later may not disappear
        return
    x, activation = gate.args[0], act.args[2]
    split = Step("mlp", (x, up.args[1], down.args[1], gate.args[1], activation, None, None, None), down.outputs)
    yield Stretch((split,), 4, "the whole feed-forward in one")
    if not _plain_weights([gate, up], weights):
        return
    name = f"packed_{gate.args[1].name}_{up.args[1].name}"
    pack = Step("pack", (gate.args[1], up.args[1]), (name,))
    packed = Step("mlp", (x, Ref(name), down.args[1], None, activation, None, None, None), down.outputs)
    yield Stretch((pack, packed), 4, "the whole feed-forward in one, gate and up packed")
    op = _GATED.get(activation)
    if op is not None:
        options = (("tanh" if activation == "gelu_tanh" else "none"),) if op == "gelu_and_mul" else ()
        wide = Step("linear", (x, Ref(name), None, None), ("gate_up",))
        gated = Step(op, (Ref("gate_up"), *options), act.outputs)
        yield Stretch((pack, wide, gated, down), 4, "gate and up in one projection")


def _other_layout(block: Block, at: int, weights: Mapping[str, Any]) -> Iterator[Stretch]:
    """attention and rope over transposed views; both layouts are views of one memory."""
    step = block.steps[at]
    if step.op == "attention":
        yield Stretch((replace(step, layout="BHSD"),), 1, "heads first, as views")
        yield Stretch((replace(step, layout="BHSD copied"),), 1, "heads first, copied")
    elif step.op == "rope" and "BSHD" in step.args:
        args = tuple("BHSD" if item == "BSHD" else item for item in step.args)
        yield Stretch((replace(step, args=args, layout="BHSD"),), 1, "heads first, as views")


_RULES: tuple[Rule, ...] = (_add_norm, _packed_linears, _feed_forward, _other_layout)

"""Blocks: several ops and the tensors between them, as a value the planner can look at.

A block is a straight line of steps. A step is an op of LayerZero with its canonical arguments, or glue: views and
elementwise sums that no kernel is chosen for. Names stand for tensors; everything else is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.errors import invalid


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor by name. An optional one that is not given is None."""

    name: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One op: `args` are canonical arguments in order, `outputs` the names of its results."""

    op: str
    args: tuple[Any, ...]
    outputs: tuple[str, ...]
    layout: str | None = None

    def reads(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.args if isinstance(item, Ref))

    @property
    def heads_first(self) -> int:
        """How many of its first arguments it takes with the heads before the tokens; its results come so too."""
        if self.layout in (None, "BSHD"):
            return 0
        return min(len(self.args), 3 if self.op == "attention" else 2)

    @property
    def op_layout(self) -> str | None:
        """The layout an attention step is described with."""
        return self.layout.removesuffix(" copied") if self.op == "attention" and self.layout is not None else None


GLUE = frozenset({"add", "heads", "merge", "gate", "pack", "split"})
"""What stands between ops.

add(a, b)                   a + b
heads(x, count)             [B, S, count · D] as [B, S, count, D], a view
merge(x)                    [B, S, H, D] as [B, S, H · D]
gate(gate, up, activation)  act(gate) · up
pack(a, b, …)               weights below each other; made once, when all are weights
split(x, sizes)             the last axis cut, as views
"""


@dataclass(frozen=True)
class Block:
    """Steps in order. `inputs` change with each call; all other tensors are weights, given when it is planned."""

    name: str
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = field(init=False)
    optional: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        made: set[str] = set()
        weights: dict[str, None] = {}
        needed: set[str] = set()
        for number, step in enumerate(self.steps):
            for item in step.args:
                if isinstance(item, Ref) and item.name not in made and item.name not in self.inputs:
                    weights[item.name] = None
                    if not item.optional:
                        needed.add(item.name)
            twice = (made | set(self.inputs)) & set(step.outputs)
            if twice:
                message = f"block {self.name}: step {number} makes {sorted(twice)[0]} again"
                raise invalid("VALUE_INVALID", sorted(twice)[0], "a new name for every result", message)
            made.update(step.outputs)
        missing = [name for name in self.outputs if name not in made]
        if missing or not self.steps:
            message = f"block {self.name}: no step makes {missing[0] if missing else 'anything'}"
            raise invalid("VALUE_INVALID", str(missing), "outputs that some step makes", message)
        object.__setattr__(self, "weights", tuple(weights))
        object.__setattr__(self, "optional", frozenset(weights) - needed)

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Refuse tensors that the block does not know, and the lack of those it needs."""
        known = {*self.inputs, *self.weights}
        unknown = sorted(set(tensors) - known)
        if unknown:
            message = f"block {self.name} has no tensor {unknown[0]!r}"
            raise invalid("VALUE_INVALID", unknown[0], ", ".join(sorted(known)), message)
        needed = (name for name in (*self.inputs, *self.weights) if name not in self.optional)
        missing = [name for name in needed if tensors.get(name) is None]
        if missing:
            message = f"block {self.name} needs {', '.join(missing)}"
            raise invalid("CONTEXT_FIELD_MISSING", missing[0], self.name, message)

    def live(self, position: int) -> tuple[str, ...]:
        """Names that steps from a position on read, or that are results, and that were made before it."""
        made = {name for step in self.steps[:position] for name in step.outputs}
        used = {name for step in self.steps[position:] for name in step.reads()} | set(self.outputs)
        return tuple(sorted(made & used))


# -- the blocks of a decoder -----------------------------------------------------------------------------------------
def attention_input(heads: int, kv_heads: int, *, eps: float = 1e-6, rotary: bool = True) -> Block:
    """Norm, q, k and v projections, rotary embedding: x [B, S, H] to q, k, v [B, S, heads, D]."""
    inputs = ("x", "cos", "sin") if rotary else ("x",)
    return Block("attention_input", inputs, tuple(_before(heads, kv_heads, eps, rotary)), ("q_out", "k_out", "v"))


def attention_output(*, eps: float = 1e-6, activation: str = "silu") -> Block:
    """Output projection, residual add and norm, gated MLP, residual add; `attended` is [B, S, heads, D]."""
    return Block("attention_output", ("x", "attended"), tuple(_after(eps, activation)), ("out",))


def decoder_layer(
    heads: int,
    kv_heads: int,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    causal: bool = True,
    rotary: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> Block:
    """A whole layer: norm, q/k/v, rope, attention, projection, add and norm, gated MLP, add.

    Inputs: x [B, S, H], cos, sin [S, D / 2]. Weights: ln1, wq, wk, wv, wo, ln2, w_gate, w_up, w_down, and optionally
    bq, bk, bv.
    """
    args = (Ref("q_out"), Ref("k_out"), Ref("v"), None, 0.0, causal, scale, window, None, None, False)
    attend = Step("attention", args, ("attended",), layout="BSHD")
    steps = (*_before(heads, kv_heads, eps, rotary), attend, *_after(eps, activation))
    return Block("decoder_layer", ("x", "cos", "sin") if rotary else ("x",), steps, ("out",))


def _before(heads: int, kv_heads: int, eps: float, rotary: bool) -> Iterable[Step]:
    yield Step("rms_norm", (Ref("x"), Ref("ln1"), eps), ("normed",))
    for letter in "qkv":
        args = (Ref("normed"), Ref(f"w{letter}"), Ref(f"b{letter}", optional=True), None)
        yield Step("linear", args, (f"{letter}_flat",))
    q_name, k_name = ("q", "k") if rotary else ("q_out", "k_out")
    for name, flat, count in ((q_name, "q_flat", heads), (k_name, "k_flat", kv_heads), ("v", "v_flat", kv_heads)):
        yield Step("heads", (Ref(flat), count), (name,))
    if rotary:
        turned = (Ref("q"), Ref("k"), Ref("cos"), Ref("sin"), False, "BSHD", None, False)
        yield Step("rope", turned, ("q_out", "k_out"))


def _after(eps: float, activation: str) -> Iterable[Step]:
    yield Step("merge", (Ref("attended"),), ("merged",))
    yield Step("linear", (Ref("merged"), Ref("wo"), None, None), ("projected",))
    yield Step("add", (Ref("projected"), Ref("x")), ("stream",))
    yield Step("rms_norm", (Ref("stream"), Ref("ln2"), eps), ("normed2",))
    yield Step("linear", (Ref("normed2"), Ref("w_gate"), None, None), ("gate",))
    yield Step("linear", (Ref("normed2"), Ref("w_up"), None, None), ("up",))
    yield Step("gate", (Ref("gate"), Ref("up"), activation), ("gated",))
    yield Step("linear", (Ref("gated"), Ref("w_down"), None, None), ("down",))
    yield Step("add", (Ref("stream"), Ref("down")), ("out",))


# -- one step by itself ----------------------------------------------------------------------------------------------
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def glue(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a glue step."""
    if op == "add":
        return (args[0] + args[1],)
    if op == "heads":
        x, count = args
        return (x.unflatten(-1, (count, -1)),)
    if op == "merge":
        return (args[0].flatten(-2),)
    if op == "gate":
        gate, up, activation = args
        return (ACTIVATIONS[activation](gate) * up,)
    if op == "pack":
        return (torch.cat(args, dim=0),)
    x, sizes = args  # split
    return tuple(x.split(sizes, dim=-1))


def arguments(step: Step, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    """Canonical arguments of a step. Where the step looks at heads first, q, k and v come as such views."""
    found = tuple(tensors.get(item.name) if isinstance(item, Ref) else item for item in step.args)
    count = step.heads_first
    if not count:
        return found
    turned = tuple(None if item is None else item.transpose(1, 2) for item in found[:count])
    if step.layout == "BHSD copied":
        turned = tuple(None if item is None else item.contiguous() for item in turned)
    return (*turned, *found[count:])


def results(step: Step, out: Any) -> tuple[Any, ...]:
    """A step's results by position, tokens first again."""
    found = out if isinstance(out, tuple) else (out,)
    if not step.heads_first:
        return found
    return tuple(None if item is None else item.transpose(1, 2) for item in found)


def unread(block: Block, steps: Sequence[Step], number: int) -> list[str]:
    """Results that a step was the last to read; let go, they leave warm memory to the next."""
    made = {name for step in steps[: number + 1] for name in step.outputs}
    later = {name for step in steps[number + 1 :] for name in step.reads()} | {*block.outputs}
    step = steps[number]
    return [name for name in dict.fromkeys((*step.reads(), *step.outputs)) if name in made and name not in later]


# -- other ways to compute a stretch -----------------------------------------------------------------------------------
# Each rule looks at the steps from a position on and gives stretches of steps with the same results. Which of them is
# taken is a matter of time, so nothing here prefers any.
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
    biases = [weights.get(step.args[2].name) if isinstance(step.args[2], Ref) else None for step in run]
    mixed = len({item is None for item in biases}) > 1
    if len(run) < 2 or mixed or not _plain_weights(run, weights):
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
    yield Stretch(tuple(steps), len(run), f"one projection instead of {len(run)}")


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

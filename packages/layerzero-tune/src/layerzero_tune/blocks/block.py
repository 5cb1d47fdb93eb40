"""Blocks: several ops and the tensors between them, as a value the planner can look at.

A block is a straight line of steps. A step is an op of LayerZero with its canonical arguments, or glue: views and
elementwise sums that no kernel is chosen for. Names stand for tensors; everything else is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

    def words(self) -> str:
        """For people: `q, k = rope(q, k, cos, sin)`."""
        return f"{', '.join(self.outputs)} = {self.op}({', '.join(self.reads())})"


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
        missing = [name for name in (*self.inputs, *self.weights) if tensors.get(name) is None]
        missing = [name for name in missing if name not in self.optional]
        if missing:
            message = f"block {self.name} needs {', '.join(missing)}"
            raise invalid("CONTEXT_FIELD_MISSING", missing[0], self.name, message)

    def live(self, position: int) -> tuple[str, ...]:
        """Names that steps from a position on read, or that are results, and that were made before it."""
        made = {name for step in self.steps[:position] for name in step.outputs}
        used = {name for step in self.steps[position:] for name in step.reads()} | set(self.outputs)
        return tuple(sorted(made & used))


# -- the blocks of a decoder -----------------------------------------------------------------------------------------
def attention_input(
    heads: int, kv_heads: int, *, eps: float = 1e-6, rotary: bool = True, inputs: tuple[str, ...] = ("x", "cos", "sin")
) -> Block:
    """Norm, q, k and v projections, rotary embedding: x [B, S, H] to q, k, v [B, S, heads, D]."""
    steps = _before(heads, kv_heads, eps, rotary)
    given = inputs if rotary else ("x",)
    return Block("attention_input", given, tuple(steps), ("q_out", "k_out", "v"))


def attention_output(*, eps: float = 1e-6, activation: str = "silu") -> Block:
    """Output projection, residual add and norm, gated MLP, residual add; `attended` is [B, S, heads, D]."""
    steps = [Step("merge", (Ref("attended"),), ("merged",)), *_after(eps, activation)]
    return Block("attention_output", ("x", "attended"), tuple(steps), ("out",))


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
    steps = list(_before(heads, kv_heads, eps, rotary))
    args = (Ref("q_out"), Ref("k_out"), Ref("v"), None, 0.0, causal, scale, window, None, None, False)
    steps.append(Step("attention", args, ("attended",), layout="BSHD"))
    steps.append(Step("merge", (Ref("attended"),), ("merged",)))
    steps += _after(eps, activation)
    return Block("decoder_layer", ("x", "cos", "sin") if rotary else ("x",), tuple(steps), ("out",))


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


def heads_first(step: Step) -> int:
    """How many of its first arguments a step takes with the heads before the tokens; its results come so too."""
    if step.layout in (None, "BSHD"):
        return 0
    return min(len(step.args), 3 if step.op == "attention" else 2)


def arguments(step: Step, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    """Canonical arguments of a step. Where the step looks at heads first, q, k and v come as such views."""
    found = tuple(tensors.get(item.name) if isinstance(item, Ref) else item for item in step.args)
    count = heads_first(step)
    if not count:
        return found
    turned = tuple(None if item is None else item.transpose(1, 2) for item in found[:count])
    if step.layout == "BHSD copied":
        turned = tuple(None if item is None else item.contiguous() for item in turned)
    return (*turned, *found[count:])


def op_layout(step: Step) -> str | None:
    """The layout an attention step is described with."""
    return step.layout.removesuffix(" copied") if step.op == "attention" and step.layout is not None else None


def results(step: Step, out: Any) -> tuple[Any, ...]:
    """A step's results by position, tokens first again."""
    found = out if isinstance(out, tuple) else (out,)
    if not heads_first(step):
        return found
    return tuple(None if item is None else item.transpose(1, 2) for item in found)


def unread(block: Block, steps: Sequence[Step], number: int) -> list[str]:
    """Results that a step was the last to read; let go, they leave warm memory to the next."""
    made = {name for step in steps[: number + 1] for name in step.outputs}
    later = {name for step in steps[number + 1 :] for name in step.reads()} | {*block.outputs}
    step = steps[number]
    return [name for name in dict.fromkeys((*step.reads(), *step.outputs)) if name in made and name not in later]

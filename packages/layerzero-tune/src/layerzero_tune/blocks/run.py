"""One step by itself, as the search runs it: arguments from names, glue in plain PyTorch, results by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero_tune.blocks.block import Block, Ref, Step

__all__ = ["ACTIVATIONS", "arguments", "glue", "heads_first", "op_layout", "results", "unread"]

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

"""Running steps: arguments from names, glue in plain PyTorch, kernels with their failover."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.dispatch.bind import Bound
from layerzero.dispatch.run import current_world, recover
from layerzero.model.op import OperationSpec
from layerzero.plans.blocks import Ref, Step

__all__ = ["arguments", "glue", "op_layout", "results", "runner"]

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
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
        return (_ACTIVATIONS[activation](gate) * up,)
    if op == "pack":
        return (torch.cat(args, dim=0),)
    x, sizes = args  # split
    return tuple(x.split(sizes, dim=-1))


def arguments(step: Step, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    """Canonical arguments of a step. Where the step looks at heads first, q, k and v come as such views."""
    found = tuple(tensors.get(item.name) if isinstance(item, Ref) else item for item in step.args)
    if step.layout in (None, "BSHD"):
        return found
    count = 3 if step.op == "attention" else 2
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
    if step.layout in (None, "BSHD"):
        return found
    return tuple(None if item is None else item.transpose(1, 2) for item in found)


def runner(step: Step, spec: OperationSpec | None, bound: Bound | None) -> Callable[[dict[str, Any]], None]:
    """A function that runs one step on the named tensors and adds its results to them."""
    if bound is None or spec is None:
        return _glued(step)
    run, layout, outputs = bound.run, op_layout(step), step.outputs
    names = [item.name if isinstance(item, Ref) else None for item in step.args]
    constants = [None if isinstance(item, Ref) else item for item in step.args]
    simple = step.layout in (None, "BSHD")
    if simple and len(outputs) == 1:
        only = outputs[0]

        def direct(tensors: dict[str, Any]) -> None:
            # The common step, without detours: a block saves the price of a dispatch for each of its ops.
            get = tensors.get
            args = [get(name) if name is not None else value for name, value in zip(names, constants, strict=True)]
            try:
                tensors[only] = run(*args)
            except Exception as error:
                tensors[only] = recover(spec, current_world(), None, bound, tuple(args), layout, None, error)

        return direct

    def general(tensors: dict[str, Any]) -> None:
        args = arguments(step, tensors)
        try:
            out = run(*args)
        except Exception as error:
            out = recover(spec, current_world(), None, bound, args, layout, None, error)
        tensors.update(zip(outputs, results(step, out), strict=True))

    return general


def _glued(step: Step) -> Callable[[dict[str, Any]], None]:
    """Glue as a layer's author would write it: its price is that of the torch calls."""
    outputs = step.outputs
    names = step.reads()
    if step.op == "add":
        (left, right), (out,) = names, outputs

        def added(tensors: dict[str, Any]) -> None:
            tensors[out] = tensors[left] + tensors[right]

        return added
    if step.op == "heads":
        source, sizes, (made,) = names[0], (step.args[1], -1), outputs

        def cut(tensors: dict[str, Any]) -> None:
            tensors[made] = tensors[source].unflatten(-1, sizes)

        return cut
    if step.op == "gate":
        (gate, up), act, (gated,) = names, _ACTIVATIONS[step.args[2]], outputs

        def activated(tensors: dict[str, Any]) -> None:
            tensors[gated] = act(tensors[gate]) * tensors[up]

        return activated

    def plain(tensors: dict[str, Any]) -> None:
        tensors.update(zip(outputs, glue(step.op, arguments(step, tensors)), strict=True))

    return plain

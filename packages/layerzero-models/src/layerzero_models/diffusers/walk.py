"""One pass over a model of diffusers: each part replaced or left, with the reason."""

from __future__ import annotations

from typing import Any

from torch import nn

from layerzero_models.changes import Changes
from layerzero_models.diffusers.borrowed import borrow
from layerzero_models.diffusers.dispatcher import backend
from layerzero_models.diffusers.parts import feed_forward_of, norm_of
from layerzero_models.diffusers.processors import known
from layerzero_models.report import Left, Patched

__all__ = ["apply"]

_GATE_LAST = "its gate is the second half, so that lz.mlp needs two products; feed_forward=True patches it"


def apply(
    model: nn.Module, changes: Changes, *, attention: bool, norms: bool, feed_forward: bool
) -> tuple[list[Patched], list[Left]]:
    """Replace what can be replaced, noting it in `changes`; what was done, and what was left and why."""
    done: list[Patched] = []
    left: list[Left] = []
    ours = known()
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if attention and callable(processor):
            op = _attention(module, processor, changes, ours)
            kind = type(processor).__name__
            done.append(Patched(name, kind, op[0])) if op[1] else left.append(Left(name, kind, op[0]))
        if norms:
            found = norm_of(module)
            if isinstance(found, str):
                left.append(Left(name, type(module).__name__, found))
            elif found is not None:
                changes.set(module, "forward", found[0])
                done.append(Patched(name, type(module).__name__, found[1]))
        forward = feed_forward_of(module)
        if forward is not None and feed_forward:
            changes.set(module, "forward", forward)
            done.append(Patched(name, type(module).__name__, "mlp"))
        elif forward is not None:
            left.append(Left(name, type(module).__name__, _GATE_LAST))
    return done, left


def _attention(module: Any, processor: Any, changes: Changes, ours: dict[type, Any]) -> tuple[str, bool]:
    """The op and True, or why not and False."""
    if getattr(processor, "_parallel_config", None) is not None:
        return "runs over several devices by the library's own scheme", False
    replacement = ours.get(type(processor))
    if replacement is not None:
        changes.set(module, "processor", replacement)
        return replacement.op, True
    if hasattr(processor, "_attention_backend"):
        changes.set(processor, "_attention_backend", backend())
        return "attention", True
    borrowed = borrow(processor)
    if borrowed is not None:
        changes.set(module, "processor", borrowed)
        return "attention", True
    if isinstance(processor, nn.Module):
        return "the processor has weights of its own", False
    return "the processor computes its scores itself", False

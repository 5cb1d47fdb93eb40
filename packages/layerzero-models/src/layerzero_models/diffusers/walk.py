"""One pass over a model of diffusers: each part replaced or left, with the reason."""

from __future__ import annotations

from typing import Any

from torch import nn

from layerzero_models.diffusers.borrowed import borrow
from layerzero_models.diffusers.dispatcher import backend
from layerzero_models.diffusers.parts import feed_forward_of, norm_of
from layerzero_models.diffusers.processors import known
from layerzero_models.record import Changes, Record

_GATE_LAST = "its gate is the second half, so that lz.mlp needs two products; feed_forward=True patches it"


def apply(model: nn.Module, record: Record, *, attention: bool, norms: bool, feed_forward: bool) -> None:
    """Replace what can be replaced, and write down what was done, and what was left and why."""
    changes, ours = record.changes, known()
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if attention and callable(processor):
            word, done = _attention(module, processor, changes, ours)
            (record.did if done else record.leave)(name, processor, word)
        found = norm_of(module) if norms else None
        if isinstance(found, str):
            record.leave(name, module, found)
        elif found is not None:
            changes.set(module, "forward", found[0])
            record.did(name, module, found[1])
        forward = feed_forward_of(module)
        if forward is not None and feed_forward:
            changes.set(module, "forward", forward)
            record.did(name, module, "mlp")
        elif forward is not None:
            record.leave(name, module, _GATE_LAST)


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

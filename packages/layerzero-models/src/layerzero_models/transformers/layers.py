"""How the parts of a model stand to each other: stacks of layers, the norm after each, the inputs of an attention."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from layerzero_models.transformers import parts, rewriting

__all__ = ["first_norm", "is_rms", "other_inputs", "stacks"]

_FOREIGN = ("key_value_states", "encoder_hidden_states")


def is_rms(module: Any) -> bool:
    """Whether a norm was patched, so that a sum before it can be taken in the same kernel."""
    return isinstance(getattr(module, parts.STATE, None), parts.Rms)


def other_inputs(kind: type) -> str:
    """Why the projections of an attention may get different inputs; empty when they all get the same one."""
    names = set(inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]
    found = sorted(names.intersection(_FOREIGN))
    return f"keys may come from {found[0]}" if found else ""


def stacks(model: nn.Module) -> Iterator[tuple[list[Any], Any]]:
    """(layers run one after another, the norm of their result or None), for every stack of one class of layers."""
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) and len({type(layer) for layer in child}) == 1:
                yield list(child), _final_norm(owner, name)


def first_norm(layer: Any) -> Any:
    """The norm a layer begins with, when the first thing its forward does with its input is that: else None."""
    try:
        body = rewriting.body_of(type(layer).forward)
    except rewriting.NotRewritable:
        return None
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # a docstring
        body = body[1:]
    match body[:2]:
        case [
            ast.Assign(targets=[ast.Name(id=residual)], value=ast.Name(id=kept)),
            ast.Assign(
                targets=[ast.Name(id=out)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=norm), args=[ast.Name(id=given)], keywords=[]
                ),
            ),
        ] if kept == given == out and residual != kept:
            found = getattr(layer, norm, None)
            return found if is_rms(found) else None
    return None


def _final_norm(owner: Any, name: str) -> Any:
    """The norm an owner of layers takes of their result: the one RMSNorm directly beside them, if there is one."""
    beside = [child for child_name, child in owner.named_children() if child_name != name and is_rms(child)]
    return beside[0] if len(beside) == 1 else None

"""A `forward` of transformers with a few of its statements exchanged, everything else being its own.

Two exchanges. A function the file calls by a global name (`apply_rotary_pos_emb`) becomes another one. And the residual
stream: where a layer says

    h = residual + h; residual = h; h = self.some_norm(h)

it becomes `h, residual = add_norm(self.some_norm, h, residual)`; and `h = residual + h; return h` at the very end
becomes `return end(self, h, residual)`.

The new function is compiled from the class's own source with the globals of its file, for one instance: neither the
class nor the file changes, and other models of the same class go on as they were.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from layerzero_models.patching import over
from layerzero_models.transformers import parts

_ADD, _END = "_layerzero_add_norm", "_layerzero_end"
_FOREIGN = ("key_value_states", "encoder_hidden_states")


class NotRewritable(Exception):
    """Why a forward is left as it is."""


def renamed(function: Any, **names: Any) -> Callable[..., Any]:
    """The function with other values for some of its global names."""
    return over(_plain(function), names)  # type: ignore[no-any-return]


def residual_norms(function: Any) -> tuple[str, ...]:
    """Names of the norms that a forward takes of its residual stream right after adding to it."""
    try:
        tree = _parsed(_plain(function))
    except NotRewritable:
        return ()
    found = (_norm_at(body, i) for body in _bodies(tree) for i in range(len(body)))
    return tuple(item[2] for item in found if item is not None)


def with_residuals(
    function: Any, norms: Iterable[str], add_norm: Callable[..., Any], end: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The forward with the sums before these norms, and the one at its end, handed to two functions."""
    plain = _plain(function)
    code = _rewritten(plain, tuple(norms), end is not None)
    return over(plain, {_ADD: add_norm, _END: end}, code)  # type: ignore[no-any-return]


def _plain(function: Any) -> types.FunctionType:
    if not isinstance(function, types.FunctionType):
        raise NotRewritable("its forward is not a plain function")
    if hasattr(function, "__wrapped__") or function.__closure__:
        raise NotRewritable("its forward is wrapped by a decorator")
    return function


@lru_cache(maxsize=256)
def _rewritten(function: types.FunctionType, norms: tuple[str, ...], end: bool) -> types.CodeType:
    tree = _parsed(function)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    done = 0
    for body in _bodies(tree):
        for i in range(len(body) - 1, -1, -1):
            found = _norm_at(body, i)
            if found is not None and found[2] in norms:
                h, residual, norm = found
                body[i : i + 3] = [_placed(f"{h}, {residual} = {_ADD}(self.{norm}, {h}, {residual})", body[i])]
                done += 1
    match definition.body[-2:]:
        case [ast.Assign() as last, ast.Return(value=ast.Name(id=name))]:
            summed = _sum(last)
            if end and summed is not None and name == summed[0]:
                definition.body[-2:] = [_placed(f"return {_END}(self, {summed[0]}, {summed[1]})", last)]
                done += 1
    if not done:
        raise NotRewritable("it has no sum right before a norm")
    module = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")
    # Defaults and annotations may have code of their own beside it; none of the three is run.
    codes = (item for item in module.co_consts if isinstance(item, types.CodeType))
    return next(code for code in codes if code.co_name == definition.name)


def _parsed(function: types.FunctionType) -> ast.Module:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        raise NotRewritable("its source cannot be read") from None
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        raise NotRewritable("its forward is wrapped by a decorator")
    ast.increment_lineno(tree, first - 1)  # tracebacks go on pointing into the file
    return tree


def _bodies(tree: ast.AST) -> Iterable[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                yield body


def _sum(statement: ast.stmt) -> tuple[str, str] | None:
    """(h, residual) of `h = residual + h`, in either order."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=h)], value=ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=ast.Name(id=right))
        ) if left != right and h in (left, right):
            return h, right if h == left else left
    return None


def _norm_at(body: list[ast.stmt], i: int) -> tuple[str, str, str] | None:
    """(h, residual, norm) where the three statements of the residual stream stand at place i."""
    found = _kept_and_normed(body[i + 1 : i + 3])
    return found if found is not None and found[:2] == _sum(body[i]) else None


def _kept_and_normed(statements: list[ast.stmt]) -> tuple[str, str, str] | None:
    """(h, residual, norm) of the two statements `residual = h; h = self.norm(h)`."""
    match statements:
        case [
            ast.Assign(targets=[ast.Name(id=residual)], value=ast.Name(id=kept)),
            ast.Assign(
                targets=[ast.Name(id=out)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=norm), args=[ast.Name(id=given)], keywords=[]
                ),
            ),
        ] if kept == given == out and residual != kept:
            return kept, residual, norm
    return None


def _placed(text: str, at: ast.stmt) -> ast.stmt:
    """A statement in the place of another one."""
    made = ast.parse(text).body[0]
    for node in ast.walk(made):
        ast.copy_location(node, at)
    return made


# -- how the parts of a model stand to each other --------------------------------------------------------
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
                # the norm of their result is the one RMSNorm directly beside them, if there is one
                beside = [other for word, other in owner.named_children() if word != name and is_rms(other)]
                yield list(child), beside[0] if len(beside) == 1 else None


def first_norm(layer: Any) -> Any:
    """The norm a layer begins with, when the first thing its forward does with its input is that: else None."""
    try:
        definition = _parsed(_plain(type(layer).forward)).body[0]
    except NotRewritable:
        return None
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # a docstring
        body = body[1:]
    kept = _kept_and_normed(body[:2])
    found = None if kept is None else getattr(layer, kept[2], None)
    return found if is_rms(found) else None

"""What every public op has in common: its spec, its function, and how a public call becomes canonical arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from layerzero.dispatch.hot import aside, before_dispatch, generic_key
from layerzero.dispatch.late import current_world, miss, recover, seen
from layerzero.errors import InvalidInputError, UnknownNameError
from layerzero.model.op import OperationSpec
from layerzero.runtime.current import builtin_op, now, scope
from layerzero.runtime.late_ops import LATE_OPS, LateTable

__all__ = ["PUBLIC", "PublicOp", "dispatch", "fx_node", "fx_proxy", "public_op", "reference", "register"]

_scope = scope.get
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
PUBLIC: LateTable[PublicOp] = LateTable(LATE_OPS)


@dataclass(frozen=True, slots=True)
class PublicOp:
    """A public function and its op. `canonical` maps bound public arguments to canonical ones."""

    spec: OperationSpec
    function: Callable[..., Any]
    canonical: Callable[[dict[str, Any]], tuple[Any, ...]] | None = None
    signature: inspect.Signature = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", inspect.signature(self.function))

    def normalize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], str | None, str | None]:
        """Canonical arguments, layout and backend of a public call."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInputError(
                f"{self.spec.op_id}: {error}", code="TYPE_INVALID", value=str(error), limit=str(self.signature)
            ) from None
        bound.apply_defaults()
        given = bound.arguments
        canonical = self.canonical(given) if self.canonical else tuple(given[name] for name in self.spec.arguments)
        return canonical, given.get("layout"), given.get("backend")


def register(op: PublicOp) -> OperationSpec:
    """Make an op public: known to the runtime, to explain and to plan."""
    PUBLIC[op.spec.op_id] = op
    return builtin_op(op.spec)


def public_op(name: str) -> PublicOp:
    """A public op by name, or an error naming the nearest ones."""
    found = PUBLIC.get(name)
    if found is None:
        import difflib

        near = difflib.get_close_matches(str(name), PUBLIC, 3) or sorted(PUBLIC)
        raise UnknownNameError(f"unknown op {name!r}", code="OP_UNKNOWN", value=str(name), limit=", ".join(near))
    return found


def reference(path: str) -> Callable[..., Any]:
    """A callable that imports the reference implementation at its first use."""

    @functools.lru_cache(maxsize=1)
    def load() -> Callable[..., Any]:
        module, _, name = path.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    def call(*args: Any) -> Any:
        return load()(*args)

    call.__qualname__ = path
    return call


def fx_proxy(args: tuple[Any, ...]) -> Any:
    """The first of these arguments that `torch.fx.symbolic_trace` put in place of a tensor; None without any."""
    fx = sys.modules.get("torch.fx")
    return None if fx is None else next((item for item in args if isinstance(item, fx.Proxy)), None)


def fx_node(proxy: Any, op: PublicOp, named: dict[str, Any]) -> Any:
    """The call as one node of the graph that is being traced; its kernel is selected when the graph runs."""
    parameters = op.signature.parameters.values()
    placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = {p.name: named[p.name] for p in parameters if p.name not in placed and p.name in named}
    said = {p.name: item for p in parameters if (item := options.get(p.name, p.default)) is not p.default}
    return proxy.tracer.create_proxy("call_function", op.function, tuple(named[name] for name in placed), said)


def dispatch(spec: OperationSpec, args: tuple[Any, ...], layout: str | None = None, backend: str | None = None) -> Any:
    """Hot lookup with the generic key, for ops whose own work dwarfs a few microseconds."""
    if (
        _dispatch_modes()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or (_function_modes() and before_dispatch())
    ) and not aside.quiet:  # `hot.watched`, written out
        return seen(spec, args, layout, backend, functools.partial(dispatch, spec, args, layout, backend))
    active = _scope()
    world = now.world if active is None else active.world()
    try:
        key = generic_key(spec.op_id, args, layout, backend)
        bound = world.hot.get(key) if key is not None else None
    except (RuntimeError, TypeError):  # a nested or sparse tensor has no strides; an option that cannot be hashed
        key = bound = None
    if key is None and (proxy := fx_proxy(args)) is not None:
        named = dict(zip(spec.arguments, args, strict=True)) | {"layout": layout, "backend": backend}
        return fx_node(proxy, PUBLIC[spec.op_id], named)
    if bound is not None and (bound.guard is None or bound.guard()):
        try:
            return bound.run(*args)
        except Exception as error:
            return recover(spec, world, key, bound, args, layout, backend, error)
    return miss(spec, current_world(), key, args, layout, backend)

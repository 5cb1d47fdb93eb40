"""Hot keys: everything a choice depends on, read off the tensors in about a microsecond.

Per tensor: type, shape, dtype, device, and its strides (True stands for contiguous, whose strides follow from
the shape). Types are in the key so that a subclass can never hit: only plain tensors are inserted. The device is
`is_cpu or ~index`: True, or -1 and below for the process's one accelerator, the only two kinds that are inserted
(`modes.keyable_device`); anything else (meta) gives 0 and never hits. Values such as scale, eps or p are never in
the key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

if TYPE_CHECKING:
    from layerzero.model.op import OperationSpec

# Entries of one World's table; beyond it the table starts afresh.
HOT_LIMIT = 16_384

_grad_enabled = torch.is_grad_enabled
_BY_VALUE = frozenset({type(None), bool, str, torch.dtype})
_BY_TYPE = frozenset({int, float})
_NOT_FINITE = "not finite"  # never met by a call that is right: its own key leads to the checks of the cold path
_AUTOCASTS = ("cpu", "cuda", "xpu", "mps", "hpu")
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


class _Aside(threading.local):
    """Set in a thread that is already inside a call which torch has seen: what runs there is that call."""

    quiet = False

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """The calls made here are seen by nobody a second time."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before


aside = _Aside()


def traced() -> bool:
    """Whether torch.jit.trace is at work: sizes are tensors then, which no check of ours may look at."""
    return torch._C._get_tracing_state() is not None


def before_dispatch() -> bool:
    """Whether ops are traced before dispatch (make_fx, pre_dispatch=True): those modes have a stack of their own.

    Asked only where a torch function mode is active, as it is there: the question costs more than a hot call may.
    """
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)


def watched() -> bool:
    """Whether torch wants to see this call: a dispatch mode, a tracer before dispatch, forward-mode AD or a profiler.

    Hot ops write this out. Not asked here: the tracer of `torch.jit.trace`, under which every size is a tensor, so that
    no key is hot; and functorch, whose tensors have no storage. Both are met on the cold path (`modes.plain`).
    """
    found = (
        _dispatch_modes()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or (_function_modes() and before_dispatch())
    )
    return bool(found) and not aside.quiet


def describe_tensor(t: Tensor) -> tuple[Any, ...]:
    """One tensor's part of a key. Hot ops write this out by hand; this is the form for optional inputs."""
    return (type(t), t.shape, t.dtype, t.is_cpu or ~t.get_device(), t.is_contiguous() or t.stride())


def autocast_key() -> Hashable:
    """Which autocast dtypes are on; called only when some autocast is."""
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _AUTOCASTS)


def mode_key(needs_grad: bool) -> tuple[Any, ...]:
    """Grad, autocast and determinism."""
    return (needs_grad, autocast_key() if _any_autocast() else False, _deterministic())


def generic_key(op: str, args: Sequence[Any], layout: str | None, backend: str | None) -> tuple[Any, ...] | None:
    """The key of any call, whatever its arguments are; None when one cannot be keyed: such calls take the cold path."""
    try:
        parts = [part(item) for item in args]
    except Unkeyed:
        return None
    return (op, layout, backend, *parts, mode_key(_grad_enabled() and any(map(needs_grad, args))))


class Unkeyed(TypeError):
    """An argument of a kind that no key knows."""


def part(item: Any) -> Any:
    """One argument's part of a key: tensors by metadata, flags and words by value, numbers by type only."""
    kind = type(item)  # exact types first: most arguments are of one, and these questions cost the least
    if kind in _BY_VALUE:
        return item
    if kind in _BY_TYPE:
        return kind if item - item == 0 else _NOT_FINITE
    if kind is tuple and {*map(type, item)} == {int}:
        return item
    if hasattr(kind, "hot_key"):  # of its class: a Proxy of torch.fx would say yes to any name
        return item.hot_key()
    if isinstance(item, Tensor):
        return describe_tensor(item)
    if isinstance(item, (int, float)):
        return kind
    if isinstance(item, torch.Generator):
        return torch.Generator
    whole = isinstance(item, tuple) and all(isinstance(side, int) and not isinstance(side, bool) for side in item)
    if whole or isinstance(item, str):
        return item
    raise Unkeyed(f"a {kind.__name__} has no key")


def needs_grad(item: Any) -> bool:
    """Whether a gradient is wanted of an argument."""
    return getattr(item, "requires_grad", False) is True


# The source of an argument's part, by its kind: what `part` says, with the usual answer found first. A tensor that is
# none raises, and the call is keyed by `generic_key`. Its own names begin with an underscore, as no argument's does.
_type, _hasattr, _part, _needs_grad, _autocast_key = type, hasattr, part, needs_grad, autocast_key
_TENSOR = "_type({0}), {0}.shape, {0}.dtype, {0}.is_cpu or ~{0}.get_device(), {0}.is_contiguous() or {0}.stride()"
_PARTS = {
    "tensor": _TENSOR,
    "packed": _TENSOR.replace("shape", "shape[1:]"),  # tensors of attention over packed sequences
    "offsets": "_type({0}), {0}.dtype, {0}.ndim, {0}.is_cpu or ~{0}.get_device(), {0}.is_contiguous()",
    "tensor?": f"None if {{0}} is None else ({_TENSOR})",
    "number": "_type({0}) if _type({0}) in _BY_TYPE and {0} - {0} == 0 else _part({0})",
    "flag": "{0} is True or ({0} is not False and _part({0}))",
    "text": "{0} if _type({0}) is str else _part({0})",
    "object": "{0} if {0} is None else {0}.hot_key() if _hasattr(_type({0}), 'hot_key') else _part({0})",
}
_GRADS = {
    "tensor": "{0}.requires_grad",
    "packed": "{0}.requires_grad",
    "tensor?": "({0} is not None and {0}.requires_grad)",
    "number": "_needs_grad({0})",
    "object": "_needs_grad({0})",
}
_KEY = """(
            "{name}",
            {layout},
            backend,
            {parts},
            _grad_enabled() and ({grads}),
            _autocast_key() if _any_autocast() else False,
            _deterministic(),
        )"""


def key_source(op: str, kinds: Mapping[str, str], layout: str) -> str:
    """The key of a call as an expression of the arguments, each with its kind, of `backend` and of what `layout` names.

    It is evaluated among the names of this module.
    """
    grads = " or ".join(_GRADS[kind].format(name) for name, kind in kinds.items() if kind in _GRADS)
    parts = ",\n            ".join(_PARTS[kind].format(name) for name, kind in kinds.items())
    return _KEY.format(name=op, layout=layout, parts=parts, grads=grads or "False")


_made: dict[Hashable, tuple[tuple[str, ...], Callable[..., tuple[Any, ...]]]] = {}


def key_of(
    spec: OperationSpec, count: int | None = None, first: tuple[str, ...] = ()
) -> Callable[..., tuple[Any, ...]]:
    """(*canonical arguments, layout, backend) -> key; written out at an op's first call, by the kinds of its arguments.

    `count` is how many of them a call has that leaves the last ones out, `first` the kinds of the first ones where the
    spec's would not do. Raises for a call that `generic_key` must look at: an argument is not of its kind, or has no
    key at all.
    """
    name = spec.op_id if count is None else (spec.op_id, count)
    found = _made.get(name)
    if found is None or found[0] is not spec.input_kinds:
        kinds = {f"_{place}": kind for place, kind in enumerate((*first, *spec.input_kinds[len(first) : count]))}
        key = key_source(spec.op_id, kinds, "layout")
        found = _made[name] = spec.input_kinds, eval(f"lambda {', '.join(kinds)}, layout, backend: {key}")
    return found[1]

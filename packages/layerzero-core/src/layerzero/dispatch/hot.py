"""Hot keys: everything a choice depends on, read off the tensors in about a microsecond.

Per tensor: type, shape, dtype, device, and its strides (True stands for contiguous, whose strides follow from
the shape). Types are in the key so that a subclass can never hit: only plain tensors are inserted. The device is
`is_cpu or ~index`: True, or -1 and below for the process's one accelerator, the only two kinds that are inserted
(`modes.keyable_device`); anything else (meta) gives 0 and never hits. Values such as scale, eps or p are never in
the key.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

__all__ = ["HOT_LIMIT", "aside", "before_dispatch", "describe_tensor", "generic_key", "mode_key", "traced", "watched"]

# Entries of one World's table; beyond it the table starts afresh.
HOT_LIMIT = 16_384

_grad_enabled = torch.is_grad_enabled
_BY_VALUE = frozenset({type(None), bool, str})
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
    """The key of any call: tensors by metadata, flags and words by value, numbers by type only.

    None when an argument cannot be keyed (an object of unknown kind): such calls take the cold path.
    """
    parts: list[Any] = [op, layout, backend]
    grad = False
    for item in args:
        kind = type(item)  # exact types first: most arguments are of one, and these questions cost the least
        if kind in _BY_VALUE:
            parts.append(item)
        elif kind in _BY_TYPE:
            parts.append(kind if item - item == 0 else _NOT_FINITE)
        elif isinstance(item, Tensor):
            parts.append(
                (kind, item.shape, item.dtype, item.is_cpu or ~item.get_device(), item.is_contiguous() or item.stride())
            )
            grad = grad or item.requires_grad
        elif isinstance(item, str):
            parts.append(item)
        elif isinstance(item, (int, float)):
            parts.append(kind)
        elif isinstance(item, torch.Generator):
            parts.append(torch.Generator)
        elif isinstance(item, torch.dtype):
            parts.append(item)
        elif isinstance(item, tuple) and all(isinstance(side, int) for side in item):
            parts.append(item)
        elif hasattr(kind, "hot_key"):  # of its class: a Proxy of torch.fx would say yes to any name
            parts.append(item.hot_key())
            grad = grad or getattr(item, "requires_grad", False)
        else:
            return None
    parts.append(mode_key(grad and _grad_enabled()))
    return tuple(parts)

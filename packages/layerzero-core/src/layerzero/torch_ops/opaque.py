"""What one opaque op consists of, and when plain torch is traced instead of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from layerzero.dispatch.late import current_world

_log = logging.getLogger("layerzero.torch_ops")


@dataclass(frozen=True, slots=True)
class OpaqueOp:
    """One op. `run`, `fake` and `plain` take the schema's arguments; without `plain` there is no gradient.

    autocast    under autocast the floating inputs are cast first (matmul-like ops)
    kept        places whose tensors are not: parts of a batch or of a quantized tensor
    replay      the backward may run the public function again; otherwise it takes the plain form
    random      draws from the default generator
    call        schema, kernel and fake of the overload `call`, where they are not those of the op itself
    """

    name: str
    signature: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    plain: Callable[..., Any] | None = None
    autocast: bool = False
    kept: frozenset[int] = frozenset()
    replay: bool = True
    random: bool = False
    call: tuple[str, Callable[..., Any], Callable[..., Any]] | None = None


# Device types that know autocast; torch.amp.is_autocast_available breaks the graphs of older Dynamos.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on such a device; None where it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind in _AUTOCAST and torch.is_autocast_enabled(kind) else None


def narrowed(item: Any, dtype: torch.dtype) -> Any:
    """A floating tensor in the dtype of autocast, which leaves float64 alone."""
    if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != torch.float64:
        return item.to(dtype)
    return item


def differentiable(backend: str | None, *tensors: Tensor | None) -> bool:
    """Whether to trace plain torch instead of the opaque op."""
    # The flag behind torch.compiler.is_exporting(), which older Dynamos take for true in any graph.
    return backend is None and not torch.compiler._is_exporting_flag and recorded(*tensors)


def recorded(*args: Any) -> bool:
    """Whether a node of a graph needs the op itself, with its gradient: for export, or where one is recorded."""
    if torch.compiler._is_exporting_flag:
        return True
    if torch.is_grad_enabled():
        for item in args:
            if isinstance(item, Tensor) and item.requires_grad:
                return True
    return False


def place(op: Any, *args: Any) -> Any:
    """One node of a graph: the op, or where no gradient is recorded its overload `call`, which costs less to run."""
    return op.default(*args) if recorded(*args) else op.call(*args)


def bare(item: Any) -> Any:
    """A subclass that reaches a kernel has nothing to say about it; as itself it would be sent here again."""
    if isinstance(item, Tensor) and type(item) is not Tensor and type(item) is not Parameter:
        return item.as_subclass(Tensor)
    return item


def uncounted() -> AbstractContextManager[Any]:
    """Where nothing but the counter looks on: what runs here is not counted. A backward recomputes its forward."""
    from torch.utils import _python_dispatch

    stack = _python_dispatch._get_current_dispatch_mode_stack()
    if stack and all(type(mode).__module__ == "torch.utils.flop_counter" for mode in stack):
        return _python_dispatch._disable_current_modes()
    return contextlib.nullcontext()


# -- a graph that names a backend which is not here: a saved program outlives the machine it was made on
def present(backend: str) -> str | None:
    """The backend as named; None, said once, where it is not here and the policy's `on_fault` is "fallback".

    Otherwise the name stays, and the call is refused with the reason: nothing else runs in place of what was asked for.
    """
    world = current_world()
    if world.policy.on_fault != "fallback":
        return backend
    known = world.registry
    if backend in known.kernels or backend in known.backends or known.by_backend(backend):
        own = known.backends.get(known.kernels[backend].backend if backend in known.kernels else backend)
        if own is None or own.available:
            return backend
    _missed(backend)
    return None


@lru_cache(maxsize=256)
def _missed(backend: str) -> None:
    _log.warning("a graph asks for backend %s, which is not here; on_fault is fallback: selected without it", backend)

"""LayerZero inside torch's own machinery: torch.library, torch.compile, torch.export, tensor subclasses.

Eager calls never come through here, unless torch looks on. Four doors lead in, all of them opened by `install` and none
of them costing anything until it is used:

* `torch.ops.layerzero.<op>`: opaque ops (`library`), derived from each op's declaration (`declared`), registered when
  first asked for. Each runs the public function, so the kernel is selected at run time, on the real tensors.
* tensor subclasses, FakeTensor and export among them, dispatch modes and tracers: `dispatch.run.bypass` hands their
  calls to that op.
* torch's FLOP counter: it is told what to count (`flops`) when, and only if, it is imported.
* torch.compile: what Dynamo traces in place of every public op (`traced`), registered (`dynamo`) when, and only if,
  `torch._dynamo` is imported.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from layerzero.errors import one_line
from layerzero.model.op import Op
from layerzero.runtime.current import opaque_ops
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.imports import after_import

__all__ = ["adopt", "install"]

_log = logging.getLogger("layerzero.torch_ops")


class _LazyNamespace(torch._ops._OpNamespace):
    """`torch.ops.layerzero` until an op of it is asked for: registering forty ops takes some 25 ms."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from layerzero.torch_ops import library

        library.register()
        return getattr(library.namespace(), name)


def install(public: Mapping[str, Op], *helpers: Callable[..., Any]) -> None:
    """Open the doors for these ops and helper functions. Called once, by `import layerzero`; takes microseconds."""
    functions.fill(public, helpers)
    for name in public:
        opaque_ops[name] = functools.partial(_bridge, name)
    if "layerzero" not in vars(torch.ops):
        vars(torch.ops)["layerzero"] = _LazyNamespace("layerzero")
    untraced = "torch.compile cannot trace LayerZero's ops with this torch; they break graphs"
    uncounted = "torch's FLOP counter knows nothing of LayerZero's ops with this torch"
    after_import("torch._dynamo", functools.partial(_introduce, "dynamo", untraced))
    after_import("torch.utils.flop_counter", functools.partial(_introduce, "flops", uncounted))


def adopt(op: Op) -> None:
    """Open the same doors for the op of a plugin, as far as its declaration allows: without `fake` there are none."""
    try:
        made = () if op.fake is None else importlib.import_module("layerzero.torch_ops.declared").opaque_of(op)
    except Exception as error:  # its eager calls need none of it
        _log.warning("op %r cannot be traced by torch.compile or torch.export: %s", op.op_id, one_line(error))
        made = ()
    functions.add(op if made else replace(op, fake=None))
    if not made:
        return
    opaque_ops[op.op_id] = functools.partial(_bridge, op.op_id)
    for name in ("layerzero.torch_ops.library", "layerzero.torch_ops.dynamo"):
        if name in sys.modules:
            sys.modules[name].add(op)


def _bridge(name: str, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    from layerzero.torch_ops import declared, library

    library.register()
    return declared.bridge(functions.op(name), args, layout, backend)


def _introduce(module: str, otherwise: str) -> None:
    # This runs inside somebody else's import, of torch._dynamo for one, which must not fail for our sake.
    try:
        importlib.import_module(f"layerzero.torch_ops.{module}").register()
    except Exception:
        _log.warning(otherwise, exc_info=True)

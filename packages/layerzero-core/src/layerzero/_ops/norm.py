"""`lz.rms_norm`, `lz.add_rms_norm`, `lz.layer_norm`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from layerzero._ops.signature import declare, dispatch, fx_proxy
from layerzero.dispatch.hot import aside, autocast_key, before_dispatch
from layerzero.dispatch.late import current_world, miss, recover, seen
from layerzero.errors import invalid
from layerzero.model.checks import expect_shape, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.op import Call, Op
from layerzero.model.shapes import both, same
from layerzero.runtime.current import now, scope

_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_scope = scope.get


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, backend: str | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, times weight; computed in float32, returned in x's dtype."""
    if (
        _dispatch_modes()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or (_function_modes() and before_dispatch())
    ) and not aside.quiet:
        again = functools.partial(rms_norm, x, weight, eps, backend=backend)
        return seen(RMS_NORM, (expect_tensor(x, "x"), weight, eps), None, backend, again)  # type: ignore[no-any-return]
    try:
        hot_key = (
            "rms_norm",
            type(x),
            x.shape,
            x.dtype,
            x.is_cpu or ~x.get_device(),
            x.is_contiguous() or x.stride(),
            type(weight),
            weight.shape,  # type: ignore[union-attr]
            weight.dtype,  # type: ignore[union-attr]
            weight.is_cpu or ~weight.get_device(),  # type: ignore[union-attr]
            weight.is_contiguous() or weight.stride(),  # type: ignore[union-attr]
            backend,
            eps - eps == 0.0,  # of values only whether they are finite: what is not is refused when it is described
            _grad_enabled() and (x.requires_grad or weight.requires_grad),  # type: ignore[union-attr]
            autocast_key() if _any_autocast() else False,
            _deterministic(),
        )
        active = _scope()
        world = now.world if active is None else active.world()
        bound = world.hot.get(hot_key)
    except (AttributeError, TypeError, RuntimeError, ValueError):  # no weight, not tensors, a Proxy of torch.fx
        if fx_proxy((x,)) is None:
            expect_tensor(x, "x")
        return dispatch(RMS_NORM, (x, weight, eps), backend=backend)  # type: ignore[no-any-return]
    if bound is not None and (bound.guard is None or bound.guard()):
        try:
            return bound.run(x, weight, eps)  # type: ignore[no-any-return]
        except Exception as error:
            return recover(RMS_NORM, world, bound, (x, weight, eps), None, backend, error)  # type: ignore[no-any-return]
    return miss(RMS_NORM, current_world(), hot_key, (x, weight, eps), None, backend)  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the norm of a residual stream and the new stream."""
    return dispatch(ADD_RMS_NORM, (x, residual, weight, eps), backend=backend)  # type: ignore[no-any-return]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the last axis, times weight plus bias."""
    return dispatch(LAYER_NORM, (x, weight, bias, eps), backend=backend)  # type: ignore[no-any-return]


def norm_op(function: Callable[..., Any], cost: Roofline, *others: str, optional: bool = True) -> Op:
    """A norm over the last axis; `others` are the tensors beside x, in order, the weight and bias `optional`."""
    name = function.__name__
    added = "residual" in others

    def describe(call: Call) -> Context:
        given = dict(zip(others, call.args[1:-1], strict=True))
        for word, item in given.items():
            if word == "residual" or not optional:
                expect_tensor(item, word)
        x, eps = expect_tensor(call.args[0], "x"), call.args[-1]
        if isinstance(eps, bool) or not isinstance(eps, (int, float)):
            raise invalid("TYPE_INVALID", f"eps: {type(eps).__name__}", "a number")
        if not math.isfinite(eps):
            raise invalid("VALUE_INVALID", str(eps), "a finite number", f"eps is {eps}")
        hidden = x.shape[-1] if x.ndim else 0
        for word, shape in (("weight", (hidden,)), ("bias", (hidden,)), ("residual", tuple(x.shape))):
            expect_shape(given.get(word), word, shape)
        needs = set()
        if given.get("weight") is None:
            needs.add("no_weight")
        if given.get("bias") is not None:
            needs.add("bias")
        dims = {"rows": x.numel() // hidden if hidden else 0, "hidden": hidden}
        return simple_context(call, name, x, given, dims, needs, mixed=True)

    return declare(
        function=function,
        fake=both if added else same,
        output_kind="tensors" if added else "tensor",
        describe=describe,
        reference=f"layerzero.backends.reference.norm:{name}",
        cost=cost,
        shapes={"shape": "*rows,hidden"},
        options=("no_weight", *(word for word in others if word == "bias")),
        example="layerzero._ops.examples_rows:norm",
        tolerance="norm",
        row_wise=(0, 1) if added else (0,),
        growing=("rows",),
        fusable=True,
    )


RMS_NORM = norm_op(rms_norm, Roofline("element_bytes * hidden * (2 * rows + 1)", "4 * rows * hidden"), "weight")
ADD_RMS_NORM = norm_op(
    add_rms_norm, Roofline("element_bytes * hidden * (4 * rows + 1)", "5 * rows * hidden"), "residual", "weight"
)
LAYER_NORM = norm_op(
    layer_norm, Roofline("element_bytes * hidden * (2 * rows + 1 + bias)", "8 * rows * hidden"), "weight", "bias"
)

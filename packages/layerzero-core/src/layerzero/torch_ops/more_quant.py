"""`lz.linear` with a quantized weight inside torch's machinery.

The weight comes into a compiled region from outside or is made inside by `lz.quantize`. Of a packed weight the graph
takes the quantized weight itself: whether the packed parts are still its own can only be asked outside of a graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor, format_traits
from layerzero.torch_ops import plain
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, differentiable, place
from layerzero.torch_ops.written import chosen, write

__all__ = ["BRIDGES", "OPS", "TWINS"]

# By name: the reference lives on the floor of the backends, which nothing below may import.
_linear = importlib.import_module("layerzero.backends.reference.linear")

# Device types that know autocast; torch.amp.is_autocast_available breaks the graphs of older Dynamos.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")

_SIGNATURE = (
    "(Tensor x, Tensor data, Tensor scale, Tensor? zero_point, Tensor? tensor_scale, str fmt, str granularity, "
    "SymInt? block_size, SymInt[] shape, ScalarType weight_dtype, Tensor? bias, str? activation, str? act, "
    "str? backend=None) -> Tensor"
)


def _weight(parts: Sequence[Any], act: str | None) -> QuantizedTensor | PackedWeight:
    data, scale, zero_point, tensor_scale, fmt, granularity, block_size, shape, dtype = parts
    known, _ = format_traits(fmt)
    made = QuantizedTensor(data, scale, known, granularity, tuple(shape), dtype, block_size, zero_point, tensor_scale)
    return made if act is None else PackedWeight(made, act=act)


def _call(x: Tensor, *rest: Any) -> Tensor:
    *parts, bias, activation, act, backend = rest
    out: Tensor = functions["linear"](x, _weight(parts, act), bias, activation, backend=backend)
    return out.contiguous()


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], rest[7][0]))


def _plain(x: Tensor, *rest: Any) -> Any:
    *parts, bias, activation, act, _ = rest
    return _linear.linear(x, _weight(parts, act), bias, activation)


def _parts(source: QuantizedTensor) -> tuple[Any, ...]:
    return (
        source.data,
        source.scale,
        source.zero_point,
        source.tensor_scale,
        source.fmt.value,
        source.granularity,
        source.block_size,
        list(source.shape),
        source.dtype,
    )


def _arguments(
    x: Tensor, weight: QuantizedTensor | PackedWeight, bias: Tensor | None, activation: str | None
) -> tuple[Any, ...]:
    """The schema's arguments without the backend. Autocast is followed here: the op itself would cast the codes too."""
    kind = x.device.type
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    source, act = (weight, None) if isinstance(weight, QuantizedTensor) else (weight.source, weight.act)
    return (x, *_parts(source), bias, activation, act)


def _bridge(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    x, weight, bias, activation = args
    if isinstance(weight, Tensor):
        return ops.linear.default(x, weight, bias, activation, backend)
    return ops.linear_quantized.default(*_arguments(x, weight, bias, activation), backend)


def linear(
    x: Tensor,
    weight: Tensor | QuantizedTensor | PackedWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.linear`."""
    if isinstance(weight, Tensor):
        given = (x, weight, bias, activation)
        own = chosen("linear", given, None, backend, differentiable(backend, x, weight, bias))
        if own:
            return write(own, plain.linear, given, True)
        return place(torch.ops.layerzero.linear, *given, backend)
    args = _arguments(x, weight, bias, activation)
    if differentiable(backend, x, args[2], args[4], bias):
        return _plain(*args, backend)
    return place(torch.ops.layerzero.linear_quantized, *args, backend)


OPS = (OpaqueOp("linear_quantized", _SIGNATURE, _call, _fake, _plain),)
TWINS: dict[str, Callable[..., Any]] = {"linear": linear}
BRIDGES: dict[str, Callable[..., Any]] = {"linear": _bridge}

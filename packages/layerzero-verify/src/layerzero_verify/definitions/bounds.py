"""How close an output has to be: the table for definitions, by its dtype and by the narrowest input it is made of."""

from __future__ import annotations

from dataclasses import replace

from layerzero.numerics import Tolerance, definition_tolerance, tolerance
from layerzero_verify.definitions.schema import Definition

__all__ = ["bounds"]

_LOW_BIT = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "float4_e2m1": "nvfp4"}
_PRODUCTS = frozenset({"gemm", "moe"})


def bounds(definition: Definition, output: str, *, rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """The bounds for one output; `rtol` and `atol` override the table's numbers, not its hit ratio.

    FP8 or FP4 anywhere among the inputs means a hit ratio. A float32 output of half-precision inputs (a log-sum-exp)
    has the general float32 bounds; float32 products grow with the length of their sum.
    """
    dtype = definition.outputs[output].dtype
    tensors = [spec for spec in definition.inputs.values() if spec.floating and spec.shape is not None]
    low = next((_LOW_BIT[spec.dtype] for spec in tensors if spec.dtype in _LOW_BIT), None)
    found = definition_tolerance(low if low is not None and definition.outputs[output].floating else dtype)
    if low is None and dtype == "float32":
        if any(spec.dtype in ("float16", "bfloat16") for spec in tensors):
            found = _wider(found, tolerance("", "float32"))
        if definition.op_type in _PRODUCTS:
            longest = max((definition.const_axes.get(spec.shape[-1], 1) for spec in tensors if spec.shape), default=1)
            found = _wider(found, tolerance("gemm", "float32", k=longest))
    return replace(found, rtol=found.rtol if rtol is None else rtol, atol=found.atol if atol is None else atol)


def _wider(one: Tolerance, other: Tolerance) -> Tolerance:
    return replace(one, rtol=max(one.rtol, other.rtol), atol=max(one.atol, other.atol))

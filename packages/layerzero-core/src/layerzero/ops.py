"""Every op, by name: `lz.ops.rms_norm(...)`; those of installed plugins too."""

from __future__ import annotations

from typing import Any

from layerzero._ops.attention import attention
from layerzero._ops.linear import embedding, gelu_and_mul, linear, relu_and_mul, silu_and_mul
from layerzero._ops.norm import add_rms_norm, layer_norm, rms_norm
from layerzero._ops.paged import paged_attention
from layerzero._ops.positional import rope
from layerzero._ops.quantize import dequantize, quantize
from layerzero._ops.sampling import sample, sample_topk, sample_topp
from layerzero._ops.signature import public_op
from layerzero.dispatch.late import current_world
from layerzero.errors import UnknownNameError
from layerzero.torch_ops.functions import functions

__all__ = [
    "add_rms_norm",
    "attention",
    "dequantize",
    "embedding",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "paged_attention",
    "quantize",
    "relu_and_mul",
    "rms_norm",
    "rope",
    "sample",
    "sample_topk",
    "sample_topp",
    "silu_and_mul",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"no op {name!r}")
    try:
        function = public_op(name).function
    except UnknownNameError as error:
        raise AttributeError(str(error)) from None
    return functions.accelerated.get(name, function)  # not kept: a plugin may be loaded again


def __dir__() -> list[str]:
    return sorted(current_world().ops)

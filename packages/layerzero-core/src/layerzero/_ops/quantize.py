"""`lz.quantize` and `lz.dequantize`."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero._ops.signature import declare, dispatch
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.op import Call

if TYPE_CHECKING:
    from layerzero.model.quant import QuantizedTensor, QuantScheme


def quantize(
    x: Tensor,
    fmt: str,
    *,
    granularity: str = "tensor",
    block_size: int | None = None,
    symmetric: bool = True,
    backend: str | None = None,
) -> QuantizedTensor:
    """Quantize to int8, int4, fp8_e4m3, fp8_e5m2, mxfp4, nvfp4 or nf4; scales per tensor, channel or block.

    A channel is a row along the last axis; `block_size` elements of it make a block (default: the format's own size,
    which MXFP4 and NVFP4 fix). `symmetric=False`, for integers, adds a zero point.
    """
    try:
        scheme = _known_scheme(fmt, granularity, block_size, symmetric)
    except TypeError:  # something that cannot be looked up: said as what it is
        scheme = _scheme(fmt, granularity, block_size, symmetric)
    return dispatch(QUANTIZE, (x, scheme), backend=backend)  # type: ignore[no-any-return]


def _scheme(fmt: str, granularity: str, block_size: int | None, symmetric: bool) -> QuantScheme:
    from layerzero.model.quant import QuantScheme

    return QuantScheme(fmt, granularity, block_size, symmetric)  # type: ignore[arg-type]


_known_scheme = functools.lru_cache(maxsize=64, typed=True)(_scheme)


def dequantize(qt: QuantizedTensor, dtype: torch.dtype | None = None, *, backend: str | None = None) -> Tensor:
    """The tensor a QuantizedTensor stands for, in `dtype` (default: the dtype it was made from)."""
    return dispatch(DEQUANTIZE, (qt, dtype), backend=backend)  # type: ignore[no-any-return]


def _describe_quantize(call: Call) -> Context:
    x, scheme = call.args
    x = expect_tensor(x, "x")
    if x.ndim == 0:
        raise invalid("RANK_INVALID", 0, "1 or more", "x has rank 0 and no axis to scale along")
    scheme.scales_for(tuple(x.shape))
    width = x.shape[-1]
    dims = {"rows": x.numel() // width if width else 0, "hidden": width}
    if scheme.block_size is not None:
        dims["block"] = scheme.block_size
    needs = () if scheme.symmetric else ("zero_point",)
    call = Call(call.args, call.device, call.layout, call.backend, False)  # codes carry no gradient
    return simple_context(
        call, "quantize", x, {}, dims, needs, quant_format=scheme.fmt.value, granularity=scheme.granularity
    )


def _describe_dequantize(call: Call) -> Context:
    from layerzero.model.quant import QuantizedTensor

    qt = call.args[0]
    if not isinstance(qt, QuantizedTensor):
        raise invalid("TYPE_INVALID", type(qt).__name__, "a QuantizedTensor")
    dims = {"rows": math.prod(qt.shape[:-1]), "hidden": qt.shape[-1] if qt.shape else 1}
    if qt.block_size is not None:
        dims["block"] = qt.block_size
    word, needs = str(call.args[1] or qt.dtype).removeprefix("torch."), {"zero_point": qt.zero_point is not None}
    scheme: dict[str, Any] = {"quant_format": qt.fmt.value, "granularity": qt.granularity}
    return context_of(call, "dequantize", word, dims, needs, rank=len(qt.shape), **scheme)


def _keywords(args: tuple[Any, ...]) -> dict[str, Any]:
    x, scheme = args
    words = {"granularity": scheme.granularity, "block_size": scheme.block_size, "symmetric": scheme.symmetric}
    return {"x": x, "fmt": scheme.fmt.value, **words}


def _fake(x: Tensor, fmt: str, granularity: str, block_size: int | None, symmetric: bool) -> list[Tensor]:
    """Codes, scales, the zero points of an asymmetric scheme, and for NVFP4 the tensor scale."""
    from layerzero.model.quant import format_traits

    scheme = _scheme(format_traits(fmt)[0], granularity, block_size, symmetric)
    traits, block, width = scheme.traits, scheme.block_size, x.shape[-1]
    codes = (*x.shape[:-1], width // 2 if traits.packed else width)
    scales = () if scheme.granularity == "tensor" else (*x.shape[:-1], 1 if block is None else width // block)
    parts = [
        x.new_empty(codes, dtype=getattr(torch, traits.data_dtype)),
        x.new_empty(scales, dtype=getattr(torch, traits.scale_dtype)),
    ]
    if not scheme.symmetric:
        parts.append(x.new_empty(scales, dtype=torch.int32))
    return parts + ([x.new_empty((), dtype=torch.float32)] if traits.tensor_scale else [])


QUANTIZE = declare(
    function=quantize,
    fake=_fake,
    lowered={"symmetric": "negated"},
    arguments=("x", "scheme"),
    output_kind="quantized",
    describe=_describe_quantize,
    reference="layerzero.backends.reference.quantize:quantize",
    cost=Roofline("rows * hidden * (element_bytes + code_bytes)", "3 * rows * hidden"),
    shapes={"shape": "*rows,hidden"},
    options=("format", "granularity"),
    example="layerzero._ops.examples_rows:quantize",
    keywords=_keywords,
    growing=("rows",),
    canonical=lambda given: (
        given["x"],
        _scheme(given["fmt"], given["granularity"], given["block_size"], given["symmetric"]),
    ),
)
DEQUANTIZE = declare(
    function=dequantize,
    fake=lambda qt, dtype: qt.data.new_empty(qt.shape, dtype=dtype or qt.dtype),
    describe=_describe_dequantize,
    reference="layerzero.backends.reference.quantize:dequantize",
    cost=Roofline("rows * hidden * (element_bytes + code_bytes)", "2 * rows * hidden"),
    shapes={"shape": "*rows,hidden"},
    options=("format", "granularity"),
    example="layerzero._ops.examples_rows:dequantize",
    growing=("rows",),
)

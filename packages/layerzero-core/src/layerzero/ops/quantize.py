"""`lz.quantize` and `lz.dequantize`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.model.describe import dtype_name
from layerzero.model.enums import OpKind
from layerzero.model.op import Call, OperationSpec
from layerzero.ops.describe import expect_tensor, simple_context
from layerzero.ops.signature import PublicOp, dispatch, reference, register

if TYPE_CHECKING:
    from layerzero.model.quant import QuantizedTensor

__all__ = ["DEQUANTIZE", "QUANTIZE", "dequantize", "quantize"]


def quantize(x: Tensor, fmt: str, *, granularity: str = "tensor", backend: str | None = None) -> QuantizedTensor:
    """Quantize to int8, int4, fp8_e4m3, fp8_e5m2, mxfp4, nvfp4 or nf4; scales per tensor, channel or block."""
    from layerzero.model.quant import format_traits, resolve_granularity

    known, _ = format_traits(fmt)
    if known in ("mxfp4", "nvfp4") and granularity == "tensor":
        granularity = "block"  # these formats are defined by their block scales
    return dispatch(QUANTIZE, (x, known.value, resolve_granularity(known, granularity)), backend=backend)  # type: ignore[no-any-return]


def dequantize(qt: QuantizedTensor, dtype: torch.dtype | None = None, *, backend: str | None = None) -> Tensor:
    """The tensor a QuantizedTensor stands for, in `dtype` (default: the dtype it was made from)."""
    from layerzero.model.quant import QuantizedTensor

    if not isinstance(qt, QuantizedTensor):
        raise InvalidInputError(code="TYPE_INVALID", value=type(qt).__name__, limit="a QuantizedTensor")
    return dispatch(DEQUANTIZE, (qt, dtype), backend=backend)  # type: ignore[no-any-return]


def _describe_quantize(call: Call) -> Context:
    x, fmt, granularity = call.args
    x = expect_tensor(x, "x")
    if x.ndim == 0:
        raise InvalidInputError("x has no axis to scale along", code="RANK_INVALID", value=0, limit="1 or more")
    width = x.shape[-1]
    dims = {"rows": x.numel() // width if width else 0, "hidden": width}
    call = Call(call.args, call.device, call.layout, call.backend, False)  # codes carry no gradient
    return simple_context(call, "quantize", x, {}, dims, quant_format=fmt, granularity=granularity)


def _describe_dequantize(call: Call) -> Context:
    qt = call.args[0]
    width = qt.shape[-1] if qt.shape else 1
    rows = 1
    for size in qt.shape[:-1]:
        rows *= size
    return Context(
        op="dequantize",
        device=call.device,
        dtype=str(call.args[1] or qt.dtype).removeprefix("torch."),
        dims=(("rows", rows), ("hidden", width)),
        rank=len(qt.shape),
        backend=call.backend,
        quant_format=qt.fmt.value,
        granularity=qt.granularity,
        kv_cache_dtype=None,
        index_dtype=None if qt.data is None else dtype_name(qt.data),
    )


QUANTIZE = register(
    PublicOp(
        OperationSpec(
            op_id="quantize",
            op_kind=OpKind.TENSOR,
            arguments=("x", "fmt", "granularity"),
            input_kinds=("tensor", "text", "text"),
            output_kind="quantized",
            describe=_describe_quantize,
            fallback_impl=reference("layerzero.backends.reference.quantize:quantize"),
            fallback_id="reference.quantize.plain",
            elastic=("rows",),
        ),
        quantize,
    )
)
DEQUANTIZE = register(
    PublicOp(
        OperationSpec(
            op_id="dequantize",
            op_kind=OpKind.TENSOR,
            arguments=("qt", "dtype"),
            input_kinds=("object", "object"),
            output_kind="tensor",
            describe=_describe_dequantize,
            fallback_impl=reference("layerzero.backends.reference.quantize:dequantize"),
            fallback_id="reference.dequantize.plain",
            elastic=("rows",),
        ),
        dequantize,
    )
)

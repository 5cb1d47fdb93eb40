"""`lz.linear`: x @ weight.T + bias, with an optional activation; the weight may be quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerzero._ops.signature import dispatch, register
from layerzero.errors import invalid
from layerzero.model.checks import expect_rank, expect_shape, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_devices
from layerzero.model.op import Call, Op

if TYPE_CHECKING:
    from layerzero.model.packed import PackedWeight
    from layerzero.model.quant import QuantizedTensor

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def check_activation(activation: str) -> str:
    """The feature a kernel needs for an activation; unknown ones are refused."""
    if activation not in ACTIVATIONS:
        raise invalid("VALUE_INVALID", f"activation {activation!r}", ACTIVATIONS)
    return f"activation_{activation}"


def linear(
    x: Tensor,
    weight: Tensor | QuantizedTensor | PackedWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], then the activation (gelu, gelu_tanh, silu, relu).

    A weight from `lz.quantize` is widened as the product goes; `lz.pack_weight` packs it once for a faster kernel.
    """
    return dispatch(LINEAR, (x, weight, bias, activation), backend=backend)  # type: ignore[no-any-return]


def _describe(call: Call) -> Context:
    x, weight, bias, activation = call.args
    x = expect_tensor(x, "x")
    quantized = not isinstance(weight, Tensor)
    if quantized:
        n, k = _quantized_shape(weight)
    else:
        expect_rank(weight, "weight", (2,))
        n, k = weight.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise invalid("SHAPE_INVALID", str(tuple(x.shape)), f"[..., {k}]", "x and weight disagree")
    expect_shape(bias, "bias", (n,))
    needs = {"bias"} if bias is not None else set()
    if activation is not None:
        needs.add(check_activation(activation))
    dims = {"rows": x.numel() // k if k else 0, "n": n, "k": k}
    if not quantized:
        return simple_context(call, "linear", x, {"weight": weight, "bias": bias}, dims, needs)
    return _quantized_context(call, x, weight, bias, dims, needs)


def _quantized_shape(weight: Any) -> tuple[int, int]:
    from layerzero.model.packed import PackedWeight
    from layerzero.model.quant import QuantizedTensor

    if not isinstance(weight, (QuantizedTensor, PackedWeight)):
        expect_tensor(weight, "weight")
    shape: tuple[int, ...] = weight.shape
    if len(shape) != 2:
        raise invalid("RANK_INVALID", len(shape), "2", f"weight has rank {len(shape)}")
    return shape[0], shape[1]


def _quantized_context(
    call: Call, x: Tensor, weight: Any, bias: Tensor | None, dims: dict[str, int], needs: set[str]
) -> Context:
    """Format, granularity and packing decide among kernels; the codes' own dtype does not."""
    source = getattr(weight, "source", weight)
    act = getattr(weight, "act", None)
    layout = getattr(weight, "layout", "plain")
    check_devices(input=x, weight=source.data, bias=bias)
    needs.add("weight_only" if act is None else f"act_{act}")
    if source.zero_point is not None:
        needs.add("zero_point")
    if source.block_size is not None:
        dims["block"] = source.block_size
    return simple_context(
        call,
        "linear",
        x,
        {"bias": bias},
        dims,
        needs,
        quant_format=source.fmt.value,
        granularity=source.granularity,
        weight_layout=None if layout == "plain" else layout,
    )


LINEAR = register(
    Op(
        function=linear,
        fake=lambda x, weight, *rest: x.new_empty((*x.shape[:-1], weight.shape[0])),
        describe=_describe,
        reference="layerzero.backends.reference.linear:linear",
        cost=Roofline("element_bytes * (rows * (k + n) + bias * n) + code_bytes * n * k", "2 * rows * n * k"),
        shapes={"shape": "*rows,k", "weight": "n,k"},
        options=("bias", "activation", "format", "granularity"),
        example="layerzero._ops.examples_rows:linear",
        tolerance="gemm",
        row_wise=(0,),
        growing=("rows",),
        autocast=True,
    )
)

"""`lz.linear`: x @ weight.T + bias, with an optional activation."""

from __future__ import annotations

from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.model.enums import OpKind
from layerzero.model.op import Call, OperationSpec
from layerzero.ops.describe import expect_rank, expect_shape, expect_tensor, simple_context
from layerzero.ops.signature import PublicOp, dispatch, reference, register

__all__ = ["ACTIVATIONS", "LINEAR", "linear"]

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *, backend: str | None = None
) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], then the activation (gelu, gelu_tanh, silu, relu)."""
    return dispatch(LINEAR, (x, weight, bias, activation), backend=backend)  # type: ignore[no-any-return]


def _describe(call: Call) -> Context:
    x, weight, bias, activation = call.args
    x, weight = expect_tensor(x, "x"), expect_tensor(weight, "weight")
    expect_rank(weight, "weight", (2,))
    n, k = weight.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise InvalidInputError(
            "x and weight disagree", code="SHAPE_INVALID", value=str(tuple(x.shape)), limit=f"[..., {k}]"
        )
    expect_shape(bias, "bias", (n,))
    if activation is not None and activation not in ACTIVATIONS:
        raise InvalidInputError(code="VALUE_INVALID", value=str(activation), limit=ACTIVATIONS)
    needs = {"bias"} if bias is not None else set()
    if activation is not None:
        needs.add(f"activation_{activation}")
    rows = x.numel() // k if k else 0
    return simple_context(call, "linear", x, {"weight": weight, "bias": bias}, {"rows": rows, "n": n, "k": k}, needs)


LINEAR = register(
    PublicOp(
        OperationSpec(
            op_id="linear",
            op_kind=OpKind.TENSOR,
            arguments=("x", "weight", "bias", "activation"),
            input_kinds=("tensor", "tensor", "tensor?", "text"),
            output_kind="tensor",
            describe=_describe,
            fallback_impl=reference("layerzero.backends.reference.linear:linear"),
            fallback_id="reference.linear.plain",
            elastic=("rows",),
            autocast=True,
        ),
        linear,
    )
)

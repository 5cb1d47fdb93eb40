"""`lz.silu_and_mul`, `lz.gelu_and_mul`, `lz.relu_and_mul`: the gated activations of SwiGLU, GeGLU and ReGLU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from layerzero._ops.signature import dispatch, register
from layerzero.errors import invalid
from layerzero.model.checks import expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.op import Call, Op
from layerzero.model.shapes import gated


def silu_and_mul(x: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(first half) * second half over the last axis (SwiGLU)."""
    return dispatch(SILU_AND_MUL, (x,), backend=backend)  # type: ignore[no-any-return]


def gelu_and_mul(x: Tensor, approximate: str = "none", *, backend: str | None = None) -> Tensor:
    """gelu(first half) * second half over the last axis (GeGLU); `approximate` is "none" or "tanh"."""
    return dispatch(GELU_AND_MUL, (x, approximate), backend=backend)  # type: ignore[no-any-return]


def relu_and_mul(x: Tensor, *, backend: str | None = None) -> Tensor:
    """relu(first half) * second half over the last axis (ReGLU)."""
    return dispatch(RELU_AND_MUL, (x,), backend=backend)  # type: ignore[no-any-return]


def _describer(op: str) -> Callable[[Call], Context]:
    def describe(call: Call) -> Context:
        x = expect_tensor(call.args[0], "x")
        width = x.shape[-1] if x.ndim else 0
        if width == 0 or width % 2:
            raise invalid("SHAPE_INVALID", width, "an even width: gate and up", f"the last axis is {width}")
        needs = set()
        if len(call.args) > 1:
            if call.args[1] not in ("none", "tanh"):
                raise invalid("VALUE_INVALID", str(call.args[1]), "'none' or 'tanh'")
            needs.add(f"gelu_{call.args[1]}")
        return simple_context(call, op, x, {}, {"rows": x.numel() // width, "hidden": width // 2}, needs)

    return describe


def _op(function: Callable[..., Tensor]) -> Op:
    name = function.__name__
    return register(
        Op(
            function=function,
            fake=gated,
            describe=_describer(name),
            reference=f"layerzero.backends.reference.mlp:{name}",
            cost=Roofline("3 * element_bytes * rows * hidden", "8 * rows * hidden"),
            shapes={"shape": "*rows,2*hidden"},
            options=("approximate",) if name == "gelu_and_mul" else (),
            example="layerzero._ops.examples_rows:gated",
            tolerance="gemm",
            row_wise=(0,),
            growing=("rows",),
            fusable=True,
        )
    )


SILU_AND_MUL = _op(silu_and_mul)
GELU_AND_MUL = _op(gelu_and_mul)
RELU_AND_MUL = _op(relu_and_mul)

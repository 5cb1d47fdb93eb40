"""`lz.mlp`: the feed-forward block of a transformer in one call, gated or not."""

from __future__ import annotations

from torch import Tensor

from layerzero._ops.linear import check_activation
from layerzero._ops.signature import dispatch, register
from layerzero.errors import invalid
from layerzero.model.checks import expect_rank, expect_shape, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.op import Call, Op


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None = None,
    activation: str = "silu",
    *,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """x [..., H] through a feed-forward block with inner width I; `down_weight` is [O, I].

    Three forms, told apart by the shape of `up_weight`:
    * [2 I, H]: gate and up packed, the gate first: act(x @ gate.T) * (x @ up.T), then down. SwiGLU with
      activation="silu", GeGLU with "gelu" (erf) or "gelu_tanh", ReGLU with "relu".
    * [I, H] with `gate_weight` [I, H]: the same from two weights.
    * [I, H] alone: act(x @ up.T), then down (fc1, activation, fc2).
    """
    return dispatch(  # type: ignore[no-any-return]
        MLP, (x, up_weight, down_weight, gate_weight, activation, up_bias, gate_bias, down_bias), backend=backend
    )


def gating(rows: int, inner: int, name: str) -> str:
    """ "gated" for a packed weight of 2 I rows, "ungated" for one of I rows."""
    if inner > 0 and rows in (inner, 2 * inner):
        return "ungated" if rows == inner else "gated"
    raise invalid("SHAPE_INVALID", f"{name} of {rows} rows", f"{inner}, or {2 * inner} for gate and up packed")


def _describe(call: Call) -> Context:
    x, up, down, gate, activation, up_bias, gate_bias, down_bias = call.args
    x, up, down = expect_tensor(x, "x"), expect_tensor(up, "up_weight"), expect_tensor(down, "down_weight")
    expect_rank(up, "up_weight", (2,))
    expect_rank(down, "down_weight", (2,))
    hidden, inner, out = up.shape[1], down.shape[1], down.shape[0]
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise invalid("SHAPE_INVALID", str(tuple(x.shape)), f"[..., {hidden}]", "x and up_weight disagree")
    kind = gating(up.shape[0], inner, "up_weight")
    needs = {check_activation(activation)}
    if gate is not None:
        expect_shape(gate, "gate_weight", (inner, hidden))
        expect_shape(up, "up_weight beside a gate_weight", (inner, hidden))
        kind = "split_gate"
    elif gate_bias is not None:
        raise invalid("VALUE_INVALID", "gate_bias", "taken without gate_weight; a packed weight has up_bias [2 I]")
    needs.add(kind)
    expect_shape(up_bias, "up_bias", (up.shape[0],))
    expect_shape(gate_bias, "gate_bias", (inner,))
    expect_shape(down_bias, "down_bias", (out,))
    others = {
        "up_weight": up,
        "down_weight": down,
        "gate_weight": gate,
        "up_bias": up_bias,
        "gate_bias": gate_bias,
        "down_bias": down_bias,
    }
    if any(others[name] is not None for name in ("up_bias", "gate_bias", "down_bias")):
        needs.add("bias")
    rows = x.numel() // hidden if hidden else 0
    return simple_context(call, "mlp", x, others, {"rows": rows, "hidden": hidden, "inner": inner, "n": out}, needs)


MLP = register(
    Op(
        function=mlp,
        fake=lambda x, up, down, *rest: x.new_empty((*x.shape[:-1], down.shape[0])),
        plain="layerzero.backends.reference.feed_forward:feed_forward",  # in the dtype of its arguments
        describe=_describe,
        reference="layerzero.backends.reference.feed_forward:mlp",
        cost=Roofline(
            "element_bytes * (rows * (hidden + n) + inner * (hidden + bias) * (1 + gated + split_gate) "
            "+ n * (inner + bias))",
            "2 * rows * inner * (hidden * (1 + gated + split_gate) + n)",
        ),
        shapes={"shape": "*rows,hidden","weight": "2*inner,hidden","n": "hidden"},
        options=("activation",),
        example="layerzero._ops.examples_rows:mlp",
        tolerance="gemm",
        row_wise=(0,),
        growing=("rows",),
        autocast=True,
    )
)  # fmt: skip

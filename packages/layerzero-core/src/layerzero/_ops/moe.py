"""`lz.mlp`: a feed-forward block in one call. `lz.topk_gate`, `lz.grouped_gemm` and `lz.moe`: the same of experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero._ops.linear import check_activation, quantized_context, weight_shape
from layerzero._ops.signature import declare, dispatch
from layerzero.errors import invalid
from layerzero.model.checks import expect_index, expect_rank, expect_shape, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_devices, check_floating, stride_class
from layerzero.model.op import Call
from layerzero.model.shapes import same

if TYPE_CHECKING:
    from layerzero.model.packed import PackedWeight
    from layerzero.model.quant import QuantizedTensor


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
    x, up, down = expect_tensor(x, "x"), expect_rank(up, "up_weight", (2,)), expect_rank(down, "down_weight", (2,))
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
    biases = {"up_bias": up_bias, "gate_bias": gate_bias, "down_bias": down_bias}
    others = {"up_weight": up, "down_weight": down, "gate_weight": gate, **biases}
    if any(bias is not None for bias in biases.values()):
        needs.add("bias")
    rows = x.numel() // hidden if hidden else 0
    return simple_context(call, "mlp", x, others, {"rows": rows, "hidden": hidden, "inner": inner, "n": out}, needs)


MLP = declare(
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
)  # fmt: skip


SCORINGS = ("softmax", "sigmoid")


def topk_gate(
    router_logits: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token: (weights [T, k] in float32, ids [T, k] in int64), best first.

    `router_logits` [T, E] become scores by softmax over the experts or sigmoid, in float32. The k best are taken; of
    equal ones the lowest id. `bias` [E] is added to the scores for that choice only, never to the weights (the
    correction bias of DeepSeek-V3). With `num_groups` > 1 the experts of the `top_groups` best groups alone may be
    chosen; a group counts by its best expert, or by the sum of its best two where there is a bias. `renormalize`
    divides the weights by their sum; `scale` multiplies them last. Nothing is drawn at random: a router with jitter
    adds it to the logits.
    """
    choice = (k, num_groups, top_groups)
    return dispatch(  # type: ignore[no-any-return]
        TOPK_GATE, (router_logits, choice, scoring, renormalize, bias, scale), backend=backend
    )


def grouped_gemm(x: Tensor, weights: Tensor, group_sizes: Tensor, *, backend: str | None = None) -> Tensor:
    """Rows of x [T, K], group after group, times weights [E, N, K] transposed: [T, N].

    The first `group_sizes[0]` rows meet `weights[0]`, the next `group_sizes[1]` meet `weights[1]`, and so on; a group
    may be empty. Rows beyond the last group give zeros. Sizes that are negative or add up to more than T rows are
    refused on the CPU; on other devices they are not read, and the result is undefined.
    """
    return dispatch(GROUPED_GEMM, (x, weights, group_sizes), backend=backend)  # type: ignore[no-any-return]


def moe(
    x: Tensor,
    gate_up: Tensor | QuantizedTensor | PackedWeight,
    down: Tensor | QuantizedTensor | PackedWeight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    expert_offset: int = 0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float | None = None,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """x [T, H] through each token's experts, weighted and summed: [T, H].

    `gate_up` [E, 2 I, H] holds gate and up of every expert, the gate first ([E, I, H]: experts without a gate), `down`
    is [E, H, I]; `topk_weights` and `topk_ids` [T, k] come from `lz.topk_gate`. These E experts have the ids from
    `expert_offset` on; any other id (another rank's, or -1 for none) adds nothing, so the results of all ranks of an
    expert-parallel group add up to the whole. An id named twice by one token counts twice. The sum is taken in float32;
    autocast casts every floating input, the router's weights among them.

    `gate_up_bias` [E, 2 I] and `down_bias` [E, H] are added to each expert's products. With `interleaved` the rows of
    `gate_up` alternate, a gate and its up. `limit` bounds the gate from above and up on both sides. The activation
    "swigluoai" of gpt-oss is gate * sigmoid(alpha * gate) * (up + 1). A view of weights that are stored transposed
    will do: `gate_up.transpose(1, 2)`. Both weights may come from `lz.quantize`, in one format and granularity.
    """
    return dispatch(  # type: ignore[no-any-return]
        MOE,
        (
            x, gate_up, down, topk_weights, topk_ids, activation, expert_offset, gate_up_bias, down_bias, alpha, limit,
            interleaved,
        ),
        backend=backend,
    )  # fmt: skip


# -- what a call must be -------------------------------------------------------------------------------
def _whole(value: Any, name: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid("TYPE_INVALID", f"{name}: {type(value).__name__}", "an int")
    if not low <= value <= high:
        raise invalid("VALUE_INVALID", f"{name}={value}", f"{low} to {high}", f"{name}={value}")


def _describe_gate(call: Call) -> Context:
    logits, (k, num_groups, top_groups), scoring, renormalize, bias, scale = call.args
    logits = expect_rank(logits, "router_logits", (2,))
    tokens, experts = logits.shape
    if experts == 0:
        raise invalid("SHAPE_INVALID", str(tuple(logits.shape)), "[T, E >= 1]", "there are no experts")
    _whole(num_groups, "num_groups", 1, experts)
    if experts % num_groups:
        raise invalid("VALUE_INVALID", f"num_groups={num_groups}", f"a divisor of {experts}, the experts")
    _whole(top_groups, "top_groups", 1, num_groups)
    _whole(k, "k", 1, experts // num_groups * top_groups)
    if scoring not in SCORINGS:
        raise invalid("VALUE_INVALID", f"scoring {scoring!r}", SCORINGS)
    if not isinstance(renormalize, bool):
        raise invalid("TYPE_INVALID", f"renormalize: {type(renormalize).__name__}", "True or False")
    if not isinstance(scale, (int, float)):
        raise invalid("TYPE_INVALID", f"scale: {type(scale).__name__}", "a number")
    if not math.isfinite(scale):
        raise invalid("SCALE_INVALID", str(scale))
    expect_shape(bias, "bias", (experts,))
    needs = {f"scoring_{scoring}"}
    if bias is not None:
        check_floating(bias, "bias")
        check_devices(router_logits=logits, bias=bias)
        needs.add("choice_bias")
    if num_groups > 1:
        needs.add("expert_groups")
    dims = {"tokens": tokens, "experts": experts, "top_k": k, "groups": num_groups}
    return simple_context(call, "topk_gate", logits, {}, dims, needs)


def _describe_grouped(call: Call) -> Context:
    x, weights, sizes = call.args
    x, weights = expect_rank(x, "x", (2,)), expect_rank(weights, "weights", (3,))
    experts, n, k = weights.shape
    if x.shape[1] != k or not experts:
        raise invalid("SHAPE_INVALID", str(tuple(x.shape)), f"[T, {k}], 1 group or more", "x and weights disagree")
    index = expect_index(sizes, "group_sizes")
    expect_shape(sizes, "group_sizes", (experts,))
    check_devices(x=x, weights=weights, group_sizes=sizes)
    dims = {"tokens": x.shape[0], "experts": experts, "n": n, "k": k}
    made = simple_context(call, "grouped_gemm", x, {"weights": weights}, dims, index_dtype=index)
    return replace(made, strides=stride_class((x, weights)))


def _describe_moe(call: Call) -> Context:
    x, gate_up, down, shares, ids, activation, expert_offset, *biases, alpha, limit, interleaved = call.args
    x = expect_rank(x, "x", (2,))
    tokens, hidden = x.shape
    experts, rows, width = weight_shape(gate_up, "gate_up", 3)
    *outer, inner = weight_shape(down, "down", 3)
    if not experts or width != hidden:
        raise invalid("SHAPE_INVALID", str(tuple(gate_up.shape)), f"[E >= 1, 2 I, {hidden}]", "x and gate_up disagree")
    if outer != [experts, hidden]:
        raise invalid("SHAPE_INVALID", f"down {tuple(down.shape)}", f"({experts}, {hidden}, {inner})")
    needs = {gating(rows, inner, "gate_up")}
    needs.add("activation_swigluoai" if activation == "swigluoai" else check_activation(activation))
    needs |= _gate_options(activation, alpha, limit, interleaved, "gated" in needs)
    for bias, name, width in zip(biases, ("gate_up_bias", "down_bias"), (rows, hidden), strict=True):
        if bias is not None:
            expect_shape(bias, name, (experts, width))
            needs.add("expert_bias")
    index = expect_index(ids, "topk_ids")
    expect_rank(ids, "topk_ids", (2,))
    top_k = ids.shape[1]
    if not top_k:
        raise invalid("SHAPE_INVALID", str(tuple(ids.shape)), "k >= 1", "no expert per token")
    expect_shape(ids, "topk_ids", (tokens, top_k))
    expect_shape(shares, "topk_weights", (tokens, top_k))
    check_floating(expect_tensor(shares, "topk_weights"), "topk_weights")
    _whole(expert_offset, "expert_offset", -math.inf, math.inf)
    check_devices(x=x, topk_weights=shares, topk_ids=ids)
    dims = {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "inner": inner}
    others = {"gate_up_bias": biases[0], "down_bias": biases[1]}
    stored = [_stored(weight) for weight in (gate_up, down)]
    if stored[0] != stored[1]:
        raise invalid("VALUE_INVALID", f"gate_up {stored[0]}, down {stored[1]}", "two weights that are stored alike")
    if stored[0] != "plain":
        check_devices(x=x, down=getattr(down, "source", down).data)
        return quantized_context(call, "moe", x, gate_up, others, dims, needs, index_dtype=index)
    made = simple_context(call, "moe", x, {"gate_up": gate_up, "down": down, **others}, dims, needs, index_dtype=index)
    return replace(made, strides=stride_class((x, gate_up, down)))


def _stored(weight: Any) -> str:
    """How the numbers of a weight are stored, in words."""
    if isinstance(weight, Tensor):
        return "plain"
    source, act = getattr(weight, "source", weight), getattr(weight, "act", None)
    shifted = "" if source.zero_point is None else "shifted"
    words = source.fmt.value, "by", source.granularity, source.block_size, shifted, act
    return " ".join(str(word) for word in words if word)


def _gate_options(activation: str, alpha: Any, limit: Any, interleaved: Any, gated: bool) -> set[str]:
    """What the options of the gate ask of a kernel; experts without a gate take none of them."""
    if not isinstance(interleaved, bool):
        raise invalid("TYPE_INVALID", f"interleaved: {type(interleaved).__name__}", "True or False")
    for value, name in ((alpha, "alpha"), (limit, "limit")):
        if value is None and name == "limit":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid("TYPE_INVALID", f"{name}: {type(value).__name__}", "a number")
        if not math.isfinite(value) or value <= 0:
            raise invalid("VALUE_INVALID", f"{name}={value}", "a finite number above 0")
    asked = {"swigluoai": activation == "swigluoai", "clamped": limit is not None, "interleaved": interleaved}
    found = {name for name, wanted in asked.items() if wanted}
    if found and not gated:
        raise invalid("VALUE_INVALID", ", ".join(sorted(found)), "experts with a gate: gate_up [E, 2 I, H]")
    return found - {"swigluoai"}


def _canonical_gate(given: dict[str, Any]) -> tuple[Any, ...]:
    choice = (given["k"], given["num_groups"], given["top_groups"])
    return (given["router_logits"], choice, given["scoring"], given["renormalize"], given["bias"], given["scale"])


def _keywords_gate(args: tuple[Any, ...]) -> dict[str, Any]:
    names = ("router_logits", "k", "num_groups", "top_groups", "scoring", "renormalize", "bias", "scale")
    return dict(zip(names, (args[0], *args[1], *args[2:]), strict=True))


def _fake_gate(logits: Tensor, k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


TOPK_GATE = declare(
    function=topk_gate,
    fake=_fake_gate,
    arguments=("logits", "choice", "scoring", "renormalize", "bias", "scale"),
    input_kinds=("tensor", "object", "text", "flag", "tensor?", "number"),
    output_kind="tensors",
    describe=_describe_gate,
    reference="layerzero.backends.reference.moe:topk_gate",
    cost=Roofline(
        "element_bytes * tokens * experts + 4 * choice_bias * experts + 12 * tokens * top_k",
        "6 * tokens * experts",
    ),
    shapes={"shape": "tokens,experts", "top_k": "2", "groups": "1"},
    options=("top_k",),
    example="layerzero._ops.examples_rows:gate",
    keywords=_keywords_gate,
    growing=("tokens",),
    canonical=_canonical_gate,
)

GROUPED_GEMM = declare(
    function=grouped_gemm,
    fake=lambda x, weights, *rest: x.new_empty((x.shape[0], weights.shape[1])),
    plain="layerzero.backends.torch_native.moe:traced_grouped_gemm",
    describe=_describe_grouped,
    reference="layerzero.backends.reference.moe:grouped_gemm",
    cost=Roofline(
        "element_bytes * (tokens * (k + n) + experts * n * k) + index_bytes * experts",
        "2 * tokens * n * k",
    ),
    shapes={"shape": "tokens,k", "weight": "experts,n,k"},
    example="layerzero._ops.examples_rows:grouped_gemm",
    tolerance="gemm",
    growing=("tokens",),
    autocast=True,
)

MOE = declare(
    function=moe,
    fake=same,
    plain="layerzero.backends.torch_native.moe:traced_moe",
    describe=_describe_moe,
    reference="layerzero.backends.reference.moe:moe",
    cost=Roofline(
        "hidden * (2 * element_bytes * tokens + code_bytes * min(experts, tokens * top_k) * inner * (2 + gated)) "
        "+ (4 + index_bytes) * tokens * top_k",
        "2 * tokens * top_k * inner * hidden * (2 + gated)",
    ),
    shapes={"shape": "tokens,hidden", "weight": "experts,2*inner,hidden", "top_k": "2"},
    options=("top_k", "activation", "format", "granularity"),
    example="layerzero._ops.examples_rows:moe",
    tolerance="gemm",
    growing=("tokens",),
    autocast=True,
)

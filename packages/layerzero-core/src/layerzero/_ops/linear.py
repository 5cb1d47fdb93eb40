"""What stands in a feed-forward block and around it: `lz.linear` (x @ weight.T + bias, then an activation; the weight
may be quantized), the gated activations of SwiGLU, GeGLU and ReGLU, and `lz.embedding`: rows by id."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerzero._ops.signature import declare, dispatch, expect_below
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_index, expect_rank, expect_shape, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_devices, check_floating
from layerzero.model.op import Call, Op
from layerzero.model.shapes import gated

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
    n, k = weight_shape(weight, "weight", 2)
    if x.ndim == 0 or x.shape[-1] != k:
        raise invalid("SHAPE_INVALID", str(tuple(x.shape)), f"[..., {k}]", "x and weight disagree")
    expect_shape(bias, "bias", (n,))
    needs = {"bias"} if bias is not None else set()
    if activation is not None:
        needs.add(check_activation(activation))
    dims = {"rows": x.numel() // k if k else 0, "n": n, "k": k}
    if isinstance(weight, Tensor):
        return simple_context(call, "linear", x, {"weight": weight, "bias": bias}, dims, needs)
    return quantized_context(call, "linear", x, weight, {"bias": bias}, dims, needs)


def weight_shape(weight: Any, name: str, rank: int) -> tuple[int, ...]:
    """The shape of a weight, plain, quantized or packed, which must have so many axes."""
    from layerzero.model.packed import PackedWeight
    from layerzero.model.quant import QuantizedTensor

    if not isinstance(weight, (QuantizedTensor, PackedWeight)):
        expect_tensor(weight, name)
    if len(weight.shape) != rank:
        raise invalid("RANK_INVALID", len(weight.shape), str(rank), f"{name} has rank {len(weight.shape)}")
    return tuple(weight.shape)


def quantized_context(
    call: Call,
    op: str,
    x: Tensor,
    weight: Any,
    others: dict[str, Any],
    dims: dict[str, int],
    needs: set[str],
    **more: Any,
) -> Context:
    """Format, granularity and packing decide among kernels; the codes' own dtype does not."""
    source = getattr(weight, "source", weight)
    act = getattr(weight, "act", None)
    layout = getattr(weight, "layout", "plain")
    check_devices(input=x, weight=source.data, **others)
    needs.add("weight_only" if act is None else f"act_{act}")
    if source.zero_point is not None:
        needs.add("zero_point")
    if source.block_size is not None:
        dims["block"] = source.block_size
    more |= {"quant_format": source.fmt.value, "granularity": source.granularity}
    return simple_context(call, op, x, others, dims, needs, weight_layout=None if layout == "plain" else layout, **more)


LINEAR = declare(
    function=linear,
    fake=lambda x, weight, *rest: x.new_empty((*x.shape[:-1], weight.shape[0])),
    describe=_describe,
    reference="layerzero.backends.reference.feed_forward:linear",
    cost=Roofline("element_bytes * (rows * (k + n) + bias * n) + code_bytes * n * k", "2 * rows * n * k"),
    shapes={"shape": "*rows,k", "weight": "n,k"},
    options=("bias", "activation", "format", "granularity"),
    example="layerzero._ops.examples_rows:linear",
    tolerance="gemm",
    row_wise=(0,),
    growing=("rows",),
    autocast=True,
)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, backend: str | None = None) -> Tensor:
    """weight[ids]; the row of `padding_idx` (negative: counted from the end) receives no gradient.

    On the CPU an id outside the table is refused; other devices do not look (CUDA asserts on the device).
    """
    return dispatch(EMBEDDING, (ids, weight, padding_idx), backend=backend)  # type: ignore[no-any-return]


def _describe_embedding(call: Call) -> Context:
    ids, weight, padding_idx = call.args
    ids, weight = expect_tensor(ids, "ids"), expect_rank(weight, "weight", (2,))
    check_devices(ids=ids, weight=weight)
    word = check_floating(weight, "weight")
    index = expect_index(ids, "ids")
    vocab, hidden = weight.shape
    if padding_idx is not None and (type(padding_idx) is not int or not -vocab <= padding_idx < vocab):
        raise invalid("VALUE_INVALID", f"padding_idx {padding_idx!r}", f"an int from {-vocab} to {vocab - 1}")
    expect_below(ids, "ids", vocab)
    dims, needs = {"tokens": ids.numel(), "vocab": vocab, "hidden": hidden}, {"padding_idx": padding_idx is not None}
    return context_of(call, "embedding", word, dims, needs, (weight,), dtypes=(word,), rank=ids.ndim, index_dtype=index)


EMBEDDING = declare(
    function=embedding,
    fake=lambda ids, weight, *rest: weight.new_empty((*ids.shape, weight.shape[1])),
    torch_names=("embedding_lookup",),
    describe=_describe_embedding,
    reference="layerzero.backends.reference.feed_forward:embedding",
    cost=Roofline("tokens * (2 * element_bytes * hidden + index_bytes)", "0"),
    shapes={"shape": "*tokens", "weight": "vocab,hidden"},
    example="layerzero._ops.examples_rows:embedding",
    tolerance="exact",
    growing=("tokens",),
)


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


def _gated(function: Callable[..., Tensor]) -> Op:
    name = function.__name__
    return declare(
        function=function,
        fake=gated,
        describe=_describer(name),
        reference=f"layerzero.backends.reference.feed_forward:{name}",
        cost=Roofline("3 * element_bytes * rows * hidden", "8 * rows * hidden"),
        shapes={"shape": "*rows,2*hidden"},
        options=("approximate",) if name == "gelu_and_mul" else (),
        example="layerzero._ops.examples_rows:gated",
        tolerance="gemm",
        row_wise=(0,),
        growing=("rows",),
        fusable=True,
    )


SILU_AND_MUL = _gated(silu_and_mul)
GELU_AND_MUL = _gated(gelu_and_mul)
RELU_AND_MUL = _gated(relu_and_mul)

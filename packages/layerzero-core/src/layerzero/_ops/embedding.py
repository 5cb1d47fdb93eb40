"""`lz.embedding`: rows of a table by id."""

from __future__ import annotations

from torch import Tensor

from layerzero._ops.signature import dispatch, expect_below, register
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_index, expect_rank, expect_tensor
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_devices, check_floating
from layerzero.model.op import Call, Op


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, backend: str | None = None) -> Tensor:
    """weight[ids]; the row of `padding_idx` (negative: counted from the end) receives no gradient.

    On the CPU an id outside the table is refused; other devices do not look (CUDA asserts on the device).
    """
    return dispatch(EMBEDDING, (ids, weight, padding_idx), backend=backend)  # type: ignore[no-any-return]


def _describe(call: Call) -> Context:
    ids, weight, padding_idx = call.args
    ids, weight = expect_tensor(ids, "ids"), expect_tensor(weight, "weight")
    expect_rank(weight, "weight", (2,))
    check_devices(ids=ids, weight=weight)
    word = check_floating(weight, "weight")
    index = expect_index(ids, "ids")
    vocab, hidden = weight.shape
    if padding_idx is not None and (type(padding_idx) is not int or not -vocab <= padding_idx < vocab):
        raise invalid("VALUE_INVALID", f"padding_idx {padding_idx!r}", f"an int from {-vocab} to {vocab - 1}")
    expect_below(ids, "ids", vocab)
    dims, needs = {"tokens": ids.numel(), "vocab": vocab, "hidden": hidden}, {"padding_idx": padding_idx is not None}
    return context_of(call, "embedding", word, dims, needs, (weight,), dtypes=(word,), rank=ids.ndim, index_dtype=index)


EMBEDDING = register(
    Op(
        function=embedding,
        fake=lambda ids, weight, *rest: weight.new_empty((*ids.shape, weight.shape[1])),
        torch_names=("embedding_lookup",),
        describe=_describe,
        reference="layerzero.backends.reference.linear:embedding",
        cost=Roofline("tokens * (2 * element_bytes * hidden + index_bytes)", "0"),
        shapes={"shape": "*tokens", "weight": "vocab,hidden"},
        example="layerzero._ops.examples_rows:embedding",
        tolerance="exact",
        growing=("tokens",),
    )
)

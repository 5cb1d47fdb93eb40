"""`lz.sampling_probs`: the distribution that `lz.sample` draws from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero._ops.sampling import FILTERS, Number, check_filters, check_param
from layerzero._ops.signature import declare, dispatch
from layerzero.errors import invalid
from layerzero.model.checks import expect_rank, expect_shape, expect_vocabulary, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.op import Call


def sampling_probs(
    logits: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    temperature: Number = 1.0,
    backend: str | None = None,
) -> Tensor:
    """The probabilities `lz.sample` draws with, for logits [..., V]: filtered and renormalised, in the logits' shape.

    A parameter tensor has one value for each row, or one for each entry of the first axis. Temperature 0 puts all on
    the likeliest token. A row with a NaN, or with nothing but -inf, has no distribution and gives zeros. float64 for
    float64 logits, else float32; differentiable, the choice of the kept tokens aside.
    """
    check_filters(top_k, top_p, min_p)
    check_param(temperature, "temperature")
    args = _rows(logits, top_k, top_p, min_p, temperature)
    out: Tensor = dispatch(SAMPLING_PROBS, args, backend=backend)
    return out if logits.ndim == 2 else out.reshape(logits.shape)


def _rows(logits: Any, *params: Any) -> tuple[Any, ...]:
    """Logits as [rows, V], and parameter tensors of the first axis repeated for its rows."""
    if not isinstance(logits, Tensor) or logits.ndim <= 2:
        return (logits, *params)
    lead = tuple(logits.shape[:-1])

    def spread(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if tuple(item.shape) == lead:
            return item.reshape(-1)
        if tuple(item.shape) == lead[:1]:
            return item.reshape(-1, *(1,) * (len(lead) - 1)).expand(lead).reshape(-1)
        raise invalid("SHAPE_INVALID", f"of a parameter, {tuple(item.shape)},", f"the logits: {lead} or {lead[:1]}")

    return (logits.reshape(-1, logits.shape[-1]), *(spread(item) for item in params))


def _describe_probs(call: Call) -> Context:
    logits = expect_rank(call.args[0], "logits", (2,))
    rows, vocab = logits.shape
    expect_vocabulary(logits, "logits")
    given = dict(zip((*FILTERS, "temperature"), call.args[1:], strict=True))
    params = {name: item for name, item in given.items() if isinstance(item, Tensor)}
    for name, item in params.items():
        expect_shape(item, name, (rows,))
    needs = {f"sample_{name}" for name in FILTERS if given[name] is not None}
    if params:
        needs.add("tensor_params")
    dims = {"batch": rows, "vocab": vocab}
    return simple_context(call, "sampling_probs", logits, dict(params), dims, needs, mixed=True)


def _fake_probs(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


SAMPLING_PROBS = declare(
    function=sampling_probs,
    fake=_fake_probs,
    plain="layerzero.backends.reference.sampling:probs_of_rows",
    describe=_describe_probs,
    reference="layerzero.backends.reference.sampling:sampling_probs",
    cost=Roofline("2 * element_bytes * batch * vocab", "5 * batch * vocab"),
    shapes={"shape": "batch,vocab"},
    options=("top_k", "top_p"),
    example="layerzero._ops.examples_rows:sampling",
    row_wise=(0,),
    canonical=lambda a: _rows(a["logits"], a["top_k"], a["top_p"], a["min_p"], a["temperature"]),
)

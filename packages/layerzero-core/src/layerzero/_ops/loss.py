"""`lz.cross_entropy`: the loss of next-token prediction."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from layerzero._ops.signature import declare, dispatch, expect_below
from layerzero.errors import invalid
from layerzero.model.checks import expect_index, expect_shape, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import absent, check_counted
from layerzero.model.op import Call


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = ..., label_smoothing: float = ...,
    softcap: float | None = ..., z_loss: float = ..., reduction: str = ..., return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = ..., label_smoothing: float = ...,
    softcap: float | None = ..., z_loss: float = ..., reduction: str = ..., return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = ..., label_smoothing: float = ...,
    softcap: float | None = ..., z_loss: float = ..., reduction: str = ..., return_lse: bool,
    backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """logsumexp(logits) - logits[label]; logits are [..., vocab] (the classes stand last), labels [...] integers.

    The loss is accumulated and returned in float32 (float64 for float64 logits), also for bfloat16 logits. Rows whose
    label is `ignore_index` cost nothing and have no gradient; the mean is over the others, and 0 where there are none.
    `label_smoothing` gives its share of the target to all classes alike; `softcap` first makes logits
    softcap * tanh(logits / softcap), as Gemma does; `z_loss` adds z_loss * logsumexp² to every row that counts.
    `reduction` is "mean", "sum" or "none" (one loss a row). With `return_lse` the result is (loss, logsumexp of each
    row), which is what a vocabulary split over several devices is put together from.
    """
    args = (logits, labels, ignore_index, *absent(label_smoothing, z_loss, softcap), reduction, return_lse)
    return dispatch(CROSS_ENTROPY, args, backend=backend)  # type: ignore[no-any-return]


def _canonical(given: dict[str, Any]) -> tuple[Any, ...]:
    options = absent(given["label_smoothing"], given["z_loss"], given["softcap"])
    told = {**given, **dict(zip(("label_smoothing", "softcap", "z_loss"), options, strict=True))}
    return tuple(told[name] for name in CROSS_ENTROPY.arguments)


def _keywords(args: tuple[Any, ...]) -> dict[str, Any]:
    given = dict(zip(CROSS_ENTROPY.arguments, args, strict=True))
    return {**given, "label_smoothing": args[3] or 0.0, "z_loss": args[5] or 0.0}


def _fake(logits: Tensor, labels: Tensor, *rest: Any) -> Tensor | tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss = logits.new_empty(labels.shape if rest[4] == "none" else (), dtype=dtype)
    return (loss, logits.new_empty(labels.shape, dtype=dtype)) if rest[5] else loss


def _describe(call: Call) -> Context:
    logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction, return_lse = call.args
    logits, labels = expect_tensor(logits, "logits"), expect_tensor(labels, "labels")
    vocab = logits.shape[-1] if logits.ndim else 0
    if vocab == 0:
        raise invalid("SHAPE_INVALID", f"logits {tuple(logits.shape)}", "[..., vocab]")
    index = expect_index(labels, "labels")
    expect_shape(labels, "labels", tuple(logits.shape[:-1]))
    check_counted(ignore_index, reduction)
    expect_below(labels, "labels", vocab, but=ignore_index)
    needs = {
        "label_smoothing": label_smoothing is not None,
        "softcap": softcap is not None,
        "z_loss": z_loss is not None,
        "lse": bool(return_lse),
        "lse_backward": bool(return_lse) and call.needs_grad,
    }
    dims = {"rows": labels.numel(), "vocab": vocab}
    wanted = [name for name, needed in needs.items() if needed]
    return simple_context(call, "cross_entropy", logits, {"labels": labels}, dims, wanted, index_dtype=index)


CROSS_ENTROPY = declare(
    function=cross_entropy,
    fake=_fake,
    lowered={"label_smoothing": "absent for 0", "z_loss": "absent for 0"},
    output_kind="tensors",
    describe=_describe,
    reference="layerzero.backends.reference.loss:cross_entropy",
    cost=Roofline("element_bytes * rows * vocab + (index_bytes + 4) * rows", "4 * rows * vocab"),
    shapes={"shape": "*rows,vocab"},
    options=("softcap", "lse",),
    example="layerzero._ops.examples_rows:cross_entropy",
    keywords=_keywords,
    growing=("rows",),
    canonical=_canonical,
    keyed="TTNYAYWWW",
)  # fmt: skip

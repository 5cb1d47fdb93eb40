"""`lz.ops.linear_cross_entropy`: the head of a language model and its loss in one op, declared here and nowhere else.

The logits of a training step are its largest tensor. Whoever computes head and loss together needs only some rows of
them at a time, forward and backward: the baseline in plain torch does so, and so do the kernels of other backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference.loss import cross_entropy
from layerzero.backends.reference.precision import computable, compute_dtype, no_autocast
from layerzero.errors import invalid
from layerzero.model.checks import expect_index
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_softcap
from layerzero.plugin import Call, Context, Op, expect_rank, expect_shape, expect_tensor, simple_context

_CHUNK = 1 << 26  # logits at a time: 256 MiB in float32
_WIDENED = "max(4, element_bytes) * (rows + vocab) * hidden"  # bytes of x and weight where a CPU multiplies them wide


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float | None = None,
    softcap: float | None = None,
    z_loss: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`lz.cross_entropy` of the logits x @ weight.T + bias: x [..., hidden], weight [vocab, hidden], labels [...].

    The options are those of `lz.cross_entropy`; the loss is float32 (float64 for float64).
    """
    wide = compute_dtype(x, weight, bias)
    rest = (ignore_index, label_smoothing, softcap, z_loss, reduction)
    with no_autocast(x.device.type):
        return by_compiler(x.to(wide), weight.to(wide), labels, bias, *rest)


def by_compiler(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The same in a compiled graph: the product in the dtype of x, as in a model's own head, its loss in float32."""
    logits = _logits(x, weight, bias, None, compute_dtype(x, weight, bias))
    loss = cross_entropy(logits, labels, *(*rest, False))
    assert isinstance(loss, Tensor)
    return loss


def by_chunks(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, *rest: Any) -> Tensor:
    """The same, some rows of the logits at a time; the backward computes them again."""
    label_smoothing, softcap, z_loss, reduction = rest
    targets = labels.reshape(-1).to(torch.int64)
    options = (ignore_index, label_smoothing or 0.0, softcap, z_loss or 0.0)
    loss: Tensor = _Rows.apply(*computable(x.reshape(-1, x.shape[-1]), weight), bias, targets, *options)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss.reshape(labels.shape)
    total = loss.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp(min=1)


class _Rows(torch.autograd.Function):
    """One loss a row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, smoothing: float,
        softcap: float | None, z_loss: float,
    ) -> Tensor:  # fmt: skip
        counted = labels != ignore_index
        index = torch.where(counted, labels, 0)
        wide = compute_dtype(x, weight, bias)
        lse = torch.empty(x.shape[0], dtype=wide, device=x.device)
        loss = torch.empty_like(lse)
        for rows in _chunks(x, weight):
            logits = _logits(x[rows], weight, bias, softcap, wide)
            lse[rows] = torch.logsumexp(logits, dim=-1)
            hit = logits.gather(-1, index[rows].unsqueeze(-1)).squeeze(-1)
            if smoothing:
                hit = (1.0 - smoothing) * hit + smoothing * logits.mean(dim=-1)
            loss[rows] = lse[rows] - hit
        if z_loss:
            loss = loss + z_loss * lse.square()
        ctx.save_for_backward(x, weight, bias, index, counted, lse)
        ctx.options = smoothing, softcap, z_loss
        return torch.where(counted, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, index, counted, lse = ctx.saved_tensors
        smoothing, softcap, z_loss = ctx.options
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: that of the reference
            labels = torch.where(counted, index, -100)
            loss = linear_cross_entropy(x, weight, labels, bias, -100, smoothing, softcap, z_loss, "none")
            wanted = [item for item, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(loss, wanted, grads[0], create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), *(None,) * 5
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        above = torch.where(counted, grads[0], 0.0)
        wide = lse.dtype
        of_x = torch.empty_like(x) if to_x else None
        of_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
        of_bias = torch.zeros_like(bias, dtype=wide) if to_bias else None
        for rows in _chunks(x, weight):
            logits = _logits(x[rows], weight, bias, softcap, wide)
            grad = torch.exp(logits - lse[rows, None]) * (1.0 + 2.0 * z_loss * lse[rows, None])
            hit = torch.full_like(lse[rows, None], smoothing - 1.0)
            grad = grad.scatter_add_(-1, index[rows].unsqueeze(-1), hit) - smoothing / weight.shape[0]
            grad = grad * above[rows, None]
            if softcap is not None:
                grad = grad * (1.0 - (logits / softcap).square())
            if of_bias is not None:
                of_bias += grad.sum(dim=0)
            narrow = grad.to(x.dtype)
            if of_x is not None:
                of_x[rows] = narrow @ weight.to(x.dtype)
            if of_weight is not None:
                of_weight += narrow.T @ x[rows]
        return (
            of_x,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _chunks(x: Tensor, weight: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(1, weight.shape[0]))
    return [slice(begin, begin + step) for begin in range(0, x.shape[0], step)]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, wide: torch.dtype) -> Tensor:
    logits = (x @ weight.to(x.dtype).T).to(wide)
    if bias is not None:
        logits = logits + bias.to(wide)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _describe(call: Call) -> Context:
    x, weight, labels, bias, ignore_index, smoothing, softcap, z_loss, reduction = call.args
    x, weight, labels = expect_tensor(x, "x"), expect_tensor(weight, "weight"), expect_tensor(labels, "labels")
    expect_rank(weight, "weight", (2,))
    vocab, hidden = weight.shape
    if not x.ndim or x.shape[-1] != hidden or not vocab:
        raise invalid("SHAPE_INVALID", f"x {tuple(x.shape)}, weight {tuple(weight.shape)}", "[..., H] and [V, H]")
    index = expect_index(labels, "labels")
    expect_shape(labels, "labels", tuple(x.shape[:-1]))
    expect_shape(bias, "bias", (vocab,))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise invalid("TYPE_INVALID", f"ignore_index: {type(ignore_index).__name__}", "an integer")
    if reduction not in ("mean", "sum", "none"):
        raise invalid("VALUE_INVALID", f"reduction {reduction!r}", "mean, sum or none")
    if smoothing is not None and not 0.0 <= smoothing <= 1.0:
        raise invalid("VALUE_INVALID", f"label_smoothing {smoothing!r}", "a number in [0, 1]")
    if z_loss is not None and not 0.0 <= z_loss < float("inf"):
        raise invalid("VALUE_INVALID", f"z_loss {z_loss!r}", "a finite number >= 0")
    check_softcap(softcap)
    needs = {
        "bias": bias is not None,
        "label_smoothing": smoothing is not None,
        "softcap": softcap is not None,
        "z_loss": z_loss is not None,
        "per_row": reduction == "none",
    }
    dims = {"rows": labels.numel(), "hidden": hidden, "vocab": vocab}
    others = {"weight": weight, "bias": bias, "labels": labels}
    wanted = [name for name, needed in needs.items() if needed]
    return simple_context(call, "linear_cross_entropy", x, others, dims, wanted, index_dtype=index, mixed=True)


def _fake(x: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(labels.shape if rest[-1] == "none" else (), dtype=dtype)


def _example(draw: Any) -> tuple[Any, ...]:
    """Hidden states, a head of which a row is about as long as they are, and labels of which some do not count."""
    needs = draw.ctx.needs
    rows, hidden, vocab = draw.size("rows"), draw.size("hidden"), draw.size("vocab")
    labels = draw.integers(vocab, rows, dtype=draw.index())
    labels = labels.masked_fill(draw.uniform(rows) < 0.2, -100)
    weight = draw.leaf(draw.normal(vocab, hidden, scale=hidden**-0.5))
    bias = draw.leaf(draw.normal(vocab)) if "bias" in needs else None
    usual = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}
    options = (draw.choice(name, value) if name in needs else None for name, value in usual.items())
    return (draw.main(rows, hidden), weight, labels, bias, -100, *options, "none" if "per_row" in needs else "mean")


LINEAR_CROSS_ENTROPY = Op(
    function=linear_cross_entropy,
    describe=_describe,
    features=("bias", "label_smoothing", "softcap", "z_loss", "per_row"),
    sizes={"rows": (5, 33), "hidden": (16, 64), "vocab": (40, 300)},
    example=_example,
    fake=_fake,
    plain=by_compiler,
    baseline="layerzero_models.linear_loss:by_chunks",
    cost=Roofline("element_bytes * (rows * hidden + vocab * hidden) + 12 * rows", "2 * rows * hidden * vocab"),
    workspace="16 * rows * vocab",
    baseline_workspace=f"16 * min(rows * vocab, max(vocab, {_CHUNK})) + {_WIDENED} + 64 * rows",
    tolerance="gemm",
    autocast=True,
    growing=("rows",),
)

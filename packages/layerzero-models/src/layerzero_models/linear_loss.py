"""`lz.ops.linear_cross_entropy`: the head of a language model and its loss in one op, declared here and nowhere else.

The logits of a training step are its largest tensor. Whoever computes head and loss together needs only some rows of
them at a time, forward and backward: the baseline in plain torch does so, and so do the kernels of other backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from layerzero.backends.reference.loss import cross_entropy
from layerzero.backends.reference.precision import computable, compute_dtype, no_autocast
from layerzero.errors import invalid
from layerzero.model.checks import expect_index
from layerzero.model.cost import Roofline
from layerzero.model.describe import absent, check_counted
from layerzero.plugin import Call, Context, Op, expect_rank, expect_shape, expect_tensor, simple_context

_CHUNK = 1 << 26  # logits at a time: 256 MiB in float32
_PIECE = 1 << 29  # logits at a time in a compiled graph, where they have the dtype of x
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
    logits = _logits(x, weight, bias, compute_dtype(x, weight, bias))
    loss = cross_entropy(logits, labels, *(*rest, False))
    assert isinstance(loss, Tensor)
    return loss


def in_graph(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The same in a compiled graph with a gradient: of many logits some at a time, their gradient beside the loss."""
    ignore_index, *options, reduction = rest
    plain = bias is None and options == [None, None, None] and reduction != "none" and x.dtype is weight.dtype
    plain = plain and x.requires_grad and weight.requires_grad
    if not plain or not statically_known_true(labels.numel() * weight.shape[0] > _PIECE):
        return by_compiler(x, weight, labels, bias, *rest)
    targets = labels.reshape(-1)
    total: Tensor = _Beside.apply(x.reshape(-1, x.shape[-1]), weight, targets, ignore_index)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp(min=1)


class _Beside(torch.autograd.Function):
    """The sum of the losses, for a compiler: its gradients are those of a sum and wait for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        rows, vocab = x.shape[0], weight.shape[0]
        pieces = -(-rows * vocab // _PIECE)
        wide = compute_dtype(x, weight)
        total, of_x, of_weight = x.new_zeros((), dtype=wide), [], None
        for part, label in zip(x.chunk(pieces), labels[:, None].chunk(pieces), strict=True):
            counted = label != ignore_index
            logits = _logits(part, weight, None, wide)
            lse = torch.logsumexp(logits, dim=-1, keepdim=True)
            hit = torch.arange(vocab, device=x.device) == label
            total = total + torch.where(counted, lse - torch.where(hit, logits, 0.0).sum(-1, keepdim=True), 0.0).sum()
            grad = torch.where(counted, torch.exp(logits - lse) - hit.to(wide), 0.0).to(x.dtype)
            of_x.append(grad @ weight)
            of_weight = grad.T @ part if of_weight is None else torch.addmm(of_weight, grad.T, part)
        ctx.save_for_backward(torch.cat(of_x), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        return *(grad * above[0].to(grad.dtype) for grad in ctx.saved_tensors), None, None


def by_chunks(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The same, some rows of the logits at a time; the backward computes them again."""
    *options, reduction = rest
    targets = labels.reshape(-1)
    loss: Tensor = _Rows.apply(*computable(x.reshape(-1, x.shape[-1]), weight), bias, targets, (*options, "none"))  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss.reshape(labels.shape)
    total = loss.sum()
    return total if reduction == "sum" else total / (targets != options[0]).sum().clamp(min=1)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, labels)
        ctx.options = options
        return torch.cat([by_compiler(x[rows], weight, labels[rows], bias, *options) for rows in _chunks(x, weight)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, labels = ctx.saved_tensors
        given = (x, weight, bias)
        places = [place for place in range(3) if ctx.needs_input_grad[place]]
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: that of the reference
            loss = linear_cross_entropy(x, weight, labels, bias, *ctx.options)
            found = torch.autograd.grad(loss, [given[place] for place in places], grads[0], create_graph=True)
            back = dict(zip(places, found, strict=True))
            return *(back.get(place) for place in range(3)), None, None
        # those of weight and bias are summed up in the dtype of the loss
        sums = {place: torch.zeros_like(given[place], dtype=grads[0].dtype if place else None) for place in places}
        for rows in _chunks(x, weight):
            parts: list[Any] = [item if item is None else item.detach() for item in (x[rows], weight, bias)]
            wanted = [parts[place].requires_grad_() for place in places]
            with torch.enable_grad():
                loss = by_compiler(parts[0], parts[1], labels[rows], parts[2], *ctx.options)
            for place, grad in zip(places, torch.autograd.grad(loss, wanted, grads[0][rows]), strict=True):
                (sums[place] if place else sums[place][rows]).add_(grad)
        return *(sums[place].to(given[place].dtype) if place in sums else None for place in range(3)), None, None


def _chunks(x: Tensor, weight: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(1, weight.shape[0]))
    return [slice(begin, begin + step) for begin in range(0, max(1, x.shape[0]), step)]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    logits = (x @ weight.to(x.dtype).T).to(wide)
    return logits if bias is None else logits + bias.to(wide)


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
    check_counted(ignore_index, reduction)
    absent(smoothing or 0.0, z_loss or 0.0, softcap)
    given = {"bias": bias, "label_smoothing": smoothing, "softcap": softcap, "z_loss": z_loss}
    wanted = [name for name, item in given.items() if item is not None]
    if reduction == "none":
        wanted.append("per_row")
    dims = {"rows": labels.numel(), "hidden": hidden, "vocab": vocab}
    others = {"weight": weight, "bias": bias, "labels": labels}
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
    plain=in_graph,
    baseline="layerzero_models.linear_loss:by_chunks",
    cost=Roofline("element_bytes * (rows * hidden + vocab * hidden) + 12 * rows", "2 * rows * hidden * vocab"),
    workspace="16 * rows * vocab",
    baseline_workspace=f"16 * min(rows * vocab, max(vocab, {_CHUNK})) + {_WIDENED} + 64 * rows",
    tolerance="gemm",
    autocast=True,
    growing=("rows",),
)

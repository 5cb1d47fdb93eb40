"""The parity gate: no kernel is timed before its result is the reference's, on the very tensors it will be timed on.

A kernel that is right is returned with its largest error; one that is wrong with the reason, and it is not measured.
Forward results are compared piece by piece in float64 (`pieces`); where a gradient is asked for, gradients too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import from_outside
from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.model.quant import QuantizedTensor
from layerzero.numerics import Tolerance, compare, tolerance
from layerzero.numerics.tolerances import dtype_name, full_float32
from layerzero.runtime.current import builtin_ops
from layerzero.tuning.inputs import Call
from layerzero.tuning.pieces import Piece, pieces

UNLIKELY = 1e-6  # a right kernel falls below this once in a million checks of its draws
_LEAST_EXPECTED = 5.0

# Numbers in the largest intermediate of the truth; beyond it pieces stand for the whole.
ROOM = {"cpu": 1 << 21, "cuda": 1 << 27}
_WIDEN = 1 << 28  # elements up to which inputs are widened to float64
_GRADIENT = {"float32": 1e-5}

Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a kernel is right, its largest error, and why it is not; None: nothing could be found out, and why."""

    ok: bool | None
    max_error: float = 0.0
    why: str = ""


def flat(result: Any) -> list[Tensor]:
    """The tensors of a result, in order; a quantized one by the values its codes stand for."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, QuantizedTensor):
        reference = builtin_ops["dequantize"].fallback_impl
        assert reference is not None
        return [reference(result, torch.float32)]
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, (tuple, list)):
        return [item for part in result for item in flat(part)]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return [item for part in dataclasses.fields(result) for item in flat(getattr(result, part.name))]
    return []


def truth(op: OperationSpec, args: tuple[Any, ...]) -> Any:
    """The right result for canonical arguments: the op's own `truth`, else its reference, on the numbers in float64.

    Codes, copies and conversions are defined on the numbers as they are given: wider ones would round elsewhere.
    """
    formula = getattr(op, "truth", None) or op.fallback_impl
    assert callable(formula), f"op {op.op_id} has no reference to compare with"
    if op.output_kind == "quantized" or getattr(op, "tolerance", "") == "exact":
        return formula(*args)
    return formula(*(item.double() if computed(item) else item for item in args))


class Gate:
    """The truth of one call, computed once and asked for every kernel. `call()` makes the same inputs anew."""

    def __init__(self, spec: OperationSpec, ctx: Context, call: Callable[[], Call]) -> None:
        self._spec = spec
        self._ctx = ctx
        self._call = call
        self._room = ROOM.get(ctx.device.device_type, ROOM["cpu"])
        given = call()
        self._parts: list[tuple[Piece, list[Tensor]]] = []
        self._grads: list[Tensor] | None = None
        # computed wide, whatever autocast would make of it
        with full_float32(), torch.autocast(ctx.device.device_type, enabled=False):
            with torch.no_grad():
                for piece in pieces(ctx, given.args, self._room):
                    self._parts.append((piece, flat(self._reference(piece.op, piece.args))))
                self._dtypes = [item.dtype for item in flat(self._reference(piece.op, piece.args, wide=False))]
            if ctx.needs_grad and self._affordable(given.args):
                wide = tuple(_leaf(item) for item in given.args)
                self._grads = gradients(self._reference(spec.op_id, wide, wide=False), wide)

    def check(self, kernel: KernelSpec | None, run: Run) -> Verdict:
        """Run a kernel, or None: torch's own code, on fresh inputs and compare. What it raises is an answer, too."""
        try:
            with full_float32():
                return self._compared(kernel, run)
        except Exception as error:
            if from_outside(error):
                raise
            return Verdict(False, why=f"{type(error).__name__}: {error}")

    # -- the truth -----------------------------------------------------------------------------------
    def _reference(self, op: str, args: tuple[Any, ...], *, wide: bool = True) -> Any:
        spec = self._spec if op == self._spec.op_id else builtin_ops[op]
        if wide and _size(args) <= _WIDEN:
            return truth(spec, args)
        assert spec.fallback_impl is not None
        return spec.fallback_impl(*args)

    def _affordable(self, args: tuple[Any, ...]) -> bool:
        """Gradients are sums over everything, so they have no pieces: they are checked where the whole is small."""
        ctx, size = self._ctx, _size(args)
        if ctx.op == "attention":
            sizes = dict(ctx.dims)
            size = sizes["batch"] * sizes["num_heads"] * sizes["seq_len_q"] * sizes["seq_len_k"]
        elif len(self._parts) > 1 or any(part.args is not args for part, _ in self._parts):
            return False
        return size <= self._room

    # -- comparing -----------------------------------------------------------------------------------
    def _compared(self, kernel: KernelSpec | None, run: Run) -> Verdict:
        args = self._call().args
        result = run(*args)
        got = [item.detach() for item in flat(result)]
        if self._ctx.autocast is None and any(a.dtype != b for a, b in zip(got, self._dtypes, strict=False)):
            return Verdict(False, why=f"results of {[item.dtype for item in got]}, expected {self._dtypes}")
        worst = 0.0
        for piece, want in self._parts:
            found = piece.take(got)
            if len(found) != len(want):
                return Verdict(False, why=f"{len(found)} results, expected {len(want)}")
            for left, right in zip(found, want, strict=True):
                report = compare(left, right, self._bound(kernel, left, args))
                worst = max(worst, report.max_abs)
                if not report.ok:
                    return Verdict(False, worst, _words(report))
        if self._grads is None:
            return Verdict(True, worst)
        for left, right in zip(gradients(result, args), self._grads, strict=True):
            largest = float(right.abs().max()) if right.numel() else 0.0
            report = compare(left, right, self._gradient_bound(kernel, left, largest))
            if not report.ok:
                return Verdict(False, worst, f"gradient: {_words(report)}")
        return Verdict(True, worst)

    def _declared(self, kernel: KernelSpec | None) -> float:
        """The error a kernel itself declares, for the dtype or the format of the call."""
        bounds = {} if kernel is None else dict(kernel.error_bounds)
        return max(bounds.get(self._ctx.dtype, 0.0), bounds.get(self._ctx.quant_format or "", 0.0))

    def _bound(self, kernel: KernelSpec | None, result: Tensor, args: tuple[Any, ...]) -> Tolerance:
        op = self._spec.stands_for or self._spec.op_id
        word = self._ctx.dtype if self._ctx.autocast is None else dtype_name(result.dtype)
        if self._spec.output_kind == "quantized":
            word = self._ctx.quant_format or word
        row = tolerance(op, word, k=reduction(args))
        declared = self._declared(kernel)
        return Tolerance(max(row.rtol, declared), max(row.atol, declared), row.hit_ratio, row.mode, row.ulps)

    def _gradient_bound(self, kernel: KernelSpec | None, found: Tensor, largest: float) -> Tolerance:
        op = self._spec.stands_for or self._spec.op_id
        word = max(self._ctx.dtype, dtype_name(found.dtype), key=lambda name: torch.finfo(getattr(torch, name)).eps)
        row = tolerance(op, word)
        base = tolerance("gradient", word) if row.exact else row
        rtol = max(_GRADIENT.get(word, base.rtol), self._declared(kernel))
        return Tolerance(rtol, rtol * max(1.0, largest), base.hit_ratio, base.mode, base.ulps)


def computed(item: Any) -> bool:
    """A floating tensor of numbers; storage formats (float8) are codes to be read."""
    return isinstance(item, Tensor) and item.is_floating_point() and item.element_size() > 1


def _size(args: tuple[Any, ...]) -> int:
    return sum(item.numel() for item in args if isinstance(item, Tensor))


def _leaf(item: Any) -> Any:
    if not isinstance(item, Tensor) or not item.requires_grad:
        return item.double() if computed(item) else item
    return item.detach().double().requires_grad_()


def reduction(args: tuple[Any, ...]) -> int:
    """The length of the longest sum: the last axis of the first tensor, or of the second for a product."""
    return max([1, *(item.shape[-1] for item in args[:2] if isinstance(item, Tensor) and item.ndim)])


def gradients(result: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Gradients of the leaves; the outputs are weighed by numbers that every dtype holds exactly."""
    outs = []  # sums, whose gradients need no start: torch imports sympy for one that is given
    for item in flat(result):
        if item.is_floating_point() and item.requires_grad:
            place = torch.arange(item.numel(), device=item.device, dtype=torch.float32).reshape(item.shape)
            outs.append((item.float() * ((place % 9) / 4 - 1)).sum())  # not every dtype can be added up
    leaves = [item for item in args if isinstance(item, Tensor) and item.requires_grad and item.is_leaf]
    found = torch.autograd.grad(outs, leaves, allow_unused=True) if outs else (None,) * len(leaves)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def _words(report: Any) -> str:
    if not report.shape_ok:
        return f"shape {list(report.shape)}, expected {list(report.expected_shape)}"
    bound = report.tolerance
    return f"off by {report.max_abs:.3g} (allowed: {bound.atol:g} + {bound.rtol:g} of the value)"


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """The chance that draws from `probs` differ from it by as much as these counts do; 0 for an impossible token.

    Cells that expect fewer than five draws are taken together.
    """
    seen, share = counts.double().flatten().cpu(), probs.double().flatten().cpu()
    if seen.shape != share.shape:
        raise ValueError(f"{seen.numel()} counts for {share.numel()} probabilities")
    if bool((seen[share == 0] > 0).any()):
        return 0.0
    expected = share / share.sum() * seen.sum()
    rare = expected < _LEAST_EXPECTED
    seen = torch.cat((seen[~rare], seen[rare].sum().reshape(1)))
    expected = torch.cat((expected[~rare], expected[rare].sum().reshape(1)))
    full = expected >= _LEAST_EXPECTED
    freedom = int(full.sum()) - 1
    if freedom < 1:
        return 1.0
    statistic = ((seen - expected)[full].square() / expected[full]).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))

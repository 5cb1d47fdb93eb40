"""Compare a result with the truth and say, in numbers, how far off it is and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from layerzero.json_form import Plain
from layerzero.numerics.tolerances import HitMode, Tolerance

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_REL_EPS = 1e-8
_TOP = 5
_NUMBERS = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio", "used")


@dataclass(frozen=True, slots=True)
class ErrorLocation:
    """One of the worst elements."""

    index: tuple[int, ...]
    actual: float
    expected: float
    abs_error: float
    rel_error: float

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; NaN and infinities are written as words."""
        names = ("actual", "expected", "abs_error", "rel_error")
        return {"index": list(self.index), **{name: _number(getattr(self, name)) for name in names}}


@dataclass(frozen=True, slots=True)
class ErrorReport(Plain):
    """What a comparison found. Metrics cover the elements that are finite on both sides.

    `used` is how much of its bounds the comparison used: 1.0 is all of it. `worst` are the five largest errors, `first`
    is the first element in memory order that misses the bounds: the worst say how bad it is, the first where it begins.
    """

    ok: bool
    tolerance: Tolerance
    shape: tuple[int, ...]
    expected_shape: tuple[int, ...]
    dtype: str
    expected_dtype: str
    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0
    mean_rel: float = 0.0
    cosine: float = 1.0
    mse: float = 0.0
    hit_ratio: float = 1.0
    used: float = 0.0
    nan_mismatches: int = 0
    inf_mismatches: int = 0
    worst: tuple[ErrorLocation, ...] = field(default=())
    first: ErrorLocation | None = None
    _unshown: ClassVar = ("tolerance",)

    @property
    def shape_ok(self) -> bool:
        """Whether the shapes are equal; nothing else is compared when they are not."""
        return self.shape == self.expected_shape

    @property
    def dtype_ok(self) -> bool:
        """Whether the dtypes are equal. Not part of `ok`: the truth is often wider."""
        return self.dtype == self.expected_dtype

    @property
    def nan_agree(self) -> bool:
        return self.nan_mismatches == 0

    @property
    def inf_agree(self) -> bool:
        return self.inf_mismatches == 0

    @property
    def seen(self) -> str:
        """What was found, in words that stand before `allowed`: how far off, where, and how much of the result."""
        if not self.shape_ok:
            return f"shape {list(self.shape)}"
        parts = [f"{self.max_abs:.3g}"]
        if not self.nan_agree:
            parts.append(f"NaN in other places ({self.nan_mismatches} elements)")
        if not self.inf_agree:
            parts.append(f"infinities in other places ({self.inf_mismatches} elements)")
        if self.first is not None:
            spot = self.first
            parts.append(f"first {spot.actual:.6g} instead of {spot.expected:.6g} at {list(spot.index)}")
        parts.append(f"{1.0 - self.hit_ratio:.2%} of the elements out of bounds")
        return ", ".join(parts)

    @property
    def allowed(self) -> str:
        """What would have been right, in the words of the tolerance."""
        return str(self.tolerance) if self.shape_ok else f"shape {list(self.expected_shape)}"

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; NaN and infinities are written as words."""
        allowed = {"rtol": self.tolerance.rtol, "atol": self.tolerance.atol}
        return Plain.to_json(self) | {name: _number(getattr(self, name)) for name in _NUMBERS} | allowed

    def __str__(self) -> str:
        if not self.shape_ok:
            return f"FAIL: shape {list(self.shape)}, expected {list(self.expected_shape)}"
        tol = self.tolerance
        lines = [
            f"{'ok' if self.ok else 'FAIL'}: {self.dtype} {list(self.shape)} against {self.expected_dtype}",
            f"  abs error  max {self.max_abs:.3e}  mean {self.mean_abs:.3e}   (atol {tol.atol:g})",
            f"  rel error  max {self.max_rel:.3e}  mean {self.mean_rel:.3e}   (rtol {tol.rtol:g})",
            f"  cosine {self.cosine:.8f}  mse {self.mse:.3e}",
            f"  hit ratio {self.hit_ratio:.2%} (need {tol.hit_ratio:.2%}, mode {tol.mode.value})",
        ]
        if not self.nan_agree:
            lines.append(f"  NaN in different places: {self.nan_mismatches} elements")
        if not self.inf_agree:
            lines.append(f"  infinities in different places: {self.inf_mismatches} elements")
        if self.first is not None:
            spot = self.first
            lines.append(f"  first miss at {list(spot.index)}: {spot.actual:.6g}, expected {spot.expected:.6g}")
        lines += [
            f"  at {list(spot.index)}: {spot.actual:.6g}, expected {spot.expected:.6g}, off by {spot.abs_error:.3e}"
            for spot in self.worst
        ]
        return "\n".join(lines)


def compare(actual: Tensor, expected: Tensor, tol: Tolerance) -> ErrorReport:
    """Compare elementwise, in float64 on the device of `expected`.

    Equal NaNs and equal infinities are hits; any disagreement about them fails, whatever the hit ratio.
    """
    import torch

    shapes = (tuple(actual.shape), tuple(expected.shape))
    dtypes = (str(actual.dtype).removeprefix("torch."), str(expected.dtype).removeprefix("torch."))
    if shapes[0] != shapes[1]:
        return ErrorReport(False, tol, *shapes, *dtypes, hit_ratio=0.0)
    if expected.numel() == 0:
        return ErrorReport(True, tol, *shapes, *dtypes)

    device = torch.device("cpu") if expected.device.type == "mps" else expected.device
    act = actual.detach().to(device=device)
    exp = expected.detach().to(device=device)
    a, e = act.to(torch.float64), exp.to(torch.float64)
    if act.dtype.is_floating_point or exp.dtype.is_floating_point:
        gap = (a - e).abs()
    else:  # large integers differ in bits that float64 does not hold: subtract first, widen after
        gap = (act.to(torch.int64) - exp.to(torch.int64)).to(torch.float64).abs()
    rel = gap / (e.abs() + _REL_EPS)
    share = _share(gap, rel, e, tol, actual.dtype)
    hits = share <= 1.0
    a0, e0, shown = a, e, gap
    nan_count, inf_count, counted = 0, 0, gap.numel()
    if not bool(gap.isfinite().all()):  # rare: NaN and infinities take part in no metric, only in the verdict
        nan_wrong = a.isnan() != e.isnan()
        inf_wrong = (a.isinf() | e.isinf()) & (a != e) & ~nan_wrong
        finite = a.isfinite() & e.isfinite()
        gap, rel, share = (torch.where(finite, item, 0.0) for item in (gap, rel, share))
        hits = torch.where(finite, hits, ~(nan_wrong | inf_wrong))
        a0, e0 = torch.where(finite, a, 0.0), torch.where(finite, e, 0.0)
        shown = gap.masked_fill(nan_wrong | inf_wrong, math.inf)
        nan_count, inf_count = int(nan_wrong.sum()), int(inf_wrong.sum())
        counted = max(int(finite.sum()), 1)
    # Counted, not averaged: CUDA takes a mean as the sum times 1/n, and 1012 hits of 1012 are then less than all.
    hit_ratio = int(hits.count_nonzero()) / hits.numel()
    top, places = (found.tolist() for found in shown.flatten().topk(min(_TOP, shown.numel())))
    return ErrorReport(
        nan_count == 0 and inf_count == 0 and hit_ratio >= tol.hit_ratio,
        tol,
        *shapes,
        *dtypes,
        max_abs=gap.max().item(),
        mean_abs=gap.sum().item() / counted,
        max_rel=rel.max().item(),
        mean_rel=rel.sum().item() / counted,
        cosine=_cosine(a0.flatten(), e0.flatten()),
        mse=gap.square().sum().item() / counted,
        hit_ratio=hit_ratio,
        used=share.max().item() if tol.hit_ratio == 1.0 else (1.0 - hit_ratio) / (1.0 - tol.hit_ratio),
        nan_mismatches=nan_count,
        inf_mismatches=inf_count,
        worst=tuple(_spot(a, e, shown, at) for error, at in zip(top, places, strict=True) if error != 0.0),
        first=None if hit_ratio == 1.0 else _spot(a, e, shown, int((~hits).flatten().int().argmax())),
    )


def assert_close(
    actual: Any, expected: Any, tol: Tolerance, *, check_dtype: bool = False, path: str = "result"
) -> None:
    """Raise AssertionError with the full report unless everything in `actual` is close to `expected`.

    Recurses over tuples, lists and dicts; `path` names the place. Numbers are compared as 0-d tensors.
    """
    import torch

    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or set(actual) != set(expected):
            found = sorted(map(str, actual)) if isinstance(actual, Mapping) else type(actual).__name__
            raise AssertionError(f"{path}: keys {found}, expected {sorted(map(str, expected))}")
        for key in expected:
            assert_close(actual[key], expected[key], tol, check_dtype=check_dtype, path=f"{path}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        if not isinstance(actual, Sequence) or isinstance(actual, str) or len(actual) != len(expected):
            found = f"{len(actual)} items" if isinstance(actual, Sequence) else type(actual).__name__
            raise AssertionError(f"{path}: {found}, expected {len(expected)} items")
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_close(left, right, tol, check_dtype=check_dtype, path=f"{path}[{index}]")
    elif isinstance(expected, (torch.Tensor, int, float)):
        if not isinstance(actual, (torch.Tensor, int, float)):
            raise AssertionError(f"{path}: {type(actual).__name__}, expected {type(expected).__name__}")
        report = compare(torch.as_tensor(actual), torch.as_tensor(expected), tol)
        if not report.ok:
            raise AssertionError(f"{path}: {report}")
        if check_dtype and not report.dtype_ok:
            raise AssertionError(f"{path}: dtype {report.dtype}, expected {report.expected_dtype}")
    elif actual != expected:
        raise AssertionError(f"{path}: {actual!r}, expected {expected!r}")


def _share(gap: Tensor, rel: Tensor, expected: Tensor, tol: Tolerance, dtype: torch.dtype) -> Tensor:
    """Each error as a share of what is allowed there: up to 1 is a hit. No error is 0 even where none is allowed."""
    import torch

    if tol.mode is HitMode.EITHER:
        share = torch.minimum(_over(gap, tol.atol), _over(rel, tol.rtol))
    else:
        share = _over(gap, tol.atol + tol.rtol * expected.abs())
    if tol.ulps and dtype.is_floating_point:
        share = torch.minimum(share, _over(gap, tol.ulps * torch.finfo(dtype).eps * expected.abs()))
    return share


def _over(error: Tensor, allowed: Tensor | float) -> Tensor:
    return (error / allowed).masked_fill_(error == 0.0, 0.0)


def _cosine(a: Tensor, e: Tensor) -> float:
    import torch

    norms = torch.linalg.vector_norm(a).item() * torch.linalg.vector_norm(e).item()
    if norms == 0.0:
        return 1.0 if torch.equal(a, e) else 0.0
    return float(torch.dot(a, e).item() / norms)


def _spot(a: Tensor, e: Tensor, gap: Tensor, position: int) -> ErrorLocation:
    got, want, error = (x.flatten()[position].item() for x in (a, e, gap))
    # By hand: torch.unravel_index imports sympy, which takes a second.
    index = tuple(position // math.prod(e.shape[axis + 1 :]) % size for axis, size in enumerate(e.shape))
    return ErrorLocation(index, got, want, error, error / (abs(want) + _REL_EPS))


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)

"""The tolerance table: how far a kernel's result may lie from the reference, by op and dtype.

An op with a row of its own uses it; every other op uses the generic bounds of its dtype. FP8 and FP4 results cannot be
held to an elementwise bound, so there a share of the elements (the hit ratio) has to meet a loose one. The float32
rows assume TF32 off and a reference computed in a wider type.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layerzero.op_tables import OP_TABLES

if TYPE_CHECKING:
    import torch


class HitMode(enum.StrEnum):
    """When an element counts as a hit. The two definitions in use differ, so each has a name.

    COMBINED: |actual - expected| <= atol + rtol * |expected|, the allclose rule.
    EITHER:   a miss only if the absolute error exceeds atol and the relative error exceeds rtol.
    """

    COMBINED = "combined"
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds for one comparison.

    hit_ratio is the share of elements that has to lie within the bounds. `ulps` also admits a difference of that many
    units in the last place of the result's dtype: for rows whose bound is tighter than the spacing of the dtype, where
    two correct roundings of the same number would otherwise fail.
    """

    rtol: float
    atol: float
    hit_ratio: float = 1.0
    mode: HitMode = HitMode.COMBINED
    ulps: int = 0

    @property
    def exact(self) -> bool:
        return self.rtol == 0.0 and self.atol == 0.0 and self.hit_ratio == 1.0 and self.ulps == 0

    def __str__(self) -> str:
        if self.exact:
            return "no difference"
        joined = "+" if self.mode is HitMode.COMBINED else "or"
        text = f"{self.atol:g} {joined} {self.rtol:g} of the value"
        if self.ulps:
            text += f" or {self.ulps} ulp"
        return text if self.hit_ratio == 1.0 else f"{text}, in {self.hit_ratio:.2%} of the elements"


_EXACT = Tolerance(0.0, 0.0)
_HIT_RATIO = Tolerance(rtol=2e-1, atol=1e-1, hit_ratio=0.85)

_LOW_BIT_FLOATS = frozenset(
    {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "mxfp4", "nvfp4", "nf4", "float4_e2m1fn_x2"}
)
_QUANTIZED = _LOW_BIT_FLOATS | {"int8", "int4", "uint8"}
_INTEGERS = frozenset({"int4", "int8", "uint8", "int16", "int32", "int64", "bool"})

_ALIASES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "nvfp4",
}

_HALVES = {"float16": Tolerance(1e-3, 1e-3), "bfloat16": Tolerance(1e-2, 1e-2)}
_GENERIC = {**_HALVES, "float32": Tolerance(rtol=1e-4, atol=1e-5), "float64": Tolerance(rtol=1e-5, atol=1e-8)}
_ROWS: dict[str, dict[str, Tolerance]] = {
    "attention": {**_HALVES, "float32": Tolerance(1e-5, 1e-5), "int8": Tolerance(1e-2, 1e-2)},
    "norm": {**_HALVES, "float32": Tolerance(1e-6, 1e-6)},
    "gemm": {**_HALVES, "float32": Tolerance(1e-6, 1e-6)},
    "positional": {
        "float16": Tolerance(1e-4, 1e-4, ulps=1),
        "bfloat16": Tolerance(1e-3, 1e-3, ulps=1),
        "float32": Tolerance(1e-6, 1e-6),
    },
}

# Rows by other names than those of ops that say theirs (`Op.tolerance`).
_ROW_OF_OP = {"gemm": "gemm", "alibi": "positional"}

_DEFINITIONS = {
    "float32": Tolerance(1e-5, 1e-5),
    "float16": Tolerance(1e-3, 1e-3),
    "bfloat16": Tolerance(rtol=1e-2, atol=8e-3),
}


def dtype_name(dtype: torch.dtype | str) -> str:
    """One name for a dtype or a storage format: torch's own, or "mxfp4", "nvfp4", "nf4", "int4"."""
    name = str(dtype).removeprefix("torch.").lower()
    return _ALIASES.get(name, name)


def tolerance(op: str, dtype: torch.dtype | str, *, k: int | None = None, declared: float | None = None) -> Tolerance:
    """The bounds for the result of `op` in `dtype`.

    `k` is the length of the reduction of a matrix product: the float32 GEMM bound grows with sqrt(k), as the rounding
    error of a sum does. `declared` is the error a backend itself states for a quantized format: a matrix product of
    quantized weights has no bound of its own, so there the backend's word is taken, and held against it.
    """
    known = next((table[op] for table in OP_TABLES if op in table), None)
    name, row = dtype_name(dtype), _ROW_OF_OP.get(op, "") if known is None else known.tolerance
    if row == "exact":
        return _EXACT
    if declared is not None and name in _QUANTIZED and row == "gemm":
        return Tolerance(declared, declared)
    if name in _LOW_BIT_FLOATS:
        return _HIT_RATIO
    found = _ROWS.get(row, {}).get(name)
    if found is None:
        return _EXACT if name in _INTEGERS else _generic(name)
    if row == "gemm" and name == "float32" and k is not None and k > 1:
        growth = math.sqrt(k)
        return replace(found, rtol=found.rtol * growth, atol=found.atol * growth)
    return found


def classify(op: str, row: str) -> None:
    """Say which row of the table holds for an op of a plugin: one of the table's, or "exact"."""
    if row != "exact" and row not in _ROWS:
        raise ValueError(f"op {op!r}: no row {row!r} in the tolerance table; known: exact, {', '.join(_ROWS)}")
    _ROW_OF_OP[op] = row


def definition_tolerance(dtype: torch.dtype | str, *, mode: HitMode = HitMode.COMBINED, op_type: str = "") -> Tolerance:
    """The bounds of flashinfer-bench definitions against their ground truth.

    The default is the table of the definitions. `HitMode.EITHER` gives the rule of flashinfer-bench's own evaluator:
    1e-2 absolute or relative for every dtype, and 95 % of the elements for a mixture of experts in FP8.
    """
    name = dtype_name(dtype)
    if mode is HitMode.EITHER and name not in _INTEGERS:
        share = 0.95 if op_type.startswith("moe") and name in _LOW_BIT_FLOATS else 1.0
        return Tolerance(1e-2, 1e-2, share, mode)
    if name in _LOW_BIT_FLOATS:
        return _HIT_RATIO
    return _EXACT if name in _INTEGERS else _DEFINITIONS.get(name) or _generic(name)


def _generic(name: str) -> Tolerance:
    if name not in _GENERIC:
        raise ValueError(f"no tolerance for dtype {name!r}; known: {', '.join(sorted(_GENERIC | _ROWS['attention']))}")
    return _GENERIC[name]


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside the block float32 matrix products are computed in float32, on every device; then the settings return."""
    import torch

    # torch has an old and a new set of switches, and refuses to answer through the old ones once both were used.
    with ExitStack() as stack:
        try:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:
            for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
                stack.callback(setattr, switch, "fp32_precision", switch.fp32_precision)
                switch.fp32_precision = "ieee"
        yield

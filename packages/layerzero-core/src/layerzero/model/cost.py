"""What a call costs: the bytes it has to move and the operations it has to make, from its sizes alone.

Every input is read once and every result written once; of caches and tables only what the call looks at, of experts
only those that can be asked. No kernel is faster than that, so it is a floor in reports, and where nothing is measured
an estimate. A backward pass is not counted.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from layerzero.model.context import Context, element_bytes
from layerzero.model.enums import Causal
from layerzero.model.formula import Formula

_PACKED = frozenset({"int4", "mxfp4", "nvfp4", "nf4"})  # two codes a byte


class Cost(NamedTuple):
    """Bytes moved and floating-point operations of one call."""

    bytes: int
    flops: int


class Roofline:
    """The cost of an op as two formulas over its sizes.

    A word that `describe` may put among a call's needs is 1 where the call has it, else 0. Beside the sizes a formula
    may name `element_bytes`, `cache_bytes` and `index_bytes`, `code_bytes` (of a quantized weight, or of one as it is)
    and `keys_seen`: how many keys a query sees on average, behind a triangle and a window.
    """

    __slots__ = ("moved", "work")

    def __init__(self, moved: str, work: str) -> None:
        self.moved, self.work = moved, work

    def __call__(self, ctx: Context) -> Cost:
        def value(name: str) -> float:
            found = ctx.dim(name)
            if found is not None:
                return found
            derived = _DERIVED.get(name)
            return int(name in ctx.needs) if derived is None else derived(ctx)

        return Cost(_parsed(self.moved)(value), _parsed(self.work)(value))


_parsed = cache(Formula)


def _code_bytes(ctx: Context) -> float:
    if ctx.quant_format is None:
        return element_bytes(ctx.dtype)
    return 0.5 if ctx.quant_format in _PACKED else 1.0


def _keys_seen(ctx: Context) -> float:
    rows, keys = ctx.dim("seq_len_q") or 1, ctx.dim("seq_len_k") or 0
    seen = float(keys)
    if ctx.causal is not Causal.NONE:
        above = min(rows, keys) - 1  # in the last row of the triangle everything is seen
        seen = (above + 2) / 2 if ctx.causal is Causal.TOP_LEFT and rows < keys else keys - above / 2
    if ctx.window is not None:
        left, right = (keys if side < 0 else side for side in ctx.window)
        seen = min(seen, left + 1 + right)
    return max(seen, 0.0)


_DERIVED = {
    "cache_bytes": lambda ctx: element_bytes(ctx.kv_cache_dtype or ctx.dtype),
    "index_bytes": lambda ctx: element_bytes(ctx.index_dtype or "int64"),
    "head_dim_v": lambda ctx: ctx.dim("head_dim") or 0,
    "code_bytes": _code_bytes,
    "keys_seen": _keys_seen,
}

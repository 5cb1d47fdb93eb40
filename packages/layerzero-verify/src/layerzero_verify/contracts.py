"""Level 1, continued: promises that one comparison of numbers does not show.

Inputs stay as they were; nothing is remembered from one call to the next (a packed weight that went stale); a sliding
window hides what lies outside it; a paged cache is read in the layout that is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.packed import PackedWeight
from layerzero.numerics import Tolerance, compare
from layerzero.reasons import ReasonCode
from layerzero_verify.kernels import Bench, flat, guarded
from layerzero_verify.report import Check, failed, of_error
from layerzero_verify.testing.cases import Case, fit
from layerzero_verify.testing.cases_attention import attention, layouts_of, paged
from layerzero_verify.testing.kit import import_string

__all__ = ["CONTRACTS", "cache_layouts", "fresh", "packed", "untouched", "window"]

_SAME = Tolerance(0.0, 0.0)


def untouched(bench: Bench) -> Iterator[Check]:
    """The kernel leaves its inputs bit for bit as they were."""
    case = bench.plain()
    if case is None:
        return
    where = bench.at(case, "inputs")

    def check() -> Iterator[Check]:
        args = bench.arguments(case)
        before = [item.clone() for item in args if isinstance(item, Tensor)]
        with torch.no_grad():
            bench.call(args)
        for old, new in zip(before, (item for item in args if isinstance(item, Tensor)), strict=True):
            yield of_error(1, "inputs unchanged", compare(new, old, _SAME), detail="an input was changed", **where)

    yield from guarded("inputs unchanged", where, check)


def fresh(bench: Bench) -> Iterator[Check]:
    """The same tensors with new numbers in them, a weight after a training step, give the new result."""
    case = bench.plain()
    if case is None or bench.op.output_kind in ("ids", "text"):
        return
    where = bench.at(case, "weights rewritten in place")

    def check() -> Iterator[Check]:
        args = bench.arguments(case)
        with torch.no_grad():
            bench.call(args)
            for item in args:
                if isinstance(item, Tensor) and item.is_floating_point() and item.element_size() > 1:
                    item.mul_(-0.5).add_(0.125)
            got, want = flat(bench.call(args)), flat(bench.truth(args))
        bound = bench.bound(case, 64)
        for left, right in zip(got, want, strict=True):
            detail = "the result still belongs to the old numbers, or to no numbers at all"
            yield of_error(1, "no stale state", compare(left, right, bound), detail=detail, **where)

    yield from guarded("no stale state", where, check)


def packed(bench: Bench) -> Iterator[Check]:
    """A packed weight whose source was written to is packed again, or refused; its old parts are never used."""
    case = bench.plain()
    if case is None or bench.spec.packer is None or bench.spec.weight_layout is None:
        return
    where = bench.at(case, "packed weight, source rewritten")
    pack, layout = import_string(bench.spec.packer), bench.spec.weight_layout

    def check() -> Iterator[Check]:
        for again in (pack, None):
            x, weight, *rest = bench.arguments(case)
            source = weight.source
            given = PackedWeight(source, layout, pack(source), weight.act, again)
            args = (x, given, *rest)
            with torch.no_grad():
                bench.call(args)
                source.scale.mul_(-1.5)
                try:
                    got = flat(bench.call(args))[0]
                except InvalidInputError as refused:
                    if again is None and refused.code is ReasonCode.WEIGHT_PACK_STALE:
                        continue
                    raise
                want = flat(bench.truth((x, source, *rest)))[0]
            bound = bench.bound(case, x.shape[-1])
            detail = "the parts packed before the write were used"
            yield of_error(1, "packed weight", compare(got, want, bound), detail=detail, **where)

    yield from guarded("packed weight", where, check)


def window(bench: Bench) -> Iterator[Check]:
    """The sliding-window contract: what lies outside the window has no influence, what lies inside has."""
    if bench.op.op_id not in ("attention", "paged_attention"):
        return
    if "window" not in bench.spec.features:
        return
    case = _windowed(bench, "left 5", (5, 0))
    where = bench.at(case, "sliding window")
    yield from guarded("sliding window", where, lambda: _influence(bench, case, where))
    wide = _windowed(bench, "wider than the sequence", (64, 64))
    there = bench.at(wide, "sliding window")
    yield from guarded("sliding window", there, lambda: _wide_window(bench, wide, there))


def _dtype(bench: Bench) -> str:
    found = bench.plain()
    return found.dtype if found is not None else "float32"


def _windowed(bench: Bench, label: str, sides: tuple[int, int]) -> Case:
    if bench.op.op_id == "paged_attention":
        return paged.case(bench.spec, label, _dtype(bench), contexts=(19,), window=sides)
    return attention.case(bench.spec, label, _dtype(bench), batch=1, num_heads=2, window=sides)


def _influence(bench: Bench, case: Case, where: dict[str, str]) -> Iterator[Check]:
    """Rewrite the first keys and values: the last row, whose window begins later, stays; the first row changes."""
    args = bench.arguments(case)
    paged = bench.op.op_id == "paged_attention"
    with torch.no_grad():
        before = flat(bench.call(args))[0]
        key, value = args[1], args[2]
        if paged:
            page = int(args[3].block_tables[0, 0])
            layout = args[9]
            for cache in (key, value):
                (cache[page][:4] if layout == "NHD" else cache[page][:, :4]).add_(3.0)
        else:
            key[:, :, :4].add_(3.0)
            value[:, :, :4].add_(3.0)
        after = flat(bench.call(args))[0]
        want = flat(bench.truth(args))[0]
    last, first = (slice(None), slice(None)) if paged else ((0, slice(None), -1), (0, slice(None), 0))
    bound = bench.bound(case)
    detail = "keys outside the window changed the result"
    yield of_error(1, "sliding window", compare(after[last], before[last], bound), detail=detail, **where)
    if not paged and torch.equal(after[first], before[first]):
        yield failed(1, "sliding window", "keys inside the window have no influence", **where)
    yield of_error(1, "sliding window", compare(after, want, bound), **where)


def _wide_window(bench: Bench, case: Case, where: dict[str, str]) -> Iterator[Check]:
    """A window wider than the sequence is no window."""
    args = bench.arguments(case)
    same = bench.arguments(replace(case, given={**case.given, "window": None}))
    with torch.no_grad():
        got, want = flat(bench.call(args))[0], flat(bench.call(same))[0]
    bound = bench.bound(case)
    detail = "a window wider than the sequence changed the result"
    yield of_error(1, "sliding window", compare(got, want, bound), detail=detail, **where)


def cache_layouts(bench: Bench) -> Iterator[Check]:
    """Pages of as many tokens as there are heads: read in the wrong layout they give numbers, not an error."""
    if bench.op.op_id != "paged_attention":
        return
    page = fit(bench.spec, "page_size", 4)
    sizes = {"num_heads": page, "page_size": page, "contexts": (2 * page + 1, page)}
    for layout in layouts_of(bench.spec):
        case = paged.case(bench.spec, f"{layout}, square pages", _dtype(bench), kv_cache_layout=layout, **sizes)
        where = bench.at(case, "KV layout")

        def check(case: Case = case, where: dict[str, str] = where) -> Iterator[Check]:
            args = bench.arguments(case)
            with torch.no_grad():
                got, want = flat(bench.call(args))[0], flat(bench.truth(bench.arguments(case)))[0]
            bound = bench.bound(case)
            yield of_error(1, "KV layout", compare(got, want, bound), **where)

        yield from guarded("KV layout", where, check)


CONTRACTS = (untouched, fresh, packed, window, cache_layouts)

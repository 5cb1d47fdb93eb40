"""The gate before anything heavy (level 0), and promises that one comparison of numbers does not show (level 1).

Inputs stay as they were; nothing is remembered from one call to the next (a packed weight that went stale); a sliding
window hides what lies outside it; a paged cache is read in the layout that is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.bind import resolve
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.model.context import Context
from layerzero.model.enums import Layout
from layerzero.model.kernel import KernelSpec
from layerzero.model.packed import PackedWeight
from layerzero.reasons import ReasonCode
from layerzero.tuning.truth import flat
from layerzero_verify.kernels import SAME, Bench, Compared, guarded
from layerzero_verify.report import Check, Status, failed, skipped
from layerzero_verify.testing.cases import Case, cases_of, dtypes_of, fit
from layerzero_verify.testing.cases_attention import attention, layouts_of, paged
from layerzero_verify.testing.kit import import_string


# -- level 0 ---------------------------------------------------------------------------------------------
def sound(kernel: KernelSpec) -> str:
    """Why a kernel cannot be put on the bench at all; empty when it can."""
    if current_world().ops.get(kernel.op) is None:
        return f"no op {kernel.op!r} is known: register it with registrar.op, or correct the name"
    try:
        resolve(kernel)
    except LayerZeroError as error:
        return str(error)
    return ""


def contract(kernel: KernelSpec, device: torch.device) -> Iterator[Check]:
    """What can be said of a kernel without comparing a number."""
    where: dict[str, Any] = {"op": kernel.op, "kernel": kernel.kernel_id, "stage": "contract"}
    try:
        problem = sound(kernel) or _broken(kernel, Bench(kernel, device))
    except LayerZeroError as error:
        yield failed(0, "contract", error, **where)
        return
    if problem is None:
        words = ", ".join(sorted(kernel.dtypes))
        yield skipped(0, "contract", f"nothing to try it with: no case for {kernel.op} in {words}", **where)
        return
    yield failed(0, "contract", problem, **where) if problem else Check(0, "contract", Status.OK, **where)


def _broken(kernel: KernelSpec, bench: Bench) -> str | None:
    """What the kernel and its declaration disagree on, "" if nothing; None where there is no case to find out."""
    if kernel.op == "attention" and kernel.layouts not in ({Layout.BHSD}, {Layout.BSHD}):
        return "an attention kernel cannot see the layout: declare BHSD or BSHD"
    case = bench.plain()
    if case is None:
        known = kernel.op in PUBLIC and dtypes_of(kernel)
        return f"the conformance kit has no plain case for {kernel.op}" if known else None
    with bench.locked():
        decision = decide(bench.op, bench.described(bench.arguments(case)), current_world())
    if not decision.chosen:
        text = decision.refusal.message if decision.refusal is not None else "refused"
        return f"its own constraints refuse a plain call: {text}"
    for group in bench.groups(declared=False):
        # On equal lengths both causal triangles agree, so those calls are rightly accepted.
        case = None if group.name.startswith("causal") else next(cases_of(group, kernel), None)
        if case is not None and not kernel.check(_own_layout(bench, bench.arguments(case))):
            missing = ", ".join(sorted(group.requires - kernel.features))
            return f"{missing} is not declared, yet a call that needs it is accepted"
    return ""


def _own_layout(bench: Bench, args: tuple[Any, ...]) -> Context:
    """The call as selection would describe it, in the kernel's own layout."""
    if bench.op.op_id == "attention" and bench.spec.layouts == {Layout.BSHD}:
        swapped = tuple(item.transpose(1, 2).contiguous() for item in args[:3])
        return describe(bench.op, (*swapped, *args[3:]), "BSHD", None, current_world())
    return bench.described(args)


# -- level 1 ---------------------------------------------------------------------------------------------
Promise = Callable[[Bench], Iterator[Check]]
CONTRACTS: list[Promise] = []


def _plain(bench: Bench) -> Iterable[Case]:
    case = bench.plain()
    return () if case is None else (case,)


def _promise(
    name: str, stage: str, cases: Callable[[Bench], Iterable[Case]] = _plain
) -> Callable[[Callable[[Bench, Case], Iterator[Compared]]], Promise]:
    """A promise that is tried on some cases of a kernel, the plain one unless others are named."""

    def register(check: Callable[[Bench, Case], Iterator[Compared]]) -> Promise:
        def promise(bench: Bench) -> Iterator[Check]:
            for case in cases(bench):
                yield from guarded(name, bench.at(case, stage), check, bench, case)

        CONTRACTS.append(promise)
        return promise

    return register


@_promise("inputs unchanged", "inputs")
def _untouched(bench: Bench, case: Case) -> Iterator[Compared]:
    """The kernel leaves its inputs bit for bit as they were."""
    args = bench.arguments(case)
    before = [item.clone() if isinstance(item, Tensor) else None for item in args]
    with torch.no_grad():
        bench.call(args)
    for old, new in zip(before, args, strict=True):
        if old is not None:
            yield new, old, SAME, "an input was changed"


@_promise("no stale state", "weights rewritten in place")
def _fresh(bench: Bench, case: Case) -> Iterator[Compared]:
    """The same tensors with new numbers in them, a weight after a training step, give the new result."""
    if bench.op.output_kind in ("ids", "text"):
        return
    args = bench.arguments(case)
    with torch.no_grad():
        bench.call(args)
        for item, other in zip(args, case.arguments(bench.device, bench.seed + 1), strict=True):
            if isinstance(item, Tensor) and item.is_floating_point() and item.element_size() > 1:
                item.copy_(other).mul_(0.5)  # still a call of the op: decays stay below one, scales above zero
        got, want = flat(bench.call(args)), flat(bench.truth(args))
    for left, right in zip(got, want, strict=True):
        detail = "the result still belongs to the old numbers, or to no numbers at all"
        yield left, right, bench.bound(case, 64), detail


@_promise("packed weight", "packed weight, source rewritten")
def _packed(bench: Bench, case: Case) -> Iterator[Compared]:
    """A packed weight whose source was written to is packed again, or refused; its old parts are never used."""
    if bench.spec.packer is None or bench.spec.weight_layout is None:
        return
    pack = import_string(bench.spec.packer)
    for again in (pack, None):
        x, weight, *rest = bench.arguments(case)
        source = weight.source
        args = (x, PackedWeight(source, bench.spec.weight_layout, pack(source), weight.act, again), *rest)
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
        yield got, want, bench.bound(case, x.shape[-1]), "the parts packed before the write were used"


def _drawn(bench: Bench, label: str, **given: Any) -> Case:
    """A case of attention, dense or over pages, that belongs to no group."""
    found = bench.plain()
    dtype = found.dtype if found is not None else "float32"
    return (paged if bench.op.op_id == "paged_attention" else attention).case(bench.spec, label, dtype, **given)


def _windowed(bench: Bench, label: str, sides: tuple[int, int]) -> Iterator[Case]:
    sizes: dict[str, dict[str, Any]] = {
        "paged_attention": {"contexts": (19,)}, "attention": {"batch": 1, "num_heads": 2}
    }  # fmt: skip
    if bench.op.op_id in sizes and "window" in bench.spec.features:
        yield _drawn(bench, label, window=sides, **sizes[bench.op.op_id])


@_promise("sliding window", "sliding window", lambda bench: _windowed(bench, "left 5", (5, 0)))
def window(bench: Bench, case: Case) -> Iterator[Compared]:
    """Rewrite the first keys and values: the last row, whose window begins later, stays; the first row changes."""
    args = bench.arguments(case)
    over_pages = bench.op.op_id == "paged_attention"
    with torch.no_grad():
        before = flat(bench.call(args))[0]
        for cache in args[1:3]:
            rows = cache if not over_pages else cache[int(args[3].block_tables[0, 0])]
            (rows[:4] if over_pages and args[9] == "NHD" else rows[..., :4, :]).add_(3.0)
        after = flat(bench.call(args))[0]
        want = flat(bench.truth(args))[0]
    last, first = (slice(None), slice(None)) if over_pages else ((0, slice(None), -1), (0, slice(None), 0))
    if not over_pages and torch.equal(after[first], before[first]):
        raise ValueError("keys inside the window have no influence")
    yield after[last], before[last], bench.bound(case), "keys outside the window changed the result"
    yield after, want, bench.bound(case), ""


@_promise("sliding window", "sliding window", lambda bench: _windowed(bench, "wider than the sequence", (64, 64)))
def _wide_window(bench: Bench, case: Case) -> Iterator[Compared]:
    """A window wider than the sequence is no window."""
    args = bench.arguments(case)
    same = bench.arguments(replace(case, given={**case.given, "window": None}))
    with torch.no_grad():
        got, want = flat(bench.call(args))[0], flat(bench.call(same))[0]
    yield got, want, bench.bound(case), "a window wider than the sequence changed the result"


def _square_pages(bench: Bench) -> Iterator[Case]:
    if bench.op.op_id == "paged_attention":
        page = fit(bench.spec, "page_size", 4)
        sizes = {"num_heads": page, "page_size": page, "contexts": (2 * page + 1, page)}
        for layout in layouts_of(bench.spec):
            yield _drawn(bench, f"{layout}, square pages", kv_cache_layout=layout, **sizes)


@_promise("KV layout", "KV layout", _square_pages)
def _cache_layouts(bench: Bench, case: Case) -> Iterator[Compared]:
    """Pages of as many tokens as there are heads: read in the wrong layout they give numbers, not an error."""
    with torch.no_grad():
        got, want = flat(bench.call(bench.arguments(case)))[0], flat(bench.truth(bench.arguments(case)))[0]
    yield got, want, bench.bound(case), ""

"""Each kernel alone: the gate before anything heavy (level 0), forward and backward against float64 (level 1).

The calls are the conformance kit's cases, one for each declared capability; the op is locked to the kernel under test
and called through the real dispatch, adaptation of inputs included. The reference kernels themselves are held against
formulas written apart from them. Then come promises that one comparison of numbers does not show (`CONTRACTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from layerzero._ops.signature import PUBLIC, dispatch
from layerzero.dispatch.bind import resolve
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.model.context import Context
from layerzero.model.enums import Layout
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Op, OperationSpec
from layerzero.model.packed import PackedWeight
from layerzero.numerics import Tolerance, compare
from layerzero.numerics.tolerances import dtype_name
from layerzero.public.control import scoped
from layerzero.reasons import ReasonCode
from layerzero.tuning.truth import computed, flat, gradients, reduction, truth
from layerzero_verify.oracles import ORACLES
from layerzero_verify.report import Check, Status, failed, of_error, skipped
from layerzero_verify.testing.cases import Case, Group, cases_of, declare, dtypes_of, fit, load_cases
from layerzero_verify.testing.cases_attention import attention, layouts_of, paged
from layerzero_verify.testing.compositions import unkept
from layerzero_verify.testing.kit import import_string
from layerzero_verify.thresholds import gradient, kernel

SAME = Tolerance(0.0, 0.0)
# Result, truth, how close they have to be, and what a difference means beyond its numbers.
Compared: TypeAlias = tuple[Tensor, Tensor, Tolerance, str]
# Groups whose result is random: judged by what they promise, not by numbers.
_RANDOM = frozenset({"dropout", "sampling", "speculation"})


@dataclass(eq=False)
class Bench:
    """One kernel on the bench: its cases, its truth, and calls of it through dispatch.

    `dtype` restricts to one; `among` to some, for kernels that have one of them.
    """

    spec: KernelSpec
    device: torch.device
    seed: int = 0
    dtype: str | None = None
    among: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        op, known = current_world().ops.get(self.spec.op), dtypes_of(self.spec)
        assert op is not None
        if isinstance(op, Op):
            declare(op)
        self.op: OperationSpec = op
        self.dtypes = tuple(item for item in known if self.among is None or item in self.among) or known
        self.where: dict[str, Any] = {"op": self.spec.op, "kernel": self.spec.kernel_id}

    # -- cases ---------------------------------------------------------------------------------------
    def groups(self, *, declared: bool = True) -> Iterator[Group]:
        """Groups of cases whose features the kernel declares, or does not; a stand-in's are those of its op."""
        wanted = {self.op.op_id, self.op.stands_for}
        for groups in load_cases().values():
            for group in groups:
                if group.op in wanted and (group.requires <= self.spec.features) is declared:
                    yield group

    def cases(self, group: Group) -> Iterator[Case]:
        if self.dtype is not None:
            return cases_of(group, self.spec, [item for item in dtypes_of(self.spec) if item == self.dtype])
        return (case for case in cases_of(group, self.spec) if case.dtype in self.dtypes)

    def plain(self) -> Case | None:
        found = [group for group in self.groups() if group.name not in _RANDOM]
        ordered = sorted(found, key=lambda group: group.name != "result")
        return next((case for group in ordered for case in self.cases(group)), None)

    def arguments(self, case: Case) -> tuple[Any, ...]:
        return case.arguments(self.device, self.seed)

    # -- calls ---------------------------------------------------------------------------------------
    def call(self, args: tuple[Any, ...]) -> Any:
        """The kernel's result; to be called inside `locked`."""
        return dispatch(self.op, args, self.layout(args))

    def layout(self, args: tuple[Any, ...]) -> str | None:
        if "attention" in (self.op.op_id, self.op.stands_for):
            return "BHSD"
        return args[self.op.arguments.index("layout")] if "layout" in self.op.arguments else None

    def described(self, args: tuple[Any, ...]) -> Context:
        return describe(self.op, args, self.layout(args), None, current_world())

    def locked(self) -> Any:
        """A block in which the op runs this kernel or raises."""
        return scoped(locks={self.op.op_id: self.spec.kernel_id}, on_fault="raise", jit="block", on_first_use="off")

    def truth(self, args: tuple[Any, ...]) -> Any:
        """The result in float64; for a reference kernel by a formula of its own where there is one."""
        if self.spec.kernel_id == self.op.fallback_id and self.op.op_id in ORACLES:
            found = ORACLES[self.op.op_id](*(item.double() if computed(item) else item for item in args))
            if found is not NotImplemented:
                return found
        return truth(self.op, args)

    def at(self, case: Case, group: str) -> dict[str, str]:
        return {**self.where, "stage": f"{group}: {case.label}", "dtype": case.dtype}

    def bound(self, case: Case, k: int | None = None) -> Tolerance:
        """How close the result of a case has to be; `k` is the length of its sums."""
        return kernel(self.op.stands_for or self.op.op_id, case.dtype, k=k, declared=self.loss(case))

    def loss(self, case: Case) -> float:
        """The error the kernel itself declares for the dtype of a case."""
        return dict(self.spec.error_bounds).get(case.dtype, 0.0)

    # -- checks --------------------------------------------------------------------------------------
    def forward(self) -> Iterator[Check]:
        """Every case against the truth; random ones by their seeds."""
        for group in self.groups():
            for case in self.cases(group):
                name, check = ("seeded", self._random) if group.name in _RANDOM else ("forward", self._results)
                yield from _first_failure(guarded(name, self.at(case, group.name), check, case))

    def _results(self, case: Case) -> Iterator[Compared]:
        args = self.arguments(case)
        with torch.no_grad():
            got, want = flat(self.call(args)), flat(self.truth(self.arguments(case)))
        if len(got) != len(want):
            raise ValueError(f"{len(got)} results, expected {len(want)}")
        bound = self.bound(case, reduction(args))
        for index, (left, right) in enumerate(zip(got, want, strict=True)):
            yield left, right, bound, f"result {index}" if len(got) > 1 else ""

    def _random(self, case: Case) -> Iterator[Compared]:
        runs = []
        for turn, seed in enumerate((1, 1, 2)):
            given = self.arguments(case)
            own = any(isinstance(item, torch.Generator) for item in given)
            # Where the call brings its generator, torch's own must not matter: it differs at each turn.
            torch.manual_seed(100 + turn if own else seed)
            args = tuple(
                torch.Generator(self.device).manual_seed(seed) if isinstance(item, torch.Generator) else item
                for item in given
            )
            with torch.no_grad():
                runs.append(flat(self.call(args))[0])
        if torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2]):
            raise ValueError("another seed gave the same result: the seed does not matter")
        yield runs[1], runs[0], SAME, "equal seeds gave different results"

    def backward(self) -> Iterator[Check]:
        if "backward" not in self.spec.features:
            yield skipped(1, "backward", "not declared", **self.where)
            return
        exact = dtypes_of(self.spec)[0]
        for group in self.groups():
            if group.name in _RANDOM or group.name == "quantized":
                continue
            for case in self.cases(group):
                # plain calls run backward in every dtype, others in the most exact one alone
                if self.dtype is not None or case.dtype == exact or group.name == "result":
                    yield from _first_failure(guarded("backward", self.at(case, group.name), self._gradients, case))

    def _gradients(self, case: Case) -> Iterator[Compared]:
        for required_only in (False, True):
            args = self._leaves(case, required_only)
            if args is not None and self.accepts(args):
                break
        else:
            return  # a gradient of this call is not declared
        result = self.call(args)
        if not any(item.is_floating_point() for item in flat(result)):
            return  # whole numbers have no gradient
        # The truth starts from the same, already rounded numbers.
        wide = self._leaves(case, required_only, torch.float64)
        assert wide is not None
        want = gradients(self.truth(wide), wide)
        for index, (left, right) in enumerate(zip(gradients(result, args), want, strict=True)):
            largest = right.abs().max().item() if right.numel() else 0.0
            # A gradient is as good as the coarser of the call's dtype and its own.
            kind = max((getattr(torch, case.dtype), left.dtype), key=lambda item: torch.finfo(item).eps)
            bound = gradient(self.op.stands_for or self.op.op_id, dtype_name(kind), largest, declared=self.loss(case))
            yield left, right, bound, f"gradient {index}"

    def _leaves(self, case: Case, required_only: bool, dtype: torch.dtype | None = None) -> tuple[Any, ...] | None:
        """Fresh arguments with gradients asked for: of all floating tensors, or of the required ones alone."""
        args = list(self.arguments(case))
        leaves = [
            place
            for place, (kind, item) in enumerate(zip(self.op.input_kinds, args, strict=False))
            if isinstance(item, Tensor) and item.is_floating_point() and not (required_only and kind != "tensor")
        ]
        for place in leaves:
            args[place] = args[place].detach().to(dtype or args[place].dtype, copy=True).requires_grad_()
        return tuple(args) if leaves else None

    def accepts(self, args: tuple[Any, ...]) -> bool:
        """Whether the kernel may run a call; to be asked inside `locked`."""
        try:
            return bool(decide(self.op, self.described(args), current_world()).chosen)
        except InvalidInputError:  # in place, for example, on a leaf that wants its gradient
            return False

    def repeated(self) -> Iterator[Check]:
        """Where the kernel says it is deterministic: three runs, the same bits."""
        case = self.plain()
        if case is None or not self.spec.deterministic:
            why = "not declared" if not self.spec.deterministic else "the kit has no plain case"
            yield skipped(1, "determinism", why, **self.where)
        else:
            yield from guarded("determinism", self.at(case, "result"), self._runs, case)

    def composed(self, count: int) -> Iterator[Check]:
        """Where the kernel says it is batch invariant: rows in `count` compositions have the bits they have alone."""
        if not self.spec.batch_invariant:
            yield skipped(1, "batch invariance", "not declared", **self.where)
            return
        try:
            found = unkept(self.call, self.spec, self.device, count, self.seed)
        except Exception as error:
            yield failed(1, "batch invariance", error, **self.where)
        else:
            yield Check(1, "batch invariance", Status.FAIL if found else Status.OK, detail=found or "", **self.where)

    def _runs(self, case: Case) -> Iterator[Compared]:
        with torch.no_grad():
            first, *others = (flat(self.call(self.arguments(case))) for _ in range(3))
        for other in others:
            for left, right in zip(other, first, strict=True):
                yield left, right, SAME, "two runs on equal inputs differ"


def guarded(name: str, where: dict[str, str], check: Callable[..., Iterator[Compared]], *args: Any) -> Iterator[Check]:
    """A check of each pair that a function gives; whatever it raises is a failed check."""
    try:
        for left, right, bound, detail in list(check(*args)):
            yield of_error(1, name, compare(left, right, bound), detail=detail, **where)
    except Exception as error:
        yield failed(1, name, error, **where)


def _first_failure(checks: Iterator[Check]) -> Iterator[Check]:
    """The checks up to the first that failed: the other results of the same call show no more."""
    for check in checks:
        yield check
        if check.status is Status.FAIL:
            return


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
        if case is None:
            continue
        args = bench.arguments(case)
        described = bench.described(args)
        if bench.op.op_id == "attention" and kernel.layouts == {Layout.BSHD}:  # as it comes in the kernel's own layout
            swapped = tuple(item.transpose(1, 2).contiguous() for item in args[:3])
            described = describe(bench.op, (*swapped, *args[3:]), "BSHD", None, current_world())
        if not kernel.check(described):
            missing = ", ".join(sorted(group.requires - kernel.features))
            return f"{missing} is not declared, yet a call that needs it is accepted"
    return ""


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

"""Level 1: each kernel alone, forward and backward, against the reference in float64.

The calls are the conformance kit's cases, one for each declared capability; the op is locked to the kernel under test
and called through the real dispatch, adaptation of inputs included. The reference kernels themselves are held against
formulas written apart from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.signature import dispatch
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Op, OperationSpec
from layerzero.numerics import Tolerance, compare
from layerzero.numerics.tolerances import dtype_name
from layerzero.public.control import scoped
from layerzero.tuning.truth import computed, flat, reduction, truth
from layerzero_verify.oracles import ORACLES
from layerzero_verify.report import Check, Status, failed, of_error, skipped
from layerzero_verify.testing.cases import Case, Group, cases_of, declare, dtypes_of, load_cases
from layerzero_verify.thresholds import gradient, kernel

__all__ = ["Bench", "flat", "guarded"]

_SAME = Tolerance(0.0, 0.0)
# Groups whose result is random: judged by what they promise, not by numbers.
_RANDOM = frozenset({"dropout", "sampling", "speculation"})
# Groups whose cases also run backward in every dtype, not in the most exact one alone.
_EVERY_DTYPE = frozenset({"result"})


class Bench:
    """One kernel on the bench: its cases, its truth, and calls of it through dispatch."""

    def __init__(
        self,
        spec: KernelSpec,
        device: torch.device,
        *,
        seed: int = 0,
        dtype: str | None = None,
        among: tuple[str, ...] | None = None,
    ) -> None:
        """`dtype` restricts to one; `among` to some, for kernels that have one of them."""
        op = current_world().ops.get(spec.op)
        assert op is not None
        if isinstance(op, Op):
            declare(op)
        self.spec = spec
        self.op: OperationSpec = op
        self.device = device
        self.seed = seed
        self.dtype = dtype
        known = dtypes_of(spec)
        self.dtypes = tuple(item for item in known if among is None or item in among) or known
        self.where = {"op": spec.op, "kernel": spec.kernel_id}
        self.declared = dict(spec.error_bounds)
        self.is_reference = spec.kernel_id == op.fallback_id

    # -- cases ---------------------------------------------------------------------------------------
    def groups(self) -> Iterator[Group]:
        """Groups of cases whose features the kernel declares; a stand-in's are those of the op it stands for."""
        wanted = {self.op.op_id, self.op.stands_for}
        for groups in load_cases().values():
            for group in groups:
                if group.op in wanted and group.requires <= self.spec.features:
                    yield group

    def cases(self, group: Group) -> Iterator[Case]:
        """The cases of a group in the dtypes asked for."""
        if self.dtype is not None:
            return cases_of(group, self.spec, [item for item in dtypes_of(self.spec) if item == self.dtype])
        return (case for case in cases_of(group, self.spec) if case.dtype in self.dtypes)

    def plain(self) -> Case | None:
        """The first plain case, None where the kit has none."""
        found = [group for group in self.groups() if group.name not in _RANDOM]
        for group in sorted(found, key=lambda group: group.name != "result"):
            for case in self.cases(group):
                return case
        return None

    def arguments(self, case: Case) -> tuple[Any, ...]:
        """Fresh canonical arguments; another seed gives other numbers."""
        return case.arguments(self.device, self.seed)

    # -- calls ---------------------------------------------------------------------------------------
    def call(self, args: tuple[Any, ...]) -> Any:
        """The kernel's result; to be called inside `locked`."""
        return dispatch(self.op, args, self._layout(args))

    def _layout(self, args: tuple[Any, ...]) -> str | None:
        if "attention" in (self.op.op_id, self.op.stands_for):
            return "BHSD"
        return args[self.op.arguments.index("layout")] if "layout" in self.op.arguments else None

    def described(self, args: tuple[Any, ...]) -> Context:
        """The call as selection sees it."""
        return describe(self.op, args, self._layout(args), None, current_world())

    def locked(self) -> Any:
        """A block in which the op runs this kernel or raises."""
        return scoped(locks={self.op.op_id: self.spec.kernel_id}, on_fault="raise", jit="block", on_first_use="off")

    def truth(self, args: tuple[Any, ...]) -> Any:
        """The result in float64; for a reference kernel by a formula of its own where there is one."""
        if self.is_reference and self.op.op_id in ORACLES:
            found = ORACLES[self.op.op_id](*(item.double() if computed(item) else item for item in args))
            if found is not NotImplemented:
                return found
        return truth(self.op, args)

    def at(self, case: Case, group: str) -> dict[str, str]:
        """Where a check of a case belongs."""
        return {**self.where, "stage": f"{group}: {case.label}", "dtype": case.dtype}

    # -- checks --------------------------------------------------------------------------------------
    def forward(self) -> Iterator[Check]:
        """Every case against the truth."""
        for group in self.groups():
            for case in self.cases(group):
                where = self.at(case, group.name)
                check = self._random if group.name in _RANDOM else self._compared
                yield from guarded("forward", where, lambda c=case, w=where, k=check: k(c, w))  # type: ignore[misc]

    def _compared(self, case: Case, where: dict[str, str]) -> Iterator[Check]:
        args = self.arguments(case)
        with torch.no_grad():
            got = flat(self.call(args))
            want = flat(self.truth(self.arguments(case)))
        yield from self._close("forward", got, want, where, case, args)

    def _close(
        self, name: str, got: list[Tensor], want: list[Tensor], where: dict[str, str], case: Case, args: Any
    ) -> Iterator[Check]:
        if len(got) != len(want):
            yield failed(1, name, f"{len(got)} results, expected {len(want)}", **where)
            return
        bound = self.bound(case, reduction(args))
        for index, (left, right) in enumerate(zip(got, want, strict=True)):
            report = compare(left, right, bound)
            check = of_error(1, name, report, **where)
            if len(got) > 1 and check.status is Status.FAIL:
                check = dataclasses.replace(check, detail=f"result {index}; {check.detail}".rstrip("; "))
            yield check
            if check.status is Status.FAIL:
                return

    def bound(self, case: Case, k: int | None = None) -> Tolerance:
        """How close the result of a case has to be; `k` is the length of its sums."""
        return kernel(self.op.stands_for or self.op.op_id, case.dtype, k=k, declared=self.loss(case))

    def loss(self, case: Case) -> float:
        """The error the kernel itself declares for the dtype of a case."""
        return self.declared.get(case.dtype, 0.0)

    def _random(self, case: Case, where: dict[str, str]) -> Iterator[Check]:
        """Equal seeds give equal results, other seeds others."""
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
        report = compare(runs[1], runs[0], _SAME)
        detail = "equal seeds gave different results"
        yield of_error(1, "seeded", report, detail=detail, **where)
        if report.ok and torch.equal(runs[0], runs[2]):
            yield failed(1, "seeded", "another seed gave the same result: the seed does not matter", **where)

    def backward(self) -> Iterator[Check]:
        """Gradients of all floating inputs, where backward is declared."""
        if "backward" not in self.spec.features:
            yield skipped(1, "backward", "not declared", **self.where)
            return
        for group in self.groups():
            if group.name in _RANDOM or group.name == "quantized":
                continue
            exact = dtypes_of(self.spec)[0]
            for case in self.cases(group):
                if self.dtype is None and case.dtype != exact and group.name not in _EVERY_DTYPE:
                    continue
                where = self.at(case, group.name)
                yield from guarded("backward", where, lambda c=case, w=where: self._gradients(c, w))  # type: ignore[misc]

    def _gradients(self, case: Case, where: dict[str, str]) -> Iterator[Check]:
        for required_only in (False, True):
            args = self._leaves(self.arguments(case), required_only)
            if args is not None and self._accepts(args):
                break
        else:
            return  # a gradient of this call is not declared
        result = self.call(args)
        kinds = [item.dtype for item in flat(result) if item.is_floating_point()]
        if not kinds:
            return  # whole numbers have no gradient
        got = _backward(result, args, kinds)
        # The truth starts from the same, already rounded numbers, and its loss weighs the outputs the same.
        again = self._leaves(self.arguments(case), required_only)
        assert again is not None
        wide = tuple(_widened(item) for item in again)
        want = _backward(self.truth(wide), wide, kinds)
        for index, (left, right) in enumerate(zip(got, want, strict=True)):
            largest = right.abs().max().item() if right.numel() else 0.0
            # A gradient is as good as the coarser of the call's dtype and its own.
            kind = max((getattr(torch, case.dtype), left.dtype), key=lambda item: torch.finfo(item).eps)
            bound = gradient(self.op.stands_for or self.op.op_id, dtype_name(kind), largest, declared=self.loss(case))
            check = of_error(1, "backward", compare(left, right, bound), **where)
            if check.status is Status.FAIL:
                yield dataclasses.replace(check, detail=f"gradient {index}; {check.detail}".rstrip("; "))
                return
            yield check

    def _leaves(self, args: tuple[Any, ...], required_only: bool) -> tuple[Any, ...] | None:
        """The arguments with gradients asked for: of all floating tensors, or of the required ones alone."""
        found, any_leaf = [], False
        for kind, item in zip(self.op.input_kinds, args, strict=True):
            leaf = isinstance(item, Tensor) and item.is_floating_point() and not (required_only and kind != "tensor")
            any_leaf = any_leaf or leaf
            found.append(item.detach().clone().requires_grad_() if leaf else item)
        return tuple(found) if any_leaf else None

    def _accepts(self, args: tuple[Any, ...]) -> bool:
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
            return
        where = self.at(case, "result")

        def check() -> Iterator[Check]:
            with torch.no_grad():
                runs = [flat(self.call(self.arguments(case))) for _ in range(3)]
            for other in runs[1:]:
                for left, right in zip(other, runs[0], strict=True):
                    detail = "two runs on equal inputs differ"
                    yield of_error(1, "determinism", compare(left, right, _SAME), detail=detail, **where)

        yield from guarded("determinism", where, check)


def guarded(name: str, where: dict[str, str], check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks of a function; whatever it raises is a failed check."""
    try:
        yield from list(check())
    except Exception as error:
        yield failed(1, name, error, **where)


def _widened(item: Any) -> Any:
    if isinstance(item, Tensor) and item.requires_grad:
        return item.detach().double().requires_grad_()
    return item


def _backward(result: Any, args: tuple[Any, ...], kinds: list[torch.dtype]) -> list[Tensor]:
    """Gradients of the leaves; the outputs are weighed by numbers that the kernel's own dtypes hold exactly."""
    outs, seeds = [], []
    floating = [item for item in flat(result) if item.is_floating_point()]
    for item, kind in zip(floating, kinds, strict=True):
        if item.requires_grad:
            outs.append(item)
            weights = torch.linspace(-1, 1, item.numel(), device=item.device).reshape(item.shape)
            seeds.append(weights.to(kind).to(item.dtype))
    leaves = [item for item in args if isinstance(item, Tensor) and item.requires_grad]
    # A result without a gradient has the gradient zero; where the truth has another one, that will show.
    found = torch.autograd.grad(outs, leaves, seeds, allow_unused=True) if outs else (None,) * len(leaves)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]

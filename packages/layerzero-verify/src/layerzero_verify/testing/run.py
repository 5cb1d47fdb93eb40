"""Run one case on the kernel and on the reference, and compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.model.context import Context
from layerzero.model.enums import Layout
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Call, OperationSpec
from layerzero.numerics import Tolerance, assert_close, tolerance
from layerzero.tuning.truth import truth
from layerzero_verify.testing.cases import Case
from layerzero_verify.testing.kit import Kit, import_string


def place(kit: Kit, spec: KernelSpec) -> torch.device:
    """The device a kernel is tried on; the plugin's hooks have skipped the test where there is none."""
    found = kit.device_for(spec)
    assert not isinstance(found, str), found
    return found[0]


def _swapped(spec: KernelSpec, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of an attention kernel that wants BSHD, from BHSD or back; those of any other kernel as they are."""
    if spec.op != "attention" or spec.layouts != {Layout.BSHD}:
        return values
    first = (item.transpose(1, 2) if isinstance(item, Tensor) and item.ndim == 4 else item for item in values[:3])
    return (*first, *values[3:])


def tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among the arguments, in order."""
    return [item for item in args if isinstance(item, Tensor)]


def call(kit: Kit, case: Case, args: tuple[Any, ...]) -> Any:
    """The kernel's result for canonical arguments in the op's own layout."""
    result = kit.function(case.spec)(*_to_kernel(case, args))
    if isinstance(result, tuple):
        return (*_swapped(case.spec, result[:1]), *result[1:])
    return _swapped(case.spec, (result,))[0]


def _to_kernel(case: Case, args: tuple[Any, ...]) -> tuple[Any, ...]:
    found = _swapped(case.spec, args)
    return args if found is args else (*(item.contiguous() for item in found[:3]), *found[3:])


def _op(kit: Kit, case: Case) -> OperationSpec:
    found = kit.operation(case.spec.op)
    assert found is not None, f"no op {case.spec.op!r}: register it with registrar.op, or correct the name"
    return found


def expected(kit: Kit, case: Case, args: tuple[Any, ...]) -> Any:
    """The reference's result, computed in float64 from the very same (already rounded) inputs."""
    return truth(_op(kit, case), args)


def context(kit: Kit, case: Case, args: tuple[Any, ...], *, needs_grad: bool = False) -> Context:
    """What selection would see for this call, in the kernel's own layout."""
    op = _op(kit, case)
    found = kit.device_for(case.spec)
    assert not isinstance(found, str), found
    assert op.describe is not None
    layout = args[op.arguments.index("layout")] if "layout" in op.arguments else None
    if case.spec.op == "attention":
        layout = Layout.BSHD.value if case.spec.layouts == {Layout.BSHD} else Layout.BHSD.value
    return op.describe(Call(_to_kernel(case, args), found[1], layout, None, needs_grad))


def refusal(case: Case, ctx: Context) -> Any:
    """Why the kernel's own predicate refuses a call, which says what data cannot; selection asks it too."""
    return import_string(case.spec.predicate)(ctx) if case.spec.predicate is not None else ()


def bounds(case: Case, factor: float = 1.0) -> Tolerance:
    """The tolerance table's bounds, or the error the kernel itself declares for the dtype where that is larger."""
    table = tolerance(case.spec.op, case.dtype, k=64)
    declared = dict(case.spec.error_bounds).get(case.dtype, 0.0)
    return replace(table, rtol=max(table.rtol, declared) * factor, atol=max(table.atol, declared) * factor)


def check(kit: Kit, case: Case) -> None:
    """The kernel accepts the call and its result is the reference's."""
    device = place(kit, case.spec)
    args = case.arguments(device)
    ctx = context(kit, case, args)
    reasons = case.spec.check(ctx)
    assert not reasons, (
        f"{case.spec.kernel_id} declares this, but its constraints refuse it: {[str(r) for r in reasons]}"
    )
    refused = refusal(case, ctx)
    if refused:
        import pytest

        pytest.skip(f"{case.spec.kernel_id} refuses this call by its predicate: {refused[0]}")
    with torch.no_grad():
        result = call(kit, case, args)
    assert_close(result, expected(kit, case, case.arguments(device)), bounds(case))


def counts_of(tokens: Tensor, cells: int) -> Tensor:
    """How often each of the numbers 0 … cells - 1 occurs."""
    return torch.bincount(tokens.flatten().cpu(), minlength=cells)

"""Run one case on the kernel and on the reference, and compare."""

from __future__ import annotations

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

__all__ = ["bounds", "call", "check", "context", "expected", "kernel_layout", "place", "tensors"]


def kernel_layout(spec: KernelSpec) -> str:
    """The layout an attention kernel wants its tensors in."""
    return Layout.BSHD.value if spec.layouts == {Layout.BSHD} else Layout.BHSD.value


def place(kit: Kit, spec: KernelSpec) -> torch.device:
    """The device a kernel is tried on; the plugin's hooks have skipped the test where there is none."""
    found = kit.device_for(spec)
    assert not isinstance(found, str), found
    return found[0]


def _swapped(value: Any) -> Any:
    return value.transpose(1, 2) if isinstance(value, Tensor) and value.ndim == 4 else value


def _to_kernel(case: Case, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if case.spec.op != "attention" or kernel_layout(case.spec) == "BHSD":
        return args
    return (*(_swapped(item).contiguous() for item in args[:3]), *args[3:])


def _from_kernel(case: Case, result: Any) -> Any:
    if case.spec.op != "attention" or kernel_layout(case.spec) == "BHSD":
        return result
    return (_swapped(result[0]), *result[1:]) if isinstance(result, tuple) else _swapped(result)


def tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among the arguments, in order."""
    return [item for item in args if isinstance(item, Tensor)]


def call(kit: Kit, case: Case, args: tuple[Any, ...]) -> Any:
    """The kernel's result for canonical arguments in the op's own layout."""
    return _from_kernel(case, kit.function(case.spec)(*_to_kernel(case, args)))


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
    layout = kernel_layout(case.spec) if case.spec.op == "attention" else _layout_of(op, args)
    return op.describe(Call(_to_kernel(case, args), found[1], layout, None, needs_grad))


def _layout_of(op: OperationSpec, args: tuple[Any, ...]) -> str | None:
    return args[op.arguments.index("layout")] if "layout" in op.arguments else None


def bounds(case: Case, factor: float = 1.0) -> Tolerance:
    """The tolerance table's bounds, or the error the kernel itself declares for the dtype where that is larger."""
    table = tolerance(case.spec.op, case.dtype, k=64)
    declared = dict(case.spec.error_bounds).get(case.dtype, 0.0)
    return Tolerance(
        max(table.rtol, declared) * factor, max(table.atol, declared) * factor, table.hit_ratio, table.mode, table.ulps
    )


def check(kit: Kit, case: Case) -> None:
    """The kernel accepts the call and its result is the reference's."""
    device = place(kit, case.spec)
    args = case.arguments(device)
    ctx = context(kit, case, args)
    reasons = case.spec.check(ctx)
    assert not reasons, (
        f"{case.spec.kernel_id} declares this, but its constraints refuse it: {[str(r) for r in reasons]}"
    )
    # What data cannot say, the kernel's own predicate does; selection asks it too, so such a call never comes here.
    refused = import_string(case.spec.predicate)(ctx) if case.spec.predicate is not None else ()
    if refused:
        import pytest

        pytest.skip(f"{case.spec.kernel_id} refuses this call by its predicate: {refused[0]}")
    with torch.no_grad():
        result = call(kit, case, args)
    assert_close(result, expected(kit, case, case.arguments(device)), bounds(case))

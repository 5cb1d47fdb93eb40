"""How the kernels behave: their inputs, their gradients, threads, strides, and what they refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.model.enums import Layout, OpKind
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import assert_close, tolerance
from layerzero.reasons import ReasonCode
from layerzero.tuning.truth import flat, gradients
from layerzero_verify.testing.cases import GROUPS, Case, cases_of, dtypes_of
from layerzero_verify.testing.compositions import VARYING, unkept
from layerzero_verify.testing.kit import Kit
from layerzero_verify.testing.run import bounds, call, context, expected, place, refusal, tensors


def _plain_case(kit: Kit, spec: KernelSpec, needs_grad: bool = False) -> Case:
    """The first plain case of a kernel that its predicate takes; skips where there is none."""
    if dtypes_of(spec):
        for found in GROUPS["result"]:
            if found.op == spec.op and found.requires <= spec.features:
                for case in cases_of(found, spec):
                    args = case.arguments(place(kit, spec))
                    if not refusal(case, context(kit, case, args, needs_grad=needs_grad)):
                        return case
    pytest.skip(f"no plain case that {spec.kernel_id} takes for {spec.op} in {', '.join(sorted(spec.dtypes))}")


def test_adapter_can_be_imported(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """The function named in capabilities.json exists and is callable."""
    try:
        lz_kit.function(lz_kernel)
    except Exception as error:
        pytest.fail(f"{lz_kernel.function}: {type(error).__name__}: {error}")


def test_attention_kernel_names_one_layout(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """An attention kernel cannot see the layout, so it declares the one it wants."""
    if lz_kernel.op != "attention":
        pytest.skip("only attention kernels take a fixed layout")
    assert lz_kernel.layouts in ({Layout.BHSD}, {Layout.BSHD}), "declare layouts: ['BHSD'] or ['BSHD']"


def test_inputs_are_not_changed(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """The kernel leaves its inputs bit for bit as they were."""
    case = _plain_case(lz_kit, lz_kernel)
    args = case.arguments(place(lz_kit, lz_kernel))
    before = [item.clone() for item in tensors(args)]
    with torch.no_grad():
        call(lz_kit, case, args)
    for index, (old, new) in enumerate(zip(before, tensors(args), strict=True)):
        assert torch.equal(old, new), f"tensor argument {index} was changed"


def test_a_changed_weight_is_seen(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """A weight that is written to between two calls counts with its new numbers; a stale pack may only be refused."""
    if lz_kernel.op != "linear":
        pytest.skip("only linear layers keep a weight that might be packed")
    case = _plain_case(lz_kit, lz_kernel)
    args = case.arguments(place(lz_kit, lz_kernel))
    weight = args[1]
    with torch.no_grad():
        call(lz_kit, case, args)
        written = weight if isinstance(weight, Tensor) else getattr(weight, "source", weight).data
        written.copy_(written.flip(0))
        try:
            got = call(lz_kit, case, args)
        except InvalidInputError as error:
            if error.code is not ReasonCode.WEIGHT_PACK_STALE:
                raise
            return
    assert_close(got, expected(lz_kit, case, args), bounds(case))


def test_same_inputs_give_the_same_bits(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Where deterministic is declared, three runs agree exactly."""
    if not lz_kernel.deterministic:
        pytest.skip(f"{lz_kernel.kernel_id} does not declare deterministic")
    case = _plain_case(lz_kit, lz_kernel)
    device = place(lz_kit, lz_kernel)
    with torch.no_grad():
        runs = [call(lz_kit, case, case.arguments(device)) for _ in range(3)]
    for other in runs[1:]:
        for left, right in zip(flat(runs[0]), flat(other), strict=True):
            assert torch.equal(left, right), "two runs on equal inputs differ"


def test_a_row_keeps_its_bits_in_any_batch(lz_kit: Kit, lz_kernel: KernelSpec, pytestconfig: pytest.Config) -> None:
    """Where batch_invariant is declared, rows in any company have the bits they have alone."""
    if not lz_kernel.batch_invariant:
        pytest.skip(f"{lz_kernel.kernel_id} does not declare batch_invariant")
    limited = sorted(VARYING & dict(lz_kernel.limits).keys())
    assert not limited, f"limits on {', '.join(limited)} leave some batches to another kernel, and its bits"
    case, count = Case(lz_kernel, lz_kernel.op, "", "", {}), pytestconfig.getoption("--lz-compositions")
    found = unkept(lambda args: call(lz_kit, case, args), lz_kernel, place(lz_kit, lz_kernel), count)
    assert found is None, f"{lz_kernel.kernel_id} declares batch_invariant: {found}"


def test_gradients_match_the_reference(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Where backward is declared, the gradients of all floating inputs are the reference's."""
    if "backward" not in lz_kernel.features:
        pytest.skip(f"{lz_kernel.kernel_id} does not declare backward")
    case = _plain_case(lz_kit, lz_kernel, needs_grad=True)
    device = place(lz_kit, lz_kernel)

    def leaves(dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        return tuple(
            item.to(dtype or item.dtype).requires_grad_()
            if isinstance(item, Tensor) and item.is_floating_point()
            else item
            for item in case.arguments(device)
        )

    ours, wide = leaves(), leaves(torch.float64)
    result = call(lz_kit, case, ours)
    assert all(item.requires_grad for item in flat(result) if item.is_floating_point()), "the result has no gradient"
    got, want = gradients(result, ours), gradients(expected(lz_kit, case, wide), wide)
    # An op that copies has exact results, but its gradient is a sum all the same.
    limit = bounds(case, factor=20.0)
    assert_close(got, want, tolerance("gradient", case.dtype) if limit.exact else limit, path="gradient")


def test_strided_inputs_are_understood(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Without `contiguous`, inputs that lie in memory otherwise give the same result."""
    if lz_kernel.contiguous or lz_kernel.aligned_strides:
        pytest.skip(f"{lz_kernel.kernel_id} declares contiguous or aligned_strides")
    case = _plain_case(lz_kit, lz_kernel)
    args = case.arguments(place(lz_kit, lz_kernel))

    def spread(item: Any) -> Any:
        """The same numbers inside a larger tensor, rows apart (and the last axis too where that is allowed)."""
        if not isinstance(item, Tensor) or item.ndim < 2 or not item.is_floating_point():
            return item
        step = 1 if lz_kernel.stride_last_dim == 1 else 2
        room = item.new_full((*item.shape[:-1], item.shape[-1] * step + 8), float("nan"))
        view = room[..., : item.shape[-1] * step : step]
        view.copy_(item)
        return view

    with torch.no_grad():
        got = call(lz_kit, case, tuple(spread(item) for item in args))
    assert_close(got, expected(lz_kit, case, args), bounds(case))


def test_kernel_is_thread_safe(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """Four threads calling at once get what one thread gets."""
    case = _plain_case(lz_kit, lz_kernel)
    device = place(lz_kit, lz_kernel)
    args = case.arguments(device)
    inputs = [
        tuple(item * scale if isinstance(item, Tensor) and item.is_floating_point() else item for item in args)
        for scale in (1.0, 0.5, 2.0, 0.25)
    ]
    with torch.no_grad():
        alone = [call(lz_kit, case, one) for one in inputs]
    problems: list[str] = []
    start = threading.Barrier(len(inputs))

    def work(index: int) -> None:
        device = next((item.device for item in inputs[index] if isinstance(item, Tensor)), None)
        if device is not None:
            torch.zeros(1, device=device)  # a new thread has no CUDA context yet, and cuBLAS would warn of it
        start.wait()
        for _ in range(5):
            try:
                with torch.no_grad():
                    assert_close(call(lz_kit, case, inputs[index]), alone[index], bounds(case))
            except Exception as error:
                problems.append(f"thread {index}: {type(error).__name__}: {error}")
                return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, "\n".join(problems)


def _undeclared(kit: Kit, spec: KernelSpec) -> Iterator[tuple[str, Context]]:
    for name, groups in GROUPS.items():
        for found in groups:
            missing = found.requires - spec.features
            if found.op != spec.op or not missing:
                continue
            for case in cases_of(found, spec):
                # Both causal alignments agree on equal lengths, so a square call is rightly accepted.
                if not (name.startswith("causal") and case.label == "square"):
                    yield name, context(kit, case, case.arguments(place(kit, spec)))
                    break


def test_undeclared_features_are_rejected(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """A call that needs what the kernel does not declare, a gradient included, is refused with a reason."""
    for name, ctx in _undeclared(lz_kit, lz_kernel):
        assert lz_kernel.check(ctx), f"{name} is not declared, yet a call that needs it is accepted"
    op = lz_kit.operation(lz_kernel.op)
    if "backward" not in lz_kernel.features and op is not None and op.op_kind is OpKind.TENSOR:
        case = _plain_case(lz_kit, lz_kernel)
        ctx = context(lz_kit, case, case.arguments(place(lz_kit, lz_kernel)), needs_grad=True)
        assert lz_kernel.check(ctx), "backward is not declared, yet a call that needs a gradient is accepted"


def test_sizes_outside_the_limits_are_rejected(lz_kit: Kit, lz_kernel: KernelSpec) -> None:
    """One more than a maximum, one less than a minimum, and no multiple: each is refused with a reason."""
    if not lz_kernel.limits:
        pytest.skip(f"{lz_kernel.kernel_id} declares no limits")
    case = _plain_case(lz_kit, lz_kernel)
    ctx = context(lz_kit, case, case.arguments(place(lz_kit, lz_kernel)))
    for name, limit in lz_kernel.limits:
        outside = [value + 1 for value in (limit.max,) if value is not None]
        outside += [value - 1 for value in (limit.min,) if value]
        outside += [value + 1 for value in (limit.multiple_of,) if value and value > 1]
        outside += [max(limit.one_of) + 1] if limit.one_of else []
        for value in outside:
            assert lz_kernel.check(ctx.with_dims(**{name: value})), f"{name}={value} is outside the limits but accepted"

"""Where no kernel fits a call every op has its reference: it answers, it is right, and it says why nobody else did."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.model.enums import Platform
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.current import builtin_ops
from layerzero.runtime.state import state
from tools.pytest_fixtures import module_beside

CALLS = module_beside(__file__, "torch_calls").calls()


@pytest.mark.req("R-SEL-04")
def test_the_reference_of_every_op_answers_rightly_where_nothing_else_fits(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [function(*inputs) for _, function, inputs in CALLS]  # by whatever kernel is usual
    unfit = {op: lab.kernel(f"narrow.{op}.tiny", dtypes=frozenset({"float8_e5m2"})) for op in builtin_ops}
    lab.use(*unfit.values(), only=True)
    answered = set()
    for (name, function, inputs), right in zip(CALLS, wanted, strict=True):
        caplog.clear()
        state.ran.clear()
        with caplog.at_level(logging.WARNING, logger="layerzero.selection"):
            out, ran = lab.run(function, *inputs)
        assert ran and all(kernel_id.startswith("reference.") for kernel_id in ran), name
        assert_close(out, right, tolerance("attention", torch.float32), path=name)
        for ctx, _ in list(state.ran):
            answered.add(ctx.op)
            report = lz.explain(ctx.op, ctx)
            assert report.is_fallback and report.chosen == f"reference.{ctx.op}.plain", name
            assert "DTYPE_UNSUPPORTED" in [why.code for why in report.reasons[f"narrow.{ctx.op}.tiny"]], name
            assert f"{ctx.op}: no kernel fits, the reference runs (narrow.{ctx.op}.tiny: " in caplog.text, name
    assert len(answered) >= 20


@pytest.mark.req("R-SEL-04")
def test_every_op_of_the_core_has_a_reference_for_every_platform(lab: Any) -> None:
    for name, op in builtin_ops.items():
        kernel = lab.builtin.kernels[op.fallback_id]
        assert op.has_fallback and kernel.kernel_id == f"reference.{name}.plain"
        assert (kernel.platforms, kernel.min_sm, kernel.limits, kernel.predicate) == (set(Platform), None, (), None)

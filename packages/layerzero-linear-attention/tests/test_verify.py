"""`lz verify` with the models this package brings: every level on the real architectures, and a fault is found."""

from __future__ import annotations

import subprocess
import sys

import pytest

import layerzero as lz
from layerzero_linear_attention.architectures import MODELS
from layerzero_linear_attention.build import LIBRARY

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="missing tool: the compiled library")


@pytest.mark.parametrize(
    "name", ["mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "kimi_linear"))]
)
def test_every_level_of_models_passes_with_the_kernels_in_them(name):
    op = MODELS[name][3][0]
    report = lz.verify(op=op, level=(2, 3, 4, 5))
    assert report.ok, report.verdict.text
    for level in report.levels[1:]:
        own = [check for check in level.checks if check.subject.startswith(name)]
        kernels = {kernel for check in own for kernel in check.served}
        assert {f"torch.{op}.baseline", f"reference.{op}.plain"} <= kernels, level.number
        # training needs a backward, which the kernels in C++ have none of
        assert (f"linear_attention.{op}.native" in kernels) is (level.number < 5), level.number


def test_a_kernel_that_is_wrong_is_found_in_a_layer_and_in_the_model(monkeypatch):
    from layerzero_linear_attention import cpu

    right = cpu._dense
    monkeypatch.setattr(cpu, "_dense", lambda tensor: right(tensor) * 1.01)
    report = lz.verify(kernel="linear_attention.mamba2_scan.native", level=(2, 3, 4))
    failed = {level.number for level in report.levels if level.failures}
    assert not report.ok and failed == {2, 3, 4}


@pytest.mark.parametrize("plugin", ["fla", "flashinfer_linear"])
def test_the_kit_has_cases_for_kernels_of_an_op_that_another_plugin_declares(plugin, monkeypatch):
    from layerzero_verify.testing.cases import GROUPS, cases_of
    from layerzero_verify.testing.kit import Kit

    monkeypatch.setitem(GROUPS, "result", [])
    for spec in Kit.open(plugin).kernels:
        assert [case for group in GROUPS["result"] if group.op == spec.op for case in cases_of(group, spec)]


_ASKED = """
import pytest
from layerzero_verify.testing.kit import Kit
from layerzero_verify.testing.suite import kernels

kit = Kit.open("linear_attention")
spec = next(spec for spec in kit.kernels if spec.kernel_id == "linear_attention.mamba2_scan.native")
kernels.refusal = lambda case, context: ["on Hopper"] if context.needs_grad else []
assert kernels._plain_case(kit, spec).spec is spec
with pytest.raises(pytest.skip.Exception, match="no plain case that linear_attention"):
    kernels._plain_case(kit, spec, needs_grad=True)
print("ALL RIGHT")
"""


def test_the_kit_asks_no_gradient_of_a_kernel_whose_predicate_refuses_it():
    done = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, timeout=250, check=False)
    assert "ALL RIGHT" in done.stdout, done.stderr[-3000:]

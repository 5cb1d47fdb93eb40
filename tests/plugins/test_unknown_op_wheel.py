"""An op nobody knows, brought by a wheel: everything that LayerZero does with an op, it does with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.fresh import forking

pytest.importorskip("hatchling", reason="missing tool: hatchling")
pytest.importorskip("pip", reason="missing tool: pip")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

HERE = Path(__file__).resolve().parent
FUSED, SPLIT = "gatednorm.rms_norm_gated.fused", "gatednorm.rms_norm_gated.split"
OWN = ["torch.rms_norm_gated.baseline", "reference.rms_norm_gated.plain"]


ENV = {k: v for k, v in os.environ.items() if not k.startswith(("LAYERZERO_", "COV_", "PYTEST_"))}
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs Python, with what lies in `site`, in a child of an interpreter that has loaded torch and nothing of ours."""
    with forking(Path(sys.executable), ENV, tmp_path_factory.mktemp("run")) as forked:

        def one(*command: str, site: Path | None = None, cwd: Path | None = None) -> str:
            env = {}
            if site is not None:
                env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), ENV.get("PYTHONPATH", ""))))
                env["LAYERZERO_QUARANTINE"] = str(site.parent / "quarantine.json")  # and checks of its own
            done = forked(*command, cwd=cwd, env=env)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            return done.stdout

        yield one


def _pip(*command: str) -> None:
    full = [sys.executable, "-m", "pip", *command, "--no-deps", "--no-index", "-q", "--disable-pip-version-check"]
    done = subprocess.run(full, env=ENV, capture_output=True, text=True, timeout=450, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("unknown")
    _pip("wheel", "--no-build-isolation", "-w", str(folder / "wheels"), str(HERE / "layerzero-gated-norm"))
    (wheel,) = (folder / "wheels").glob("*.whl")
    _pip("install", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


@pytest.fixture(scope="module")
def found(run: Run, site: Path) -> dict[str, Any]:
    """What the driver saw, in a process that has the wheel."""
    out = run(str(HERE / "unknown_op.py"), str(site.parent), site=site)
    answer: dict[str, Any] = json.loads(next(line for line in out.splitlines() if line.startswith("FOUND "))[6:])
    return answer


def test_it_is_called_by_its_name_and_hot_after_the_first_call(found: dict[str, Any]) -> None:
    assert found["call"] is True
    assert found["hot"] == [0, 1]


def test_a_hot_call_costs_what_that_of_rms_norm_does(found: dict[str, Any]) -> None:
    own, norm = found["overhead"]
    assert 0 < own <= norm, "entered functions; one more tensor enters the key"


def test_its_gradient_is_the_formulas_with_every_kernel(found: dict[str, Any]) -> None:
    assert found["gradient"] is True


def test_plans_explanations_locks_and_policies_know_it(found: dict[str, Any]) -> None:
    assert found["plan"] == [FUSED, True]
    assert found["explain"] == {FUSED: [], SPLIT: ["FEATURE_UNSUPPORTED"], **{name: ["OUTSCORED"] for name in OWN}}
    assert found["lock_and_policy"] == [SPLIT, OWN[0], FUSED]


def test_its_calls_are_recorded_tuned_solved_and_warmed_up(found: dict[str, Any]) -> None:
    measured = found["measured"]
    assert measured["recorded"] == "rms_norm_gated" and measured["solved"] == ["rms_norm_gated"]
    assert measured["timed"] == sorted([FUSED, SPLIT, *OWN]) and measured["refused"] == {}
    assert measured["followed"] == ["PLAN_FOLLOWED"] and measured["warmed"] == 1


def test_verify_checks_every_kernel_of_it(found: dict[str, Any]) -> None:
    assert found["verified"] == [True, sorted([FUSED, SPLIT, *OWN]), []]


def test_it_compiles_into_one_graph_and_is_exported(found: dict[str, Any]) -> None:
    assert found["compiled"] == [True, True, True]
    assert found["exported"] == [True, True]


def test_a_kernel_of_it_that_raises_is_replaced(found: dict[str, Any]) -> None:
    assert found["failover"] == [True, 1]


def test_telemetry_and_lists_name_it_and_a_wrong_call_is_refused(found: dict[str, Any]) -> None:
    assert found["telemetry"] is True
    assert found["listed"] == [["x", "gate", "weight", "eps"], [FUSED, SPLIT, *OWN]]
    assert found["bad_input"].startswith("InvalidInputError") and "gate" in found["bad_input"]


def test_the_command_line_lists_and_explains_it(run: Run, site: Path) -> None:
    shown = run("-m", "layerzero_cli", "list", "--op", "rms_norm_gated", site=site)
    assert all(kernel in shown for kernel in (FUSED, SPLIT, *OWN))
    explained = run("-m", "layerzero_cli", "explain", "rms_norm_gated", "--shape", "8,64", "--dtype", "fp32", site=site)
    assert FUSED in explained and "rows=8  hidden=64" in explained


def test_it_has_a_documentation_page_as_every_op_has(run: Run, site: Path) -> None:
    shown = run("-m", "layerzero_cli", "list", "--op", "rms_norm_gated", "--page", "--json", site=site)
    text = json.loads(shown)["page"]
    assert text.startswith("# lz.ops.rms_norm_gated\n") and "lz explain rms_norm_gated --shape ROWS,HIDDEN" in text
    assert all(f"`{name}`" in text for name in ("x", "gate", "weight", "eps", FUSED, SPLIT, *OWN))


def test_the_conformance_kit_runs_its_kernels(run: Run, site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_kit.py").write_text("from layerzero.testing.suite import *\n")
    kit = ("-p", "layerzero_verify.testing.pytest_plugin", "--lz-plugin", "gatednorm")
    shown = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *kit, ".", site=site, cwd=tmp_path)
    assert " failed" not in shown and int(shown.split(" passed")[0].split()[-1]) >= 40, shown[-1500:]


def test_without_the_wheel_nothing_of_it_is_left(run: Run) -> None:
    script = """
import layerzero as lz, torch
assert "rms_norm_gated" not in dir(lz.ops) and not hasattr(lz.ops, "rms_norm_gated")
assert not [kernel for kernel in lz.list_kernels() if "gated_norm" in kernel.op or "gatednorm" in kernel.kernel_id]
assert not hasattr(torch.ops.layerzero, "rms_norm_gated")
"""
    run("-c", script)


def test_an_op_that_two_plugins_bring_is_refused_by_name(run: Run, site: Path) -> None:
    script = """
from types import SimpleNamespace
from importlib_metadata import EntryPoint
from layerzero.plugin.manager import load_plugins
first, second = (EntryPoint(name, "layerzero_gated_norm.plugin", "layerzero.backends") for name in ("one", "two"))
records = {record.name: record for record in load_plugins((first, second), {}).records}
(why,) = records["two"].reasons
assert records["one"].state == "ok" and why.code.value == "PLUGIN_DUPLICATE" and "rms_norm_gated" in why.message, why
"""
    run("-c", script, site=site)


def test_an_op_named_like_one_of_the_core_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "shadow.py").write_text("""
from torch import Tensor
from layerzero.plugin import Op, hookimpl

def relu_and_mul(x: Tensor) -> Tensor:
    return x

@hookimpl
def layerzero_register(registrar):
    registrar.op(Op(function=relu_and_mul, describe=lambda call: None, fallback_id="shadow.relu_and_mul.plain"))
""")
    info = tmp_path / "shadow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shadow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nshadow = shadow\n")
    script = """
import layerzero as lz, torch
assert torch.equal(lz.ops.relu_and_mul(torch.tensor([3.0, 2.0])), torch.tensor([6.0]))
from layerzero.runtime.state import state
(record,) = [record for record in state.records if record.name == "shadow"]
(why,) = record.reasons
assert why.code.value == "PLUGIN_DUPLICATE" and "relu_and_mul" in why.message, why
assert not [kernel for kernel in lz.list_kernels() if kernel.kernel_id.startswith("shadow")]
"""
    run("-c", script, site=tmp_path)

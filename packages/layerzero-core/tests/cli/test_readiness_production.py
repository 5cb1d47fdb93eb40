"""`readiness_check(production=True)`: what a server must not start with fails, with the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.device.probe import probe_devices
from layerzero.health.quarantine import Quarantine
from layerzero.public.checks import ReadinessReport
from layerzero.runtime.crashes import place
from layerzero.runtime.state import state
from layerzero_cli.root import cli
from layerzero_verify.testing.fakes import capabilities
from tools import faulty_plugins as faults

pytestmark = pytest.mark.usefixtures("clean")


def failed(report: ReadinessReport) -> dict[str, Any]:
    return {check.name: check for check in report.failed}


@pytest.mark.req("R-GATE-06", "R-OPS-03")
def test_the_production_configuration_of_this_repository_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of docs/production.md, on this machine; asked in code and as the page says."""
    page = (Path(__file__).parents[4] / "docs" / "production.md").read_text(encoding="utf-8")
    text = page.partition("```yaml\n")[2].partition("```")[0]
    file = Path("layerzero-production.yaml")
    file.write_text(text, encoding="utf-8")
    report = lz.readiness_check(file, production=True)
    assert report.ok, str(report)
    assert report.check("production").status == "ok"
    report.require()
    (command,) = (line for line in page.splitlines() if "lz readiness" in line and line.startswith("LAYERZERO_CONFIG"))
    monkeypatch.setenv("LAYERZERO_CONFIG", command.partition(" ")[0].partition("=")[2])
    lz.reset()
    done = CliRunner().invoke(cli, command.partition(" lz ")[2].split())
    assert done.exit_code == 0 and "production" in done.stdout, done.stdout
    policy = lz.get_config()
    assert (policy.jit, policy.on_fault, policy.breaker.cooldown_s) == ("background", "fallback", 30)


@pytest.mark.req("R-OPS-03")
def test_a_kernel_that_may_be_chosen_and_is_not_compiled_fails_in_production_only(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.install(site, "healthy", "swift", descriptor=capabilities("swift", {"jit": True, "priority": 90}))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "swift")
    lz.reset()
    assert lz.readiness_check().ok
    report = lz.readiness_check(production=True)
    (check,) = report.failed
    assert check.name == "jit cache" and check.code == "JIT_NOT_READY" and "swift.rms_norm" in check.message
    assert "lz warmup" in check.fix
    assert lz.readiness_check({"jit": "off"}, production=True).ok
    assert lz.readiness_check({"deny": ["swift"]}, production=True).ok
    assert "jit" in failed(lz.readiness_check({"jit": "block"}, production=True))


@pytest.fixture
def quarantined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ReadinessReport]:
    """Quarantine torch's rms_norm in a version on a device, and judge a policy in production."""
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(tmp_path / "quarantine.json"))
    lz.reset()
    name = "torch.rms_norm.native"
    lz.which("rms_norm", torch.ones(2, 8), torch.ones(8))
    here = {"version": state.world.registry.kernels[name].version, "device_signature": probe_devices()[-1].signature}

    def judge(policy: dict[str, Any] | None = None, **other: str) -> ReadinessReport:
        path = place()
        assert path is not None
        quarantine = Quarantine(path)
        quarantine.remove(name)
        quarantine.add(name, **(here | other), code="KERNEL_RAISED", detail="it crashed")
        lz.reset()
        assert lz.readiness_check(policy).ok
        return lz.readiness_check(policy, production=True)

    return judge


@pytest.mark.req("R-OPS-03")
def test_a_quarantined_kernel_fails_with_the_command_that_lifts_it(quarantined: Any) -> None:
    (check,) = quarantined().failed
    assert check.code == "QUARANTINED" and check.fix == "lz quarantine clear torch.rms_norm.native"


@pytest.mark.fault(27)
@pytest.mark.req("R-OPS-03")
def test_a_quarantined_kernel_that_cannot_be_chosen_here_does_not_fail(quarantined: Any) -> None:
    assert quarantined({"deny": ["torch.rms_norm.*"]}).ok
    assert quarantined({"rules": [{"match": {"op": "rms_norm"}, "allow": ["reference"]}]}).ok
    assert quarantined(version="0").ok  # the installed version is another
    assert quarantined(device_signature="a GPU that is not here").ok
    spent = [check for check in lz.doctor(probe=False).checks if check.name == "quarantine"]
    assert [(check.status, "a device that is not here" in check.message) for check in spent] == [("ok", True)]


@pytest.mark.fault(27)
def test_a_rule_that_denies_only_some_calls_does_not_excuse_a_quarantined_kernel(quarantined: Any) -> None:
    some = {"match": {"op": "rms_norm", "when": {"dtype": "float16"}}}
    assert failed(quarantined({"rules": [some | {"deny": ["torch"]}]}))
    allowed = {"rules": [some | {"allow": ["torch"]}, {"match": {"op": "rms_norm"}, "allow": ["reference"]}]}
    assert failed(quarantined(allowed))


@pytest.mark.req("R-OPS-03")
def test_an_open_breaker_is_not_ready() -> None:
    lz.rms_norm(torch.ones(2, 8), torch.ones(8))
    state.health.kernel_failed("torch.rms_norm.native", "boom")
    assert lz.readiness_check().ok
    (check,) = lz.readiness_check(production=True).failed
    assert check.code == "CIRCUIT_OPEN"


@pytest.mark.req("R-OPS-03")
def test_an_invalid_table_and_an_invalid_descriptor_fail_fast(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faults.install(site, "healthy", "crooked", descriptor=capabilities("crooked") | {"ops": {"rms_norm": [{}]}})
    (tmp_path / "table.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("LAYERZERO_PLUGINS", "crooked")
    monkeypatch.setenv("LAYERZERO_DISPATCH_TABLE", str(tmp_path / "table.json"))
    lz.reset()
    found = failed(lz.readiness_check(production=True))
    assert set(found) == {"crooked", "dispatch table"} and all(check.fix for check in found.values())


def test_misspelt_variables_and_work_beside_requests_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_STRCIT", "1")
    monkeypatch.setenv("LAYERZERO_DEBUG", "1")
    lz.reset()
    report = lz.readiness_check({"perfdb": {"auto_tune": True}}, production=True)
    (check,) = report.failed
    assert "LAYERZERO_STRCIT" in check.message and "LAYERZERO_STRICT" in check.fix
    warned = {item.name for item in report.checks if item.status == "warn"}
    assert {"variable", "perfdb"} <= warned


def test_a_policy_in_the_working_directory_is_pointed_out() -> None:
    Path("layerzero.yaml").write_text("strict_mode: true\n", encoding="utf-8")
    lz.reset()
    report = lz.readiness_check(production=True)
    assert report.ok and report.check("policy file", "production").fix.startswith("name it: LAYERZERO_CONFIG=")


def test_the_command_line_says_the_same_with_exit_codes(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["readiness", "--production"]).exit_code == 0
    file = tmp_path / "p.yaml"
    file.write_text("jit: block\n", encoding="utf-8")
    done = CliRunner().invoke(cli, ["readiness", "--production", "--config", str(file), "--json"])
    assert done.exit_code == 1
    assert [c["code"] for c in json.loads(done.stdout)["checks"] if c["status"] == "fail"] == ["JIT_NOT_READY"]
    assert CliRunner().invoke(cli, ["readiness", "--config", str(file)]).exit_code == 0

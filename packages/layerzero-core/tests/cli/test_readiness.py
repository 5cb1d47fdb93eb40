"""lz.readiness_check: everything the policy needs exists and works, before the first request asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.signature import environment_signature
from layerzero.errors import LayerZeroError
from layerzero.jit.index import Index
from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus
from layerzero.plugin.probing import ProbeResult
from layerzero.public import check_policy
from layerzero.runtime.state import state
from layerzero_verify.testing.fakes import capabilities
from tools import faulty_plugins as faults

pytestmark = pytest.mark.usefixtures("clean")


def add(site: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, **kernel: Any) -> None:
    faults.install(site, kind, name, descriptor=capabilities(name, kernel) if kernel else None)
    monkeypatch.setenv("LAYERZERO_PLUGINS", name)
    lz.reset()


def lock(kernel_id: str, op: str = "rms_norm") -> dict[str, Any]:
    return {"locks": {op: kernel_id}}


@pytest.mark.req("R-API-22", "R-OPS-02")
def test_a_plain_machine_is_ready_and_the_report_has_schemas_and_caches() -> None:
    lz.rms_norm(torch.ones(2, 8), torch.ones(8))
    report = lz.readiness_check()
    assert report.ok, str(report)
    assert f"{len(lz.list_kernels())} kernels" in report.check("schemas").message
    assert report.caches["selection"]["entries"] >= 1 and report.caches["selection"]["misses"] >= 1
    assert "entries" in report.check("selection", "caches").message
    assert json.loads(report.to_json())["caches"] == json.loads(json.dumps(report.caches))
    report.require()


@pytest.mark.req("R-CAP-06", "R-OPS-02", "R-OPS-03")
@pytest.mark.parametrize("wrong", [{"platfroms": ["cpu"]}, {"schema_version": "9.9"}, {"ops": {"rms_norm": [{}]}}])
def test_an_invalid_capabilities_file_is_not_ready(
    site: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    faults.install(site, "healthy", "crooked", descriptor=capabilities("crooked") | wrong)
    monkeypatch.setenv("LAYERZERO_PLUGINS", "crooked")
    lz.reset()
    report = lz.readiness_check()
    (check,) = report.failed
    assert check.group == "capabilities" and check.name == "crooked"
    assert check.code is not None and check.code.startswith("SCHEMA_") and "layerzero-crooked" in check.fix


def test_a_plugin_that_breaks_otherwise_is_a_warning_until_the_policy_needs_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(site, monkeypatch, "raises_at_import", "raises_at_import")
    assert lz.readiness_check().ok
    report = lz.readiness_check(lock("raises_at_import.rms_norm.plain"))
    (check,) = report.failed
    assert check.code == "PLUGIN_IMPORT_FAILED" and "did not load" in check.message and check.fix


def test_an_invalid_policy_fails_fast_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("strict_mode: true\nlocsk: {}\n", encoding="utf-8")
    report = lz.readiness_check(file)
    (check,) = report.failed
    assert check.code == "POLICY_UNKNOWN_KEY" and f"{file}:2" in check.message and "locks" in check.fix
    assert report.check("required").status == "skip"


def test_a_wrong_variable_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_CACHE_TTL", "soon")
    lz.reset()
    (check,) = lz.readiness_check().failed
    assert "LAYERZERO_CACHE_TTL" in check.message


@pytest.mark.req("R-API-22", "R-OPS-03")
def test_a_locked_kernel_that_nobody_registered_is_named_with_the_nearest() -> None:
    report = lz.readiness_check(lock("torch.rms_norm.natve"))
    (check,) = report.failed
    assert check.code == "KERNEL_UNKNOWN" and check.fix == "did you mean torch.rms_norm.native?"
    with pytest.raises(LayerZeroError, match=r"torch\.rms_norm\.natve") as raised:
        report.require()
    assert raised.value.code == "KERNEL_UNKNOWN"


def test_a_kernel_named_in_an_allow_list_is_required_too() -> None:
    (check,) = lz.readiness_check({"allow": ["torch.rms_norm.natve", "sdpa"]}).failed
    assert check.name == "torch.rms_norm.natve"


def test_locks_that_can_run_are_ready() -> None:
    report = lz.readiness_check({"locks": {"rms_norm": "torch.rms_norm.native", "attention": "sdpa.attention.math"}})
    assert report.ok and "locked for rms_norm" in report.check("torch.rms_norm.native").message


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs here")
def test_a_lock_on_a_kernel_for_another_device_is_not_ready() -> None:
    (check,) = lz.readiness_check(lock("sdpa.attention.flash", "attention")).failed
    assert check.code == "PLATFORM_MISMATCH" and "cuda" in check.fix


def test_a_lock_pattern_that_takes_in_ops_the_kernel_does_not_compute_is_not_ready() -> None:
    (check,) = lz.readiness_check(lock("torch.rms_norm.native", "*rms_norm")).failed
    assert check.code == "LOCKED_KERNEL_UNAVAILABLE" and "add_rms_norm" in check.message


def test_a_lock_that_is_denied_by_the_same_policy_is_not_ready() -> None:
    (check,) = lz.readiness_check({**lock("torch.rms_norm.native"), "deny": ["torch"]}).failed
    assert check.code == "POLICY_DENIED"


@pytest.mark.usefixtures("built_in")
def test_an_op_for_which_the_policy_leaves_nothing_is_not_ready() -> None:
    report = lz.readiness_check({"fallback_enabled": False, "deny": ["torch.rms_norm.*", "inductor.*"]})
    assert "rms_norm" in {check.name for check in report.failed if check.code == "NO_KERNEL"}


def test_a_pattern_that_names_nothing_is_a_warning() -> None:
    report = lz.readiness_check({"prefer": ["sdap.*"]})
    assert report.ok and report.check("prefer").status == "warn" and report.check("prefer").fix


def test_an_open_breaker_of_a_required_kernel_is_not_ready() -> None:
    lz.list_kernels()
    state.health.kernel_failed("torch.rms_norm.native", "boom")
    (check,) = lz.readiness_check(lock("torch.rms_norm.native")).failed
    assert check.code == "CIRCUIT_OPEN" and "boom" in check.message


def test_a_required_kernel_whose_vendor_crashes_is_not_ready(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(site, monkeypatch, "crashes_in_probe", "crashes_in_probe")
    (check,) = lz.readiness_check(lock("crashes_in_probe.rms_norm.plain")).failed
    assert check.code == "BACKEND_PROBE_CRASHED"


def test_a_required_kernel_whose_adapter_is_missing_is_not_ready(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(site, monkeypatch, "healthy", "hollow", function="faulty_hollow.nowhere:rms_norm")
    (check,) = lz.readiness_check(lock("hollow.rms_norm.plain")).failed
    assert check.code == "KERNEL_FUNCTION_MISSING"


@pytest.mark.req("R-OPS-02", "R-OPS-03")
def test_a_required_kernel_without_its_compiled_artifact_is_not_ready(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add(site, monkeypatch, "healthy", "compiled", jit=True)
    well = ProbeResult(BackendStatus("compiled", True, kernels=("compiled.rms_norm.plain",)))
    monkeypatch.setattr(check_policy, "probe", lambda *args, **kwargs: well)
    cache = tmp_path / "jit"
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(cache))
    policy = lock("compiled.rms_norm.plain")
    assert lz.readiness_check().ok  # nobody needs it, so it need not be there
    (check,) = lz.readiness_check(policy).failed
    assert check.code == "JIT_NOT_READY" and "lz.warmup" in check.fix
    index, here = Index(cache), environment_signature(DeviceSpec.detect())
    version = state.world.registry.kernels["compiled.rms_norm.plain"].version
    cache.mkdir(0o700)
    index.add(("compiled.rms_norm.plain", (version, "another machine")))
    index.add(("compiled.rms_norm.plain", ("another version", here)))
    (check,) = lz.readiness_check(policy).failed  # artifacts of other versions and machines are none here
    assert check.code == "JIT_NOT_READY"
    index.add(("compiled.rms_norm.plain", (version, here)), error="no compiler")
    (check,) = lz.readiness_check(policy).failed
    assert check.code == "JIT_FAILED" and "no compiler" in check.message
    artifact = cache / "kernel.so"
    artifact.write_bytes(b"\x7fELF")
    index.add(("compiled.rms_norm.plain", (version, here)), evidence=[str(artifact)])
    assert lz.readiness_check(policy).ok
    artifact.unlink()
    assert not lz.readiness_check(policy).ok  # the index alone is not believed
    artifact.write_bytes(b"\x7fELF")
    assert lz.readiness_check(policy).ok
    cache.chmod(0o777)
    (check,) = lz.readiness_check(policy).failed
    assert "chmod 700" in check.fix


def test_the_judged_policy_does_not_become_the_policy_in_force() -> None:
    before = lz.get_config().policy_hash
    lz.readiness_check({"deny": ["sdpa"]})
    assert lz.get_config().policy_hash == before

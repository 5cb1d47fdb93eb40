"""lz.doctor: what is here, what works, and the exact fix for what does not; nothing it meets can take it down."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.spec import Platform
from layerzero.dispatch.run import current_world
from layerzero.env import Env
from layerzero.health.quarantine import Quarantine
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import BackendSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.perfdb.store import create
from layerzero.plugin.discovery import OURS, VENDORS, normalized
from layerzero.plugin.manager import PluginRecord, load_plugins
from layerzero.plugin.probing import ProbeResult, answer
from layerzero.plugin.vendor import vendor_status
from layerzero.public import check_backends, check_machine
from layerzero.public.checks import Check, look, tolerant_env
from layerzero.reasons import reason
from layerzero.runtime.crashes import place
from layerzero.runtime.state import state
from layerzero.tables.file import hardware_of, make_table, save_table
from layerzero_verify.testing import fakes
from layerzero_verify.testing.fakes import capabilities
from tools import faulty_plugins as faults

pytestmark = pytest.mark.usefixtures("clean")


def install(site: Path, monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    for kind in kinds:
        faults.install(site, kind)
    monkeypatch.setenv("LAYERZERO_PLUGINS", ",".join(kinds))
    lz.reset()


# -- the machine -------------------------------------------------------------------------------------------------
@pytest.mark.req("R-API-21", "R-ENV-12")
def test_versions_devices_and_libraries_are_reported_and_absence_is_no_failure() -> None:
    report = lz.doctor(probe=False)
    assert report.ok, str(report)
    assert {"python", "torch"} <= {check.name for check in report.checks if check.group == "platform"}
    assert report.check("device cpu").status == "ok"
    wanted = {"torch", "cuda", "flash_attn", "flashinfer", "xformers", "liger_kernel", "pytest", "hypothesis"}
    assert wanted <= set(report.libraries)
    assert report.libraries["torch"] and report.libraries["pytest"]


def test_a_report_says_the_same_as_text_and_as_json() -> None:
    report = lz.doctor(probe=False)
    data = json.loads(report.to_json())
    assert data["ok"] is True and data["counts"]["fail"] == 0
    for check in data["checks"]:
        assert set(check) == {"group", "name", "status", "message", "code", "fix"}
        assert check["name"] in str(report)


@pytest.mark.parametrize(("version", "right"), [("2.9.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("x", False)])
def test_a_version_outside_the_supported_range_fails_with_the_command_that_helps(version: str, right: bool) -> None:
    check = check_machine._in_range("torch", version, ">=2.10", "pip install 'torch>=2.10'")
    assert (check.status == "ok") is right
    if not right:
        assert check.code == "BACKEND_VERSION_MISMATCH" and check.fix == "pip install 'torch>=2.10'"


@pytest.mark.parametrize("version", ["2.10.1", "2.12.0+cpu", "2.14.0a0+git1234567", "3.0"])
def test_a_supported_version_that_no_test_has_run_on_is_a_warning_that_names_the_tested_ones(version: str) -> None:
    check = check_machine._in_range("torch", version, ">=2.10", "pip install 'torch>=2.10'")
    assert check.status == "warn" and check.message == f"{version} (supported: >=2.10; tested: 2.11, 2.13)"
    assert "lz verify" in check.fix


def test_the_supported_ranges_are_those_of_the_package_metadata() -> None:
    assert check_machine.supported() == {"python": ">=3.11", "torch": ">=2.10"}


# -- settings ----------------------------------------------------------------------------------------------------
def test_a_misspelt_variable_is_a_warning_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_PERFER", "sdpa")
    report = lz.doctor(probe=False)
    check = report.check("variable")
    assert check.status == "warn" and "LAYERZERO_PERFER" in check.message and "LAYERZERO_PREFER" in check.fix
    assert report.ok


@pytest.mark.req("R-API-21")
def test_a_wrong_variable_and_a_corrupt_policy_are_findings_and_the_rest_is_still_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bad = tmp_path / "policy.yaml"
    bad.write_text("deny: [sdpa\n\x00", encoding="utf-8")
    monkeypatch.setenv("LAYERZERO_CACHE_SIZE", "many")
    monkeypatch.setenv("LAYERZERO_CONFIG", str(bad))
    lz.reset()
    report = lz.doctor(probe=False)
    failed = {check.name: check for check in report.failed}
    assert not report.ok and all(check.fix for check in report.failed)
    assert "LAYERZERO_CACHE_SIZE" in failed["variable"].message and failed["variable"].code == "CONFIG_INVALID"
    assert str(bad) in failed["policy file"].message
    assert report.check("sdpa", "plugins").status == "ok"


def test_a_wrong_variable_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_STRICT", "perhaps")
    report = lz.doctor(probe=False)
    assert len([check for check in report.checks if "LAYERZERO_STRICT" in check.message]) == 1


def test_variables_that_contradict_each_other_leave_a_readable_environment() -> None:
    given = {"LAYERZERO_LOCK_ATTENTION": "a.attention.b", "LAYERZERO_LOCK_attention": "a.attention.c", "PATH": "p"}
    env, kept, wrong = tolerant_env(given)
    assert len(wrong) == 1 and env.locks == () and kept == {"PATH": "p"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fakes run on the CPU, which is not the first device here")
# -- plugins and vendors -----------------------------------------------------------------------------------------
@pytest.mark.req("R-API-21", "R-OPS-01", "R-BK-OT-02")
def test_a_crashing_vendor_and_a_plugin_that_raises_cost_only_themselves(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, monkeypatch, "healthy", "raises_at_import", "chatters_in_probe")
    faults.install(site, "healthy", "aborts")
    plugin = site / "faulty_aborts" / "plugin.py"
    plugin.write_text(
        plugin.read_text(encoding="utf-8")
        + "\n@hookimpl\ndef layerzero_capabilities(device):\n    import os\n    os.abort()\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("LAYERZERO_PLUGINS", "healthy,raises_at_import,aborts,chatters_in_probe")
    lz.reset()
    report = lz.doctor(timeout=60)
    crashed = report.check("aborts", "backends")
    assert crashed.status == "fail" and crashed.code == "BACKEND_PROBE_CRASHED" and "SIGABRT" in crashed.message
    assert "LAYERZERO_PLUGINS_DENY=aborts" in crashed.fix
    broken = report.check("raises_at_import", "plugins")
    assert broken.status == "fail" and broken.code == "PLUGIN_IMPORT_FAILED" and "broken install" in broken.message
    assert "pip install --upgrade" in broken.fix
    assert {check.name for check in report.failed} == {"aborts", "raises_at_import"}
    for name in ("reference", "sdpa", "torch", "healthy", "chatters_in_probe"):
        assert report.check(name, "backends").status == "ok", str(report)
    assert "self test passed" in report.check("sdpa", "backends").message
    # Doctor and the list of kernels agree about what was registered.
    listed = {kernel.backend for kernel in lz.list_kernels()}
    assert {"healthy", "aborts"} <= listed and "raises_at_import" not in listed


def test_a_hanging_vendor_is_cut_off_and_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, monkeypatch, "hangs_in_probe")
    report = lz.doctor("hangs_in_probe", timeout=1.0)
    check = report.check("hangs_in_probe", "backends")
    assert check.code == "BACKEND_PROBE_TIMEOUT" and check.status == "fail" and check.fix


@pytest.mark.req("R-BK-OT-02")
def test_an_adapter_that_cannot_be_imported_is_found_before_a_call_meets_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = capabilities("ghost", {"function": "faulty_ghost.nowhere:rms_norm"})
    faults.install(site, "healthy", "ghost", descriptor=descriptor)
    monkeypatch.setenv("LAYERZERO_PLUGINS", "ghost")
    lz.reset()
    assert [kernel.backend for kernel in lz.list_kernels(backend="ghost", available=True)] == ["ghost"]
    check = lz.doctor("ghost", timeout=60).check("ghost", "backends")
    assert check.status == "fail" and check.code == "KERNEL_FUNCTION_MISSING"
    assert "faulty_ghost.nowhere" in check.message


def test_a_vendor_that_raises_while_an_adapter_imports_it_is_not_a_wrong_name(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = capabilities("ghost", {"function": "faulty_ghost.torn:rms_norm"})
    faults.install(site, "healthy", "ghost", descriptor=descriptor)
    (site / "faulty_ghost" / "torn.py").write_text("int + int  # as a vendor built for another compiler\n")
    monkeypatch.setenv("LAYERZERO_PLUGINS", "ghost")
    lz.reset()
    check = lz.doctor("ghost", timeout=60).check("ghost", "backends")
    assert check.status == "fail" and check.code == "BACKEND_IMPORT_FAILED"
    assert "unsupported operand" in check.message and "capabilities.json" not in check.fix


_RECORD = PluginRecord("vendor", "layerzero-vendor", "1.0", kernels=("vendor.rms_norm.a", "vendor.rms_norm.b"))
_SPEC = BackendSpec("vendor", vendor="libvendor", vendor_version="2.0")
_GOOD = ProbeResult(BackendStatus("vendor", True, "2.0", _RECORD.kernels), HealthReport("vendor", True, "", 1e-7))


def _judged(spec: BackendSpec = _SPEC, result: ProbeResult = _GOOD) -> Check:
    return check_backends.judge_probe("vendor", spec, _RECORD, result)


@pytest.mark.req("R-BK-OT-02", "R-OPS-01")
def test_where_metadata_and_probe_disagree_the_mismatch_is_flagged() -> None:
    assert _judged().status == "ok"
    missing = reason("BACKEND_NOT_INSTALLED", "libvendor", "libvendor")
    unpromised = _judged(replace(_SPEC, available=False, reasons=(missing,)))
    assert unpromised.status == "fail" and unpromised.code == "AVAILABILITY_MISMATCH"
    failed = reason("BACKEND_IMPORT_FAILED", "ImportError: libvendor.so")
    broken = _judged(result=ProbeResult(BackendStatus("vendor", False, reasons=(failed,), fix="reinstall it")))
    assert (broken.status, broken.code, broken.fix) == ("fail", "BACKEND_IMPORT_FAILED", "reinstall it")
    strange = _judged(result=replace(_GOOD, status=replace(_GOOD.status, kernels=("vendor.rms_norm.c",))))
    assert strange.code == "AVAILABILITY_MISMATCH" and "vendor.rms_norm.c" in strange.message
    other = _judged(result=replace(_GOOD, status=replace(_GOOD.status, version="3.0")))
    assert other.status == "warn" and "3.0" in other.message and "2.0" in other.message
    ill = _judged(result=replace(_GOOD, health=HealthReport("vendor", False, "got 5, expected 4")))
    assert ill.status == "fail" and ill.code == "HEALTH_CHECK_FAILED" and "got 5" in ill.message


def test_a_vendor_for_another_device_is_a_warning_not_a_failure() -> None:
    why = reason("PLATFORM_MISMATCH", "cpu", ["cuda"])
    check = _judged(result=ProbeResult(BackendStatus("vendor", False, "2.0", reasons=(why,))))
    assert check.status == "warn" and check.code == "PLATFORM_MISMATCH"


def test_a_backend_for_the_cpu_is_no_warning_beside_a_gpu() -> None:
    why = reason("PLATFORM_MISMATCH", "cuda", ["cpu"])
    found = ProbeResult(BackendStatus("vendor", False, "2.0", reasons=(why,)))
    assert _judged(replace(_SPEC, platforms=frozenset({Platform.CPU})), found).status == "ok"
    both = frozenset({Platform.CPU, Platform.ROCM})
    assert _judged(replace(_SPEC, platforms=both), found).status == "warn"


def test_cpu_libraries_that_are_not_installed_are_no_warnings_beside_a_gpu() -> None:
    missing = reason("BACKEND_NOT_INSTALLED", "libvendor", "libvendor")
    spec = replace(_SPEC, available=False, reasons=(missing,), platforms=frozenset({Platform.CPU}))
    gpu, cpu = DeviceSpec.for_sm(90), DeviceSpec(Platform.CPU, "cpu")
    assert check_backends._promise("vendor", spec, gpu).status == "skip"
    assert check_backends._promise("vendor", spec, cpu).status == "warn"
    assert check_backends._promise("vendor", replace(spec, platforms=frozenset({Platform.CUDA})), gpu).status == "warn"


def test_a_vendor_behind_a_pth_file_that_nobody_obeyed_is_named_as_such(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the CuTe compiler of FlashAttention 4 is where its folder comes in by PYTHONPATH."""
    place = tmp_path / "opt"
    (place / "deep" / "packages" / "hidden_vendor").mkdir(parents=True)
    (place / "deep" / "packages" / "hidden_vendor" / "__init__.py").touch()
    (place / "hidden_vendor.pth").write_text("# where it is\ndeep/packages\n")
    monkeypatch.syspath_prepend(str(place))
    vendor = {"dist": "pytest", "import": "hidden_vendor"}
    found = vendor_status(capabilities("behind", vendor=vendor), DeviceSpec.detect("cpu"))
    (why,) = found.reasons
    assert why.code == "BACKEND_IMPORT_FAILED" and "hidden_vendor.pth leads to it" in why.message
    assert str(place / "deep" / "packages") in why.hint and "site.addsitedir" in found.fix
    monkeypatch.syspath_prepend(str(place / "deep" / "packages"))
    assert vendor_status(capabilities("behind", vendor=vendor), DeviceSpec.detect("cpu")).available
    absent = vendor_status(capabilities("behind", vendor={**vendor, "import": "nowhere"}), DeviceSpec.detect("cpu"))
    assert ".pth" not in str(absent.reasons[0])


def test_what_is_not_compiled_yet_is_to_be_compiled_not_installed_again() -> None:
    health = HealthReport("vendor", False, "nothing is compiled yet; `lz warmup` does it")
    check = _judged(result=replace(_GOOD, health=health))
    assert (check.status, check.code, check.fix) == ("warn", "JIT_NOT_READY", "lz warmup")
    assert "compiled" in check.message


@pytest.mark.req("R-BK-OT-02")
def test_a_vendor_without_metadata_is_probed_when_its_module_can_be_imported(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed by hand, without a package: metadata says no, reality says yes."""
    vendor = {"dist": "no-such-dist-anywhere", "import": "json"}
    faults.install(site, "healthy", "byhand", descriptor=capabilities("byhand", vendor=vendor))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "byhand")
    lz.reset()
    assert lz.doctor("byhand", probe=False).check("byhand", "backends").code == "BACKEND_NOT_INSTALLED"
    assert lz.doctor("byhand", timeout=60).check("byhand", "backends").code == "AVAILABILITY_MISMATCH"


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("vendor", "fix"),
    [
        ({"dist": "sgl-kernel", "version": ">=99"}, "pip install 'sgl-kernel>=99'"),
        (
            {"dist": "no-such-dist-anywhere"},
            "bare asks for no-such-dist-anywhere, a distribution LayerZero does not know",
        ),
    ],
    ids=["known", "unknown"],
)
def test_a_missing_vendor_needs_no_process_and_comes_with_the_command_where_we_know_it(
    site: Path, monkeypatch: pytest.MonkeyPatch, vendor: dict[str, str], fix: str
) -> None:
    faults.install(site, "healthy", "bare", descriptor=capabilities("bare", vendor=vendor))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "bare")
    lz.reset()
    monkeypatch.setattr(check_backends, "probe", None)  # calling it would raise
    report = lz.doctor("bare")
    check = report.check("bare", "backends")
    assert report.ok and check.status == "warn" and check.fix.startswith(fix)


def test_two_plugins_that_claim_one_backend_are_a_conflict(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(site, "healthy", "first", descriptor=capabilities("same"))
    faults.install(site, "healthy", "second", descriptor=capabilities("same"))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "first,second")
    lz.reset()
    report = lz.doctor(probe=False)
    check = report.check("second", "conflicts")
    assert check.status == "fail" and check.code in ("PLUGIN_DUPLICATE", "KERNEL_DUPLICATE") and check.fix


@pytest.mark.req("R-DEV-10")
def test_vendor_packages_that_do_not_go_together_are_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flashinfer-cubin": "0.6.13", "flashinfer-python": "0.7.2"}
    monkeypatch.setattr(check_backends, "dist_version", versions.get)
    (check,) = check_backends.clashes(look())
    assert check.code == "BACKEND_CONFLICT" and "0.6.13" in check.message and "flashinfer-cubin==0.7.2" in check.fix


def test_a_denied_plugin_is_skipped_by_the_users_own_wish(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, monkeypatch, "healthy")
    monkeypatch.setenv("LAYERZERO_PLUGINS_DENY", "healthy")
    lz.reset()
    report = lz.doctor(probe=False)
    check = report.check("healthy", "plugins")
    assert report.ok and check.status == "skip" and check.code == "PLUGIN_DENIED"


@pytest.mark.fault(28)
def test_a_backend_nobody_has_is_named_with_the_way_to_get_it() -> None:
    check = lz.doctor("sdpaa", probe=False).failed[0]
    assert check.code == "BACKEND_NOT_INSTALLED" and "sdpa" in check.fix
    quux = lz.doctor("quux", probe=False).failed[0]  # nobody's: whoever takes the name would be installed
    assert "pip install" not in quux.fix and "layerzero-quux" not in quux.message and "sdpa" in quux.fix
    assert answer(load_plugins(entry_points=()), "quux", fakes.cpu())["status"]["fix"].count("pip install") == 0
    (ours,) = check_backends.unknown(look(), "hub")
    assert ours.fix == "pip install layerzero-hub"


@pytest.mark.fault(28)
def test_a_plugin_without_a_distribution_gets_no_install_hint() -> None:
    class Broken:
        name, value = "torch_tools", "torch_tools.plugin"

        def load(self) -> Any:
            raise ImportError("nothing here")

    record = load_plugins(entry_points=[Broken()], env=Env()).record("torch_tools")
    assert record is not None and record.state == "failed" and "pip" not in record.fix
    assert "LAYERZERO_PLUGINS_DENY=torch_tools" in record.fix
    assert "pip" not in check_backends._reinstall(record)


@pytest.mark.fault(28)
def test_every_distribution_of_ours_and_every_vendor_of_ours_may_be_named_in_a_hint() -> None:
    packages = Path(__file__).parents[3]
    ours = {tomllib.loads(file.read_text())["project"]["name"] for file in packages.glob("*/pyproject.toml")}
    assert ours == set(OURS)
    vendors = {
        vendor["dist"]
        for file in packages.glob("*/src/**/capabilities.json")
        if (vendor := json.loads(file.read_text()).get("vendor")) is not None
    }
    assert {normalized(dist) for dist in vendors} <= VENDORS


# -- dispatch table ----------------------------------------------------------------------------------------------
@pytest.mark.fault(28)
def test_a_dispatch_table_that_is_not_in_force_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, device = current_world(), look().devices[0]
    assert lz.doctor(probe=False).check("dispatch table").status == "skip"
    table = make_table(hardware_of(device), world.policy.policy_hash, {}, {}, ())
    path = tmp_path / "table.json"
    for wrong, code in (
        (None, None),
        (replace(table.hardware, signature="0123456789abcdef"), "PLAN_HARDWARE_MISMATCH"),
    ):
        save_table(make_table(wrong or table.hardware, table.policy_hash, {}, {}, ()), path)
        monkeypatch.setenv("LAYERZERO_DISPATCH_TABLE", str(path))
        lz.reset()
        report = lz.doctor(probe=False)
        check = report.check("dispatch table", "settings")
        assert (check.status, check.code) == ("ok" if wrong is None else "fail", code), str(report)
    assert not report.ok and f"{path} is not in force" in check.message and check.fix
    path.write_text("{}")
    lz.reset()
    check = lz.doctor(probe=False).check("dispatch table")
    assert check.status == "fail" and check.code == "SCHEMA_VERSION_UNKNOWN" and "not in force" in check.message
    lz.use_table(None)
    check = lz.doctor(probe=False).check("dispatch table")
    assert check.status == "warn" and "put it aside" in check.message


# -- health ------------------------------------------------------------------------------------------------------
def test_a_damaged_database_of_measured_times_is_shown_until_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "times.db"
    monkeypatch.setenv("LAYERZERO_PERFDB", str(path))
    lz.reset()
    assert not [check for check in lz.doctor(probe=False).checks if check.group == "measured times"]
    path.write_text("a diary")
    assert lz.doctor(probe=False).check("times.db").code == "PERF_FILE_FOREIGN"
    path.unlink()
    kept = tmp_path / f"times.db.corrupt-{'0' * 32}"  # as another process has left it
    for file in (path, kept):
        with contextlib.closing(sqlite3.connect(file)) as raw:
            create(raw)
    told = [check for check in lz.doctor(probe=False).checks if check.group == "measured times"]
    assert [(check.status, check.code) for check in told] == [("ok", None), ("warn", "CACHE_CORRUPT")]
    assert "0 rows in" in told[0].message and str(kept) in told[1].message and "remove the file" in told[1].fix


@pytest.mark.req("R-OPS-01")
def test_an_open_breaker_is_shown_with_its_cause() -> None:
    lz.list_kernels()
    state.health.kernel_failed("sdpa.attention.math", "illegal instruction")
    report = lz.doctor(probe=False)
    check = report.check("kernel sdpa.attention.math")
    assert report.ok and check.status == "warn" and check.code == "CIRCUIT_OPEN"
    assert "illegal instruction" in check.message


@pytest.fixture
def own_quarantine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quarantine file of the test's own: what was set aside is remembered by file for the life of the process."""
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(tmp_path / "quarantine.json"))
    file = place()
    assert file is not None and file.parent == tmp_path
    return file


def test_quarantined_kernels_and_a_corrupt_quarantine_are_shown(own_quarantine: Path) -> None:
    file = own_quarantine
    Quarantine(file).add("x.attention.y", "1.0", "device", "DEVICE_LOST", "illegal memory access")
    check = lz.doctor(probe=False).check("quarantine")
    assert check.code == "QUARANTINED" and "x.attention.y" in check.message
    file.write_text("{", encoding="utf-8")
    assert lz.doctor(probe=False).check("quarantine").code == "CACHE_CORRUPT"


def test_a_corrupt_quarantine_that_was_set_aside_when_the_kernels_were_listed_is_still_shown(
    own_quarantine: Path,
) -> None:
    own_quarantine.write_text("{", encoding="utf-8")
    state.reset()
    lz.list_kernels()
    assert not own_quarantine.exists()
    assert lz.doctor(probe=False).check("quarantine").code == "CACHE_CORRUPT"


@pytest.mark.req("R-OPS-01", "R-API-19")
def test_a_kernel_that_could_not_be_bound_in_this_process_is_a_failure() -> None:
    lz.list_kernels()
    state.unbindable("sdpa.attention.math", reason("BACKEND_IMPORT_FAILED", "ImportError: no libc"))
    check = lz.doctor(probe=False).check("sdpa.attention.math", "health")
    assert check.status == "fail" and "no libc" in check.message
    usable = {kernel.kernel_id for kernel in lz.list_kernels("attention", available=True)}
    assert "sdpa.attention.math" not in usable and "reference.attention.plain" in usable
    assert "sdpa.attention.math" in {kernel.kernel_id for kernel in lz.list_kernels("attention", available=False)}

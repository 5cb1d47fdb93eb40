"""What the backend says about itself with the vendor absent, wrong, broken and there; no vendor is needed for it."""

from __future__ import annotations

import importlib
import sys

import pytest

from layerzero.plugin.discovery import dist_version
from layerzero.plugin.probing import probe
from layerzero_flashinfer.plugin import layerzero_capabilities, layerzero_health
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

DEVICE = fakes.gpu(90)


def codes(status):
    return [item.code.value for item in status.reasons]


@pytest.mark.req("R-BK-FI-01")
def test_an_absent_vendor_is_reported_with_the_command_that_brings_it():
    with pretend({"flashinfer-python": None, "flashinfer-cubin": None, "flashinfer-jit-cache": "0.7.2+cu130"}):
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_NOT_INSTALLED"]
    assert status.fix == status.reasons[0].hint == "pip install 'layerzero-flashinfer[flashinfer]'"


def test_a_version_outside_the_range_is_reported_with_the_range():
    with pretend(
        {"flashinfer-python": "0.5.0", "flashinfer-cubin": None, "flashinfer-jit-cache": "0.7.2+cu130"},
        {"flashinfer": None},
    ) as imported:
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert (status.reasons[0].value, status.reasons[0].limit) == ("flashinfer-python 0.5.0", ">=0.6.6,<0.8")
    assert (status.version, imported) == ("0.5.0", [])


def test_a_vendor_that_cannot_be_imported_is_a_reason():
    with pretend(
        {"flashinfer-python": "0.7.2", "flashinfer-cubin": None, "flashinfer-jit-cache": "0.7.2+cu130"},
        {"flashinfer": ImportError("undefined symbol")},
    ):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_IMPORT_FAILED"]
    assert "import flashinfer" in status.fix


@pytest.mark.req("R-BK-FI-01")
def test_with_the_vendor_there_it_names_its_kernels():
    with pretend(
        {"flashinfer-python": "0.7.2", "flashinfer-cubin": None, "flashinfer-jit-cache": "0.7.2+cu130"},
        {"flashinfer": None},
    ) as imported:
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, codes(status)) == (True, "0.7.2", [])
    assert "flashinfer.paged_attention.decode_tc" in status.kernels
    assert "flashinfer.attention.single_fa3" in status.kernels
    assert "flashinfer" in imported


@pytest.mark.req("R-BK-FI-01")
def test_what_pip_has_installed_is_found_and_the_compiled_package_counts(tmp_path, monkeypatch):
    """Folders as pip leaves them, nothing pretended: none, one without a compiler, one with the compiled kernels."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)

    def installed(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def asked():
        dist_version.cache_clear()
        importlib.invalidate_caches()
        status = layerzero_capabilities(DEVICE)
        return status.version, codes(status), bool(status.kernels)

    try:
        assert asked() == (None, ["BACKEND_NOT_INSTALLED"], False)
        installed("flashinfer-python", "0.7.2")
        assert asked() == ("0.7.2", ["JIT_TOOLCHAIN_MISSING", "BACKEND_IMPORT_FAILED"], False)
        (tmp_path / "flashinfer.py").touch()
        assert asked() == ("0.7.2", ["JIT_TOOLCHAIN_MISSING"], False)
        installed("flashinfer-jit-cache", "0.7.2+cu130")
        assert asked() == ("0.7.2", [], True)
    finally:
        dist_version.cache_clear()
        sys.modules.pop("flashinfer", None)


def test_a_device_it_cannot_use_is_named():
    with pretend(
        {"flashinfer-python": "0.7.2", "flashinfer-cubin": None, "flashinfer-jit-cache": "0.7.2"}, {"flashinfer": None}
    ):
        assert codes(layerzero_capabilities(fakes.cpu())) == ["PLATFORM_MISMATCH"]
        assert codes(layerzero_capabilities(fakes.gpu(70))) == ["SM_TOO_OLD"]


def test_the_hopper_template_is_for_hopper_alone():
    found = {}
    with pretend(
        {"flashinfer-python": "0.7.2", "flashinfer-cubin": None, "flashinfer-jit-cache": "0.7.2"}, {"flashinfer": None}
    ):
        for sm in (75, 80, 90, 100, 120):
            found[sm] = set(layerzero_capabilities(fakes.gpu(sm)).kernels)
    assert [sm for sm, kernels in found.items() if "flashinfer.attention.single_fa3" in kernels] == [90]
    assert [sm for sm, kernels in found.items() if "flashinfer.attention.single_fa2" in kernels] == [80, 90, 100, 120]
    assert "flashinfer.rms_norm.rows" in found[75]


@pytest.mark.req("R-BK-FI-01")
@pytest.mark.parametrize("dist", ["flashinfer-cubin", "flashinfer-jit-cache"])
def test_binaries_of_another_version_are_reported_with_the_fix(dist):
    found = {
        "flashinfer-python": "0.7.2.post1",
        "flashinfer-cubin": "0.7.2.post1",
        "flashinfer-jit-cache": "0.7.2.post1",
    }
    with pretend(found | {dist: "0.6.13"}, {"flashinfer": None}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert (status.reasons[0].value, status.reasons[0].limit) == (f"{dist} 0.6.13", "==0.7.2.post1")
    assert status.fix == f"pip uninstall --yes {dist}"


@pytest.mark.req("R-BK-FI-01")
def test_a_missing_compiler_is_reported_unless_the_kernels_are_compiled_already(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    vendor = {"flashinfer-python": "0.7.2", "flashinfer-cubin": None}
    with pretend(vendor | {"flashinfer-jit-cache": None}, {"flashinfer": None}):
        status = layerzero_capabilities(DEVICE)
        assert codes(status) == ["JIT_TOOLCHAIN_MISSING"]
        assert "nvcc and ninja" in status.reasons[0].message and "flashinfer-jit-cache" in status.fix
        for tool in ("bin/nvcc", "ninja"):
            (tmp_path / tool).parent.mkdir(exist_ok=True)
            (tmp_path / tool).touch(mode=0o755)
        assert layerzero_capabilities(DEVICE).available
    with pretend(vendor | {"flashinfer-jit-cache": "0.7.2+cu130"}, {"flashinfer": None}):
        assert layerzero_capabilities(DEVICE).available


def test_the_probe_answers_within_its_time_limit():
    result = probe("flashinfer", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_health_claims_nothing_without_a_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    report = layerzero_health("flashinfer")
    assert (report.ok, report.max_error, report.detail) == (False, None, "no CUDA device")

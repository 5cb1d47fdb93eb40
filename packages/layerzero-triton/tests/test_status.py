"""What the backend says about itself with the vendor absent, wrong, broken and there; no vendor is needed for it."""

from __future__ import annotations

from layerzero.plugin.probing import probe
from layerzero.testing import fakes
from layerzero.testing.vendors import pretend
from layerzero_triton.plugin import layerzero_capabilities, layerzero_health

DEVICE = fakes.gpu(90)


def codes(status):
    return [item.code.value for item in status.reasons]


def test_an_absent_vendor_is_reported_with_the_command_that_brings_it():
    with pretend({"triton": None}):
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_NOT_INSTALLED", "BACKEND_STUB"]
    assert status.fix == status.reasons[0].hint == "pip install 'layerzero-triton[triton]'"


def test_a_version_outside_the_range_is_reported_with_the_range():
    with pretend({"triton": "2.3.1"}, {"triton": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_VERSION_MISMATCH", "BACKEND_STUB"]
    assert (status.reasons[0].value, status.reasons[0].limit) == ("triton 2.3.1", ">=3.5,<4")
    assert (status.version, imported) == ("2.3.1", [])


def test_a_vendor_that_cannot_be_imported_is_a_reason():
    with pretend({"triton": "3.9.0"}, {"triton": ImportError("undefined symbol")}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_IMPORT_FAILED", "BACKEND_STUB"]
    assert "import triton" in status.fix


def test_with_the_vendor_there_it_says_that_no_kernel_is():
    with pretend({"triton": "3.9.0"}, {"triton": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, codes(status)) == (False, "3.9.0", ["BACKEND_STUB"])
    assert "triton" in imported


def test_a_device_it_cannot_use_is_named():
    with pretend({"triton": "3.9.0"}, {"triton": None}):
        assert codes(layerzero_capabilities(fakes.cpu())) == ["PLATFORM_MISMATCH", "BACKEND_STUB"]
        assert codes(layerzero_capabilities(fakes.gpu(75))) == ["SM_TOO_OLD", "BACKEND_STUB"]


def test_the_probe_answers_within_its_time_limit():
    result = probe("triton", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_health_claims_nothing():
    report = layerzero_health("triton")
    assert (report.ok, report.max_error) == (False, None)
    assert "yet" in report.detail

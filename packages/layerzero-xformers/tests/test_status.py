"""What the backend says about itself with the vendor absent, wrong, broken and there; no vendor is needed for it."""

from __future__ import annotations

import pytest

from layerzero.plugin.probing import probe
from layerzero.testing import fakes
from layerzero.testing.vendors import pretend
from layerzero_xformers.plugin import layerzero_capabilities, layerzero_health

ALONE = {"xformers": "0.0.35", "flash-attn": None, "flash-attn-4": None}
DEVICE = fakes.gpu(90, cuda_version="12.8")


def codes(status):
    return [item.code.value for item in status.reasons]


def test_an_absent_vendor_is_reported_with_the_command_that_brings_it():
    with pretend({"xformers": None, "flash-attn": None, "flash-attn-4": None}):
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_NOT_INSTALLED", "BACKEND_STUB"]
    assert status.fix == status.reasons[0].hint == "pip install 'layerzero-xformers[xformers]'"


def test_a_version_outside_the_range_is_reported_with_the_range():
    with pretend({"xformers": "0.0.31", "flash-attn": None, "flash-attn-4": None}, {"xformers": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_VERSION_MISMATCH", "BACKEND_STUB"]
    assert (status.reasons[0].value, status.reasons[0].limit) == ("xformers 0.0.31", ">=0.0.35,<0.0.36")
    assert (status.version, imported) == ("0.0.31", [])


def test_a_vendor_that_cannot_be_imported_is_a_reason():
    with pretend(
        {"xformers": "0.0.35", "flash-attn": None, "flash-attn-4": None}, {"xformers": ImportError("undefined symbol")}
    ):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_IMPORT_FAILED", "BACKEND_STUB"]
    assert "import xformers.ops" in status.fix


def test_with_the_vendor_there_it_says_that_no_kernel_is():
    with pretend({"xformers": "0.0.35", "flash-attn": None, "flash-attn-4": None}, {"xformers": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, codes(status)) == (False, "0.0.35", ["BACKEND_STUB"])
    assert "xformers.ops" in imported


def test_a_device_it_cannot_use_is_named():
    with pretend(ALONE, {"xformers": None}):
        assert codes(layerzero_capabilities(fakes.cpu())) == ["PLATFORM_MISMATCH", "BACKEND_STUB"]
        assert codes(layerzero_capabilities(fakes.gpu(70))) == ["SM_TOO_OLD", "BACKEND_STUB"]
        status = layerzero_capabilities(fakes.gpu(90, cuda_version="13.0"))
        assert codes(status) == ["CUDA_VERSION_MISMATCH", "BACKEND_STUB"]
        assert (status.reasons[0].value, status.reasons[0].limit) == ("13.0", "12")


def test_the_folder_of_flash_attention_4_is_seen_before_it_breaks_the_import():
    with pretend(ALONE | {"flash-attn-4": "4.0.0b36"}, {"xformers": None}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_CONFLICT", "BACKEND_STUB"]
    assert status.reasons[0].value == "flash-attn-4 4.0.0b36"
    assert status.fix == "pip uninstall --yes flash-attn-4"


@pytest.mark.parametrize(
    ("flash", "expected"),
    [("2.8.3.post2", ["BACKEND_STUB"]), ("2.9.0", ["BACKEND_VERSION_MISMATCH", "BACKEND_STUB"])],
)
def test_flash_attention_2_beside_it_has_to_be_one_it_takes(flash, expected):
    with pretend(ALONE | {"flash-attn": flash, "flash-attn-4": "4.0.0b36"}, {"xformers": None}):
        assert codes(layerzero_capabilities(DEVICE)) == expected


def test_the_probe_answers_within_its_time_limit():
    result = probe("xformers", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_health_claims_nothing():
    report = layerzero_health("xformers")
    assert (report.ok, report.max_error) == (False, None)
    assert "yet" in report.detail

"""What the backend says about itself with the vendor absent, wrong, broken and there; no GPU is needed for it."""

from __future__ import annotations

import pytest

from layerzero.model.enums import Platform
from layerzero.plugin.probing import probe
from layerzero_triton.plugin import layerzero_capabilities, layerzero_health
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

DEVICE = fakes.gpu(90)


def codes(status):
    return [item.code.value for item in status.reasons]


@pytest.mark.req("R-BK-TR-01")
def test_an_absent_vendor_is_reported_with_the_command_that_brings_it():
    with pretend({"triton": None}):
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_NOT_INSTALLED"]
    assert status.fix == status.reasons[0].hint == "pip install 'layerzero-triton[triton]'"


@pytest.mark.req("R-BK-TR-01")
def test_a_version_outside_the_range_is_reported_with_the_range():
    with pretend({"triton": "2.3.1"}, {"triton": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert (status.reasons[0].value, status.reasons[0].limit) == ("triton 2.3.1", ">=3.5,<4")
    assert (status.version, imported) == ("2.3.1", [])


def test_a_vendor_that_cannot_be_imported_is_a_reason():
    with pretend({"triton": "3.9.0"}, {"triton": ImportError("undefined symbol")}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_IMPORT_FAILED"]
    assert "import triton" in status.fix


@pytest.mark.req("R-BK-TR-01")
def test_with_the_vendor_there_it_names_version_and_kernels():
    with pretend({"triton": "3.9.0"}, {"triton": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, codes(status)) == (True, "3.9.0", [])
    assert {"triton.rms_norm.rows", "triton.paged_attention.split", "triton.linear.fp8_weight"} <= set(status.kernels)
    assert "triton" in imported


@pytest.mark.req("R-BK-TR-04")
def test_on_rocm_it_offers_all_but_packed_weights_and_grouped_attention():
    with pretend({"triton": "3.9.0"}, {"triton": None}):
        status = layerzero_capabilities(fakes.gpu(90, platform=Platform.ROCM, sm_version=None))
        cuda = layerzero_capabilities(DEVICE)
    assert status.available and cuda.available and set(status.kernels) < set(cuda.kernels)
    assert {"triton.rope.fused", "triton.rms_norm.rows", "triton.paged_attention.split"} <= set(status.kernels)
    assert "triton.linear.fp8_weight" in cuda.kernels and "triton.linear.fp8_weight" not in status.kernels
    lacking = {name.split(".")[1] for name in set(cuda.kernels) - set(status.kernels)}
    assert lacking == {"linear", "moe", "grouped_attention"}


def test_a_device_it_cannot_use_is_named():
    with pretend({"triton": "3.9.0"}, {"triton": None}):
        assert set(codes(layerzero_capabilities(fakes.cpu()))) == {"PLATFORM_MISMATCH"}
        assert codes(layerzero_capabilities(fakes.gpu(75)))[0] == "SM_TOO_OLD"


def test_the_probe_answers_within_its_time_limit():
    result = probe("triton", timeout=60.0)
    assert result.status.available or result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))


def test_health_claims_nothing_where_no_kernel_can_run():
    import torch

    report = layerzero_health("triton")
    assert report.ok == torch.cuda.is_available()
    assert report.ok or "no GPU" in report.detail

"""What the accelerator says about itself."""

from __future__ import annotations

import pytest
import torch

from layerzero.plugin.probing import probe
from layerzero.testing import fakes
from layerzero_accel.plugin import layerzero_capabilities, layerzero_health


def codes(status):
    return [item.code.value for item in status.reasons]


@pytest.mark.parametrize("device", [fakes.cpu(), fakes.gpu(90)], ids=["cpu", "cuda"])
def test_it_needs_no_vendor_and_says_that_nothing_is_there_yet(device):
    status = layerzero_capabilities(device)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_STUB"]


def test_a_torch_without_the_exchange_api_is_reported(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    status = layerzero_capabilities(fakes.cpu())
    assert codes(status) == ["BACKEND_VERSION_MISMATCH", "BACKEND_STUB"]
    assert status.reasons[0].limit == ">=2.10"
    assert status.fix == "pip install 'torch>=2.10'"


def test_the_probe_answers_within_its_time_limit():
    result = probe("accel", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_health_claims_nothing():
    report = layerzero_health("accel")
    assert (report.ok, report.max_error) == (False, None)
    assert "yet" in report.detail

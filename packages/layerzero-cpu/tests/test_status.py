"""What the backend says about itself and about the CPU libraries beside it; none of them is needed for it."""

from __future__ import annotations

import pytest

from layerzero.plugin.probing import probe
from layerzero.testing import fakes
from layerzero.testing.vendors import pretend
from layerzero_cpu.plugin import layerzero_capabilities, layerzero_health

NOTHING = {"zentorch": None, "intel-extension-for-pytorch": None}


def codes(status):
    return [item.code.value for item in status.reasons]


def test_it_needs_no_vendor_and_says_that_no_kernel_is_there():
    with pretend(NOTHING):
        status = layerzero_capabilities(fakes.cpu())
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_STUB"]


def test_a_gpu_is_not_its_device():
    with pretend(NOTHING):
        assert codes(layerzero_capabilities(fakes.gpu(90))) == ["PLATFORM_MISMATCH", "BACKEND_STUB"]


@pytest.mark.parametrize("there", [True, False])
def test_onednn_is_looked_for_inside_torch(monkeypatch, there):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: there)
    monkeypatch.setattr("torch.__config__.show", lambda: "- Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)")
    with pretend(NOTHING):
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert ("oneDNN 3.12.0 in torch" in why.message) is there
    assert ("this torch has no oneDNN" in why.message) is not there


def test_zentorch_is_named_with_its_version():
    with pretend(NOTHING | {"zentorch": "2.13.0.2"}, {"zentorch": None}):
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert "zentorch 2.13.0.2" in why.message and "cannot" not in why.message


@pytest.mark.parametrize("error", [ImportError("built for another torch"), SystemExit(1)])
def test_a_zentorch_that_cannot_be_imported_is_named_as_such(error):
    with pretend(NOTHING | {"zentorch": "2.14.0.1"}, {"zentorch": error}):
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert f"zentorch 2.14.0.1 cannot be imported: {type(error).__name__}" in why.message


def test_the_archived_extension_is_detected_but_never_imported():
    name = "intel_extension_for_pytorch"
    with pretend(NOTHING | {"intel-extension-for-pytorch": "2.8.0"}, {name: ImportError("no")}) as imported:
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert "intel-extension-for-pytorch 2.8.0 (archived" in why.message
    assert imported == []


def test_the_probe_answers_within_its_time_limit():
    result = probe("cpu", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_health_claims_nothing():
    report = layerzero_health("cpu")
    assert (report.ok, report.max_error) == (False, None)
    assert "yet" in report.detail

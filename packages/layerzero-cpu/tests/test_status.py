"""What the backend says about itself and about the CPU libraries beside it; none of them is needed for it."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from layerzero.device.signature import backend_versions
from layerzero.plugin.probing import probe
from layerzero.public.check_backends import clashes
from layerzero.public.checks import look
from layerzero_cpu import plugin
from layerzero_cpu.plugin import layerzero_capabilities, layerzero_health
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

NOTHING = {"zentorch": None, "intel-extension-for-pytorch": None}


def codes(status):
    return [item.code.value for item in status.reasons]


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setattr(plugin, "LIBRARY", Path("/nonexistent/_native.abi3.so"))


@pytest.mark.req("R-BK-CPU-04")
def test_with_its_library_it_offers_its_kernels_on_any_cpu():
    with pretend(NOTHING):
        status = layerzero_capabilities(fakes.cpu())
    assert (status.available, codes(status)) == (True, [])
    assert {"cpu.rms_norm.rows", "cpu.layer_norm.rows", "cpu.quantize.groups"} <= set(status.kernels)


def test_without_its_library_it_says_so_and_how_to_get_it(no_library):
    with pretend(NOTHING):
        status = layerzero_capabilities(fakes.cpu())
    assert (status.available, status.kernels, codes(status)) == (False, (), ["NATIVE_KERNELS_MISSING"])
    assert status.fix == status.reasons[0].hint
    assert "g++" in status.fix and "python -m layerzero_cpu.build" in status.fix


def test_a_gpu_is_not_its_device():
    with pretend(NOTHING):
        status = layerzero_capabilities(fakes.gpu(90))
    assert not status.available
    assert set(codes(status)) == {"PLATFORM_MISMATCH"}


def test_an_instruction_set_the_machine_does_not_have_is_refused(monkeypatch):
    import sys

    monkeypatch.setenv("LAYERZERO_CPU_ISA", "quantum")
    monkeypatch.delitem(sys.modules, "layerzero_cpu.library", raising=False)
    with pretend(NOTHING):
        status = layerzero_capabilities(fakes.cpu())
    assert codes(status) == ["CPU_FEATURE_MISSING"]
    assert status.reasons[0].value == "quantum" and "portable" in str(status.reasons[0].limit)


@pytest.mark.req("R-BK-CPU-01")
@pytest.mark.parametrize("there", [True, False])
def test_onednn_is_looked_for_inside_torch(monkeypatch, no_library, there):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: there)
    monkeypatch.setattr("torch.__config__.show", lambda: "- Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)")
    with pretend(NOTHING):
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert ("oneDNN 3.12.0 in torch" in why.message) is there
    assert ("this torch has no oneDNN" in why.message) is not there


@pytest.mark.req("R-BK-CPU-01")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's, at any change of the flags
def test_the_onednn_of_this_torch_is_named_and_computes_what_torch_computes_without_it(no_library, capfd):
    import torch

    import layerzero as lz

    built = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    assert built is not None and torch.backends.mkldnn.is_available()
    with pretend(NOTHING):
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert f"oneDNN {built[1]} in torch" in why.message
    draw = torch.Generator().manual_seed(0)
    x, w, gain = (torch.randn(*shape, generator=draw) for shape in ((64, 128), (256, 128), (128,)))
    q = torch.randn(2, 4, 33, 64, generator=draw)
    sent = [torch.float32] * torch.backends.mkldnn.is_acl_available()
    sent += [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for dtype in sent:  # where torch gives products to oneDNN, the kernel that we choose does
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            lz.linear(x.to(dtype), w.to(dtype), backend="torch")
        ctypes.CDLL(None).fflush(None)
        assert re.search(r"onednn_verbose,.*exec,cpu,(matmul|inner_product)", capfd.readouterr().out), dtype
    calls = {
        "linear": lambda: lz.linear(x, w, backend="torch"),
        "layer_norm": lambda: lz.layer_norm(x, gain, backend="torch"),
        "attention": lambda: lz.attention(q, q, q, is_causal=True, backend="sdpa"),
    }
    for name, call in calls.items():
        found = call()
        with torch.backends.mkldnn.flags(enabled=False):
            torch.testing.assert_close(
                found, call(), rtol=1e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.req("R-BK-CPU-02")
def test_zentorch_is_named_with_its_version(no_library):
    with pretend(NOTHING | {"zentorch": "2.13.0.2"}, {"zentorch": None}):
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert "zentorch 2.13.0.2" in why.message and "cannot" not in why.message


@pytest.mark.parametrize("error", [ImportError("built for another torch"), SystemExit(1)])
def test_a_zentorch_that_cannot_be_imported_is_named_as_such(no_library, error):
    with pretend(NOTHING | {"zentorch": "2.14.0.1"}, {"zentorch": error}):
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert f"zentorch 2.14.0.1 cannot be imported: {type(error).__name__}" in why.message


@pytest.mark.req("R-BK-CPU-03")
def test_the_archived_extension_is_detected_but_never_imported(no_library):
    name = "intel_extension_for_pytorch"
    with pretend(NOTHING | {"intel-extension-for-pytorch": "2.8.0"}, {name: ImportError("no")}) as imported:
        (why,) = layerzero_capabilities(fakes.cpu()).reasons
    assert "intel-extension-for-pytorch 2.8.0 (archived" in why.message
    assert imported == []


@pytest.mark.req("R-BK-CPU-03")
def test_beside_working_kernels_the_archived_extension_is_a_version_in_the_snapshot_and_a_finding_of_the_doctor():
    """Built for another torch it would end the process: nothing imports it to say so."""
    name = "intel-extension-for-pytorch"
    with pretend(NOTHING | {name: "2.8.0"}, {"intel_extension_for_pytorch": SystemExit(1)}) as imported:
        status = layerzero_capabilities(fakes.cpu())
        versions = dict(backend_versions())
        told = [check for check in clashes(look()) if check.name == name]
    assert (status.available, codes(status)) == (True, []) and versions[name] == "2.8.0"
    assert [(check.code, "2.8.0" in check.message) for check in told] == [("BACKEND_CONFLICT", True)]
    assert f"pip uninstall {name}" in told[0].fix and imported == []


def test_the_probe_answers_within_its_time_limit_and_runs_the_self_test():
    import torch

    if torch.cuda.is_available():
        pytest.skip("asked about the accelerator, it rightly says that it is for the CPU")
    result = probe("cpu", timeout=60.0)
    assert result.status.available, result.status.reasons
    assert result.health is not None and result.health.ok, result.health


def test_known_answers_are_given():
    report = layerzero_health("cpu")
    assert report.ok, report.detail
    assert report.max_error is not None and report.max_error < 1e-5

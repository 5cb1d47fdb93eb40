"""What the backend says about itself with the vendor absent, wrong, broken and there; no vendor is needed for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Platform
from layerzero.plugin.probing import probe
from layerzero.registry.capabilities import load_capabilities
from layerzero_liger import plugin
from layerzero_liger.plugin import layerzero_capabilities, layerzero_health
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

DEVICE = fakes.gpu(90)
OPS = {
    "rms_norm", "add_rms_norm", "gemma_rms_norm", "gemma_add_rms_norm", "layer_norm", "rope", "silu_and_mul",
    "gelu_and_mul", "mlp", "cross_entropy", "linear_cross_entropy",
}  # fmt: skip


def codes(status):
    return [item.code.value for item in status.reasons]


@pytest.mark.req("R-BK-LG-01")
def test_an_absent_vendor_is_reported_with_the_command_that_brings_it():
    with pretend({"liger-kernel": None, "triton": "3.9.0"}):
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_NOT_INSTALLED"]
    assert status.fix == status.reasons[0].hint == "pip install 'layerzero-liger[liger]'"


@pytest.mark.req("R-BK-LG-01")
def test_a_version_outside_the_range_is_reported_with_the_range():
    with pretend({"liger-kernel": "0.5.0", "triton": "3.9.0"}, {"liger_kernel": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert (status.reasons[0].value, status.reasons[0].limit) == ("liger-kernel 0.5.0", ">=0.8,<0.9")
    assert (status.version, imported) == ("0.5.0", [])


def test_a_vendor_that_cannot_be_imported_is_a_reason():
    with pretend({"liger-kernel": "0.8.5", "triton": "3.9.0"}, {"liger_kernel": ImportError("undefined symbol")}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_IMPORT_FAILED"]
    assert "import liger_kernel" in status.fix


@pytest.mark.req("R-BK-LG-01")
def test_with_the_vendor_there_it_offers_its_kernels():
    with pretend({"liger-kernel": "0.8.5", "triton": "3.9.0"}, {"liger_kernel": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, codes(status)) == (True, "0.8.5", [])
    assert {name.split(".")[1] for name in status.kernels} == OPS
    with pretend({"liger-kernel": "0.8.5", "triton": "3.5.0"}, {"liger_kernel": None}):
        assert layerzero_capabilities(DEVICE).available, "the oldest Triton that fits"
    assert "liger_kernel" in imported


def test_a_device_it_cannot_use_is_named():
    with pretend({"liger-kernel": "0.8.5", "triton": "3.9.0"}, {"liger_kernel": None}):
        assert set(codes(layerzero_capabilities(fakes.cpu()))) == {"PLATFORM_MISMATCH"}
        assert set(codes(layerzero_capabilities(fakes.gpu(75)))) == {"SM_TOO_OLD"}


@pytest.mark.req("R-BK-LG-03")
def test_rocm_gets_all_but_the_block_that_needs_hoppers_copies():
    rocm = DeviceSpec(Platform.ROCM, "cuda", name="MI300X", supports_bf16=True)
    with pretend({"liger-kernel": "0.8.5", "triton": "3.9.0"}, {"liger_kernel": None}):
        status = layerzero_capabilities(rocm)
    assert {name.split(".")[1] for name in status.kernels} == OPS - {"mlp"}


@pytest.mark.req("R-BK-LG-03")
@pytest.mark.parametrize(
    ("device", "ops"),
    [(DEVICE, OPS), (DeviceSpec(Platform.ROCM, "cuda", name="MI300X", supports_bf16=True), OPS - {"mlp"})],
    ids=["cuda", "rocm"],
)
def test_cuda_and_rocm_are_served_each_with_kernels_that_take_a_call_there(device, ops):
    with pretend({"liger-kernel": "0.8.5", "triton": "3.9.0"}, {"liger_kernel": None}):
        status = layerzero_capabilities(device)
    assert (status.available, codes(status)) == (True, [])
    kernels = load_capabilities(Path(plugin.__file__).with_name("capabilities.json")).kernels
    there = {spec.kernel_id for spec in kernels if not spec.check_device(device)}
    assert set(status.kernels) == there and {name.split(".")[1] for name in there} == ops
    call = Context(op="rms_norm", device=device, dtype="bfloat16", dims=(("rows", 4), ("hidden", 64)))
    (norm,) = (spec for spec in kernels if spec.kernel_id == "liger.rms_norm.triton")
    assert norm.check(call) == []
    assert {item.code.value for item in norm.check(replace(call, device=fakes.cpu()))} == {"PLATFORM_MISMATCH"}


def test_the_fused_block_takes_square_blocks_only():
    from layerzero.model.context import Context
    from layerzero_liger.limits import mlp

    square = Context(op="mlp", dims=(("rows", 4), ("hidden", 64), ("inner", 128), ("n", 64)))
    assert mlp(square) == []
    assert [item.code.value for item in mlp(square.with_dims(n=32))] == ["DIM_OUT_OF_RANGE"]


@pytest.mark.req("R-BK-LG-01")
@pytest.mark.parametrize(
    ("triton", "code"),
    [
        (None, "BACKEND_NOT_INSTALLED"),
        *((version, "BACKEND_VERSION_MISMATCH") for version in ("2.3.1", "3.4.0", "4.0.0")),
    ],
)
def test_the_triton_under_it_has_to_fit(triton, code):
    with pretend({"liger-kernel": "0.8.5", "triton": triton}, {"liger_kernel": None}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == [code]
    assert status.fix == "pip install 'triton>=3.5,<4'"


def test_the_probe_answers_within_its_time_limit():
    result = probe("liger", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_without_a_gpu_the_self_test_fails_and_says_why():
    import torch

    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    report = layerzero_health("liger")
    assert (report.ok, report.max_error) == (False, None)
    assert "GPU" in report.detail

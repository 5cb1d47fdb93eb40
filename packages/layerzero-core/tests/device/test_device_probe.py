"""Detection, with stand-ins for a torch that sees other hardware than this machine has."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.device import cuda, probe
from layerzero.device.memory import available_host_bytes, free_bytes
from layerzero.device.probe import _cache, probe_device, probe_devices
from layerzero.errors import InvalidInputError
from layerzero.model.device import DEFAULT_GENERATIONS, DeviceSpec
from layerzero.model.enums import GPUGeneration, InstructionFamily, Platform


class Accelerator:
    """What torch.cuda, torch.xpu and torch.hpu have in common."""

    def __init__(self, *properties: Any, current: int = 0) -> None:
        self.properties = properties
        self.current = current

    def is_available(self) -> bool:
        return bool(self.properties)

    def device_count(self) -> int:
        return len(self.properties)

    def current_device(self) -> int:
        return self.current

    def get_device_properties(self, index: int) -> Any:
        return self.properties[index]

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 3_000, 10_000

    def memory_reserved(self, index: int) -> int:
        return 700

    def memory_allocated(self, index: int) -> int:
        return 200


def nvidia(major: int, minor: int, name: str = "NVIDIA H100 80GB HBM3") -> Any:
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 * 2**30, multi_processor_count=132)


def amd(gfx: str) -> Any:
    return SimpleNamespace(
        name="AMD Instinct", major=9, minor=4, total_memory=192 * 2**30, multi_processor_count=304, gcnArchName=gfx
    )


def fake_torch(*, cuda: Any = None, hip: str | None = None, mps: bool = False, **modules: Any) -> Any:
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=None if hip else "12.9", hip=hip),
        cuda=cuda or Accelerator(),
        cpu=SimpleNamespace(get_capabilities=lambda: {"avx2": True, "architecture": "x86_64"}),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
        mps=SimpleNamespace(recommended_max_memory=lambda: 100, driver_allocated_memory=lambda: 30),
        _C=SimpleNamespace(_cuda_getDriverVersion=lambda: 13000),
        **modules,
    )


@pytest.fixture
def no_driver_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    for name in ("_KERNEL_DRIVER", "_PROC_DRIVER", "_AMD_DRIVER"):
        monkeypatch.setattr(cuda, name, str(tmp_path / name))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    return tmp_path


@pytest.mark.req("R-DEV-04", "R-CORE-20", "R-CORE-21", "R-ENV-01", "R-BK-FA4-01", "R-DEV-03", "R-DEV-05")
@pytest.mark.parametrize(("major", "minor"), [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cuda_device_is_described_from_its_properties(major: int, minor: int, no_driver_files: Any) -> None:
    (no_driver_files / "_KERNEL_DRIVER").write_text("580.65.06\n")
    spec = probe_device("cuda:0", torch=fake_torch(cuda=Accelerator(nvidia(major, minor))))
    sm = 10 * major + minor
    assert (spec.platform, spec.device_type, spec.vendor) == (Platform.CUDA, "cuda", "nvidia")
    assert spec.sm_version == sm
    assert spec.gpu_generation is DEFAULT_GENERATIONS.lookup(sm).generation
    assert spec.tensor_core_generation == DEFAULT_GENERATIONS.lookup(sm).tensor_core_generation
    assert (spec.cuda_version, spec.driver_version, spec.torch_version) == ("12.9", "580.65.06", "2.11.0")
    assert (spec.supports_bf16, spec.supports_fp8) == (sm >= 80, sm >= 89)
    assert (spec.memory_bytes, spec.multiprocessors) == (80 * 2**30, 132)
    assert spec.max_grid == (2**31 - 1, 65535, 65535) and spec.max_threads_per_block == 1024


@pytest.mark.req("R-GEN-01")
@pytest.mark.parametrize(
    ("capability", "blackwell"),
    [((9, 0), False), ((9, 9), False), ((10, 0), True), ((10, 3), True), ((12, 1), True), ((13, 0), True),
     ((25, 4), True)],
)  # fmt: skip
def test_a_device_of_sm100_or_newer_is_detected_as_blackwell(capability: tuple[int, int], blackwell: bool) -> None:
    spec = probe_device("cuda:0", torch=fake_torch(cuda=Accelerator(nvidia(*capability))))
    assert (spec.gpu_generation is GPUGeneration.BLACKWELL) is blackwell


@pytest.mark.req("R-DEV-02")
def test_a_gpu_nobody_knows_is_described_without_an_exception() -> None:
    spec = probe_device(torch=fake_torch(cuda=Accelerator(nvidia(8, 8))))
    assert spec.gpu_generation is GPUGeneration.UNKNOWN and spec.sm_version == 88


@pytest.mark.req("R-DEV-08", "R-DEV-03")
def test_detection_uses_an_overridden_generation_map() -> None:
    generations = DEFAULT_GENERATIONS.override({"89": {"tensor_core_generation": 4}})
    spec = probe_device(torch=fake_torch(cuda=Accelerator(nvidia(8, 9))), generations=generations)
    assert spec.tensor_core_generation == 4


@pytest.mark.req("R-DEV-06", "R-ENV-02", "R-DEV-04")
@pytest.mark.parametrize(
    ("arch", "gfx", "fp8"),
    [
        ("gfx90a:sramecc+:xnack-", "gfx90a", False),
        ("gfx940", "gfx940", True),
        ("gfx942:sramecc+:xnack-", "gfx942", True),
    ],
)
def test_rocm_device_is_described_by_its_gfx_name(arch: str, gfx: str, fp8: bool) -> None:
    spec = probe_device(torch=fake_torch(cuda=Accelerator(amd(arch)), hip="6.4.2"))
    assert (spec.platform, spec.device_type, spec.vendor) == (Platform.ROCM, "cuda", "amd")
    assert (spec.gfx, spec.rocm_version, spec.cuda_version) == (gfx, "6.4.2", None)
    assert spec.sm_version is None and spec.gpu_generation is GPUGeneration.UNKNOWN
    assert spec.instruction_families == {InstructionFamily.MFMA}
    assert (spec.supports_bf16, spec.supports_fp8) == (True, fp8)


def test_an_unknown_gfx_promises_nothing() -> None:
    spec = probe_device(torch=fake_torch(cuda=Accelerator(amd("gfx803")), hip="6.4"))
    assert spec.instruction_families == frozenset() and not spec.supports_bf16


@pytest.mark.req("R-DEV-06", "R-CORE-21")
def test_without_an_accelerator_the_cpu_is_described() -> None:
    spec = probe_device(torch=fake_torch())
    assert (spec.platform, spec.device_type) == (Platform.CPU, "cpu")
    assert spec.sm_version is None and spec.tensor_core_generation == 0
    assert spec.cpu_features == {"avx2"}


@pytest.mark.req("R-CORE-21", "R-DEV-05", "R-DEV-06")
def test_detect_describes_the_cpu_of_this_machine() -> None:
    torch = pytest.importorskip("torch")
    spec = DeviceSpec.detect("cpu")
    assert (spec.platform, spec.device_type, spec.torch_version) == (Platform.CPU, "cpu", str(torch.__version__))
    assert spec.name and spec.memory_bytes > 2**28 and spec.multiprocessors >= 1
    assert spec.cpu_features


@pytest.mark.req("R-CORE-21", "R-DEV-06")
def test_detect_without_a_name_is_the_cpu_where_torch_sees_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for module in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", lambda: False)
    spec = DeviceSpec.detect()
    assert spec == DeviceSpec.detect("cpu") == DeviceSpec.detect(torch.empty(1).device)
    assert (spec.platform, spec.device_type, spec.tensor_core_generation) == (Platform.CPU, "cpu", 0)


@pytest.mark.req("R-DEV-05")
def test_a_snapshot_names_the_backends_that_pip_has_installed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for name, version in (("triton", "91.2.3"), ("flash_attn", "92.8")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _cache.clear()
    try:
        spec = DeviceSpec.detect("cpu")
    finally:
        _cache.clear()
    found = dict(spec.backend_versions)
    assert (found["triton"], found["flash-attn"]) == ("91.2.3", "92.8")
    assert spec.torch_version == str(torch.__version__) and dict(spec.to_json()["backend_versions"]) == found


@pytest.mark.gpu
@pytest.mark.req("R-CORE-21", "R-DEV-04", "R-DEV-07")
def test_detect_describes_the_gpu_of_this_machine() -> None:
    import torch

    spec = DeviceSpec.detect()
    assert spec == DeviceSpec.detect("cuda")
    assert spec.device_type == "cuda" and spec.driver_version and spec.memory_bytes > 2**30
    if spec.platform is Platform.CUDA:
        assert divmod(spec.sm_version or 0, 10) == torch.cuda.get_device_capability()
        assert spec.supports_bf16 == torch.cuda.is_bf16_supported(including_emulation=False)
    assert 0 < (free_bytes("cuda") or 0) <= spec.memory_bytes


@pytest.mark.req("R-BK-CPU-03")
def test_accelerators_are_named_by_their_torch_word() -> None:
    xpu = Accelerator(SimpleNamespace(name="Intel Data Center GPU Max 1550", total_memory=2**37, driver_version="1.6"))
    hpu = Accelerator(SimpleNamespace(name="GAUDI3", total_memory=2**37))
    spec = probe_device("xpu", torch=fake_torch(xpu=xpu))
    assert (spec.platform, spec.vendor, spec.name) == (Platform.XPU, "intel", "Intel Data Center GPU Max 1550")
    assert spec.driver_version == "1.6"
    assert probe_device("mps", torch=fake_torch(mps=True)).platform is Platform.MPS
    assert probe_device("meta", torch=fake_torch()).platform is Platform.META
    assert probe_device(torch=fake_torch(hpu=hpu)).platform is Platform.HPU


@pytest.mark.req("R-ENV-04")
@pytest.mark.parametrize("name", ["GAUDI2", "GAUDI3"])
def test_gaudi_is_described_with_bf16_and_fp8(name: str) -> None:
    spec = probe_device("hpu:0", torch=fake_torch(hpu=Accelerator(SimpleNamespace(name=name, total_memory=96 * 2**30))))
    assert (spec.platform, spec.device_type, spec.vendor, spec.name) == (Platform.HPU, "hpu", "habana", name)
    assert spec.supports_bf16 and spec.supports_fp8


def test_probe_devices_lists_accelerators_before_the_cpu() -> None:
    specs = probe_devices(torch=fake_torch(cuda=Accelerator(nvidia(9, 0), nvidia(8, 0))))
    assert [(spec.device_type, spec.index) for spec in specs] == [("cuda", 0), ("cuda", 1), ("cpu", 0)]


def test_the_current_device_is_taken_when_no_index_is_given() -> None:
    torch = fake_torch(cuda=Accelerator(nvidia(9, 0), nvidia(8, 0), current=1))
    assert probe_device("cuda", torch=torch).index == 1
    assert probe_device(torch=torch).sm_version == 80
    assert probe_device(0, torch=torch).sm_version == 90
    assert probe_device(SimpleNamespace(type="cuda", index=0), torch=torch).sm_version == 90


@pytest.mark.parametrize("device", ["cuda:2", "xpu", 7])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(device: str | int) -> None:
    with pytest.raises(InvalidInputError) as caught:
        probe_device(device, torch=fake_torch(cuda=Accelerator(nvidia(9, 0))))
    assert caught.value.code == "DEVICE_NOT_PRESENT"
    assert "cuda:0, cpu" in str(caught.value)


@pytest.mark.parametrize("device", ["", "cuda:-1", "cuda:x", "h 100"])
def test_a_word_that_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        probe_device(device, torch=fake_torch())
    assert caught.value.code == "VALUE_INVALID"


def test_a_broken_driver_counts_as_no_device() -> None:
    broken = Accelerator()
    broken.is_available = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert probe_device(torch=fake_torch(cuda=broken)).device_type == "cpu"


@pytest.mark.req("R-DEV-04")
def test_driver_version_falls_back_from_module_to_nvml_to_torch(
    no_driver_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = fake_torch()
    assert cuda.driver_version(torch) == "cuda 13.0"
    calls: list[str] = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=lambda: b"570.1",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert cuda.driver_version(torch) == "570.1" and calls == ["init", "shutdown"]
    nvml.nvmlInit = lambda: 1 / 0
    assert cuda.driver_version(torch) == "cuda 13.0"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build"
    (no_driver_files / "_PROC_DRIVER").write_text(line)
    assert cuda.driver_version(torch) == "575.57.08"
    (no_driver_files / "_KERNEL_DRIVER").write_text("580.65.06\n")
    assert cuda.driver_version(torch) == "580.65.06"


def test_detection_is_kept_until_it_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    calls: list[str] = []
    describe = probe._describe
    monkeypatch.setattr(probe, "_describe", lambda *args: calls.append(args[1]) or describe(*args))
    _cache.clear()
    assert probe_device("cpu") is probe_device("cpu")
    assert calls == ["cpu"]
    _cache.clear()
    probe_device("cpu")
    assert calls == ["cpu", "cpu"]


def test_free_memory_counts_what_torch_holds_unused() -> None:
    torch = fake_torch(cuda=Accelerator(nvidia(9, 0)), mps=True)
    assert free_bytes("cuda:0", torch=torch) == 3_000 + 500
    assert free_bytes("mps", torch=torch) == 70
    assert free_bytes("xpu:0", torch=torch) is None
    assert (free_bytes(torch=torch) or 0) > 2**20


def test_free_memory_of_a_lost_device_is_not_known() -> None:
    torch = fake_torch(cuda=Accelerator(nvidia(9, 0)))
    torch.cuda.mem_get_info = lambda index: 1 / 0
    assert free_bytes("cuda", torch=torch) is None


@pytest.mark.req("R-MEM-03", "R-MEM-05")
def test_host_memory_respects_the_limit_of_the_container(tmp_path: Any) -> None:
    meminfo = "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"
    assert available_host_bytes(meminfo, cgroup=str(tmp_path)) == 1000 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3800\n")
    assert available_host_bytes(meminfo, cgroup=str(tmp_path)) == 1200
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, cgroup=str(tmp_path)) == 1000 * 1024

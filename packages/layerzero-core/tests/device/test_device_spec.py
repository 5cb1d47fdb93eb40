"""DeviceSpec as a value: JSON, signatures, the catalogue of named devices, backend versions."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.device.catalogue import device_names, named_device
from layerzero.device.signature import backend_versions, environment_signature
from layerzero.errors import UnknownNameError
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import GPUGeneration, InstructionFamily, Platform

H100 = named_device("h100", torch_version="2.13.0", cuda_version="13.0", driver_version="580.65.06")


@pytest.mark.req("R-CORE-20", "R-DEV-03")
def test_spec_has_the_fields_of_the_specification_and_is_frozen() -> None:
    assert (H100.device_type, H100.sm_version, H100.gpu_generation) == ("cuda", 90, GPUGeneration.HOPPER)
    assert H100.tensor_core_generation == 4 and type(H100.tensor_core_generation) is int
    with pytest.raises(FrozenInstanceError):
        H100.sm_version = 80  # type: ignore[misc]


@pytest.mark.req("R-CORE-20")
@pytest.mark.parametrize("name", device_names())
def test_every_named_device_survives_json(name: str) -> None:
    spec = named_device(name, backend_versions=(("triton", "3.9.0"), ("flash-attn", "2.8.3")))
    again = DeviceSpec.from_json(json.loads(json.dumps(spec.to_json(), sort_keys=True)))
    assert again == spec and hash(again) == hash(spec)
    assert again.signature == spec.signature == spec.to_json()["signature"]
    assert 0 <= spec.tensor_core_generation <= 5


def test_named_devices_differ_in_signature() -> None:
    signatures = {named_device(name).hardware_signature for name in device_names()}
    assert len(signatures) == len(device_names())


def test_a_stored_signature_is_computed_again() -> None:
    data = H100.to_json() | {"signature": "forged", "from_the_future": 1}
    assert DeviceSpec.from_json(data).signature == H100.signature


@pytest.mark.parametrize(
    "wrong",
    [{"index": "0"}, {"platform": "abacus"}, {"gpu_generation": 4}, {"cpu_features": "avx2"}, {"max_grid": [1, 2]},
     {"supports_fp8": 1}, {"driver_version": 580}, {"backend_versions": [["triton"]]}],
)  # fmt: skip
def test_what_is_no_device_is_not_read_as_one(wrong: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        DeviceSpec.from_json(H100.to_json() | wrong)


def test_signature_does_not_change_between_releases_by_accident() -> None:
    assert named_device("a100").signature == "4a440ed96e14c414"


@pytest.mark.parametrize(
    "change",
    [
        {"sm_version": 80}, {"name": "other"}, {"instruction_families": frozenset()}, {"multiprocessors": 114},
        {"cuda_version": "12.9"}, {"driver_version": "570.1"}, {"torch_version": "2.11.0"}, {"memory_bytes": 2**36},
        {"platform": Platform.ROCM}, {"gfx": "gfx942"}, {"cpu_features": frozenset({"avx2"})},
    ],
)  # fmt: skip
def test_signature_follows_what_kernel_choice_depends_on(change: dict[str, object]) -> None:
    assert replace(H100, **change).signature != H100.signature  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"index": 3}, {"memory_bytes": H100.memory_bytes + 2**20}, {"backend_versions": (("triton", "3.9"),)}]
)
def test_signature_ignores_what_equal_devices_differ_in(change: dict[str, object]) -> None:
    assert replace(H100, **change).signature == H100.signature  # type: ignore[arg-type]


def test_hardware_signature_survives_an_upgrade_of_torch() -> None:
    newer = replace(H100, torch_version="2.15.0", driver_version="590.1", cuda_version="13.2")
    assert newer.hardware_signature == H100.hardware_signature
    assert newer.signature != H100.signature


@pytest.mark.req("R-DEV-05")
def test_backend_versions_are_part_of_the_snapshot_and_of_the_environment() -> None:
    installed = {"triton": "3.9.0", "xformers": "0.0.35"}
    found = backend_versions(read=installed.__getitem__)
    assert found == (("triton", "3.9.0"), ("xformers", "0.0.35"))
    spec = replace(H100, backend_versions=found)
    assert spec.torch_version == "2.13.0"
    assert spec.to_json()["backend_versions"] == installed
    assert environment_signature(spec) != environment_signature(H100)


def test_broken_metadata_counts_as_not_installed() -> None:
    assert backend_versions(["a", "b"], read=lambda name: None if name == "a" else 1 / 0) == ()  # type: ignore[arg-type, return-value]


@given(st.lists(st.sampled_from(["avx2", "avx512f", "avx512_f", "fma", "fma3"])))
def test_equal_features_in_other_spellings_are_equal_specs(words: list[str]) -> None:
    first = DeviceSpec(Platform.CPU, "cpu", cpu_features=frozenset(words))
    other = DeviceSpec(
        Platform.CPU, "cpu", cpu_features=frozenset(word.replace("avx512f", "avx512_f") for word in words)
    )
    assert first == other and first.signature == other.signature


@pytest.mark.req("R-ENV-01", "R-ENV-02", "R-ENV-03", "R-ENV-04")
@pytest.mark.parametrize(
    ("name", "platform", "detail"),
    [
        ("a100", Platform.CUDA, 80), ("a10", Platform.CUDA, 86), ("rtx3090", Platform.CUDA, 86),
        ("l4", Platform.CUDA, 89),
        ("l40s", Platform.CUDA, 89), ("rtx4090", Platform.CUDA, 89), ("h100", Platform.CUDA, 90),
        ("h200", Platform.CUDA, 90), ("gh200", Platform.CUDA, 90), ("b200", Platform.CUDA, 100),
        ("b300", Platform.CUDA, 103), ("rtx5090", Platform.CUDA, 120), ("t4", Platform.CUDA, 75),
        ("v100", Platform.CUDA, 70), ("mi250", Platform.ROCM, "gfx90a"), ("mi300x", Platform.ROCM, "gfx942"),
        ("gaudi2", Platform.HPU, "habana"), ("gaudi3", Platform.HPU, "habana"),
        ("sapphire-rapids", Platform.CPU, "amx_bf16"), ("ice-lake", Platform.CPU, "avx512_f"),
        ("zen3", Platform.CPU, "avx2"), ("zen4", Platform.CPU, "avx512_bf16"), ("neoverse-n1", Platform.CPU, "neon"),
        ("apple-m2", Platform.MPS, "apple"),
    ],
)  # fmt: skip
def test_the_targets_of_the_specification_have_names(name: str, platform: Platform, detail: int | str) -> None:
    spec = named_device(name)
    assert spec.platform is platform
    assert detail in {spec.sm_version, spec.gfx, spec.vendor, *spec.cpu_features}


def test_amx_and_no_avx512_are_told_apart_in_the_catalogue() -> None:
    assert named_device("sapphire-rapids").instruction_families == {InstructionFamily.AMX}
    assert "avx512_f" not in named_device("zen3").cpu_features
    assert InstructionFamily.TCGEN05 not in named_device("rtx5090").instruction_families
    assert InstructionFamily.TCGEN05 not in named_device("h100").instruction_families


@pytest.mark.parametrize("name", ["H100", " h100 ", "rtx 4090", "RTX-4090", "sapphire_rapids"])
def test_spelling_of_a_name_does_not_matter(name: str) -> None:
    assert named_device(name).name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        named_device("h1000")
    assert "nearest: h100" in str(caught.value)
    with pytest.raises(UnknownNameError):
        named_device("")

"""Devices by name, for planning on a machine that does not have them: `lz explain … --device h100`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerzero.device.cpu import cpu_families
from layerzero.device.cuda import amd_spec
from layerzero.device.spec import CUDA_MAX_THREADS_PER_BLOCK, DeviceSpec, Platform
from layerzero.errors import UnknownNameError, nearest

_GIB = 2**30

# name → (SM version, product, memory in GiB, multiprocessors)
_NVIDIA: dict[str, tuple[int, str, int, int]] = {
    "v100": (70, "Tesla V100-SXM2-32GB", 32, 80),
    "t4": (75, "Tesla T4", 16, 40),
    "rtx2080ti": (75, "NVIDIA GeForce RTX 2080 Ti", 11, 68),
    "a100": (80, "NVIDIA A100-SXM4-80GB", 80, 108),
    "a100-40gb": (80, "NVIDIA A100-SXM4-40GB", 40, 108),
    "a30": (80, "NVIDIA A30", 24, 56),
    "a10": (86, "NVIDIA A10", 24, 72),
    "a40": (86, "NVIDIA A40", 48, 84),
    "rtx3090": (86, "NVIDIA GeForce RTX 3090", 24, 82),
    "orin": (87, "NVIDIA Jetson AGX Orin", 64, 16),
    "l4": (89, "NVIDIA L4", 24, 58),
    "l40s": (89, "NVIDIA L40S", 48, 142),
    "rtx4090": (89, "NVIDIA GeForce RTX 4090", 24, 128),
    "h100": (90, "NVIDIA H100 80GB HBM3", 80, 132),
    "h100-pcie": (90, "NVIDIA H100 PCIe", 80, 114),
    "h200": (90, "NVIDIA H200", 141, 132),
    "gh200": (90, "NVIDIA GH200 480GB", 96, 132),
    "b200": (100, "NVIDIA B200", 180, 148),
    "gb200": (100, "NVIDIA GB200", 186, 152),
    "b300": (103, "NVIDIA B300", 275, 148),
    "thor": (110, "NVIDIA Thor", 128, 20),
    "rtx5090": (120, "NVIDIA GeForce RTX 5090", 32, 170),
    "rtx-pro-6000": (120, "NVIDIA RTX PRO 6000 Blackwell", 96, 188),
    "gb10": (121, "NVIDIA GB10", 128, 48),
}

# name → (gfx, product, memory in GiB, compute units)
_AMD: dict[str, tuple[str, str, int, int]] = {
    "mi100": ("gfx908", "AMD Instinct MI100", 32, 120),
    "mi210": ("gfx90a", "AMD Instinct MI210", 64, 104),
    "mi250": ("gfx90a", "AMD Instinct MI250 (one die)", 64, 104),
    "mi250x": ("gfx90a", "AMD Instinct MI250X (one die)", 64, 110),
    "mi300a": ("gfx942", "AMD Instinct MI300A", 128, 228),
    "mi300x": ("gfx942", "AMD Instinct MI300X", 192, 304),
    "mi325x": ("gfx942", "AMD Instinct MI325X", 256, 304),
    "mi355x": ("gfx950", "AMD Instinct MI355X", 288, 256),
    "rx7900xtx": ("gfx1100", "AMD Radeon RX 7900 XTX", 24, 96),
}

_AVX2 = "sse3 ssse3 sse4_1 sse4_2 avx avx2 fma3 f16c bmi bmi2 popcnt"
_AVX512 = f"{_AVX2} avx512_f avx512_cd avx512_dq avx512_bw avx512_vl"
_ICE_LAKE = f"{_AVX512} avx512_ifma avx512_vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq"
_SPR = f"{_ICE_LAKE} avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_int8 amx_bf16"
_N1 = "neon fp16_arith dot rdm"
_V1 = f"{_N1} fhm bf16 i8mm sve sve_bf16"

# name → (vendor, product, cores of one socket, features)
_CPUS: dict[str, tuple[str, str, int, str]] = {
    "haswell": ("intel", "Intel Xeon E5 v3 (Haswell)", 18, _AVX2),
    "skylake-avx512": ("intel", "Intel Xeon Scalable (Skylake)", 28, _AVX512),
    "cascade-lake": ("intel", "Intel Xeon Scalable 2nd Gen (Cascade Lake)", 28, f"{_AVX512} avx512_vnni"),
    "ice-lake": ("intel", "Intel Xeon Scalable 3rd Gen (Ice Lake)", 40, _ICE_LAKE),
    "sapphire-rapids": ("intel", "Intel Xeon Scalable 4th Gen (Sapphire Rapids)", 56, _SPR),
    "emerald-rapids": ("intel", "Intel Xeon Scalable 5th Gen (Emerald Rapids)", 64, _SPR),
    "granite-rapids": ("intel", "Intel Xeon 6 (Granite Rapids)", 128, f"{_SPR} amx_fp16 avx10_1"),
    "zen2": ("amd", "AMD EPYC 7002 (Zen 2)", 64, _AVX2),
    "zen3": ("amd", "AMD EPYC 7003 (Zen 3)", 64, _AVX2),
    "zen4": ("amd", "AMD EPYC 9004 (Zen 4)", 96, f"{_ICE_LAKE} avx512_bf16"),
    "zen5": ("amd", "AMD EPYC 9005 (Zen 5)", 128, f"{_ICE_LAKE} avx512_bf16 avx_vnni"),
    "neoverse-n1": ("arm", "Neoverse N1", 64, _N1),
    "neoverse-v1": ("arm", "Neoverse V1", 64, _V1),
    "neoverse-n2": ("arm", "Neoverse N2", 64, f"{_V1} sve2"),
    "neoverse-v2": ("arm", "Neoverse V2", 72, f"{_V1} sve2"),
}

# name → (platform, torch word, vendor, product, memory in GiB, fp8)
_OTHERS: dict[str, tuple[Platform, str, str, str, int, bool]] = {
    "gaudi2": (Platform.HPU, "hpu", "habana", "Intel Gaudi2", 96, True),
    "gaudi3": (Platform.HPU, "hpu", "habana", "Intel Gaudi3", 128, True),
    "apple-m1": (Platform.MPS, "mps", "apple", "Apple M1", 16, False),
    "apple-m2": (Platform.MPS, "mps", "apple", "Apple M2", 24, False),
    "apple-m3": (Platform.MPS, "mps", "apple", "Apple M3", 24, False),
    "apple-m4": (Platform.MPS, "mps", "apple", "Apple M4", 32, False),
    "pvc": (Platform.XPU, "xpu", "intel", "Intel Data Center GPU Max 1550", 128, False),
    "arc-a770": (Platform.XPU, "xpu", "intel", "Intel Arc A770", 16, False),
}


def device_names() -> tuple[str, ...]:
    """Every name `named_device` knows, sorted."""
    return tuple(sorted([*_NVIDIA, *_AMD, *_CPUS, *_OTHERS]))


def named_device(name: str, **given: Any) -> DeviceSpec:
    """The spec of a device by its name ("h100", "mi300x", "zen4"; case, spaces and underscores do not matter).

    Versions of drivers and torch are unknown (None) unless `given`, which replaces any field. Raises
    UnknownNameError with the nearest names.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    spec = _build(key) or _build(key.replace("-", ""))
    if spec is None:
        near = nearest(key, device_names(), cutoff=0.5)
        message = f"no device is named {name!r}" + (f"; nearest: {', '.join(near)}" if near else "")
        raise UnknownNameError(
            message, code="DEVICE_NOT_PRESENT", value=name, limit=near or device_names(),
            hint=f"known names: {', '.join(device_names())}",
        )  # fmt: skip
    return replace(spec, **given) if given else spec


def _build(key: str) -> DeviceSpec | None:
    if key in _NVIDIA:
        sm, product, memory, units = _NVIDIA[key]
        return DeviceSpec.for_sm(sm, name=product, memory_bytes=memory * _GIB, multiprocessors=units)
    if key in _AMD:
        gfx, product, memory, units = _AMD[key]
        return amd_spec(
            gfx, name=product, memory_bytes=memory * _GIB, multiprocessors=units,
            max_threads_per_block=CUDA_MAX_THREADS_PER_BLOCK,
        )  # fmt: skip
    if key in _CPUS:
        vendor, product, cores, words = _CPUS[key]
        features = frozenset(words.split())
        return DeviceSpec(
            Platform.CPU, "cpu", product, vendor, cpu_features=features, instruction_families=cpu_families(features),
            supports_bf16=True, supports_fp16=True, multiprocessors=cores,
        )  # fmt: skip
    if key in _OTHERS:
        platform, word, vendor, product, memory, fp8 = _OTHERS[key]
        return DeviceSpec(
            platform, word, product, vendor, memory_bytes=memory * _GIB, supports_bf16=True, supports_fp16=True,
            supports_fp8=fp8,
        )  # fmt: skip
    return None

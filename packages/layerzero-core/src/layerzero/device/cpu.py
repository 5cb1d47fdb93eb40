"""The CPU as a device: vendor, name, and which instruction sets torch and its kernels may use.

torch reports the ISA itself where `torch.cpu.get_capabilities` exists; for older ones `/proc/cpuinfo` is read, and
its words are turned into torch's. Both sources are arguments, so that any CPU can be described in a test.
"""

from __future__ import annotations

import os
import platform as host
from collections.abc import Mapping
from typing import Any

from layerzero.device.memory import host_bytes, text_of
from layerzero.device.spec import DeviceSpec, InstructionFamily, Platform, canonical_cpu_feature

_CPUINFO = "/proc/cpuinfo"

# Only what a kernel may ask for; the hundred other flags of a cpuinfo line would only make signatures differ.
_KNOWN = frozenset({
    "sse3", "ssse3", "sse4_1", "sse4_2", "avx", "avx2", "fma3", "fma4", "f16c", "bmi", "bmi2", "popcnt",
    "avx_vnni", "avx_vnni_int8", "avx_vnni_int16", "avx_ne_convert", "avx10_1", "avx10_2",
    "avx512_f", "avx512_cd", "avx512_dq", "avx512_bw", "avx512_vl", "avx512_ifma", "avx512_vbmi", "avx512_vbmi2",
    "avx512_bitalg", "avx512_vpopcntdq", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "neon", "fp16_arith", "bf16", "i8mm", "dot", "rdm", "fhm", "sve", "sve2", "sve_bf16", "sme", "sme2",
})  # fmt: skip

_X86_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon", "CentaurHauls": "zhaoxin"}
_ARM_IMPLEMENTERS = {
    "0x41": "arm", "0x46": "fujitsu", "0x48": "hisilicon", "0x4e": "nvidia", "0x51": "qualcomm", "0x61": "apple",
    "0x6d": "microsoft", "0xc0": "ampere",
}  # fmt: skip
_ARM_PARTS = {
    "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse N1", "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2", "0xd83": "Neoverse V3", "0xd84": "Neoverse V3AE",
    "0xd8e": "Neoverse N3",
}  # fmt: skip


def features_from_capabilities(capabilities: Mapping[str, Any]) -> frozenset[str]:
    """Feature words from `torch.cpu.get_capabilities()`, which mixes flags with sizes and names."""
    return frozenset(word for word, value in capabilities.items() if value is True) & _KNOWN


def features_from_cpuinfo(text: str) -> frozenset[str]:
    """Feature words from the `flags` (x86) or `Features` (aarch64) line of a cpuinfo text."""
    info = read_cpuinfo(text)
    words = info.get("flags", "") or info.get("Features", "")
    return frozenset(canonical_cpu_feature(word) for word in words.split()) & _KNOWN


def read_cpuinfo(text: str) -> dict[str, str]:
    """The first processor of a cpuinfo text as key → value. Lines of another form are passed over."""
    info: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            info.setdefault(key.strip(), value.strip())
    return info


def cpu_families(features: frozenset[str]) -> frozenset[InstructionFamily]:
    """The matrix instruction families of a CPU: AMX, when tiles and at least one multiply on them exist."""
    tiles = "amx_tile" in features and features & {"amx_bf16", "amx_int8", "amx_fp16"}
    return frozenset({InstructionFamily.AMX}) if tiles else frozenset()


def cpu_spec(torch: Any, *, cpuinfo: str | None = None, machine: str | None = None) -> DeviceSpec:
    """Describe the CPU. `cpuinfo` (the text) and `machine` are read from the host unless given."""
    text = text_of(_CPUINFO) if cpuinfo is None else cpuinfo
    machine = machine or host.machine()
    try:
        features = features_from_capabilities(torch.cpu.get_capabilities())
    except Exception:  # an older torch, or one built without cpuinfo: the file still tells
        features = frozenset()
    features = features or features_from_cpuinfo(text)
    name, vendor = _identity(read_cpuinfo(text), machine)
    return DeviceSpec(
        platform=Platform.CPU,
        device_type="cpu",
        name=name,
        vendor=vendor,
        instruction_families=cpu_families(features),
        cpu_features=features,
        memory_bytes=host_bytes("MemTotal", "SC_PHYS_PAGES") or 0,
        torch_version=str(torch.__version__),
        supports_bf16=True,
        supports_fp16=True,
        multiprocessors=os.cpu_count() or 1,
    )


def _identity(info: Mapping[str, str], machine: str) -> tuple[str, str]:
    if "vendor_id" in info:
        return info.get("model name", machine), _X86_VENDORS.get(info["vendor_id"], info["vendor_id"].lower())
    if "CPU implementer" in info:
        vendor = _ARM_IMPLEMENTERS.get(info["CPU implementer"], info["CPU implementer"])
        part = info.get("CPU part", "")
        return _ARM_PARTS.get(part, f"{machine} part {part}" if part else machine), vendor
    name = host.processor() or machine
    return name, "apple" if host.system() == "Darwin" and machine == "arm64" else ""

"""The family of a device: what a kernel that was right on one of its members may be trusted on."""

from __future__ import annotations

import platform as host

from layerzero.device.enums import Platform
from layerzero.device.spec import DeviceSpec

# The levels of x86-64 that compilers know: kernels have code of their own for each.
_X86 = (
    ("v4", frozenset({"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"})),
    ("v3", frozenset({"avx2", "fma3"})),
)
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def family_of(device: DeviceSpec) -> str:
    """ "sm90", "gfx942", "cpu-x86_64-v4", "cpu-aarch64-sve", else the kind of device and its vendor."""
    if device.sm_version is not None:
        return f"sm{device.sm_version}"
    if device.gfx is not None:
        return device.gfx
    if device.platform is not Platform.CPU:
        return f"{device.device_type}-{device.vendor}"
    machine = host.machine().lower()
    machine = _MACHINES.get(machine, machine)
    if machine == "x86_64":
        level = next((name for name, needs in _X86 if needs <= device.cpu_features), "v2")
        return f"cpu-x86_64-{level}"
    return f"cpu-{machine}-sve" if "sve" in device.cpu_features else f"cpu-{machine}"

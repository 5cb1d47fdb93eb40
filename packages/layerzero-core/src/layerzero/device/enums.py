"""Kinds of devices, as enums. String enums serialise as their value."""

from __future__ import annotations

import enum


class Platform(enum.StrEnum):
    """Kind of device, in torch's words where torch has one."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"
    XPU = "xpu"
    HPU = "hpu"
    META = "meta"
    OTHER = "other"


class GPUGeneration(enum.IntEnum):
    """NVIDIA generations, ordered by age. UNKNOWN sorts first."""

    UNKNOWN = 0
    TURING = 1
    AMPERE = 2
    ADA_LOVELACE = 3
    HOPPER = 4
    BLACKWELL = 5


class InstructionFamily(enum.StrEnum):
    """Matrix instructions a kernel is written for; routing asks for these, never for "SM >= x"."""

    NONE = "none"
    MMA = "mma"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05"
    MFMA = "mfma"
    AMX = "amx"

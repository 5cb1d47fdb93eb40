"""The words of the field, as enums. String enums serialise as their value."""

from __future__ import annotations

import enum

__all__ = ["Causal", "GPUGeneration", "InstructionFamily", "Layout", "MaskKind", "OpKind", "Platform", "QuantFormat"]


class OpKind(enum.StrEnum):
    """What flows through an op."""

    TENSOR = "tensor"
    TOKENIZATION = "tokenization"
    SAMPLING = "sampling"


class Layout(enum.StrEnum):
    """Order of the axes. B batch, S sequence, H heads, D head_dim, N tokens (or page slots)."""

    BHSD = "BHSD"
    BSHD = "BSHD"
    NHD = "NHD"
    HND = "HND"


class MaskKind(enum.StrEnum):
    """Kind of attn_mask."""

    NONE = "none"
    BOOL = "bool"
    FLOAT = "float"


class Causal(enum.StrEnum):
    """Which corner the causal triangle is aligned to. They agree when Sq == Sk."""

    NONE = "none"
    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


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


class QuantFormat(enum.StrEnum):
    """Storage formats of quantized tensors."""

    INT8 = "int8"
    INT4 = "int4"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    NF4 = "nf4"

"""The words of the field, as enums. String enums serialise as their value."""

from __future__ import annotations

import enum

from layerzero.device.spec import GPUGeneration, InstructionFamily, Platform

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


class QuantFormat(enum.StrEnum):
    """Storage formats of quantized tensors."""

    INT8 = "int8"
    INT4 = "int4"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    NF4 = "nf4"

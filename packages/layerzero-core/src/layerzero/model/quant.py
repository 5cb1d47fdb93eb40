"""Quantized tensors as values: the stored numbers, their scales, and what both mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from layerzero.errors import invalid
from layerzero.model.enums import Platform, QuantFormat
from layerzero.reasons import Reason, ReasonCode, reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from layerzero.model.device import DeviceSpec

GRANULARITIES = ("tensor", "channel", "block")
_scale_layout = partial(invalid, ReasonCode.QUANT_SCALE_LAYOUT)


@dataclass(frozen=True, slots=True)
class FormatTraits:
    """How a format is stored. `packed`: two 4-bit codes a byte, the even element in the low half.

    `min_sm` is the first NVIDIA generation whose matrix units compute in the format; None: none does.
    """

    data_dtype: str
    scale_dtype: str = "float32"
    packed: bool = False
    block_size: int = 128
    block_only: bool = False
    tensor_scale: bool = False
    zero_point: bool = False
    min_sm: int | None = None


FORMATS: dict[QuantFormat, FormatTraits] = {
    QuantFormat.INT8: FormatTraits("int8", zero_point=True, min_sm=80),
    QuantFormat.INT4: FormatTraits("uint8", packed=True, zero_point=True, min_sm=80),
    QuantFormat.FP8_E4M3: FormatTraits("float8_e4m3fn", min_sm=89),
    QuantFormat.FP8_E5M2: FormatTraits("float8_e5m2", min_sm=89),
    QuantFormat.MXFP4: FormatTraits("uint8", "float8_e8m0fnu", packed=True, block_size=32, block_only=True, min_sm=100),
    QuantFormat.NVFP4: FormatTraits(
        "uint8", "float8_e4m3fn", packed=True, block_size=16, block_only=True, tensor_scale=True, min_sm=100
    ),
    QuantFormat.NF4: FormatTraits("uint8", packed=True, block_size=64),
}


def format_traits(fmt: QuantFormat | str) -> tuple[QuantFormat, FormatTraits]:
    """The format and its traits, from its name. Raises QUANT_FORMAT_UNSUPPORTED."""
    try:
        known = QuantFormat(fmt)
    except ValueError:
        names = ", ".join(item.value for item in QuantFormat)
        raise invalid(ReasonCode.QUANT_FORMAT_UNSUPPORTED, fmt, names) from None
    return known, FORMATS[known]


def resolve_granularity(fmt: QuantFormat | str, granularity: str) -> str:
    """The granularity a call means.

    MXFP4 and NVFP4 define their own blocks: the default "tensor" then means these, and "channel" is refused.
    Raises QUANT_GRANULARITY_UNSUPPORTED.
    """
    known, traits = format_traits(fmt)
    if granularity not in GRANULARITIES or (traits.block_only and granularity == "channel"):
        limit = f"block (for {known.value})" if traits.block_only else ", ".join(GRANULARITIES)
        raise invalid(ReasonCode.QUANT_GRANULARITY_UNSUPPORTED, granularity, limit)
    return "block" if traits.block_only else granularity


def native_reason(fmt: QuantFormat | str, device: DeviceSpec) -> Reason | None:
    """Why the matrix units of a device cannot compute in a format; None when they can, or when it is no NVIDIA GPU.

    For kernels that declare `quant_native`: those that widen the codes first run anywhere.
    """
    known, traits = format_traits(fmt)
    if device.platform is not Platform.CUDA:
        return None
    if traits.min_sm is None:
        return reason("GENERATION_UNSUPPORTED", device.gpu_generation.name, f"no GPU: none computes in {known.value}")
    if device.sm_version is None:
        return reason("SM_UNKNOWN", device.name)
    if device.sm_version >= traits.min_sm:
        return None
    if known in (QuantFormat.FP8_E4M3, QuantFormat.FP8_E5M2):
        return reason("FP8_UNSUPPORTED", device.sm_version, traits.min_sm)
    return reason("SM_TOO_OLD", device.sm_version, traits.min_sm, detail=f"{known.value} arithmetic")


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """What to quantize to, resolved and checked: format, granularity, block size, and whether around zero.

    The block size is the format's own unless another is given; MXFP4 and NVFP4 define theirs. Asymmetric scaling
    (integers only) spends all codes between the smallest and the largest number of a group, with a zero point.
    """

    fmt: QuantFormat
    granularity: str = "tensor"
    block_size: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        known, traits = format_traits(self.fmt)
        granularity = resolve_granularity(known, self.granularity)
        block = self.block_size
        if granularity != "block":
            if block is not None:
                raise _scale_layout(f"block size {block}", f"granularity 'block', not {granularity!r}")
        elif block is None:
            block = traits.block_size
        elif isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise _scale_layout(f"block size {block!r}", "a positive size")
        elif traits.block_only and block != traits.block_size:
            raise _scale_layout(f"block size {block}", f"{traits.block_size} for {known.value}")
        elif traits.packed and block % 2:
            raise _scale_layout(f"block size {block}", f"an even size: {known.value} keeps two codes a byte")
        if not self.symmetric and not traits.zero_point:
            raise _scale_layout("asymmetric scaling", f"{known.value}, which takes no zero point")
        object.__setattr__(self, "fmt", known)
        object.__setattr__(self, "granularity", granularity)
        object.__setattr__(self, "block_size", block)

    @property
    def traits(self) -> FormatTraits:
        return FORMATS[self.fmt]

    def scales_for(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of `shape`. Raises DIM_NOT_MULTIPLE where it cannot be stored so."""
        _check_packable(shape, self.traits)
        return scale_shape(shape, self.granularity, self.block_size)

    def hot_key(self) -> tuple[object, ...]:
        """What a kernel choice may depend on: all of it."""
        return (self.fmt.value, self.granularity, self.block_size, self.symmetric)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A tensor stored in a quantized format; construction checks that the parts fit together.

    shape and dtype are those of the tensor it stands for. `data` has that shape (the last axis halved when two codes
    share a byte). `scale` is 0-d per tensor, [..., 1] per channel (one scale for each row along the last axis) and
    [..., blocks] per block of `block_size` along the last axis. The value of an element is
    (code - zero_point) * scale, times `tensor_scale` for NVFP4.
    """

    data: Tensor
    scale: Tensor
    fmt: QuantFormat
    granularity: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int | None = None
    zero_point: Tensor | None = None
    tensor_scale: Tensor | None = None

    def __post_init__(self) -> None:
        fmt, traits = format_traits(self.fmt)
        object.__setattr__(self, "fmt", fmt)
        object.__setattr__(self, "shape", tuple(self.shape))  # int() would fix a symbolic size
        if self.granularity != resolve_granularity(fmt, self.granularity):
            raise invalid(ReasonCode.QUANT_GRANULARITY_UNSUPPORTED, self.granularity, f"block (for {fmt.value})")
        _check_dtype("data", self.data, traits.data_dtype)
        _check_packable(self.shape, traits)
        width = self.shape[-1] if self.shape else 1
        expected = (*self.shape[:-1], width // 2) if traits.packed else self.shape
        if tuple(self.data.shape) != expected:
            raise invalid(ReasonCode.SHAPE_INVALID, f"data {tuple(self.data.shape)}", expected)
        self._check_scales(traits)
        places = [part.device for part in self.tensors()]
        if len(set(places)) > 1:
            raise invalid(ReasonCode.DEVICE_MIXED, [str(place) for place in places])

    @classmethod
    def fitting(cls, *parts: Any) -> QuantizedTensor:
        """One whose parts, all nine in order, fit together by the way they were made: they are not checked again."""
        made = object.__new__(cls)
        for name, part in zip(cls.__slots__, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    def to(self, device: torch.device | str) -> QuantizedTensor:
        parts = {name: getattr(self, name) for name in ("data", "scale", "zero_point", "tensor_scale")}
        moved: dict[str, Any] = {name: part if part is None else part.to(device) for name, part in parts.items()}
        return replace(self, **moved)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors inside, for device and mode checks."""
        return tuple(part for part in (self.data, self.scale, self.zero_point, self.tensor_scale) if part is not None)

    def hot_key(self) -> tuple[object, ...]:
        data = self.data
        return (
            type(data), data.is_cpu, data.get_device(), self.fmt._value_, self.granularity, self.shape, self.dtype,
            self.block_size, self.zero_point is None, data.is_contiguous() or data.stride(),
        )  # fmt: skip

    @property
    def traits(self) -> FormatTraits:
        return FORMATS[self.fmt]

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient of the scales is wanted; codes have none."""
        return self.scale.requires_grad or (self.tensor_scale is not None and self.tensor_scale.requires_grad)

    def _check_scales(self, traits: FormatTraits) -> None:
        _check_dtype("scale", self.scale, traits.scale_dtype)
        expected = scale_shape(self.shape, self.granularity, self.block_size)
        _check_scale_shape("scale", self.scale, expected)
        if traits.block_only and self.block_size != traits.block_size:
            raise _scale_layout(f"block size {self.block_size}", f"{traits.block_size} for {self.fmt.value}")
        if traits.tensor_scale != (self.tensor_scale is not None):
            verb = "needs" if traits.tensor_scale else "takes no"
            raise _scale_layout("tensor_scale", f"{self.fmt.value}, which {verb} one")
        if self.tensor_scale is not None:
            _check_dtype("tensor_scale", self.tensor_scale, "float32")
            _check_scale_shape("tensor_scale", self.tensor_scale, ())
        if self.zero_point is not None:
            if not traits.zero_point:
                raise _scale_layout("zero_point", f"{self.fmt.value}, which takes none")
            _check_scale_shape("zero_point", self.zero_point, expected)

    @property
    def nbytes(self) -> int:
        """Bytes of storage, scales included."""
        return sum(math.prod(part.shape) * part.element_size() for part in self.tensors())


def scale_shape(shape: tuple[int, ...], granularity: str, block_size: int | None) -> tuple[int, ...]:
    """The shape of the scales of a tensor of `shape`. Raises DIM_NOT_MULTIPLE, QUANT_SCALE_LAYOUT."""
    if granularity == "tensor":
        return ()
    if not shape:
        raise invalid(ReasonCode.RANK_INVALID, 0, f"at least 1 for {granularity} scales")
    if granularity == "channel":
        return (*shape[:-1], 1)
    if block_size is None or block_size <= 0:
        raise _scale_layout(f"block size {block_size}", "a positive size")
    if shape[-1] % block_size:
        raise invalid(ReasonCode.DIM_NOT_MULTIPLE, f"last axis of {shape}", f"the block size {block_size}")
    return (*shape[:-1], shape[-1] // block_size)


def _check_packable(shape: tuple[int, ...], traits: FormatTraits) -> None:
    if traits.packed and (not shape or shape[-1] % 2):
        raise invalid(ReasonCode.DIM_NOT_MULTIPLE, f"last axis of {shape}", 2)


def _check_dtype(name: str, tensor: Tensor, expected: str) -> None:
    found = str(tensor.dtype).removeprefix("torch.")
    if found != expected:
        raise invalid(ReasonCode.DTYPE_UNSUPPORTED, f"{found} ({name})", expected)


def _check_scale_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise _scale_layout(f"{name} {tuple(tensor.shape)}", f"shape {expected}")

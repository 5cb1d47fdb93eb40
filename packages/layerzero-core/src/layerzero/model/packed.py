"""A quantized weight packed for a kernel once and reused call after call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from layerzero.errors import invalid
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import QuantizedTensor, QuantScheme, format_traits
from layerzero.reasons import ReasonCode

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = "plain"

Packer: TypeAlias = "Callable[[QuantizedTensor], tuple[Tensor, ...]]"


def write_counts(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """torch's count of in-place writes to each tensor; None where torch keeps none (tensors of inference mode)."""
    try:
        return tuple(tensor._version for tensor in tensors)
    except RuntimeError:
        return None


def activation_scheme(fmt: QuantFormat | str) -> QuantScheme:
    """How activations are quantized beside a weight of a format: the same one, a scale for each row or block.

    Raises QUANT_FORMAT_UNSUPPORTED for INT4 and NF4: nothing computes with activations of theirs.
    """
    known, traits = format_traits(fmt)
    if known in (QuantFormat.INT4, QuantFormat.NF4):
        shown = f"{known.value} for activations"
        raise invalid("QUANT_FORMAT_UNSUPPORTED", shown, "int8, fp8_e4m3, fp8_e5m2, mxfp4, nvfp4")
    return QuantScheme(known, "block" if traits.block_only else "channel")


@dataclass(slots=True, eq=False, repr=False)
class PackedWeight:
    """What `lz.pack_weight` gives and `lz.linear` takes as a weight.

    source    the quantized weight itself: what the reference reads, and any kernel that wants another layout
    layout    how the parts lie: the `weight_layout` of the kernels that take them; "plain" when nothing was packed
    parts     the packed tensors, unchecked; kernels read them through `ready`
    act       None, or "dynamic": each row of the activations is quantized too, to the weight's own format
    repack    makes the parts anew
    packs     how often the parts were made

    A write in place to the source makes the parts stale. `ready` sees it by torch's own write counter, and refuses or
    packs anew, as the maker chose. Writes that torch does not count (through `.data`, or to tensors made in inference
    mode) are not seen; `tracked` tells.
    """

    source: QuantizedTensor
    layout: str = PLAIN
    parts: tuple[Tensor, ...] = ()
    act: str | None = None
    repack: Packer | None = None
    packs: int = field(init=False)
    _counts: tuple[int, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        self.packs = 1 if self.parts else 0
        self._counts = write_counts(self.source.tensors())

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a tensor begins to count its writes anew: whether the parts were stale is what goes along.
        return {name: getattr(self, name) for name in self.__slots__} | {"_counts": self.stale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._counts = (-1,) if state["_counts"] else write_counts(self.source.tensors())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def requires_grad(self) -> bool:
        return self.source.requires_grad

    @property
    def stale(self) -> bool:
        return bool(self.parts) and self._counts != write_counts(self.source.tensors())

    def ready(self) -> tuple[Tensor, ...]:
        """The parts, which are those of the source as it is now. Raises WEIGHT_PACK_STALE."""
        if self.stale:
            if self.repack is None:
                now = write_counts(self.source.tensors()) or ()
                times = sum(now) - sum(self._counts or ())
                raise invalid(ReasonCode.WEIGHT_PACK_STALE, f"{times} times" if times > 1 else "once", self.layout)
            counts = write_counts(self.source.tensors())
            self.parts, self._counts, self.packs = self.repack(self.source), counts, self.packs + 1
        return self.parts

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.source.tensors(), *self.parts)

    def hot_key(self) -> tuple[object, ...]:
        return (self.layout, self.act, self.source.hot_key())

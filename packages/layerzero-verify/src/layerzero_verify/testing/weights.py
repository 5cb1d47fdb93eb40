"""The weight of a linear layer in the form a kernel takes: as it is, quantized, or packed by its own packer."""

from __future__ import annotations

from torch import Tensor

from layerzero.backends.reference.quantize import quantize
from layerzero.model.enums import QuantFormat
from layerzero.model.kernel import KernelSpec
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import FORMATS, QuantizedTensor, QuantScheme
from layerzero_verify.testing.cases import fit
from layerzero_verify.testing.kit import import_string

__all__ = ["schemes_of", "weight_for"]


def schemes_of(spec: KernelSpec, *, symmetric: bool = True) -> list[QuantScheme]:
    """Every format and granularity a kernel declares, blocks of a size it takes."""
    found = []
    for fmt in sorted(QuantFormat(word) for word in spec.quant_formats):
        traits = FORMATS[fmt]
        if not symmetric and not traits.zero_point:
            continue
        for granularity in sorted(spec.granularities):
            if traits.block_only and granularity != "block":
                continue
            block = None
            if granularity == "block":
                block = traits.block_size if traits.block_only else fit(spec, "block", 32)
            found.append(QuantScheme(fmt, granularity, block, symmetric))
    return found


def weight_for(
    spec: KernelSpec, weight: Tensor, scheme: QuantScheme | None = None, act: str | None = None
) -> Tensor | QuantizedTensor | PackedWeight:
    """A dense weight in the form a kernel of `linear` takes; without a scheme the first it declares, or as it is."""
    if scheme is None:
        if not spec.quant_formats or "unquantized" in spec.features:
            return weight
        scheme = schemes_of(spec)[0]
        act = None if "weight_only" in spec.features else "dynamic"
    source = quantize(weight, scheme)
    if spec.weight_layout is None or spec.packer is None:
        return source if act is None else PackedWeight(source, act=act)
    return PackedWeight(source, spec.weight_layout, import_string(spec.packer)(source), act)

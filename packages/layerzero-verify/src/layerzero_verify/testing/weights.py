"""The weight of a linear layer in the form a kernel takes: as it is, quantized, or packed by its own packer."""

from __future__ import annotations

from typing import Any

from layerzero.model.enums import QuantFormat
from layerzero.model.kernel import KernelSpec
from layerzero.model.quant import FORMATS, QuantScheme
from layerzero_verify.testing.cases import fit

__all__ = ["schemes_of", "weight_given"]


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


def weight_given(spec: KernelSpec, scheme: QuantScheme | None = None) -> dict[str, Any]:
    """What a case says of a weight; without a scheme it is the first that the kernel of `linear` declares, or none."""
    needs: tuple[str, ...] = ()
    if scheme is None:
        scheme = next(iter(schemes_of(spec)), None)
        if scheme is None or "unquantized" in spec.features:
            return {}
        needs = () if "weight_only" in spec.features else ("act_dynamic",)
    return {
        "quant_format": scheme.fmt.value,
        "granularity": scheme.granularity,
        "weight_layout": spec.weight_layout,
        "packer": spec.packer,
        "needs": needs,
        "block": scheme.block_size,
    }

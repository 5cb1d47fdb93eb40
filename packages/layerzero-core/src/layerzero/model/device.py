"""What a device is, for plugins and ops: the value that `layerzero.device` makes."""

from __future__ import annotations

from layerzero.device.spec import DEFAULT_GENERATIONS, DeviceSpec, GenerationMap, GenerationRange, canonical_cpu_feature

__all__ = ["DEFAULT_GENERATIONS", "DeviceSpec", "GenerationMap", "GenerationRange", "canonical_cpu_feature"]

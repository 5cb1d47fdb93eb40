"""Numbers and quantized weights for the tests of `lz.linear`."""

from __future__ import annotations

import torch

import layerzero as lz
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import FORMATS

NEON = "neon" in DeviceSpec.detect(torch.device("cpu")).cpu_features


def draw(*shape, dtype=torch.float32, scale=1.0, seed=0):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (noise * scale).to(dtype)


def weight_of(fmt, n=16, k=64, *, granularity="block", seed=1, **options):
    if granularity == "block" and "block_size" not in options and not FORMATS[QuantFormat(fmt)].block_only:
        options["block_size"] = 32
    return lz.quantize(draw(n, k, scale=k**-0.5, seed=seed), fmt, granularity=granularity, **options)

"""QuantizedTensor: parts that do not fit together are refused with a reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import FORMATS, QuantizedTensor, format_traits, resolve_granularity
from layerzero.reasons import ReasonCode


def int8(**changes):
    parts = {
        "data": torch.zeros(4, 8, dtype=torch.int8),
        "scale": torch.ones(()),
        "fmt": QuantFormat.INT8,
        "granularity": "tensor",
        "shape": (4, 8),
        "dtype": torch.float32,
    }
    return QuantizedTensor(**(parts | changes))


def nvfp4(**changes):
    parts = {
        "data": torch.zeros(4, 16, dtype=torch.uint8),
        "scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
        "fmt": QuantFormat.NVFP4,
        "granularity": "block",
        "shape": (4, 32),
        "dtype": torch.bfloat16,
        "block_size": 16,
        "tensor_scale": torch.ones(()),
    }
    return QuantizedTensor(**(parts | changes))


def test_fitting_parts_make_a_frozen_value():
    qt = int8(fmt="int8", shape=torch.Size([4, 8]))
    assert qt.fmt is QuantFormat.INT8 and qt.shape == (4, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        qt.granularity = "block"
    assert int8(granularity="channel", scale=torch.ones(4, 1)).nbytes == 32 + 16
    assert int8(granularity="block", scale=torch.ones(4, 2), block_size=4, zero_point=torch.zeros(4, 2)).nbytes == 96
    assert nvfp4().nbytes == 64 + 8 + 4


@pytest.mark.req("R-QUANT-01")
def test_every_format_is_described_and_fp4_blocks_are_those_of_the_standards():
    assert set(FORMATS) == set(QuantFormat)
    mx, nv = FORMATS[QuantFormat.MXFP4], FORMATS[QuantFormat.NVFP4]
    assert (mx.block_size, mx.scale_dtype, mx.tensor_scale) == (32, "float8_e8m0fnu", False)
    assert (nv.block_size, nv.scale_dtype, nv.tensor_scale) == (16, "float8_e4m3fn", True)
    assert all(hasattr(torch, t.data_dtype) and hasattr(torch, t.scale_dtype) for t in FORMATS.values())


@pytest.mark.parametrize(
    ("make", "changes", "code"),
    [
        (int8, {"fmt": "int3"}, ReasonCode.QUANT_FORMAT_UNSUPPORTED),
        (int8, {"granularity": "row"}, ReasonCode.QUANT_GRANULARITY_UNSUPPORTED),
        (nvfp4, {"granularity": "tensor"}, ReasonCode.QUANT_GRANULARITY_UNSUPPORTED),
        (nvfp4, {"granularity": "channel"}, ReasonCode.QUANT_GRANULARITY_UNSUPPORTED),
        (int8, {"data": torch.zeros(4, 8)}, ReasonCode.DTYPE_UNSUPPORTED),
        (int8, {"scale": torch.ones((), dtype=torch.float16)}, ReasonCode.DTYPE_UNSUPPORTED),
        (nvfp4, {"scale": torch.ones(4, 2)}, ReasonCode.DTYPE_UNSUPPORTED),
        (int8, {"data": torch.zeros(4, 7, dtype=torch.int8)}, ReasonCode.SHAPE_INVALID),
        (nvfp4, {"data": torch.zeros(4, 32, dtype=torch.uint8)}, ReasonCode.SHAPE_INVALID),
        (int8, {"fmt": "int4", "data": torch.zeros(3, dtype=torch.uint8), "shape": (7,)}, ReasonCode.DIM_NOT_MULTIPLE),
        (int8, {"scale": torch.ones(1)}, ReasonCode.QUANT_SCALE_LAYOUT),
        (int8, {"granularity": "channel", "scale": torch.ones(1, 8)}, ReasonCode.QUANT_SCALE_LAYOUT),
        (int8, {"granularity": "block", "scale": torch.ones(4, 2)}, ReasonCode.QUANT_SCALE_LAYOUT),
        (int8, {"granularity": "block", "scale": torch.ones(4, 2), "block_size": 3}, ReasonCode.DIM_NOT_MULTIPLE),
        (nvfp4, {"block_size": 32, "scale": torch.ones(4, 1).to(torch.float8_e4m3fn)}, ReasonCode.QUANT_SCALE_LAYOUT),
        (nvfp4, {"tensor_scale": None}, ReasonCode.QUANT_SCALE_LAYOUT),
        (nvfp4, {"tensor_scale": torch.ones(4)}, ReasonCode.QUANT_SCALE_LAYOUT),
        (nvfp4, {"zero_point": torch.zeros(4, 2)}, ReasonCode.QUANT_SCALE_LAYOUT),
        (int8, {"tensor_scale": torch.ones(())}, ReasonCode.QUANT_SCALE_LAYOUT),
        (int8, {"zero_point": torch.zeros(4)}, ReasonCode.QUANT_SCALE_LAYOUT),
        (int8, {"scale": torch.ones((), device="meta")}, ReasonCode.DEVICE_MIXED),
    ],
)
@pytest.mark.req("R-QUANT-05")
def test_parts_that_do_not_fit_are_refused(make, changes, code):
    with pytest.raises(InvalidInputError) as caught:
        make(**changes)
    assert caught.value.code is code


def test_per_channel_scales_need_an_axis():
    with pytest.raises(InvalidInputError) as caught:
        int8(data=torch.zeros((), dtype=torch.int8), shape=(), granularity="channel")
    assert caught.value.code is ReasonCode.RANK_INVALID


def test_names_resolve_and_block_formats_own_their_granularity():
    assert format_traits("mxfp4")[0] is QuantFormat.MXFP4
    assert resolve_granularity("mxfp4", "tensor") == resolve_granularity("nvfp4", "block") == "block"
    assert resolve_granularity("int8", "tensor") == "tensor"
    with pytest.raises(InvalidInputError, match="block"):
        resolve_granularity("mxfp4", "channel")


@pytest.mark.req("R-QUANT-03")
@pytest.mark.parametrize("fmt", [fmt.value for fmt in QuantFormat])
def test_every_format_stands_in_the_context_under_its_own_name(fmt):
    granularity = "block" if FORMATS[QuantFormat(fmt)].block_only else "channel"
    x, weight = torch.randn(2, 64), torch.randn(16, 64)
    qt = lz.quantize(weight, fmt, granularity=granularity)
    for op, *args in (("linear", x, qt), ("dequantize", qt)):
        assert (lz.explain(op, *args).context.quant_format, lz.select(op, *args).context.quant_format) == (fmt, fmt)
    assert lz.explain("quantize", x, fmt, granularity=granularity).context.quant_format == fmt
    assert lz.explain("linear", x, weight).context.quant_format is None

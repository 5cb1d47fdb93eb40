"""The reference quantization against enumerated code tables and error bounds that follow from the formats."""

from __future__ import annotations

import math

import pytest
import torch

from layerzero.backends.reference.quantize import E2M1_VALUES, NF4_VALUES, dequantize, quantize
from layerzero.errors import InvalidInputError
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import FORMATS, QuantizedTensor
from layerzero.reasons import ReasonCode

ALL = [fmt.value for fmt in QuantFormat]


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def e2m1(code):
    """The value of a 4-bit code, from the bits: one sign, two exponent (bias 1), one mantissa."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa * 0.5))


def nearest_e2m1(x):
    """Exhaustive search; of two equally near codes the even one."""
    codes = range(8, 16) if math.copysign(1.0, x) < 0 else range(8)
    return min(codes, key=lambda code: (abs(e2m1(code) - x), code & 1))


def unpack(data):
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


@pytest.mark.req("R-QUANT-01")
def test_the_e2m1_table_is_the_one_the_bits_spell():
    assert E2M1_VALUES == tuple(e2m1(code) for code in range(8))
    assert sorted({e2m1(c) for c in range(16)}) == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.req("R-QUANT-01")
def test_mxfp4_rounds_every_input_to_the_nearest_code_ties_to_even():
    grid = torch.arange(-6.0, 6.0 + 1 / 64, 1 / 64)  # holds every code, every tie, and points on both sides of each
    rows = grid[: grid.numel() // 31 * 31].reshape(-1, 31)
    x = torch.cat((rows, torch.full((len(rows), 1), 4.0)), dim=1)  # the 4 pins the block scale to 1, up to 7.99
    qt = quantize(x, "mxfp4", "block")
    assert (qt.scale.float() == 1.0).all()
    want = [[nearest_e2m1(v) for v in row] for row in x.tolist()]
    assert unpack(qt.data).tolist() == want
    assert dequantize(qt, None).tolist() == [[e2m1(c) for c in row] for row in want]


@pytest.mark.parametrize("exponent", [-120, -30, -1, 0, 1, 30, 120])
@pytest.mark.req("R-QUANT-01")
def test_mxfp4_scale_is_the_power_of_two_of_the_standard(exponent):
    x = torch.zeros(3, 32)
    x[0, 5], x[1, 0], x[2, 31] = 2.0**exponent, -1.75 * 2.0**exponent, 1.25 * 2.0**exponent
    qt = quantize(x, "mxfp4", "block")
    assert qt.scale.dtype == torch.float8_e8m0fnu and qt.scale.shape == (3, 1)
    stored = qt.scale.view(torch.uint8).flatten().tolist()
    assert stored == [exponent - 2 + 127] * 3  # floor(log2(peak)) - emax(E2M1), biased by 127
    assert dequantize(qt, None)[0, 5] == 2.0**exponent
    assert dequantize(qt, None)[1, 0] == -1.5 * 2.0**exponent  # 7 steps saturate at 6


def test_mxfp4_saturates_instead_of_overflowing():
    x = torch.full((1, 32), 7.9)
    assert (dequantize(quantize(x, "mxfp4", "block"), None) == 6.0).all()


@pytest.mark.req("R-QUANT-01")
def test_nvfp4_has_two_levels_of_scale_and_follows_them():
    x = draw(4, 64) * torch.tensor([[0.01], [1.0], [50.0], [0.0]])
    qt = quantize(x, "nvfp4", "block")
    assert qt.block_size == 16 and qt.scale.shape == (4, 4) and qt.scale.dtype == torch.float8_e4m3fn
    assert qt.tensor_scale == x.abs().max() / (6 * 448)
    blocks = x.reshape(4, 4, 16)
    want = (blocks.abs().amax(-1) / 6 / qt.tensor_scale).to(torch.float8_e4m3fn)
    assert torch.equal(qt.scale.float(), want.float())
    codes = unpack(qt.data).reshape(4, 4, 16)
    step = qt.scale.float() * qt.tensor_scale
    for row, block, i in [(0, 0, 0), (1, 2, 7), (2, 3, 15), (1, 0, 3), (2, 1, 9)]:
        assert codes[row, block, i] == nearest_e2m1((blocks[row, block, i] / step[row, block]).item())
    values = torch.tensor([e2m1(c) for c in range(16)])[codes.long()] * step[..., None]
    assert torch.equal(dequantize(qt, None), values.reshape(4, 64))
    assert torch.count_nonzero(dequantize(qt, None)[3]) == 0


def test_nvfp4_keeps_small_blocks_better_than_one_scale_would():
    x = draw(2, 32)
    x[0] *= 1e-3
    error = (dequantize(quantize(x, "nvfp4", "block"), None) - x).abs()
    assert error[0].max() < 0.2 * x[0].abs().max()


def test_an_nvfp4_block_too_small_for_its_scale_becomes_zeros():
    x = torch.cat((torch.full((1, 16), 1e-12), torch.full((1, 16), 1.0)), dim=1)
    qt = quantize(x, "nvfp4", "block")
    assert qt.scale.float()[0, 0] == 0.0
    assert torch.count_nonzero(qt.data[0, :8]) == 0
    assert dequantize(qt, None)[0, 16:].allclose(torch.ones(16), rtol=1e-6)


@pytest.mark.req("R-QUANT-01")
def test_the_nf4_table_is_made_of_normal_quantiles():
    def quantile(p):
        return math.sqrt(2) * torch.erfinv(torch.tensor(2 * p - 1, dtype=torch.float64))

    end = 0.9677083
    upper = [quantile(p.item()) for p in torch.linspace(end, 0.5, 9, dtype=torch.float64)[:-1]]
    lower = [-quantile(p.item()) for p in torch.linspace(end, 0.5, 8, dtype=torch.float64)[:-1]]
    table = torch.tensor(sorted([*upper, 0.0, *lower]))
    assert torch.allclose(torch.tensor(NF4_VALUES), (table / table.abs().max()).float(), atol=1e-6)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_nf4_takes_the_nearest_of_its_sixteen_values(granularity):
    x = draw(4, 128)
    qt = quantize(x, "nf4", granularity)
    normed = (x.reshape(*qt.scale.shape, -1) if qt.scale.dim() else x) / (
        qt.scale[..., None] if qt.scale.dim() else qt.scale
    )
    nearest = (normed[..., None] - torch.tensor(NF4_VALUES)).abs().argmin(-1).reshape(4, 128)
    assert torch.equal(unpack(qt.data).long(), nearest)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize(("fmt", "largest"), [("int8", 127), ("int4", 7)])
@pytest.mark.req("R-QUANT-01")
def test_integers_err_by_half_a_step_at_most(fmt, largest, granularity):
    x = draw(6, 256) * torch.logspace(-3, 3, 6)[:, None]
    qt = quantize(x, fmt, granularity)
    groups = {"tensor": x.reshape(1, -1), "channel": x, "block": x.reshape(12, 128)}[granularity]
    peak = groups.abs().amax(-1)
    assert torch.allclose(qt.scale.reshape(-1), peak / largest)
    assert tuple(qt.scale.shape) == {"tensor": (), "channel": (6, 1), "block": (6, 2)}[granularity]
    error = (dequantize(qt, None) - x).abs().reshape(groups.shape)
    assert (error <= peak[:, None] / largest * 0.5 * (1 + 1e-4)).all()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize(
    ("fmt", "dtype", "bits"),
    [("fp8_e4m3", torch.float8_e4m3fn, 3), ("fp8_e5m2", torch.float8_e5m2, 2)],
)
@pytest.mark.req("R-QUANT-01")
def test_fp8_errs_by_half_an_ulp_and_uses_the_whole_range(fmt, dtype, bits, granularity):
    x = draw(4, 256)
    qt = quantize(x, fmt, granularity)
    assert qt.data.dtype == dtype
    assert qt.data.float().abs().max() == torch.finfo(dtype).max
    relative = (dequantize(qt, None) - x).abs() / x.abs()
    big = qt.data.float().abs() > 2 * torch.finfo(dtype).tiny  # subnormals have a fixed step
    assert (relative[big] <= 2.0 ** -(bits + 1) * (1 + 1e-4)).all()


@pytest.mark.parametrize("fmt", ALL)
def test_quantizing_twice_changes_nothing_more(fmt):
    once = dequantize(quantize(draw(4, 128), fmt, "block"), None)
    assert torch.allclose(dequantize(quantize(once, fmt, "block"), None), once, rtol=1e-6)


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.req("R-QUANT-01")
def test_every_format_round_trips_near_its_input_and_remembers_the_dtype(fmt, dtype):
    x = draw(3, 5, 128, dtype=dtype)
    qt = quantize(x, fmt, "block")
    assert qt.fmt == fmt and qt.dtype == dtype and qt.shape == (3, 5, 128)
    back = dequantize(qt, None)
    assert back.dtype == dtype
    assert dequantize(qt, torch.float32).dtype == torch.float32
    cosine = torch.cosine_similarity(back.double().flatten(), x.double().flatten(), dim=0)
    assert cosine > (0.98 if FORMATS[QuantFormat(fmt)].packed else 0.998)
    assert qt.nbytes < x.numel() * (0.75 if FORMATS[QuantFormat(fmt)].packed else 1.25)


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_zeros_stay_zeros(fmt, granularity):
    assert torch.count_nonzero(dequantize(quantize(torch.zeros(2, 128), fmt, granularity), None)) == 0


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_poisoned_group_stays_visible(fmt, bad):
    x = draw(2, 128)
    x[0, 3] = bad
    back = dequantize(quantize(x, fmt, "block"), None)
    assert not back[0, 3].isfinite()


def test_low_nibble_holds_the_even_element():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = 7.0, -7.0
    assert quantize(x, "int4", "tensor").data[0, 0] == (0x9 << 4 | 0x7)


def test_a_zero_point_shifts_before_the_scale():
    qt = QuantizedTensor(
        torch.tensor([[0, 10]], dtype=torch.int8),
        torch.tensor(0.5),
        QuantFormat.INT8,
        "tensor",
        (1, 2),
        torch.float32,
        zero_point=torch.tensor(4),
    )
    assert dequantize(qt, None).tolist() == [[-2.0, 3.0]]


@pytest.mark.parametrize(
    ("x", "fmt", "granularity", "code"),
    [
        (draw(2, 6), "fp7", "tensor", ReasonCode.QUANT_FORMAT_UNSUPPORTED),
        (draw(2, 6), "int8", "row", ReasonCode.QUANT_GRANULARITY_UNSUPPORTED),
        (draw(2, 32), "mxfp4", "channel", ReasonCode.QUANT_GRANULARITY_UNSUPPORTED),
        (draw(2, 33), "mxfp4", "block", ReasonCode.DIM_NOT_MULTIPLE),
        (draw(2, 24), "nvfp4", "block", ReasonCode.DIM_NOT_MULTIPLE),
        (draw(2, 7), "int4", "tensor", ReasonCode.DIM_NOT_MULTIPLE),
        (torch.ones(2, 8, dtype=torch.int32), "int8", "tensor", ReasonCode.DTYPE_UNSUPPORTED),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_a_reason(x, fmt, granularity, code):
    with pytest.raises(InvalidInputError) as caught:
        quantize(x, fmt, granularity)
    assert caught.value.code is code


@pytest.mark.parametrize("fmt", ALL)
def test_empty_and_strided_inputs(fmt):
    assert dequantize(quantize(torch.zeros(0, 128), fmt, "block"), None).shape == (0, 128)
    x = draw(128, 4).T
    assert torch.equal(
        dequantize(quantize(x, fmt, "block"), None), dequantize(quantize(x.contiguous(), fmt, "block"), None)
    )

"""The storage formats bit for bit: every code of each, every tie, every scale, against their definitions."""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import layerzero as lz
from layerzero.backends.reference.quantize import dequantize, quantize
from layerzero.errors import InvalidInputError
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import FORMATS, QuantizedTensor, QuantScheme
from layerzero.reasons import ReasonCode

_spec = importlib.util.spec_from_file_location("quant_oracle", Path(__file__).with_name("quant_oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

ALL = [fmt.value for fmt in QuantFormat]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SPACED = [v for v in (-math.inf, -1e4, -3.0, -1e-40, -0.0, 0.0, 1e-45, 1e-40, 2.0**-126, 0.3, 1e4, math.inf, math.nan)]


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def codes_of(qt):
    return oracle.unpacked(qt)


def byte(tensor):
    return (tensor.unsqueeze(0) if tensor.ndim == 0 else tensor.contiguous()).view(torch.uint8)


# -- decoding: all codes -----------------------------------------------------------------------------
@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("scale", [1.0, 0.0078125, 3.0])
def test_all_256_codes_of_fp8_decode_to_what_their_bits_say(fmt, scale, device):
    data = torch.arange(256, dtype=torch.uint8, device=device).view(FP8[fmt])
    qt = QuantizedTensor(data, torch.tensor(scale, device=device), fmt, "tensor", (256,), torch.float32)
    got = lz.dequantize(qt).cpu().double().numpy()
    want = np.array([np.float64(np.float32(oracle.CODES[fmt][code]) * np.float32(scale)) for code in range(256)])
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got)[[0, 128]], [False, True])


@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("device", DEVICES)
def test_all_16_codes_of_mxfp4_decode_under_all_255_scales(device):
    data = torch.tensor([[low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2), strict=True)] * 2])
    data = data.to(torch.uint8).repeat(256, 1).to(device)
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu).unsqueeze(-1)
    qt = QuantizedTensor(data, scale, "mxfp4", "block", (256, 32), torch.float64, 32)
    assert np.array_equal(lz.dequantize(qt).cpu().numpy(), oracle.value_of(qt), equal_nan=True)
    row = [oracle.e2m1(code) * 0.25 for code in range(16)]
    assert lz.dequantize(qt, torch.float32)[125].tolist() == row * 2


@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("device", DEVICES)
def test_all_16_codes_of_nvfp4_decode_under_all_256_block_scales(device):
    pairs = [low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2), strict=True)]
    data = torch.tensor([pairs], dtype=torch.uint8).repeat(256, 1).to(device)
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).unsqueeze(-1)
    overall = torch.tensor(0.37, device=device)
    qt = QuantizedTensor(data, scale, "nvfp4", "block", (256, 16), torch.float64, 16, None, overall)
    assert np.array_equal(lz.dequantize(qt).cpu().numpy(), oracle.value_of(qt), equal_nan=True)


@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize(
    ("fmt", "zero_point"), [("int8", None), ("int8", 3), ("int8", -128), ("int4", None), ("int4", -5), ("nf4", None)]
)
def test_all_codes_of_int8_int4_and_nf4_decode(fmt, zero_point):
    if fmt == "int8":
        data, width = torch.arange(256, dtype=torch.uint8).view(torch.int8), 256
    else:
        data, width = torch.arange(256, dtype=torch.uint8), 512  # every pair of codes in a byte
    point = None if zero_point is None else torch.tensor(zero_point, dtype=torch.int32)
    qt = QuantizedTensor(data, torch.tensor(0.625), fmt, "tensor", (width,), torch.float64, None, point)
    assert np.array_equal(lz.dequantize(qt).numpy(), oracle.value_of(qt))
    got = lz.dequantize(qt, torch.float32).double().numpy()
    assert np.array_equal(got, oracle.value_of(qt).astype(np.float32).astype(np.float64))


@pytest.mark.req("R-QUANT-01")
def test_the_nf4_table_is_made_of_normal_quantiles():
    def quantile(p):
        return math.sqrt(2) * torch.erfinv(torch.tensor(2 * p - 1, dtype=torch.float64))

    end = 0.9677083
    upper = [quantile(p.item()) for p in torch.linspace(end, 0.5, 9, dtype=torch.float64)[:-1]]
    lower = [-quantile(p.item()) for p in torch.linspace(end, 0.5, 8, dtype=torch.float64)[:-1]]
    table = torch.tensor(sorted([*upper, 0.0, *lower]))
    qt = QuantizedTensor(torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8),
                         torch.tensor(1.0), "nf4", "tensor", (16,), torch.float32)  # fmt: skip
    assert torch.allclose(lz.dequantize(qt), (table / table.abs().max()).float(), atol=1e-6)


# -- encoding: all codes, all ties, all scales -------------------------------------------------------
@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4"])
def test_every_code_comes_back_from_its_own_value(fmt, backend, device):
    """The finite codes as one group: its peak is the largest code, so the scale is one and nothing may move."""
    table = {code: value for code, value in oracle.CODES[fmt].items() if math.isfinite(value)}
    if fmt in ("int8", "int4"):
        table = {code: value for code, value in table.items() if value >= -oracle.LARGEST[fmt]}
    codes = [*table] + [next(code for code, value in table.items() if value == 0.0)] * (len(table) % 2)
    x = torch.tensor([table[code] for code in codes], dtype=torch.float32, device=device)
    qt = lz.quantize(x, fmt, backend=backend)
    assert qt.scale.item() == 1.0
    assert codes_of(qt).tolist() == codes
    assert lz.dequantize(qt).tolist() == x.tolist()


@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_every_code_of_mxfp4_comes_back_under_every_scale(backend, device):
    values = torch.tensor([oracle.e2m1(code) for code in range(16)] * 2, dtype=torch.float64)
    exponents = torch.arange(-127, 126, dtype=torch.float64)  # 6 * 2**126 is beyond float32
    x = (values * torch.exp2(exponents).unsqueeze(-1)).float().to(device)
    qt = lz.quantize(x, "mxfp4", backend=backend)
    assert byte(qt.scale).flatten().tolist() == list(range(253))
    assert codes_of(qt).tolist() == [list(range(16)) * 2] * 253
    assert torch.equal(byte(lz.dequantize(qt)), byte(x))


@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_every_code_of_nvfp4_comes_back_under_every_normal_block_scale(backend, device):
    """One block for each positive E4M3 scale up to 448, which pins the tensor scale to one."""
    scales = [code for code in range(8, 127)]
    rows = [[oracle.e2m1(code) * oracle.e4m3(scale) for code in range(16)] for scale in scales]
    x = torch.tensor(rows, dtype=torch.float32, device=device)
    qt = lz.quantize(x, "nvfp4", backend=backend)
    assert qt.tensor_scale.item() == 1.0
    assert byte(qt.scale).flatten().tolist() == scales
    assert codes_of(qt).tolist() == [list(range(16))] * len(scales)
    assert lz.dequantize(qt).tolist() == rows


def _around(fmt):
    """Every tie between neighbouring values, the two float32 numbers beside it, and quarter points."""
    values = sorted({v for v in oracle.CODES[fmt].values() if math.isfinite(v) and abs(v) <= oracle.LARGEST[fmt]})
    found = []
    for low, high in pairwise(values):
        middle = np.float32((low + high) / 2)
        found += [middle, np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))]
        found += [np.float32(low + (high - low) / 4), np.float32(low + 3 * (high - low) / 4)]
    return [float(number) for number in found]


@pytest.mark.req("R-QUANT-01", "R-API-08")
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4"])
def test_ties_go_to_the_even_code_and_all_else_to_the_nearest(fmt, backend):
    numbers = _around(fmt)
    numbers += [0.0] * (1 - len(numbers) % 2) + [oracle.LARGEST[fmt]]  # the last one pins the scale to one
    qt = lz.quantize(torch.tensor(numbers, dtype=torch.float32), fmt, backend=backend)
    assert qt.scale.item() == 1.0
    want = [oracle.nearest(fmt, number) for number in numbers]
    assert codes_of(qt).tolist() == want


@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_fp4_rounds_every_input_to_the_nearest_code_ties_to_even(fmt, backend):
    numbers = [*_around(fmt), *(n / 64 for n in range(-384, 385))]
    block = FORMATS[QuantFormat(fmt)].block_size
    numbers += [0.0] * (-len(numbers) % (block - 1))
    rows = torch.tensor(numbers, dtype=torch.float32).reshape(-1, block - 1)
    x = torch.cat((rows, torch.full((len(rows), 1), 6.0)), dim=1)  # the 6 pins the block scale
    if fmt == "nvfp4":  # and a block of 6 * 448 pins the tensor scale
        x = torch.cat((x, torch.full((1, block), 2688.0)))
    qt = lz.quantize(x, fmt, backend=backend)
    assert (qt.scale[: len(rows)].float() == 1.0).all()
    want = [[oracle.nearest(fmt, v) for v in row] for row in x[: len(rows)].tolist()]
    assert codes_of(qt)[: len(rows)].tolist() == want


@pytest.mark.parametrize("fmt", FP8)
def test_float64_is_rounded_once_not_twice(fmt):
    """A number a hair above a tie would fall onto it in float32, and then to the even code below."""
    values = sorted(v for v in oracle.CODES[fmt].values() if math.isfinite(v) and v >= 0)
    ties = [(low + high) / 2 for low, high in pairwise(values)]
    x = torch.tensor([t * (1 + s * 2.0**-40) for t in ties for s in (-1, 0, 1)] + [values[-1]], dtype=torch.float64)
    qt = quantize(x, QuantScheme(fmt))
    assert qt.scale.item() == 1.0
    assert codes_of(qt).tolist() == [oracle.nearest(fmt, v) for v in x.tolist()]


# -- scales ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("exponent", [-120, -30, -1, 0, 1, 30, 120])
@pytest.mark.req("R-QUANT-01")
def test_mxfp4_scale_is_the_power_of_two_of_the_standard(exponent):
    x = torch.zeros(3, 32)
    x[0, 5], x[1, 0], x[2, 31] = 2.0**exponent, -1.75 * 2.0**exponent, 1.25 * 2.0**exponent
    qt = lz.quantize(x, "mxfp4")
    assert qt.scale.dtype == torch.float8_e8m0fnu and qt.scale.shape == (3, 1)
    assert byte(qt.scale).flatten().tolist() == [exponent - 2 + 127] * 3  # floor(log2(peak)) - emax(E2M1), biased
    assert lz.dequantize(qt)[1, 0] == -1.5 * 2.0**exponent  # 7 steps saturate at 6


@pytest.mark.req("R-QUANT-01")
def test_nvfp4_has_two_levels_of_scale_and_follows_them():
    x = draw(4, 64) * torch.tensor([[0.01], [1.0], [50.0], [0.0]])
    qt = lz.quantize(x, "nvfp4")
    assert qt.block_size == 16 and qt.scale.shape == (4, 4) and qt.scale.dtype == torch.float8_e4m3fn
    overall = np.float32(x.abs().max().item()) / np.float32(6 * 448)
    assert qt.tensor_scale.item() == overall
    peaks = x.reshape(4, 4, 16).abs().amax(-1).numpy()
    wanted = peaks / np.float32(6) / overall
    stored = [[oracle.nearest("fp8_e4m3", min(float(v), 448.0)) for v in row] for row in wanted]
    assert byte(qt.scale).tolist() == stored
    step = np.vectorize(oracle.e4m3)(np.array(stored)).astype(np.float32) * overall
    for row, block, i in [(0, 0, 0), (1, 2, 7), (2, 3, 15), (1, 0, 3), (2, 1, 9), (0, 3, 2)]:
        number = np.float32(x[row, block * 16 + i].item()) / step[row, block]
        assert codes_of(qt)[row, block * 16 + i] == oracle.nearest("nvfp4", float(number))
    assert torch.count_nonzero(lz.dequantize(qt)[3]) == 0


def test_an_nvfp4_block_too_small_for_its_scale_becomes_zeros():
    x = torch.cat((torch.full((1, 16), 1e-12), torch.full((1, 16), 1.0)), dim=1)
    qt = lz.quantize(x, "nvfp4")
    assert qt.scale.float()[0, 0] == 0.0
    assert torch.count_nonzero(qt.data[0, :8]) == 0
    assert lz.dequantize(qt)[0, 16:].allclose(torch.ones(16), rtol=1e-6)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4"])
@pytest.mark.req("R-QUANT-01", "R-QUANT-04")
def test_a_scale_is_the_peak_of_its_group_over_the_largest_code(fmt, granularity):
    x = draw(6, 256) * torch.logspace(-3, 3, 6)[:, None]
    x[4] = 0.0
    qt = lz.quantize(x, fmt, granularity=granularity)
    size = FORMATS[QuantFormat(fmt)].block_size
    groups = {"tensor": x.reshape(1, -1), "channel": x, "block": x.reshape(-1, size)}[granularity].numpy()
    peaks = np.abs(groups).max(-1)
    want = np.where(peaks == 0, np.float32(1), peaks / np.float32(oracle.LARGEST[fmt]))
    assert np.array_equal(qt.scale.numpy().reshape(-1), want)
    assert tuple(qt.scale.shape) == {"tensor": (), "channel": (6, 1), "block": (6, 256 // size)}[granularity]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("fmt", "low", "high"), [("int8", -128, 127), ("int4", -8, 7)])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.req("R-QUANT-01")
def test_asymmetric_integers_use_every_code_and_keep_zero_exact(fmt, low, high, granularity, backend):
    x = draw(4, 128).abs() * 3 + torch.tensor([[-0.5], [0.0], [2.0], [-9.0]])
    x[:, 7] = 0.0
    qt = lz.quantize(x, fmt, granularity=granularity, symmetric=False, backend=backend)
    assert qt.zero_point is not None and qt.zero_point.shape == qt.scale.shape
    values = np.array([oracle.CODES[fmt][code] for code in codes_of(qt).reshape(-1)])
    assert values.min() == low and values.max() == high
    assert low <= qt.zero_point.min() and qt.zero_point.max() <= high
    back = lz.dequantize(qt)
    assert torch.count_nonzero(back[:, 7]) == 0
    half = torch.from_numpy(oracle.scales(qt).copy()) / 2
    assert ((back.double() - x.double()).abs() <= half * (1 + 1e-5)).all()
    spread = lz.dequantize(lz.quantize(x, fmt, granularity=granularity)).double()  # symmetric: twice the step here
    assert (back.double() - x.double()).square().mean() < (spread - x.double()).square().mean()


@pytest.mark.parametrize("size", [2, 32, 64, 128])
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3", "nf4"])
def test_blocks_may_have_another_size(fmt, size):
    x = draw(3, 128)
    qt = lz.quantize(x, fmt, granularity="block", block_size=size)
    assert qt.block_size == size and qt.scale.shape == (3, 128 // size)
    alone = lz.quantize(x.reshape(-1, size), fmt, granularity="channel")
    assert torch.equal(lz.dequantize(qt).reshape(-1, size), lz.dequantize(alone))


# -- NaN, infinity, zero, subnormal ------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_poisoned_group_stays_visible_and_alone(fmt, bad, backend):
    x = draw(2, 128)
    clean = lz.dequantize(lz.quantize(x, fmt, granularity="block", backend=backend))
    x[0, 3] = bad
    back = lz.dequantize(lz.quantize(x, fmt, granularity="block", backend=backend))
    block = FORMATS[QuantFormat(fmt)].block_size
    assert not back[0, 3].isfinite()
    if fmt != "nvfp4":  # there the largest finite block decides the scale of all, and it may be this one
        assert torch.equal(back[0, block:], clean[0, block:])
        assert torch.equal(back[1], clean[1])
    assert back[1].isfinite().all()


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_zeros_stay_zeros_with_scale_one(fmt, granularity):
    qt = lz.quantize(torch.zeros(2, 128), fmt, granularity=granularity)
    assert torch.count_nonzero(lz.dequantize(qt)) == 0
    if fmt == "nvfp4":
        assert qt.tensor_scale.item() == 1.0
    else:
        assert (qt.scale.float() == 1.0).all()


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4"])
@pytest.mark.parametrize("peak", [1e-45, 3e-44, 1.1e-42, 1e-40, 1e-38, 1.5e-36])
def test_subnormal_groups_err_by_half_a_step_of_the_smallest_normal_scale(fmt, peak):
    x = (draw(1, 64).clamp(-1, 1) * peak).float()
    qt = lz.quantize(x, fmt)
    assert qt.scale.item() >= 2.0**-126
    error = np.abs(oracle.value_of(qt) - x.double().numpy())
    assert (error <= oracle.half_gap(fmt, x.double().numpy() / qt.scale.item()) * qt.scale.item() * (1 + 1e-6)).all()


@pytest.mark.req("R-QUANT-01")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("fmt", "symmetric"), [*((fmt, True) for fmt in ALL), ("int8", False), ("int4", False)])
def test_the_fast_kernel_stores_the_same_bits_as_the_reference(fmt, symmetric, dtype, device):
    x = draw(5, 256, dtype=dtype)
    x[1, :13] = torch.tensor(SPACED).to(dtype)
    x[2] = 0.0
    x[3] *= 1e-6
    x[4, 64:] = x[4, 64:] * 300
    for granularity in ("tensor", "channel", "block"):
        if FORMATS[QuantFormat(fmt)].block_only and granularity == "channel":
            continue
        kept = x if granularity != "tensor" else x[2:]
        pair = [
            lz.quantize(kept.to(device), fmt, granularity=granularity, symmetric=symmetric, backend=backend)
            for backend in ("reference", "torch")
        ]
        for left, right in zip(pair[0].tensors(), pair[1].tensors(), strict=True):
            assert left.dtype == right.dtype and torch.equal(byte(left), byte(right))
        for target in (torch.float32, torch.bfloat16):
            values = [lz.dequantize(pair[0], target, backend=backend) for backend in ("reference", "torch")]
            assert torch.equal(byte(values[0].nan_to_num(7.0)), byte(values[1].nan_to_num(7.0)))


# -- values, shapes, refusals ------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.req("R-QUANT-01", "R-API-08")
def test_every_format_round_trips_near_its_input_and_remembers_the_dtype(fmt, dtype):
    x = draw(3, 5, 128, dtype=dtype)
    qt = lz.quantize(x, fmt, granularity="block")
    assert qt.fmt == fmt and qt.dtype == dtype and qt.shape == (3, 5, 128)
    back = lz.dequantize(qt)
    assert back.dtype == dtype
    assert lz.dequantize(qt, torch.float32).dtype == torch.float32
    assert np.allclose(lz.dequantize(qt, torch.float64).numpy(), oracle.value_of(qt), rtol=1e-15, atol=0)
    cosine = torch.cosine_similarity(back.double().flatten(), x.double().flatten(), dim=0)
    assert cosine > (0.98 if FORMATS[QuantFormat(fmt)].packed else 0.998)
    assert qt.nbytes < x.numel() * (0.75 if FORMATS[QuantFormat(fmt)].packed else 1.25)


def test_low_nibble_holds_the_even_element():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = 7.0, -7.0
    assert lz.quantize(x, "int4").data[0, 0] == (0x9 << 4 | 0x7)


@pytest.mark.parametrize(
    ("shape", "options", "code"),
    [
        ((2, 6), {"fmt": "fp7"}, "QUANT_FORMAT_UNSUPPORTED"),
        ((2, 6), {"fmt": "int8", "granularity": "row"}, "QUANT_GRANULARITY_UNSUPPORTED"),
        ((2, 32), {"fmt": "mxfp4", "granularity": "channel"}, "QUANT_GRANULARITY_UNSUPPORTED"),
        ((2, 33), {"fmt": "mxfp4", "granularity": "block"}, "DIM_NOT_MULTIPLE"),
        ((2, 24), {"fmt": "nvfp4", "granularity": "block"}, "DIM_NOT_MULTIPLE"),
        ((2, 200), {"fmt": "int8", "granularity": "block"}, "DIM_NOT_MULTIPLE"),
        ((2, 100), {"fmt": "int8", "granularity": "block", "block_size": 32}, "DIM_NOT_MULTIPLE"),
        ((2, 7), {"fmt": "int4"}, "DIM_NOT_MULTIPLE"),
        ((2, 64), {"fmt": "mxfp4", "block_size": 16}, "QUANT_SCALE_LAYOUT"),
        ((2, 64), {"fmt": "int8", "granularity": "channel", "block_size": 16}, "QUANT_SCALE_LAYOUT"),
        ((2, 64), {"fmt": "int4", "granularity": "block", "block_size": 7}, "QUANT_SCALE_LAYOUT"),
        ((2, 64), {"fmt": "int8", "granularity": "block", "block_size": 0}, "QUANT_SCALE_LAYOUT"),
        ((2, 64), {"fmt": "fp8_e4m3", "symmetric": False}, "QUANT_SCALE_LAYOUT"),
        ((), {"fmt": "int8"}, "RANK_INVALID"),
    ],
)
@pytest.mark.req("R-QUANT-05")
def test_what_cannot_be_quantized_is_refused_with_a_reason(shape, options, code):
    with pytest.raises(InvalidInputError) as caught:
        lz.quantize(torch.ones(shape), **options)
    assert caught.value.code is ReasonCode(code)
    assert caught.value.reasons[0].value is not None and caught.value.reasons[0].limit is not None


def test_whole_numbers_are_refused():
    with pytest.raises(InvalidInputError) as caught:
        lz.quantize(torch.ones(2, 8, dtype=torch.int32), "int8")
    assert caught.value.code is ReasonCode.DTYPE_UNSUPPORTED


@pytest.mark.parametrize("fmt", ALL)
def test_empty_and_strided_inputs(fmt):
    scheme = QuantScheme(fmt, "block")
    assert dequantize(quantize(torch.zeros(0, 128), scheme), None).shape == (0, 128)
    assert lz.dequantize(lz.quantize(torch.zeros(0, 128), fmt, granularity="block")).shape == (0, 128)
    x = draw(128, 4).T
    got, want = (lz.quantize(item, fmt, granularity="block") for item in (x, x.contiguous()))
    assert torch.equal(byte(got.data), byte(want.data))
    assert torch.equal(byte(got.scale), byte(want.scale))

"""`lz.cast` against the formats' definitions: every code of the small ones, ties, overflow, wrapping, gradients."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import tolerance

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS, NARROW, FLOAT8 = (F64, F32, F16, BF16, E4M3, E5M2), (F16, BF16, E4M3, E5M2), (E4M3, E5M2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ALL = (*FLOATS, *INTEGERS, torch.bool)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

EXAMPLES = 400 if os.environ.get("LAYERZERO_PROVE") == "1" else 40

# bits of exponent and mantissa, and the first code that is no finite number
LAYOUT = {F16: (5, 10, 0x7C00), BF16: (8, 7, 0x7F80), E4M3: (4, 3, 0x7F), E5M2: (5, 2, 0x7C)}
BITS = {F16: torch.int16, BF16: torch.int16, E4M3: torch.uint8, E5M2: torch.uint8}


@lru_cache
def magnitudes(dtype):
    """The finite numbers >= 0 of a format, by code: mantissa, exponent and bias, nothing of torch."""
    exponents, mantissas, end = LAYOUT[dtype]
    bias, found = 2 ** (exponents - 1) - 1, []
    for code in range(end):
        exponent, mantissa = divmod(code, 1 << mantissas)
        if exponent == 0:
            found.append(mantissa * 2.0 ** (1 - bias - mantissas))
        else:
            found.append((1 + mantissa / 2**mantissas) * 2.0 ** (exponent - bias))
    return np.array(found)


def codes_of(dtype):
    """Every code of a format as a tensor of the format."""
    if dtype in FLOAT8:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def numbers_of(dtype):
    """What those codes stand for, in float64; infinities where the format has them, else NaN."""
    half = 2 ** (7 if dtype in FLOAT8 else 15)
    found = np.full(half, np.nan)
    found[: LAYOUT[dtype][2]] = magnitudes(dtype)
    if dtype != E4M3:
        found[LAYOUT[dtype][2]] = np.inf
    if dtype in FLOAT8:
        return np.concatenate((found, -found))
    return np.concatenate((-found, found))  # int16 counts from the negative half


def rounded(values, dtype, saturate):
    """The nearest number of the format, ties to the even code, in float64 (midpoints are exact there)."""
    grid = magnitudes(dtype)
    size = np.abs(values)
    above = np.searchsorted(grid, size)  # first code whose number is not smaller
    low, high = np.clip(above - 1, 0, None), np.clip(above, None, len(grid) - 1)
    middle = (grid[low] + grid[high]) / 2
    up = (size > middle) | ((size == middle) & (high % 2 == 0)) | (size == grid[high])
    found = np.where(up, grid[high], grid[low])
    step = grid[-1] - grid[-2]
    # past the end: the number after the last would have the next code, even or not
    tie = size == grid[-1] + step / 2
    beyond = (size > grid[-1] + step / 2) | (tie & (len(grid) % 2 == 0))
    top = grid[-1] if saturate else np.nan if dtype == E4M3 else np.inf
    found = np.where(beyond, top, np.where(tie, grid[-1], found))
    if saturate:
        found = np.where(np.isinf(size), grid[-1], found)
    return np.where(np.isnan(values), np.nan, np.copysign(found, values))


def same(tensor, want):
    """Equal bit for bit, signs of zero included; NaN may have any code."""
    got = tensor.to("cpu").to(F64).numpy().ravel()
    with np.errstate(invalid="ignore"):  # a signalling NaN
        want = np.asarray(want, dtype=np.float64).ravel()
    equal = (got == want) & (np.signbit(got) == np.signbit(want)) | (np.isnan(got) & np.isnan(want))
    wrong = np.flatnonzero(~equal)
    assert wrong.size == 0, f"{wrong.size} wrong; first at {wrong[0]}: {got[wrong[0]]!r}, expected {want[wrong[0]]!r}"


@pytest.mark.parametrize("dtype", NARROW)
def test_the_oracle_reads_every_code_as_torch_does(dtype):
    same(codes_of(dtype), numbers_of(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("target", NARROW)
@pytest.mark.parametrize("source", NARROW)
def test_every_code_of_a_small_format_becomes_the_right_code_of_another(source, target, saturate, device):
    x = codes_of(source).to(device)
    got = lz.cast(x, target, saturate=saturate)
    assert got.dtype == target and got.data_ptr() != x.data_ptr()
    values = numbers_of(source)
    same(got, rounded(values, target, saturate) if source != target or saturate else values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [F64, F32, F16, BF16])
@pytest.mark.parametrize("small", FLOAT8)
def test_all_256_codes_of_fp8_survive_a_wider_format(small, wide, device):
    x = codes_of(small).to(device)
    there = lz.cast(x, wide)
    same(there, numbers_of(small))
    back = lz.cast(there, small).cpu().view(torch.uint8)
    number = ~torch.from_numpy(np.isnan(numbers_of(small)))
    assert torch.equal(back[number], codes_of(small).view(torch.uint8)[number])


def near_ties(dtype, wide):
    """Numbers of a format, the midpoints between them, and what lies beside both in the wider one."""
    grid = magnitudes(dtype)
    if len(grid) > 600:
        grid = grid[np.r_[0:40, len(grid) // 2 - 200 : len(grid) // 2 + 200, len(grid) - 40 : len(grid)]]
    step = grid[-1] - grid[-2]
    exact = np.concatenate((grid, (grid[1:] + grid[:-1]) / 2, [grid[-1] + step / 2, grid[-1] + step, 0.0]))
    with np.errstate(over="ignore"):  # past the end of bfloat16 is past the end of float32
        as_wide = exact.astype(wide)
    beside = np.concatenate((np.nextafter(as_wide, wide(np.inf)), np.nextafter(as_wide, wide(0))))
    found = np.concatenate((as_wide, beside, [wide(np.nan), wide(np.inf)]))
    return torch.from_numpy(np.concatenate((found, -found)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("target", NARROW)
def test_ties_go_to_even_and_are_not_made_by_rounding_twice(target, wide, saturate, device):
    """A float64 just beside a tie of bfloat16 is a tie once it is float32: going there first gives the wrong number."""
    x = near_ties(target, wide)
    same(lz.cast(x.to(device), target, saturate=saturate), rounded(x.double().numpy(), target, saturate))


def test_torch_itself_rounds_twice_here():
    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-40], dtype=F64)
    assert x.to(BF16).item() == 1.0 and lz.cast(x, BF16).item() == 1.0 + 2.0**-7


@pytest.mark.parametrize("target", [F32, *NARROW])
@pytest.mark.parametrize("source", [F64, F32])
def test_random_bits_are_rounded_as_defined(source, target):
    generator = torch.Generator().manual_seed(3)
    kind = torch.int64 if source is F64 else torch.int32
    bits = torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max, (20_000,), generator=generator, dtype=kind)
    x = bits.view(source)
    if source is F64:  # most float64 exponents are far outside; bring half of them near
        x = torch.cat(
            (x, torch.randn(20_000, generator=generator, dtype=F64) * 10.0 ** torch.randint(-9, 6, (20_000,)))
        )
    with np.errstate(all="ignore"):
        want = x.numpy().astype(np.float32) if target is F32 else rounded(x.double().numpy(), target, False)
    same(lz.cast(x, target), want)


# -- integers ----------------------------------------------------------------------------------------
def integers_of(dtype):
    limits = torch.iinfo(dtype)
    edges = {0, 1, 2, 3, 127, 128, 255, 256, 2**15, 2**24 + 1, 2**24 + 2**16 + 1, 2**31, 2**53 + 1, 2**62 + 2**54 + 1}
    edges |= {limits.max - i for i in range(4)} | {limits.min + i for i in range(4)} | {-n for n in edges}
    rng = np.random.default_rng(5)
    edges |= {int(n) for n in rng.integers(limits.min, limits.max, 300, dtype=np.int64)}
    edges |= {
        int(n) >> int(s) for n, s in zip(rng.integers(-(2**62), 2**62, 300), rng.integers(0, 60, 300), strict=True)
    }
    return sorted(n for n in edges if limits.min <= n <= limits.max)


def nearest(number, dtype, saturate):
    """An integer rounded to a float format, in exact arithmetic."""
    if dtype in (F32, F64):
        kind = np.float32 if dtype is F32 else np.float64
        digits = 24 if dtype is F32 else 53
        size = abs(number)
        shift = max(size.bit_length() - digits, 0)
        kept = round(Fraction(size, 1 << shift))  # rounds ties to even
        return math.copysign(float(kind(kept)) * 2.0**shift, number) if number else 0.0
    grid = magnitudes(dtype)
    at = int(np.searchsorted(grid, float(abs(number))))
    near = range(max(at - 2, 0), min(at + 2, len(grid)))
    best = min(near, key=lambda code: (abs(Fraction(grid[code]) - abs(number)), code % 2))
    step = Fraction(grid[-1]) - Fraction(grid[-2])
    over = abs(number) - Fraction(grid[-1]) - step / 2
    if over > 0 or (over == 0 and len(grid) % 2 == 0):
        found = grid[-1] if saturate else math.nan if dtype is E4M3 else math.inf
    else:
        found = grid[best]
    return math.copysign(found, number) if number else 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integers_are_rounded_once(source, target, saturate, device):
    numbers = integers_of(source)
    got = lz.cast(torch.tensor(numbers, dtype=source, device=device), target, saturate=saturate)
    same(got, [nearest(n, target, saturate) for n in numbers])


def cut(value, dtype, saturate):
    limits = torch.iinfo(dtype)
    if math.isnan(value) or (math.isinf(value) and not saturate):
        return 0
    if saturate:
        return limits.max if value >= limits.max else limits.min if value <= limits.min else int(value)
    return (int(value) - limits.min) % 2**limits.bits + limits.min


SPECIAL = [
    0.0, -0.0, 0.5, -0.5, 0.999, 1.5, -1.5, 2.7, -2.7, 127.0, 127.9, 128.0, -128.9, -129.0, 255.5, 256.0, 300.0, -300.0,
    32768.0, 65535.0, 65536.0, -65537.0, 1e9, -1e9, 3e9, -3e9, 1e10, 2.0**31, 2.0**32, 2.0**53, 2.0**62, 2.0**63,
    -(2.0**63), 1e19, -1e19, 2.0**64, 1e38, -1e38, math.nan, math.inf, -math.inf, 1e-40,
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", FLOATS)
def test_floats_are_cut_and_what_does_not_fit_wraps_or_stops_at_the_limit(source, target, saturate, device):
    x = lz.cast(torch.tensor(SPECIAL, dtype=F64), source)
    got = lz.cast(x.to(device), target, saturate=saturate)
    assert got.dtype == target
    assert got.tolist() == [cut(v, target, saturate) for v in x.to(F64).tolist()]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integers_wrap_or_stop_at_the_limit(source, target, saturate):
    numbers, limits = integers_of(source), torch.iinfo(target)
    got = lz.cast(torch.tensor(numbers, dtype=source), target, saturate=saturate).tolist()
    if saturate:
        assert got == [min(max(n, limits.min), limits.max) for n in numbers]
    else:
        assert got == [(n - limits.min) % 2**limits.bits + limits.min for n in numbers]


@pytest.mark.parametrize("dtype", ALL)
def test_bool_is_zero_or_one_and_everything_but_zero_is_true(dtype):
    flags = torch.tensor([True, False])
    assert lz.cast(lz.cast(flags, dtype), torch.bool).tolist() == [True, False]
    if dtype.is_floating_point:
        odd = lz.cast(torch.tensor([math.nan, 0.0, -0.0, 2.0**-9], dtype=F32), dtype)
        assert lz.cast(odd, torch.bool).tolist() == [True, False, False, True]


# -- kernels, shapes, refusals -----------------------------------------------------------------------
@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
@pytest.mark.req("R-OP-15")
def test_every_pair_keeps_shape_and_torchs_conversion_runs_only_where_it_is_the_same(source, target):
    numbers = torch.tensor([[-3e9, -1.5, 0.0, 0.1], [1.0, 447.0, 1e9, 3.0]], dtype=F64)
    x = lz.cast(numbers, source).t()  # not contiguous
    kernel = lz.which("cast", x, target)
    for saturate in (False, True):
        got = lz.cast(x, target, saturate=saturate)
        assert got.shape == (4, 2) and got.dtype == target
        plain = lz.cast(x, target, saturate=saturate, backend="reference")
        if target.is_floating_point:
            same(got, plain.to(F64).numpy())
        else:
            assert torch.equal(got, plain)
    unsure = (source.is_floating_point and not target.is_floating_point) or (
        target in NARROW and source in (F64, torch.int64, torch.int32)
    )
    assert kernel == ("reference.cast.plain" if unsure else "torch.cast.native")
    assert lz.which("cast", x, target, saturate=True) == kernel
    assert lz.cast(x[:0], target).shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((torch.ones(2), "float16"), "TYPE_INVALID"),
        ((torch.ones(2), torch.complex64), "DTYPE_UNSUPPORTED"),
        ((torch.ones(2, dtype=torch.complex64), F32), "DTYPE_UNSUPPORTED"),
        ((torch.ones(2), torch.float8_e4m3fnuz), "DTYPE_UNSUPPORTED"),
        (([1.0], F32), "TYPE_INVALID"),
    ],
)
def test_what_cast_does_not_know_is_refused(arguments, code):
    with pytest.raises(InvalidInputError) as caught:
        lz.cast(*arguments)
    assert caught.value.code == code


def test_a_conversion_has_one_right_answer():
    assert all(tolerance("cast", dtype).exact for dtype in ALL)


# -- gradients ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", [F64, F32, F16, BF16])
def test_the_gradient_is_cast_back(source, target):
    x = torch.tensor([1.0, -3.0, 0.1, 2.0], dtype=source).requires_grad_()
    cotangent = torch.tensor([1.0, 2.0, -0.5, 4.0]).to(target)
    for backend in {"reference", lz.which("cast", x, target).partition(".")[0]}:
        (grad,) = torch.autograd.grad(lz.cast(x, target, backend=backend), x, cotangent)
        assert grad.dtype == source and grad.tolist() == [1.0, 2.0, -0.5, 4.0]


@pytest.mark.parametrize("target", NARROW)
@pytest.mark.parametrize("source", [F64, F32])
def test_what_was_clamped_has_no_gradient(source, target):
    x = torch.tensor([1.0, 1e39 if source is F64 else 3.4e38, -math.inf, -2.0], dtype=source).requires_grad_()
    out = lz.cast(x, target, saturate=True)
    (grad,) = torch.autograd.grad(out, x, torch.ones(4).to(target))
    assert grad.tolist() == [1.0, 0.0, 0.0, 1.0]
    (through,) = torch.autograd.grad(lz.cast(x, target), x, torch.ones(4).to(target))
    assert through.tolist() == ([1.0, 0.0, 0.0, 1.0] if target is E4M3 else [1.0] * 4)


def test_gradients_pass_gradcheck_and_transforms():
    x = torch.tensor([0.5, -1.25, 3.0], dtype=F64, requires_grad=True)
    for saturate in (False, True):
        assert torch.autograd.gradcheck(lambda t, s=saturate: lz.cast(t, F64, saturate=s) ** 2, (x,))
        assert torch.autograd.gradgradcheck(lambda t, s=saturate: lz.cast(t, F64, saturate=s) ** 3, (x,))
    batch = torch.tensor([[0.5, 1.0 + 2.0**-8 + 2.0**-40], [math.inf, 3.0]], dtype=F64)
    assert torch.vmap(lambda row: lz.cast(row, BF16))(batch).tolist() == [[0.5, 1.0 + 2.0**-7], [math.inf, 3.0]]
    grad = torch.func.grad(lambda t: lz.cast(t, F16, saturate=True).float().sum())(torch.tensor([1.0, 1e6]))
    assert grad.tolist() == [1.0, 0.0]


# -- properties --------------------------------------------------------------------------------------
anything = st.lists(st.floats(width=32), min_size=1, max_size=20)
targets = st.sampled_from(FLOATS)


@given(anything, targets, st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_casting_twice_is_casting_once_and_signs_do_not_matter(values, target, saturate):
    x = torch.tensor(values, dtype=F32)
    once = lz.cast(x, target, saturate=saturate)
    same(lz.cast(once, target, saturate=saturate), once.to(F64).numpy())
    same(lz.cast(once.to(F64), target, saturate=saturate), once.to(F64).numpy())  # and through anything wider
    negated = lz.cast(-x, target, saturate=saturate).to(F64)
    same(torch.where(negated.isnan(), negated, -negated), once.to(F64).numpy())
    if saturate:
        assert once.to(F64).isinf().sum() == 0 and (once.to(F64).isnan() == x.isnan()).all()


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=20), targets)
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_cast_never_changes_the_order(values, target):
    x = torch.tensor(sorted(values), dtype=F64)
    out = lz.cast(x, target, saturate=True).to(F64)
    assert (out.diff() >= 0).all()


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), targets, st.sampled_from(INTEGERS))
@settings(max_examples=EXAMPLES, deadline=None)
def test_what_fits_is_the_same_with_and_without_saturation(values, target, kind):
    x = torch.tensor(values, dtype=F32)
    largest = min(torch.finfo(target).max, float(torch.iinfo(kind).max))
    x = x.clamp(-largest if kind is not torch.uint8 else 0.0, largest)
    for dtype in (target, kind):
        loose, tight = lz.cast(x, dtype), lz.cast(x, dtype, saturate=True)
        same(loose, tight.to(F64).numpy())

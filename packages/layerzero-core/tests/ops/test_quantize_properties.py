"""Laws of quantization over drawn tensors: error bounds, idempotence, equivariance, strides, determinism."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import FORMATS

_spec = importlib.util.spec_from_file_location("quant_oracle", Path(__file__).with_name("quant_oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

pytestmark = pytest.mark.correctness

EXAMPLES = 1_500 if os.environ.get("LAYERZERO_PROVE") == "1" else 30
lawful = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EDGES = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e4, -1e4, 1.0, 6.0, 448.0, 0.1])


@st.composite
def schemes(draw):
    fmt = draw(st.sampled_from([item.value for item in QuantFormat]))
    traits = FORMATS[QuantFormat(fmt)]
    granularity = draw(st.sampled_from(["block"] if traits.block_only else ["tensor", "channel", "block"]))
    options = {"granularity": granularity}
    if granularity == "block" and not traits.block_only:
        options["block_size"] = draw(st.sampled_from([2, 8, 16]))
    if traits.zero_point:
        options["symmetric"] = draw(st.booleans())
    return fmt, options


@st.composite
def tensors(draw, width=32):
    """Noise of a drawn size, each row of its own, with drawn numbers in drawn places; some rows only zeros."""
    rows = draw(st.integers(1, 4))
    noise = torch.randn(rows, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    sizes = draw(st.lists(st.sampled_from([0.0, 1e-38, 1e-6, 1.0, 30.0]), min_size=rows, max_size=rows))
    found = noise.double() * torch.tensor(sizes, dtype=torch.float64).unsqueeze(-1)
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, width - 1))
    numbers = st.one_of(EDGES, st.floats(-100, 100, width=32))
    for (row, column), number in draw(st.dictionaries(places, numbers, max_size=6)).items():
        found[row, column] = number
    return found


def byte(tensor):
    return (tensor.unsqueeze(0) if tensor.ndim == 0 else tensor.contiguous()).view(torch.uint8)


def same(left, right):
    return all(torch.equal(byte(a), byte(b)) for a, b in zip(left.tensors(), right.tensors(), strict=True))


@lawful
@given(x=tensors(), scheme=schemes(), dtype=st.sampled_from(FLOATS))
def test_no_number_errs_by_more_than_half_the_gap_around_it(x, scheme, dtype):
    fmt, options = scheme
    x = x.to(dtype).double()
    qt = lz.quantize(x.to(dtype), fmt, **options)
    steps = oracle.scales(qt)
    error = np.abs(oracle.value_of(qt) - x.numpy())
    if options.get("symmetric", True):
        normed = np.divide(x.numpy(), steps, out=np.zeros_like(steps), where=steps != 0)
        bound = oracle.half_gap(fmt, normed) * steps
        if fmt in ("mxfp4", "nvfp4"):  # a peak of 7 steps, or of 6.4, saturates at 6
            bound = np.maximum(bound, np.abs(x.numpy()) - 6 * steps)
        if fmt == "nvfp4":  # a block too small for an E4M3 scale becomes zeros, or loses the scale's precision
            bound = np.maximum(bound, np.where(steps < 2.0**-6 * float(qt.tensor_scale), np.abs(x.numpy()), 0))
    else:
        bound = steps / 2
    rounding = np.abs(x.numpy()).max(initial=0.0) * 2.0**-22  # of the division, in float32
    assert (error <= bound + rounding + 1e-45).all()


@lawful
@given(x=tensors(), scheme=schemes())
def test_what_was_quantized_once_is_not_changed_by_a_second_time(x, scheme):
    fmt, options = scheme
    once = lz.quantize(x.float(), fmt, **options)
    back = lz.dequantize(once)
    again = lz.quantize(back, fmt, **options)
    if fmt == "nvfp4":  # blocks whose scale is a normal E4M3 number keep their codes; the others are not exact
        exact = oracle.scales(once) >= 2.0**-6 * float(once.tensor_scale)
        assert np.array_equal(oracle.unpacked(once)[exact], oracle.unpacked(again)[exact])
    elif options.get("symmetric", True):
        empty = (back == 0).numpy()  # the zeros of a group of zeros may have lost their sign
        assert np.array_equal(np.where(empty, 0, oracle.unpacked(once)), np.where(empty, 0, oracle.unpacked(again)))
        if fmt == "mxfp4":
            used = ~empty.reshape(len(x), -1).all(-1)
            assert torch.equal(byte(once.scale)[used], byte(again.scale)[used])
    values = lz.dequantize(again)
    assert torch.allclose(values, back, rtol=2e-6, atol=1e-37) or fmt == "nvfp4" or not options.get("symmetric", True)


@lawful
@given(x=tensors(), scheme=schemes(), power=st.integers(-20, 20))
def test_a_power_of_two_moves_the_scales_and_nothing_else(x, scheme, power):
    fmt, options = scheme
    x = x.float()
    x = torch.where(x.abs() < 1e-20, 0.0, x)  # far from where scales stop at the smallest normal number
    left, right = (lz.quantize(item, fmt, **options) for item in (x, torch.ldexp(x, torch.tensor(power))))
    assert torch.equal(left.data.view(torch.uint8), right.data.view(torch.uint8))
    moved = np.where(oracle.value_of(left) == 0, 0, oracle.value_of(left) * 2.0**power)
    assert np.array_equal(moved, np.where(oracle.value_of(right) == 0, 0, oracle.value_of(right)))


@lawful
@given(x=tensors(width=64), scheme=schemes(), step=st.sampled_from([1, 2]), turned=st.booleans())
def test_strides_do_not_matter_and_every_run_gives_the_same_bits(x, scheme, step, turned):
    fmt, options = scheme
    x = x.float()
    view = x[:, ::step] if not turned else x.t().contiguous().t()[:, ::step]
    first = lz.quantize(view, fmt, **options)
    assert same(first, lz.quantize(view.contiguous(), fmt, **options))
    assert same(first, lz.quantize(view, fmt, **options))
    for backend in ("reference", "torch"):
        assert same(first, lz.quantize(view, fmt, backend=backend, **options))


@lawful
@given(x=tensors(), scheme=schemes(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_a_number_that_is_none_is_seen_after_the_round_trip(x, scheme, bad, data):
    fmt, options = scheme
    x = x.float()
    row, column = data.draw(st.integers(0, len(x) - 1)), data.draw(st.integers(0, x.shape[1] - 1))
    x[row, column] = bad
    back = lz.dequantize(lz.quantize(x, fmt, **options))
    assert not back[row, column].isfinite()
    if options["granularity"] != "tensor":
        others = torch.arange(len(x)) != row
        assert back[others].isfinite().all()

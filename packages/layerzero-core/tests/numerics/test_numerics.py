"""The tolerance table and the comparison that uses it."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch

from layerzero.numerics import (
    HitMode,
    Tolerance,
    assert_close,
    compare,
    definition_tolerance,
    full_float32,
    tolerance,
)
from layerzero.numerics.tolerances import dtype_name

LOOSE = Tolerance(rtol=1e-3, atol=1e-3)


def bounds(tol):
    return (tol.rtol, tol.atol)


@pytest.mark.parametrize(
    ("op", "dtype", "rtol", "atol"),
    [
        pytest.param("attention", torch.float16, 1e-3, 1e-3, marks=pytest.mark.req("R-TOL-01")),
        pytest.param("attention", torch.bfloat16, 1e-2, 1e-2, marks=pytest.mark.req("R-TOL-01")),
        pytest.param("paged_attention", torch.float32, 1e-5, 1e-5, marks=pytest.mark.req("R-TOL-01")),
        pytest.param("rms_norm", torch.float16, 1e-3, 1e-3, marks=pytest.mark.req("R-TOL-02")),
        pytest.param("layer_norm", torch.bfloat16, 1e-2, 1e-2, marks=pytest.mark.req("R-TOL-02")),
        pytest.param("add_rms_norm", torch.float32, 1e-6, 1e-6, marks=pytest.mark.req("R-TOL-02")),
        pytest.param("rms_norm", torch.int8, 0, 0, marks=pytest.mark.req("R-TOL-02")),
        pytest.param("linear", torch.float16, 1e-3, 1e-3, marks=pytest.mark.req("R-TOL-03")),
        pytest.param("silu_and_mul", torch.bfloat16, 1e-2, 1e-2, marks=pytest.mark.req("R-TOL-03")),
        pytest.param("linear", torch.float32, 1e-6, 1e-6, marks=pytest.mark.req("R-TOL-03")),
        pytest.param("rope", torch.float16, 1e-4, 1e-4, marks=pytest.mark.req("R-TOL-04")),
        pytest.param("rope", torch.bfloat16, 1e-3, 1e-3, marks=pytest.mark.req("R-TOL-04")),
        pytest.param("alibi", torch.float32, 1e-6, 1e-6, marks=pytest.mark.req("R-TOL-04")),
        pytest.param("sample_topk", torch.float32, 0, 0, marks=pytest.mark.req("R-TOL-05")),
        pytest.param("tokenize", torch.int64, 0, 0, marks=pytest.mark.req("R-TOL-05")),
        pytest.param("some_new_op", torch.float16, 1e-3, 1e-3, marks=pytest.mark.req("R-TOL-06")),
        pytest.param("some_new_op", torch.bfloat16, 1e-2, 1e-2, marks=pytest.mark.req("R-TOL-06")),
        pytest.param("some_new_op", torch.float32, 1e-4, 1e-5, marks=pytest.mark.req("R-TOL-06")),
        pytest.param("some_new_op", torch.float64, 1e-5, 1e-8, marks=pytest.mark.req("R-TOL-06")),
        pytest.param("attention", torch.int8, 1e-2, 1e-2, marks=pytest.mark.req("R-TOL-07")),
        pytest.param("attention", torch.float8_e4m3fn, 2e-1, 1e-1, marks=pytest.mark.req("R-TOL-07")),
        pytest.param("attention", "nvfp4", 2e-1, 1e-1, marks=pytest.mark.req("R-TOL-07")),
    ],
)
def test_the_table(op, dtype, rtol, atol):
    assert bounds(tolerance(op, dtype)) == (rtol, atol)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm", "gemma_rms_norm", "gemma_add_rms_norm"])
@pytest.mark.req("R-TOL-02")
def test_every_norm_is_held_to_the_row_of_the_norms(op):
    """The generic bounds of the halves are the same: float32 tells an op of no row, int8 one that need not be exact."""
    found = {dtype: tolerance(op, dtype) for dtype in ("fp16", "bf16", "fp32", "int8")}
    assert {dtype: bounds(tol) for dtype, tol in found.items()} == {
        "fp16": (1e-3, 1e-3), "bf16": (1e-2, 1e-2), "fp32": (1e-6, 1e-6), "int8": (0, 0),
    }  # fmt: skip
    assert all(tol.hit_ratio == 1.0 for tol in found.values()) and found["int8"].exact
    ones, off = torch.ones(4), torch.ones(4)
    off[2] += 4e-6
    assert compare(ones + 1e-6, ones, found["fp32"]).ok and not compare(off, ones, found["fp32"]).ok


FAMILIES = {
    "R-TOL-01": (
        "attention paged_attention varlen_attention grouped_attention mla_paged_attention",
        {"fp16": 1e-3, "bf16": 1e-2, "fp32": 1e-5},
    ),
    "R-TOL-03": (
        "linear silu_and_mul gelu_and_mul relu_and_mul mlp moe grouped_gemm",
        {"fp16": 1e-3, "bf16": 1e-2, "fp32": 1e-6},
    ),
    "R-TOL-04": ("rope xpos alibi", {"fp16": 1e-4, "bf16": 1e-3, "fp32": 1e-6}),
    "R-TOL-05": ("sample sample_topk sample_topp", {"fp16": 0.0, "bf16": 0.0, "fp32": 0.0, "int64": 0.0}),
}


@pytest.mark.parametrize(
    ("op", "row"),
    [
        pytest.param(op, row, marks=pytest.mark.req(line), id=op)
        for line, (ops, row) in FAMILIES.items()
        for op in ops.split()
    ],
)
def test_every_op_is_held_to_the_row_of_its_family(op, row):
    found = {dtype: tolerance(op, dtype) for dtype in row}
    assert {dtype: bounds(tol) for dtype, tol in found.items()} == {dtype: (b, b) for dtype, b in row.items()}
    one_ulp = ("fp16", "bf16") if row is FAMILIES["R-TOL-04"][1] else ()
    assert all((tol.hit_ratio, tol.ulps) == (1.0, dtype in one_ulp) for dtype, tol in found.items())
    expected = torch.tensor([8.0, -3.0], dtype=torch.float64)
    for dtype, bound in row.items():  # in a wide dtype, where no spacing counts: within the bounds, and beyond them
        off = bound * (1 + expected.abs())
        assert compare(expected + 0.9 * off, expected, found[dtype]).ok
        assert not compare(expected + 1.1 * off + 1e-12, expected, found[dtype]).ok


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4", "nf4", torch.float8_e5m2])
@pytest.mark.req("R-DEF-09", "R-TOL-07")
def test_low_bit_floats_need_85_percent_hits(dtype):
    for op in ("attention", "linear", "some_new_op"):
        assert tolerance(op, dtype).hit_ratio == 0.85
    assert tolerance("attention", torch.float16).hit_ratio == 1.0


@pytest.mark.req("R-TOL-03")
def test_the_float32_gemm_bound_grows_with_sqrt_k_and_no_other_does():
    assert bounds(tolerance("linear", "fp32", k=4096)) == pytest.approx((64e-6, 64e-6))
    assert tolerance("linear", "fp32", k=1) == tolerance("linear", "fp32")
    assert tolerance("linear", "bf16", k=4096) == tolerance("linear", "bf16")
    assert tolerance("rms_norm", "fp32", k=4096) == tolerance("rms_norm", "fp32")


@pytest.mark.req("R-TOL-03")
def test_a_product_of_quantized_weights_is_held_to_what_its_backend_declares():
    assert bounds(tolerance("linear", "int8", declared=0.02)) == (0.02, 0.02)
    assert bounds(tolerance("linear", "nvfp4", declared=0.1)) == (0.1, 0.1)
    assert tolerance("linear", "nvfp4").hit_ratio == 0.85
    # A declaration widens nothing that the table bounds itself.
    assert tolerance("linear", "fp32", declared=0.5) == tolerance("linear", "fp32")
    assert tolerance("attention", "int8", declared=0.5) == tolerance("attention", "int8")


@pytest.mark.req("R-DEF-09")
def test_the_evaluators_own_rule_has_its_own_numbers():
    either = definition_tolerance("bfloat16", mode=HitMode.EITHER)
    assert (either.rtol, either.atol, either.hit_ratio, either.mode) == (1e-2, 1e-2, 1.0, HitMode.EITHER)
    assert definition_tolerance("fp8", mode=HitMode.EITHER, op_type="moe").hit_ratio == 0.95
    assert definition_tolerance("fp8", mode=HitMode.EITHER, op_type="gemm").hit_ratio == 1.0
    assert definition_tolerance("int32", mode=HitMode.EITHER).exact


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol", "ratio"),
    [
        ("float32", 1e-5, 1e-5, 1.0),
        ("float16", 1e-3, 1e-3, 1.0),
        ("bfloat16", 1e-2, 8e-3, 1.0),
        ("float8_e4m3fn", 2e-1, 1e-1, 0.85),
        ("nvfp4", 2e-1, 1e-1, 0.85),
        ("int32", 0.0, 0.0, 1.0),
    ],
)
@pytest.mark.req("R-DEF-10")
def test_the_table_of_definitions(dtype, rtol, atol, ratio):
    tol = definition_tolerance(dtype)
    assert (tol.rtol, tol.atol, tol.hit_ratio) == (rtol, atol, ratio)


def test_dtype_names_and_aliases():
    assert dtype_name(torch.bfloat16) == dtype_name("bf16") == dtype_name("torch.bfloat16") == "bfloat16"
    assert dtype_name("fp8_e4m3") == dtype_name(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="complex64"):
        tolerance("attention", torch.complex64)


@pytest.mark.req("R-DEF-08")
def test_every_metric_on_numbers_worked_by_hand():
    expected = torch.tensor([[1.0, 2.0], [-4.0, 0.0]])
    actual = torch.tensor([[1.5, 2.0], [-3.0, 0.25]])
    report = compare(actual, expected, LOOSE)
    assert report.max_abs == 1.0
    assert report.mean_abs == pytest.approx((0.5 + 0 + 1 + 0.25) / 4)
    assert report.max_rel == pytest.approx(0.25 / 1e-8)
    assert report.mean_rel == pytest.approx((0.5 + 0 + 0.25 + 0.25 / 1e-8) / 4)
    assert report.mse == pytest.approx((0.25 + 0 + 1 + 0.0625) / 4)
    norms = math.sqrt(1.5**2 + 4 + 9 + 0.0625) * math.sqrt(21)
    assert report.cosine == pytest.approx((1.5 + 4 + 12) / norms)
    assert report.hit_ratio == 0.25
    assert not report.ok
    assert [spot.index for spot in report.worst] == [(1, 0), (0, 0), (1, 1)]
    assert (report.worst[0].actual, report.worst[0].expected, report.worst[0].abs_error) == (-3.0, -4.0, 1.0)


@pytest.mark.req("R-DEF-08")
def test_the_five_worst_places_carry_their_index_in_every_axis():
    expected = torch.zeros(3, 4, 5)
    actual = expected.clone()
    places = [(2, 3, 4), (0, 0, 1), (1, 2, 3), (2, 0, 0), (0, 3, 2), (1, 1, 1)]
    for size, place in zip((6, 5, 4, 3, 2, 1), places, strict=True):
        actual[place] = size
    report = compare(actual, expected, LOOSE)
    assert [spot.index for spot in report.worst] == places[:5]
    assert "[2, 3, 4]" in str(report)


def test_the_first_miss_is_the_first_in_memory_not_the_worst():
    expected = torch.zeros(2, 3, 4)
    actual = expected.clone()
    actual[0, 1, 2], actual[1, 0, 0], actual[0, 0, 1] = 0.5, 7.0, 1e-4  # the last one is within the bounds
    report = compare(actual, expected, LOOSE)
    assert report.first is not None
    assert (report.first.index, report.first.actual, report.first.expected) == ((0, 1, 2), 0.5, 0.0)
    assert report.worst[0].index == (1, 0, 0)
    assert "first miss at [0, 1, 2]" in str(report)
    assert compare(expected, expected.clone(), LOOSE).first is None


def test_how_much_of_the_bounds_was_used():
    tol = Tolerance(rtol=0.5, atol=1.0)
    expected = torch.tensor([4.0, 0.0])
    assert compare(torch.tensor([5.5, 0.0]), expected, tol).used == pytest.approx(0.5)  # 1.5 of 1 + 0.5 * 4
    assert compare(torch.tensor([4.0, 2.0]), expected, tol).used == pytest.approx(2.0)
    assert compare(expected, expected.clone(), Tolerance(0.0, 0.0)).used == 0.0
    assert compare(torch.tensor([4.0, 1e-9]), expected, Tolerance(0.0, 0.0)).used == math.inf
    loose = Tolerance(0.1, 0.1, hit_ratio=0.5)
    assert compare(torch.tensor([4.0, 9.0]), expected, loose).used == pytest.approx(1.0)  # the one miss that may be


@pytest.mark.req("R-DEF-08")
def test_a_report_is_json_with_every_metric():
    expected = torch.tensor([1.0, 2.0, 3.0])
    data = json.loads(
        json.dumps(compare(torch.tensor([1.0, 2.5, math.nan]), expected, LOOSE).to_json(), allow_nan=False)
    )
    assert data["max_abs"] == 0.5 and data["nan_mismatches"] == 1 and data["ok"] is False
    assert data["first"]["index"] == [1] and data["worst"][0] == {
        "index": [2], "actual": "nan", "expected": 3.0, "abs_error": "inf", "rel_error": "inf"
    }  # fmt: skip
    assert {"mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio", "rtol", "atol"} <= set(data)


@pytest.mark.req("R-TOL-01", "R-TOL-03")
def test_float32_products_are_full_precision_inside_the_block_and_settings_return():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with contextlib.suppress(KeyError), full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_equal_tensors_are_close_with_clean_metrics():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    report = compare(x, x.clone(), Tolerance(0.0, 0.0))
    assert report.ok and report.worst == ()
    assert (report.max_abs, report.max_rel, report.mse, report.hit_ratio) == (0, 0, 0, 1)
    assert report.cosine == pytest.approx(1.0)
    assert str(report).startswith("ok: float32 [4, 5]")


@pytest.mark.req("R-DEF-09")
def test_the_rule_is_atol_plus_rtol_times_expected():
    tol = Tolerance(rtol=0.5, atol=1.0)
    expected = torch.tensor([4.0, 4.0])
    assert compare(torch.tensor([7.0, 1.0]), expected, tol).ok
    assert not compare(torch.tensor([7.0, 7.01]), expected, tol).ok


@pytest.mark.req("R-DEF-09")
def test_a_hit_ratio_lets_the_stated_share_miss_and_no_more():
    tol = tolerance("attention", "fp8_e4m3")
    expected = torch.ones(100)
    for misses, ok in ((0, True), (15, True), (16, False)):
        actual = expected.clone()
        actual[:misses] = 3.0
        report = compare(actual, expected, tol)
        assert report.ok == ok
        assert report.hit_ratio == pytest.approx(1 - misses / 100)


@pytest.mark.req("R-DEF-09")
def test_both_definitions_of_a_hit_have_a_name_and_differ():
    combined = Tolerance(rtol=0.1, atol=0.1)
    either = Tolerance(rtol=0.1, atol=0.1, mode=HitMode.EITHER)
    assert combined.mode is HitMode.COMBINED
    # off by 0.15 at 1: within 0.1 + 0.1 * 1 together, beyond each bound alone
    assert compare(torch.tensor([1.15]), torch.tensor([1.0]), combined).ok
    assert not compare(torch.tensor([1.15]), torch.tensor([1.0]), either).ok
    # within one bound is enough for either: absolute near zero, relative far away
    assert compare(torch.tensor([0.05, 109.0]), torch.tensor([0.0, 100.0]), either).ok


@pytest.mark.req("R-TOL-04")
def test_one_ulp_is_admitted_where_the_bound_is_tighter_than_the_dtype():
    tol = tolerance("rope", torch.bfloat16)
    expected = torch.tensor([3.0], dtype=torch.bfloat16)
    above = torch.nextafter(expected, torch.tensor([9.0], dtype=torch.bfloat16))
    further = torch.tensor([3.0625], dtype=torch.bfloat16)
    assert (above - expected).item() > tol.atol + tol.rtol * 3
    assert compare(above, expected, tol).ok
    assert not compare(further, expected, tol).ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_equal_non_finite_values_agree_and_stay_out_of_the_metrics(value):
    x = torch.tensor([1.0, value, 3.0])
    report = compare(x, x.clone(), Tolerance(0.0, 0.0))
    assert report.ok and report.nan_agree and report.inf_agree
    assert report.max_abs == 0.0 and report.hit_ratio == 1.0


@pytest.mark.parametrize(
    ("got", "want", "nan_ok", "inf_ok"),
    [
        (math.nan, 1.0, False, True),
        (1.0, math.nan, False, True),
        (math.inf, 1.0, True, False),
        (1.0, -math.inf, True, False),
        (math.inf, -math.inf, True, False),
        (math.inf, math.nan, False, True),
    ],
)
def test_disagreement_about_non_finite_values_fails_at_any_hit_ratio(got, want, nan_ok, inf_ok):
    expected, actual = torch.ones(1000), torch.ones(1000)
    expected[7], actual[7] = want, got
    report = compare(actual, expected, Tolerance(1.0, 1.0, hit_ratio=0.5))
    assert not report.ok
    assert (report.nan_agree, report.inf_agree) == (nan_ok, inf_ok)
    assert report.hit_ratio == pytest.approx(0.999)
    assert report.worst[0].index == (7,) and report.worst[0].abs_error == math.inf
    assert "different places" in str(report)


def test_shapes_must_be_equal_and_dtypes_are_reported():
    report = compare(torch.ones(2, 3), torch.ones(3, 2), LOOSE)
    assert not report.ok and not report.shape_ok
    assert "[2, 3], expected [3, 2]" in str(report)
    mixed = compare(torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float64), LOOSE)
    assert mixed.ok and not mixed.dtype_ok


def test_an_empty_tensor_is_close_to_an_empty_tensor():
    assert compare(torch.zeros(0, 4), torch.zeros(0, 4), Tolerance(0, 0)).ok


def test_large_integers_are_compared_exactly():
    big = 2**60
    assert compare(torch.tensor([big]), torch.tensor([big]), Tolerance(0, 0)).ok
    assert compare(torch.tensor([big + 1]), torch.tensor([big]), Tolerance(0, 0)).max_abs == 1.0
    assert compare(torch.tensor([True]), torch.tensor([False]), Tolerance(0, 0)).max_abs == 1.0


def test_inputs_with_gradients_and_fp8_storage_are_fine():
    assert compare(torch.ones(2, requires_grad=True), torch.ones(2), LOOSE).ok
    assert compare(torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2), LOOSE).ok


@pytest.mark.req("R-DEF-11")
def test_assert_close_descends_into_tuples_lists_and_dicts():
    good = {"out": (torch.ones(2), [torch.zeros(3), 1.5]), "name": "x", "none": None}
    assert_close({"out": (torch.ones(2), [torch.zeros(3), 1.5]), "name": "x", "none": None}, good, LOOSE)
    bad = {"out": (torch.ones(2), [torch.zeros(3), 2.5]), "name": "x", "none": None}
    with pytest.raises(AssertionError, match=r"result\['out'\]\[1\]\[1\]"):
        assert_close(bad, good, LOOSE)


@pytest.mark.parametrize(
    ("actual", "expected", "words"),
    [
        ({"a": 1.0}, {"b": 1.0}, "keys"),
        (1.0, {"b": 1.0}, "keys"),
        ((1.0,), (1.0, 2.0), "1 items, expected 2"),
        (3, (1.0, 2.0), "int, expected 2 items"),
        (None, torch.ones(1), "NoneType, expected Tensor"),
        (torch.ones(1), None, "expected None"),
        ("a", "b", "'a', expected 'b'"),
        (torch.ones(2), torch.zeros(2), "hit ratio 0.00%"),
    ],
)
@pytest.mark.req("R-DEF-11")
def test_assert_close_names_what_differs(actual, expected, words):
    with pytest.raises(AssertionError, match=words):
        assert_close(actual, expected, LOOSE)


def test_assert_close_checks_dtypes_on_request():
    narrow, wide = torch.ones(1), torch.ones(1, dtype=torch.float64)
    assert_close(narrow, wide, LOOSE)
    with pytest.raises(AssertionError, match="dtype float32, expected float64"):
        assert_close(narrow, wide, LOOSE, check_dtype=True)

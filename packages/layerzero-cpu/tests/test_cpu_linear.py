"""Native linear layers against float64: plain, INT8 and INT4 weights, any size, stride, bias and activation."""

from __future__ import annotations

import math
import random

import pytest
import torch

import layerzero as lz
from layerzero.backends.reference.feed_forward import linear as reference
from layerzero.backends.reference.quantize import quantize
from layerzero.model.quant import QuantScheme
from layerzero.numerics.tolerances import tolerance
from layerzero_cpu.linear import linear, quantized

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = [None, None, "silu", "relu", "gelu", "gelu_tanh"]


def check(found: torch.Tensor, wanted: torch.Tensor, width: int) -> None:
    bound = tolerance("linear", found.dtype, k=width)
    torch.testing.assert_close(found.double(), wanted, rtol=bound.rtol, atol=bound.atol, equal_nan=True)


def rows_of(rng: random.Random, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, int]:
    """Rows drawn at random, now and then with one number far above the rest, and as a view with gaps."""
    torch.manual_seed(rng.randrange(1 << 30))
    rows = rng.choice([1, 1, 2, 3, 5, 8, 17, 40])
    x = torch.randn(rows, width + 5).to(dtype)[:, :width]
    if rng.random() < 0.3:
        x[0, rng.randrange(width)] *= rng.choice([30.0, 300.0, 20000.0 if dtype is not torch.float16 else 1000.0])
    return x, rng.choice([1, 3, 5, 32, 33, 100])


@pytest.mark.req("R-BK-CPU-05")
@pytest.mark.parametrize("seed", range(3))
def test_plain_weights_match(isa: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        dtype, width, act = (
            rng.choice(DTYPES),
            rng.choice([1, 2, 7, 16, 64, 100, 300, 513, 2050]),
            rng.choice(ACTIVATIONS),
        )
        x, outputs = rows_of(rng, dtype, width)
        weight = (torch.randn(outputs, width + 3) * 0.3).to(dtype)[:, :width]
        bias = torch.randn(outputs).to(dtype) if rng.random() < 0.5 else None
        wanted = reference(x.double(), weight.double(), None if bias is None else bias.double(), act)
        check(linear(x, weight, bias, act), wanted, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_rows_share_a_turned_strip(isa: str, dtype: torch.dtype) -> None:
    """Ends of strips, of blocks of k and of groups of rows; rows with gaps, repeated rows, and several visits."""
    torch.manual_seed(7)
    for rows, width, outputs in (
        (28, 16, 1), (29, 127, 15), (33, 128, 64), (35, 129, 65), (47, 256, 130), (64, 300, 520), (131, 384, 600),
    ):  # fmt: skip
        x, weight = torch.randn(rows, width + 3).to(dtype)[:, :width], (torch.randn(outputs, width) * 0.3).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        for given in (x, x.contiguous(), x[:1].expand(rows, width), x.reshape(1, rows, width)):
            check(
                linear(given, weight, bias, "silu"),
                reference(given.double(), weight.double(), bias.double(), "silu"),
                width,
            )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_with_many_rows_too_a_bad_number_stays_in_its_row_and_column(isa: str, bad: float) -> None:
    torch.manual_seed(8)
    x, weight = torch.randn(40, 200), torch.randn(70, 200)
    x[13, 150], weight[66, 3] = bad, bad
    good = linear(x, weight, None, None).isfinite()
    assert not good[13].any() and not good[:, 66].any()
    good[13], good[:, 66] = True, True
    assert good.all()


def test_a_column_of_a_part_of_the_weight_has_the_same_bits() -> None:
    """What tensor parallelism asks for: a rank that has some of the columns computes what one that has all would."""
    torch.manual_seed(9)
    x, weight = torch.randn(48, 512), torch.randn(1024, 512)
    whole = linear(x, weight, None, None)
    for begin, end in ((0, 512), (512, 1024), (64, 164), (1000, 1024)):
        assert torch.equal(linear(x, weight[begin:end], None, None), whole[:, begin:end])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_quantized_weights_match(isa: str, fmt: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        dtype, act = rng.choice(DTYPES), rng.choice(ACTIVATIONS)
        granularity, block = rng.choice(["tensor", "channel", "block"]), rng.choice([None, 6, 32, 64, 128, 256, 512])
        width = rng.choice([6, 64, 96, 100, 128, 300, 510, 1024, 1536])
        if granularity == "block":
            width = (block or 128) * rng.randint(1, 5)
        x, outputs = rows_of(rng, dtype, width)
        scheme = QuantScheme(fmt, granularity, block if granularity == "block" else None, rng.random() < 0.5)  # type: ignore[arg-type] # by name
        weight = quantize((torch.randn(outputs, width) * 0.3).to(dtype), scheme)
        bias = torch.randn(outputs).to(dtype) if rng.random() < 0.5 else None
        wanted = reference(x.double(), weight, None if bias is None else bias.double(), act)
        check(quantized(x, weight, bias, act), wanted, width)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_nan_and_infinity_in_a_row_stay_in_that_row(isa: str, fmt: str, bad: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 256)
    x[1, 77] = bad
    weight = quantize(torch.randn(8, 256), QuantScheme(fmt, "channel"))  # type: ignore[arg-type] # by name
    found, wanted = quantized(x, weight, None, None), reference(x, weight, None, None)
    assert torch.equal(found.isfinite(), wanted.isfinite()) and not bool(found[1].isfinite().any())
    assert torch.equal(found[1].isnan(), wanted[1].isnan())


def test_the_bits_do_not_depend_on_the_threads() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(9, 1024).bfloat16(), torch.randn(700, 1024)
    codes = quantize(weight, QuantScheme("int8", "channel"))  # type: ignore[arg-type] # by name
    many = torch.randn(40, 1024)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(
                (
                    linear(x, weight.bfloat16(), None, None),
                    linear(many, weight, None, None),
                    linear(many, weight[:130], None, None),
                    quantized(x, codes, None, None),
                )
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_leading_axes_zero_rows_and_a_transposed_weight() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(2, 3, 4, 24).transpose(0, 2), torch.randn(24, 10).t()
    torch.testing.assert_close(linear(x, weight, None, None), x @ weight.t(), rtol=1e-5, atol=1e-5)
    assert linear(torch.zeros(0, 24), weight, None, None).shape == (0, 10)
    assert torch.equal(linear(torch.zeros(2, 0), torch.zeros(3, 0), None, None), torch.zeros(2, 3))


def test_the_public_function_takes_each_kernel() -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(2, 64), torch.randn(16, 64)
    codes = lz.quantize(weight, "int4", granularity="block", block_size=32)
    for kernel, chosen, rows in (
        ("cpu.linear.few_rows", weight, x),
        ("cpu.linear.rows", weight, x.repeat(6, 1)),
        ("cpu.linear.codes", codes, x),
    ):
        found, wanted = lz.linear(rows, chosen, backend=kernel), lz.linear(rows, chosen, backend="reference")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    for given, word in (
        (torch.zeros(4, 9), "K"),
        (weight.to(torch.bfloat16), "dtype"),
        (torch.zeros(4, 8, 1), r"\[N, K\]"),
    ):
        with pytest.raises(ValueError, match=word):
            linear(x, given, None, None)
    with pytest.raises(ValueError, match="bias"):
        linear(x, weight, torch.zeros(5), None)

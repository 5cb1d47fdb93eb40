"""Native attention against the reference: every feature, odd sizes, layouts, rows that see nothing, and NaN."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends.reference.attention import attention as reference
from layerzero.numerics.tolerances import tolerance
from layerzero_cpu.attention import attention, fixed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = (None, 0.0, False, None, None, None, None)


def draw(rng: random.Random, dtype: torch.dtype, *shape: int, swapped: bool = False) -> torch.Tensor:
    torch.manual_seed(rng.randrange(1 << 30))
    if swapped:  # [B, S, H, D] in memory
        return torch.randn(shape[0], shape[2], shape[1], shape[3]).to(dtype).transpose(1, 2)
    return torch.randn(shape).to(dtype)


def truth(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64, on the same numbers."""
    wide = (item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item for item in args)
    out, lse = reference(*wide, True)
    return out, lse


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    bound = tolerance("attention", dtype)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=bound.rtol, atol=bound.atol, equal_nan=True)


def call(rng: random.Random) -> tuple[torch.dtype, tuple[Any, ...]]:
    """One call drawn at random: sizes that straddle tiles and chunks, any mix of options."""
    dtype = rng.choice(DTYPES)
    batch, kv_heads, group = rng.randint(1, 2), rng.randint(1, 3), rng.choice([1, 2, 3, 4, 5, 8])
    dim = rng.choice([1, 7, 32, 40, 64, 72, 96, 120, 128, 192, 256])
    dim_v = dim if rng.random() < 0.8 else rng.choice([16, 24, 33])
    queries, keys = rng.choice([1, 1, 1, 2, 5, 33, 70, 130]), rng.choice([1, 5, 63, 64, 65, 100, 300, 700])
    swapped = rng.random() < 0.5
    q = draw(rng, dtype, batch, kv_heads * group, queries, dim, swapped=swapped)
    k = draw(rng, dtype, batch, kv_heads, keys, dim, swapped=swapped)
    v = draw(rng, dtype, batch, kv_heads, keys, dim_v, swapped=swapped)
    causal: bool | str = rng.choice([False, True, "bottom_right"])
    mask = None
    if (kind := rng.choice(["none", "none", "bool", "float"])) != "none":
        causal = False
        allowed = torch.rand(batch, 1, queries, keys) > 0.3
        bias = torch.randn(queries, keys).to(dtype)
        mask = allowed if kind == "bool" else bias.masked_fill(torch.rand(queries, keys) < 0.1, -math.inf)
    window = rng.choice([None, None, (5, 0), (10, 3), (-1, 2), (100, -1)])
    slopes = rng.choice([None, torch.rand(kv_heads * group), torch.rand(batch, kv_heads * group)])
    return dtype, (q, k, v, mask, 0.0, causal, rng.choice([None, 0.3, -0.2]), window, rng.choice([None, 20.0]), slopes)


@pytest.mark.req("R-BK-CPU-05")
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_match_the_reference(isa: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        dtype, args = call(rng)
        found, lse = attention(*args, True)
        wanted, wanted_lse = truth(args)
        close(found, wanted, dtype)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.req("R-BK-SDPA-07")
@pytest.mark.parametrize("way", ["asked for", "preferred"])
def test_where_a_kernel_of_another_backend_serves_none_of_torchs_runs(way: str) -> None:
    """Torch's own are out, each with its reason, and the switches of torch's `sdpa_kernel` stay as they are."""
    q, k, v = (torch.randn(1, 4, 48, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    names = ("flash", "mem_efficient", "math", "cudnn")
    switches = [getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in names]
    before = [switch() for switch in switches]
    asked: dict[str, Any] = {"backend": "cpu"} if way == "asked for" else {}
    with lz.scoped(prefer=["cpu.attention.flash"]):
        lz.attention(q, k, v, is_causal=True, **asked)  # the first call of a kind may hold it against another kernel
        with torch.autograd.profiler.profile() as seen:
            found = lz.attention(q, k, v, is_causal=True, **asked)
        report = lz.explain("attention", q, k, v, is_causal=True, **asked)
    ran = [event.name for event in seen.function_events]
    assert "layerzero::attention" in ran and not [name for name in ran if "scaled_dot_product" in name]
    assert report.chosen == report.ran == "cpu.attention.flash"
    theirs = {name: why for name, why in report.reasons.items() if name.startswith("sdpa.")}
    code = "BACKEND_NOT_REQUESTED" if asked else "OUTSCORED"
    assert theirs["sdpa.attention.flash_cpu"][0].code == code and all(theirs.values())
    assert [switch() for switch in switches] == before
    close(found, truth((q, k, v, None, 0.0, True, None, None, None, None))[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [2048, 5000])
def test_a_long_cache_is_split_and_merged(isa: str, dtype: torch.dtype, keys: int) -> None:
    rng = random.Random(keys)
    q = draw(rng, dtype, 1, 8, 1, 64)
    k, v = (draw(rng, dtype, 1, 2, keys, 64, swapped=True) for _ in range(2))
    found, lse = attention(q, k, v, *PLAIN, True)
    wanted, wanted_lse = truth((q, k, v, *PLAIN))
    close(found, wanted, dtype)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 80])
def test_the_bits_do_not_depend_on_the_threads(queries: int) -> None:
    rng = random.Random(7)
    q = draw(rng, torch.bfloat16, 2, 8, queries, 128)
    k, v = (draw(rng, torch.bfloat16, 2, 2, 1500, 128) for _ in range(2))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(attention(q, k, v, None, 0.0, "bottom_right", None, None, None, None, False))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_bits_of_a_head_do_not_depend_on_the_other_heads() -> None:
    rng = random.Random(8)
    q, k, v = (draw(rng, torch.bfloat16, 1, heads, length, 64) for heads, length in ((8, 1), (4, 900), (4, 900)))
    whole = attention(q, k, v, *PLAIN, False)
    half = attention(q[:, 4:], k[:, 2:], v[:, 2:], *PLAIN, False)
    assert torch.equal(whole[:, 4:], half)


@pytest.mark.parametrize("queries", [1, 40])
def test_a_row_that_sees_nothing_gives_zeros_and_minus_infinity(isa: str, queries: int) -> None:
    rng = random.Random(9)
    q, k, v = (draw(rng, torch.float32, 1, heads, length, 32) for heads, length in ((2, queries), (1, 20), (1, 20)))
    mask = torch.ones(1, 1, queries, 20, dtype=torch.bool)
    mask[:, :, 0] = False
    out, lse = attention(q, k, v, mask, 0.0, False, None, None, None, None, True)
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 32)) and bool((lse[:, :, 0] == -math.inf).all())
    if queries > 1:
        assert bool(torch.isfinite(out[:, :, 1:]).all())


@pytest.mark.req("R-OP-03")
@pytest.mark.parametrize("kernel", [attention, fixed])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 40])
def test_zeros_give_zeros_and_denormal_tiny_and_huge_values_what_the_formula_gives(
    isa: str, kernel: Any, dtype: torch.dtype, queries: int
) -> None:
    q, k, v = (draw(random.Random(12), dtype, 1, 2, length, 16) for length in (queries, 70, 70))
    assert not kernel(q * 0, k * 0, v * 0, *PLAIN, False).any()
    smallest = torch.finfo(dtype).smallest_normal
    for size in (smallest / 4, smallest * 8, 1e4, 2.0**14):  # the scores are exact, so that keys which tie stay tied
        given = [item.sign() * size for item in (q, k, v)]
        out = kernel(*given, *PLAIN, False)
        assert out.isfinite().all()
        close(out, truth((*given, *PLAIN))[0], dtype)


@pytest.mark.req("R-OP-03")
@pytest.mark.parametrize("kernel", [attention, fixed])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("queries", [1, 40])
def test_a_query_that_is_no_number_spoils_its_own_row_alone(isa: str, kernel: Any, bad: float, queries: int) -> None:
    q, k, v = (draw(random.Random(13), torch.float32, 1, 2, length, 32) for length in (queries, 90, 90))
    want = kernel(q, k, v, *PLAIN, False)
    q[0, 1, queries - 1, 3] = bad
    out = kernel(q, k, v, *PLAIN, False)
    assert bool(out[0, 1, -1].isnan().all()), "inf - inf is no number either"
    out[0, 1, -1] = want[0, 1, -1] = 0
    assert torch.equal(out, want)


@pytest.mark.req("R-OP-03")
@pytest.mark.parametrize("kernel", [attention, fixed])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("queries", [1, 40])
def test_nan_and_infinity_stay_visible_where_the_reference_shows_them(
    isa: str, kernel: Any, bad: float, queries: int
) -> None:
    rng = random.Random(10)
    q, k, v = (draw(rng, torch.float32, 1, heads, length, 32) for heads, length in ((2, queries), (1, 90), (1, 90)))
    k[0, 0, 70, 3] = bad
    v[0, 0, 11, 5] = bad
    found = kernel(q, k, v, *PLAIN, False)
    wanted = reference(q, k, v, *PLAIN, False)
    assert isinstance(wanted, torch.Tensor)
    assert torch.equal(found.isnan(), wanted.isnan())
    close(found, wanted, torch.float32)


@pytest.mark.fault(5)
@pytest.mark.parametrize("far", [2**61, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 2, 2**63 - 1])
@pytest.mark.parametrize("queries", [1, 7, 40])
def test_a_window_as_far_as_integers_go_is_an_open_one(far: int, queries: int) -> None:
    rng = random.Random(11)
    q, k, v = (draw(rng, torch.float32, 1, heads, length, 8) for heads, length in ((2, queries), (1, 20), (1, 20)))
    for causal in (False, True, "bottom_right"):
        for window, same in (((far, 0), (-1, 0)), ((3, far), (3, -1)), ((far, far), (-1, -1)), ((0, far), (0, -1))):
            found = attention(q, k, v, None, 0.0, causal, None, window, None, None, False)
            assert torch.equal(found, attention(q, k, v, None, 0.0, causal, None, same, None, None, False))
            close(found, reference(q, k, v, None, 0.0, causal, None, window, None, None, False), torch.float32)


def test_a_page_of_zero_length_and_no_queries_are_no_trouble() -> None:
    empty = attention(torch.zeros(1, 2, 0, 16), *(torch.zeros(1, 1, 4, 16) for _ in range(2)), *PLAIN, False)
    assert empty.shape == (1, 2, 0, 16)
    nothing = attention(torch.ones(1, 2, 3, 16), *(torch.zeros(1, 1, 0, 16) for _ in range(2)), *PLAIN, False)
    assert torch.equal(nothing, torch.zeros(1, 2, 3, 16))


def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, 4, 16)
    for key, value, word in (
        (torch.zeros(1, 1, 4, 8), k, "head_dim"),
        (k, torch.zeros(1, 1, 5, 16), "length"),
        (k.to(torch.bfloat16), k, "dtype"),
        (torch.zeros(2, 1, 4, 16), k, "batch"),
    ):
        with pytest.raises(ValueError, match=word):
            attention(q, key, value, *PLAIN, False)

"""The AVX-512, VNNI and AMX kernels of matrices on processors without them: the same sources with emulated intrinsics.

No test machine has tiles, so here the kernels meet the reference in float64 over odd sizes, strides and options. What
only hardware can tell, the speed and the last bit of a tile's sum, is left to `test_cpu_*` on a machine that has it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.reference.attention import attention as plain_attention
from layerzero.backends.reference.feed_forward import linear as plain_linear
from layerzero.backends.reference.moe import moe as plain_moe
from layerzero.backends.reference.quantize import quantize
from layerzero.backends.reference.varlen import paged_attention as plain_paged
from layerzero.model.kv_cache import make_paged_batch
from layerzero.model.quant import QuantScheme
from layerzero.numerics.tolerances import tolerance
from layerzero_cpu import build, experts

HERE = Path(__file__).parent
ACTIVATIONS = (None, "silu", "relu", "gelu", "gelu_tanh")
GIVEN = os.environ.get("LAYERZERO_TEST_EMULATED")  # a library made beforehand: the sanitized run names it
PROVE = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=cpu")

pytestmark = [
    pytest.mark.needs_tool("g++"),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(600),
]


def made(out: Path, *more: str) -> Path:
    """Built in a process of its own: the builder changes what the package's build compiles."""
    cache = HERE.parents[2] / "build" / "emulated"
    command = [sys.executable, str(HERE / "emulated" / "build.py"), str(out), "--cache", str(cache), *more]
    found = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert found.returncode == 0, found.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A second `_native`, beside the package's own."""
    path = Path(GIVEN) if GIVEN else made(tmp_path_factory.mktemp("emulated") / build.NAME)
    loader = importlib.machinery.ExtensionFileLoader("emulated._native", str(path))
    spec = importlib.util.spec_from_file_location("emulated._native", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.setup(torch.Tensor, torch.get_num_threads)
    return module


@pytest.fixture(params=["avx512", "avx512_vnni", "amx"])
def native(request: pytest.FixtureRequest, library: Any) -> Any:
    library.set_isa(request.param)
    return library


@pytest.fixture
def amx(library: Any) -> Any:
    library.set_isa("amx")
    return library


def drawn(dice: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers in a view with gaps, or with two axes swapped in memory."""
    torch.manual_seed(dice.randrange(1 << 30))
    if len(shape) == 4 and dice.random() < 0.5:
        return torch.randn(shape[0], shape[2], shape[1], shape[3]).to(dtype).transpose(1, 2)
    return torch.randn(*shape[:-1], shape[-1] + dice.choice((0, 3, 8))).to(dtype)[..., : shape[-1]]


def wide(*items: Any) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in items)


def close(found: Tensor, wanted: Tensor, op: str, **sizes: int) -> None:
    bound = tolerance(op, found.dtype, **sizes)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=bound.rtol, atol=bound.atol, equal_nan=True)


def prefill(native: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:3], math.nan)
    scale = how.get("scale")
    left, right = how.get("window") or (-1, -1)
    causal = {False: 0, True: 1, "bottom_right": 2}[how.get("causal", False)]
    answer = native.attention_prefill(
        q, k, v, out, lse, how.get("mask"), how.get("slopes"), 1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        how.get("softcap") or 0.0, causal, left, right,
    )  # fmt: skip
    assert answer is None
    return out, lse


def truth(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    words = [how.get(name) for name in ("scale", "window", "softcap", "slopes")]
    found = plain_attention(*wide(q, k, v, how.get("mask")), 0.0, how.get("causal", False), *wide(*words), True)
    assert isinstance(found, tuple)
    return found


def attention_call(dice: random.Random, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Sizes that straddle tiles, strips, units and blocks; any mix of options."""
    batch, kv_heads, group = dice.choice((1, 2)), dice.choice((1, 2)), dice.choice((1, 1, 2, 3, 4, 8, 40))
    queries, keys = dice.choice((1, 5, 17, 40, 70)), dice.choice((0, 1, 31, 33, 64, 100, 255, 257, 300, 530))
    dim, heads = dice.choice((1, 3, 16, 31, 32, 40, 64, 72, 128, 130, 256)), kv_heads * group
    dim_v = dim if dice.random() < 0.7 else dice.choice((1, 15, 16, 17, 48, 128))
    q = drawn(dice, dtype, batch, heads, queries, dim)
    k, v = drawn(dice, dtype, batch, kv_heads, keys, dim), drawn(dice, dtype, batch, kv_heads, keys, dim_v)
    how: dict[str, Any] = {"causal": dice.choice((False, True, "bottom_right"))}
    if not how["causal"] and dice.random() < 0.4:
        sizes = [dice.choice((1, full)) for full in (batch, heads, queries, keys)]
        mask = torch.rand(sizes) > 0.3
        how["mask"] = mask if dice.random() < 0.5 else torch.randn(sizes).to(dtype).masked_fill(~mask, -math.inf)
    how["scale"] = dice.choice((None, None, 0.2, -0.3, 0.0, 3.0))
    how["window"] = dice.choice((None, None, (dice.randrange(-1, 60), dice.randrange(-1, 60))))
    how["softcap"] = dice.choice((None, None, 9.0))
    how["slopes"] = dice.choice((None, None, torch.rand(heads), torch.rand(batch, heads)))
    return (q, k, v), how


def test_the_emulated_tiles_compute_and_refuse_as_the_processor_does(tmp_path: Path) -> None:
    compiler = build.compiler()
    assert compiler is not None
    program = tmp_path / "check"
    command = [
        *compiler,
        "-std=c++17",
        "-O1",
        "-Wno-psabi",
        f"-I{HERE / 'emulated'}",
        str(HERE / "emulated" / "check.cpp"),
    ]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, timeout=120)
    assert subprocess.run([program]).returncode == 0
    for wrong in range(1, 7):
        found = subprocess.run([program, str(wrong)], capture_output=True, text=True)
        assert found.returncode != 0 and found.stderr.startswith("emulated tiles: "), wrong


@pytest.mark.req("R-BK-CPU-05")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_prefill_matches_the_reference(amx: Any, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(40):
        tensors, how = attention_call(dice, torch.bfloat16)
        (found, lse), (wanted, wanted_lse) = prefill(amx, *tensors, **how), truth(*tensors, **how)
        close(found, wanted, "attention")
        torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-4, atol=1e-4)


def test_prefill_of_other_dtypes_and_sets_matches_too(native: Any) -> None:
    dice = random.Random(7)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for _ in range(4):
            tensors, how = attention_call(dice, dtype)
            (found, lse), (wanted, wanted_lse) = prefill(native, *tensors, **how), truth(*tensors, **how)
            close(found, wanted, "attention")
            torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_prefill_matches_the_reference(amx: Any, layout: str) -> None:
    dice = random.Random(layout)
    for _ in range(12):
        page, kv_heads, group, dim = dice.choice((1, 7, 16, 32, 128)), dice.choice((1, 2)), dice.choice((1, 3, 4)), 40
        lengths = [dice.choice((0, 1, 4, 40, 70)) for _ in range(3)] + [1]
        contexts = [max(1, n + dice.choice((0, 1, 17, 300))) for n in lengths]
        width = max(-(-n // page) for n in contexts)
        blocks, heads = width * 4 + 1, kv_heads * group
        shape = (blocks, page, kv_heads, dim) if layout == "NHD" else (blocks, kv_heads, page, dim)
        table = torch.randperm(blocks)[: width * 4].view(4, width).int()
        plan = make_paged_batch(table, torch.tensor(contexts).int(), torch.tensor(lengths).int())
        q, k, v = (drawn(dice, torch.bfloat16, *size) for size in ((sum(lengths), heads, dim), shape, shape))
        window, cap = dice.choice((None, (50, 0))), dice.choice((None, 9.0))
        slopes = dice.choice((None, torch.rand(4, heads)))
        out, lse = torch.full_like(q, math.nan), torch.full((sum(lengths), heads), math.nan)
        answer = amx.attention_paged_prefill(
            q, k, v, plan.block_tables, plan.context_lens, plan.query_lens, out, lse, slopes, 0.2, cap or 0.0,
            *(window or (-1, -1)), layout == "HND",
        )  # fmt: skip
        assert answer is None
        wanted, wanted_lse = plain_paged(*wide(q, k, v), plan, 0.2, window, cap, *wide(slopes), True, layout)
        close(out, wanted, "paged_attention")
        torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-4, atol=1e-4)


def test_long_rising_rows_are_rescaled_and_threads_change_no_bit(amx: Any) -> None:
    """Scores that climb by thousands along the keys, so that every block of keys finds a higher maximum."""
    dice = random.Random(3)
    q, k, v = (drawn(dice, torch.bfloat16, 1, heads, size, 64) for heads, size in ((4, 70), (2, 1500), (2, 1500)))
    k = (k.abs() * torch.linspace(0.0, 40.0, 1500)[:, None]).bfloat16()
    q = q.abs()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(prefill(amx, q, k, v, causal="bottom_right"))
    finally:
        torch.set_num_threads(before)
    wanted, wanted_lse = truth(q, k, v, causal="bottom_right")
    close(results[0][0], wanted, "attention")
    torch.testing.assert_close(results[0][1], wanted_lse.float(), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_prefill_shows_nan_and_infinity_where_the_reference_does(amx: Any, bad: float) -> None:
    dice = random.Random(4)
    q, k, v = (drawn(dice, torch.bfloat16, 1, heads, size, 32) for heads, size in ((2, 40), (1, 300), (1, 300)))
    q[0, 1, 7, 3] = bad
    found, wanted = prefill(amx, q, k, v, causal=True)[0], truth(q, k, v, causal=True)[0]
    assert torch.equal(found.isnan(), wanted.isnan()) and bool(found.isnan().any())


def test_keys_beyond_what_is_packed_at_a_time_come_in_waves(amx: Any) -> None:
    """Eight sequences whose packed keys and values would fill 40 MB: more than one wave."""
    dice = random.Random(5)
    q = drawn(dice, torch.bfloat16, 10, 1, 2, 256)
    k, v = (drawn(dice, torch.bfloat16, 10, 1, 4096, 256) for _ in range(2))
    (found, lse), (wanted, wanted_lse) = prefill(amx, q, k, v), truth(q, k, v)
    close(found, wanted, "attention")
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-4, atol=1e-4)


def linear_of(native: Any, x: Tensor, weight: Any, bias: Tensor | None, act: str | None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), math.nan, dtype=x.dtype)
    number = ACTIVATIONS.index(act)
    if isinstance(weight, Tensor):
        answer = native.linear(x, weight, bias, out, number)
    else:
        bits = 8 if weight.data.dtype is torch.int8 else 4
        zero = None if weight.zero_point is None else weight.zero_point.to(torch.int32)
        answer = native.linear_quantized(
            x, weight.data, weight.scale, zero, bias, out, number, bits, weight.block_size or 0
        )
    assert answer is None
    return out


@pytest.mark.parametrize("seed", range(2))
def test_linear_layers_match_the_reference(native: Any, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(40):
        dtype = dice.choice((torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float16))
        rows, width = (
            dice.choice((1, 3, 5, 16, 17, 32, 33, 40, 64, 100, 140)),
            dice.choice((1, 7, 32, 100, 256, 300, 513)),
        )
        outputs, act = dice.choice((1, 15, 32, 33, 70)), dice.choice(ACTIVATIONS)
        x, weight = drawn(dice, dtype, rows, width), drawn(dice, dtype, outputs, width) * 0.3
        bias = dice.choice((None, torch.randn(outputs).to(dtype)))
        wanted = plain_linear(*wide(x, weight, bias), act)
        close(linear_of(native, x, weight, bias, act), wanted, "linear", k=width)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("seed", range(2))
def test_quantized_layers_match_the_reference(native: Any, fmt: Any, seed: int) -> None:
    if native.isa() == "avx512":
        pytest.skip("the codes are widened there by code that every processor runs")
    dice = random.Random(seed)
    for _ in range(40):
        dtype, act = (
            dice.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
            dice.choice(ACTIVATIONS),
        )
        rows, outputs = dice.choice((1, 1, 2, 9, 16, 17, 33, 50)), dice.choice((1, 31, 32, 70))
        granularity: Any = dice.choice(("tensor", "channel", "block", "block"))
        block, width = None, dice.choice((6, 64, 100, 258, 600, 1024))
        if granularity == "block":
            block = dice.choice((2, 6, 32, 64, 96, 128, 128, 256, 320, 512))
            width = block * dice.choice((1, 2, 3, 5))
        x = drawn(dice, dtype, rows, width)
        if dice.random() < 0.2:
            x[0, dice.randrange(width)] *= dice.choice((30.0, 300.0))
        weight = quantize(
            (torch.randn(outputs, width) * 0.3).to(dtype), QuantScheme(fmt, granularity, block, dice.random() < 0.5)
        )
        bias = dice.choice((None, torch.randn(outputs).to(dtype)))
        wanted = plain_linear(*wide(x, weight, bias), act)
        close(linear_of(native, x, weight, bias, act), wanted, "linear", k=width)


@pytest.mark.parametrize("fmt", ["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_match_the_reference(
    native: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fmt: Any
) -> None:
    monkeypatch.setattr(experts, "native", native)
    torch.manual_seed(0)
    for tokens in (1, 3, 17, 70):
        x, *given = (torch.randn(shape).to(dtype) / 8 for shape in ((tokens, 96), (5, 128, 96), (5, 96, 64)))
        weights = given if fmt == "plain" else [quantize(item, QuantScheme(fmt, "block", 32)) for item in given]
        biases = torch.randn(5, 128).to(dtype), torch.randn(5, 96).to(dtype)
        rest = (torch.rand(tokens, 3), torch.randint(-1, 6, (tokens, 3)), "swigluoai", 0, *biases, 1.702, 0.7, True)
        wanted = plain_moe(x.double(), *wide(*weights), *rest)
        close(experts.moe(x, *weights, *rest), wanted, "moe", k=96)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_row_of_more_blocks_than_their_scales_are_made_for_at_once(library: Any, symmetric: bool) -> None:
    library.set_isa("avx512_vnni")
    torch.manual_seed(4)
    for dtype, blocks in ((torch.bfloat16, 64), (torch.bfloat16, 67), (torch.float32, 130)):
        x = torch.randn(1, 128 * blocks).to(dtype)
        weight = quantize(torch.randn(3, 128 * blocks) * 0.05, QuantScheme("int4", "block", 128, symmetric))
        wanted = plain_linear(*wide(x, weight, None), None)
        close(linear_of(library, x, weight, None, None), wanted, "linear", k=128 * blocks)


@pytest.mark.parametrize("fmt", ["int8", "int4", "plain"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_in_a_row_stay_in_that_row(amx: Any, fmt: Any, bad: float) -> None:
    torch.manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = torch.randn(40, 256).to(dtype), torch.randn(8, 256).to(dtype)
        x[1, 77] = bad
        given = weight if fmt == "plain" else quantize(weight, QuantScheme(fmt, "channel"))
        found, wanted = linear_of(amx, x, given, None, None), plain_linear(x, given, None, None)
        assert torch.equal(found.isfinite(), wanted.isfinite()) and not bool(found[1].isfinite().any())
        assert torch.equal(found.isnan(), wanted.isnan())


def test_a_zero_point_far_out_is_still_taken_off_exactly(library: Any) -> None:
    library.set_isa("avx512_vnni")
    torch.manual_seed(2)
    x = torch.randint(-8, 9, (1, 256)).float()
    codes, scale = torch.randint(-128, 128, (4, 256), dtype=torch.int8), torch.ones(4, 1)
    for zero in (0, -100, 300, 100_000):
        out = torch.empty(1, 4)
        points = torch.full((4, 1), zero, dtype=torch.int32)
        assert library.linear_quantized(x, codes, scale, points, None, out, 0, 8, 0) is None
        wanted = x.double() @ (codes.double() - zero).t()
        torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=0.5 if zero == 100_000 else 1e-3)


@PROVE
@pytest.mark.timeout(1800)
@pytest.mark.skipif(GIVEN is not None, reason="this is the run inside it")
def test_the_sanitizers_find_nothing_in_the_emulated_kernels(tmp_path: Path) -> None:
    compiler = build.compiler()
    assert compiler is not None
    found = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(map(os.path.isabs, found)):
        pytest.skip("this compiler has no sanitizers")
    settings = {
        "LAYERZERO_TEST_EMULATED": str(made(tmp_path / build.NAME, "--sanitize")),
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not tiles_compute",
        __file__,
    ]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=1700)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]

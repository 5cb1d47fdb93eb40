"""`lz.linear` with quantized weights, packed or not, against a product of its own."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.backends.torch_native import quantize
from layerzero.errors import InvalidInputError, NoKernelFoundError
from layerzero.model.enums import QuantFormat
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import FORMATS
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.state import state
from tools import planted_faults
from tools.pytest_fixtures import module_beside

made, oracle = module_beside(__file__, "quant_lab"), module_beside(__file__, "quant_oracle")
NEON, draw, weight_of = made.NEON, made.draw, made.weight_of

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
ALL = [fmt.value for fmt in QuantFormat]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ACTS = {None: lambda y: y, "relu": lambda y: np.maximum(y, 0), "silu": lambda y: y / (1 + np.exp(-y))}


def close(got, want, dtype, k):
    assert got.dtype == dtype
    assert_close(got.double().cpu(), torch.from_numpy(want), tolerance("linear", dtype, k=k))


# -- parity with an independent product --------------------------------------------------------------
GRID = [
    (fmt, granularity, symmetric)
    for fmt in ALL
    for granularity in ("tensor", "channel", "block")
    for symmetric in (True, False)
    if not (FORMATS[QuantFormat(fmt)].block_only and granularity != "block")
    and (symmetric or FORMATS[QuantFormat(fmt)].zero_point)
]
SIZES = [(1, 64, 16), (2, 96, 32), (3, 64, 5), (9, 128, 24)]
if PROVE:
    SIZES += [(m, k, n) for m in (1, 2, 4, 5, 17, 33) for k in (32, 64, 160, 512) for n in (1, 16, 48, 130)]


@pytest.mark.correctness
@pytest.mark.req("R-QUANT-01", "R-QUANT-03", "R-QUANT-04", "R-QUANT-09")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fmt", "granularity", "symmetric"), GRID)
def test_products_are_those_of_the_numbers_the_codes_stand_for(fmt, granularity, symmetric, dtype, device):
    """GEMV and GEMM against fsum over values decoded bit by bit; every kernel that accepts the call is asked."""
    options = {} if symmetric else {"symmetric": False}
    for rows, k, n in SIZES:
        qt = weight_of(fmt, n, k, granularity=granularity, **options).to(device)
        x, bias = draw(rows, k, dtype=dtype, seed=2).to(device), draw(n, dtype=dtype, seed=3).to(device)
        want = oracle.matmul(x, qt)
        close(lz.linear(x, qt), want, dtype, k)
        want = want + bias.double().cpu().numpy()
        for activation, apply in ACTS.items():
            close(lz.linear(x, qt, bias, activation), apply(want), dtype, k)
        kernels = [c.kernel_id for c in lz.explain("linear", x, qt, bias).decision.candidates if c.accepted]
        assert "reference.linear.plain" in kernels
        for kernel in kernels:
            close(lz.linear(x, qt, bias, backend=kernel), want, dtype, k)


@pytest.mark.correctness
@pytest.mark.req("R-QUANT-09")
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_whole_numbers_give_exact_products(fmt):
    """Codes and activations that are integers: the product in int64 is the only right answer, in every kernel."""
    size = {"int8": 127, "int4": 7}[fmt]
    for rows, k, n in SIZES:
        weight = torch.randint(-size, size + 1, (n, k), generator=torch.Generator().manual_seed(k)).float()
        weight[:, ::32] = size  # each block of 32 has its largest code, so every scale is one
        qt = lz.quantize(weight, fmt, granularity="block", block_size=32)
        assert (qt.scale == 1).all()
        x = torch.randint(-9, 10, (rows, k), generator=torch.Generator().manual_seed(7)).float()
        want = [
            [sum(int(a) * int(b) for a, b in zip(row, line, strict=True)) for line in weight.tolist()]
            for row in x.tolist()
        ]
        assert lz.linear(x, qt).tolist() == want
        assert lz.linear(x, qt, backend="reference").tolist() == want
        packed = lz.pack_weight(qt, rows=rows)
        assert lz.linear(x, packed).tolist() == want
    channel = lz.quantize(weight, "int8", granularity="channel") if fmt == "int8" else None
    if channel is not None:
        assert lz.linear(x, channel).tolist() == want


@pytest.mark.correctness
@settings(max_examples=300 if PROVE else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fmt=st.sampled_from(ALL), rows=st.integers(1, 6), blocks=st.integers(1, 4), n=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999), step=st.sampled_from([1, 2]),
    lead=st.sampled_from([(), (2,), (1, 3)]), granularity=st.sampled_from(["tensor", "channel", "block"]),
)  # fmt: skip
def test_any_shape_and_stride(fmt, rows, blocks, n, dtype, seed, step, lead, granularity):
    k = 32 * blocks
    granularity = "block" if FORMATS[QuantFormat(fmt)].block_only else granularity
    qt = weight_of(fmt, n, k, granularity=granularity, seed=seed)
    x = draw(*lead, rows, k * step, dtype=dtype, seed=seed + 1)[..., ::step]
    lz.linear(x, qt)  # where its kernel has no proof, the first answer is checked and may be another's
    got = lz.linear(x, qt)
    assert got.shape == (*lead, rows, n)
    close(got.reshape(-1, n), oracle.matmul(x.reshape(-1, k), qt), dtype, k)
    assert torch.equal(got, lz.linear(x, qt))


def test_edge_values_pass_through():
    qt = weight_of("int8", granularity="channel")
    x = torch.zeros(2, 64)
    x[1, 3] = float("inf")
    for kernel in ("reference.linear.plain", "torch.linear.dequantized"):
        out = lz.linear(x, qt, backend=kernel)
        assert torch.count_nonzero(out[0]) == 0
        assert not out[1].isfinite().all()
    assert lz.linear(torch.zeros(0, 64), qt).shape == (0, 16)
    tiny = lz.linear(torch.full((1, 64), 1e-42), qt)
    assert tiny.isfinite().all() and tiny.abs().max() < 1e-40


# -- gradients, autocast, torch.compile --------------------------------------------------------------
@pytest.mark.parametrize("fmt", ["int8", "nf4", "nvfp4"])
def test_a_gradient_reaches_the_activations_and_the_bias(fmt):
    qt = weight_of(fmt)
    x, bias = draw(3, 64).requires_grad_(), draw(16, seed=5).requires_grad_()
    assert lz.which("linear", x, qt, bias) in ("torch.linear.dequantized", "reference.linear.plain")
    weight = torch.from_numpy(oracle.value_of(qt))
    for kernel in ("torch.linear.dequantized", "reference.linear.plain", None):
        found = torch.autograd.grad(lz.linear(x, qt, bias, "silu", backend=kernel).square().sum(), (x, bias))
        wide, wide_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
        out = torch.nn.functional.silu(wide @ weight.T + wide_bias)
        for got, want in zip(found, torch.autograd.grad(out.square().sum(), (wide, wide_bias)), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_scales_may_be_trained():
    qt = weight_of("int4")
    qt.scale.requires_grad_()
    x = draw(2, 64)
    with torch.no_grad():
        lz.linear(x, qt)  # this call needs no gradient; it must not decide for the next
    (found,) = torch.autograd.grad(lz.linear(x, qt).sum(), qt.scale)
    codes = torch.from_numpy(oracle.value_of(qt) / oracle.scales(qt)).reshape(16, 2, 32)
    want = (codes * x.double().sum(0).reshape(2, 32)).sum(-1)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_autocast_narrows_the_activations_not_the_weight():
    qt = weight_of("int8", granularity="channel")
    x = draw(2, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lz.linear(x, qt)
        assert lz.explain("linear", x, qt).context.dtype == "bfloat16"
    close(out, oracle.matmul(x.bfloat16(), qt), torch.bfloat16, 64)


@pytest.mark.parametrize(("fmt", "grad"), [("int4", False), ("nvfp4", True)])
def test_a_compiled_graph_holds_the_product(fmt, grad):
    qt = weight_of(fmt, symmetric=fmt != "int4")
    x, bias = draw(3, 64).requires_grad_(grad), draw(16)
    packed = lz.pack_weight(qt)
    dense = draw(16, 64, seed=9)
    torch._dynamo.reset()

    def both(x):
        return lz.linear(x, qt, bias, "relu"), lz.linear(x, packed), lz.linear(x, lz.quantize(dense, "int8"))

    got = torch.compile(both, fullgraph=True, backend="eager")(x)
    want = (lz.linear(x, qt, bias, "relu"), lz.linear(x, qt), lz.linear(x, lz.quantize(dense, "int8")))
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    if grad:
        left, right = (torch.autograd.grad(out[0].sum(), x)[0] for out in (got, want))
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_a_compiled_graph_quantizes_with_every_option():
    torch._dynamo.reset()
    x = draw(3, 64)
    words = {"granularity": "block", "block_size": 16, "symmetric": False}
    got = torch.compile(lambda x: lz.quantize(x, "int4", **words).tensors(), fullgraph=True, backend="eager")(x)
    for left, right in zip(got, lz.quantize(x, "int4", **words).tensors(), strict=True):
        assert torch.equal(left, right)


class Marked(torch.Tensor):
    """A subclass without behaviour of its own."""


@pytest.mark.parametrize("act", [None, "dynamic"])
def test_tensor_subclasses_reach_the_op(act):
    qt = weight_of("int8", granularity="channel")
    weight = qt if act is None else lz.pack_weight(qt, act=act)
    x = draw(3, 64)
    got = lz.linear(x.as_subclass(Marked), weight, draw(16), "gelu")
    torch.testing.assert_close(got.as_subclass(torch.Tensor), lz.linear(x, weight, draw(16), "gelu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lz.linear(x.as_subclass(Marked), weight).dtype == torch.bfloat16


@pytest.mark.parametrize("fmt", ["int8", "mxfp4"])
def test_the_opaque_op_passes_torchs_own_check(fmt):
    qt = weight_of(fmt, 8, 32)
    parts = (qt.data, qt.scale, qt.zero_point, qt.tensor_scale, fmt, qt.granularity, qt.block_size, list(qt.shape))
    args = (draw(3, 32).requires_grad_(), *parts, qt.dtype, None, draw(8), "silu")
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if fmt == "int8":
        utils.append("test_schema")  # it multiplies its inputs, which float8 cannot
    torch.library.opcheck(torch.ops.layerzero.linear_quantized.default, args, test_utils=utils)


# -- packing -----------------------------------------------------------------------------------------
@pytest.fixture
def counters():
    lz.reset()
    state.counters.reset()
    yield state.counters
    lz.reset()


@pytest.mark.req("R-QUANT-07")
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_is_packed_once_and_reused_by_every_call(built_in, counters, monkeypatch, symmetric):
    qt = weight_of("int4", symmetric=symmetric)
    runs = []
    torchs_packer = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    monkeypatch.setattr(
        torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", lambda *args: runs.append(1) or torchs_packer(*args)
    )
    packed = lz.pack_weight(qt)
    if packed.layout != "int4_tiles":
        pytest.skip("no kernel on this CPU wants packed int4")
    for rows in (1, 2, 1, 1, 2):
        x = draw(rows, 64, seed=rows)
        assert lz.which("linear", x, packed) == "torch.linear.int4_tiles"
        close(lz.linear(x, packed), oracle.matmul(x, qt), torch.float32, 64)
    assert (len(runs), packed.packs, counters.packs) == (1, 1, 1)
    many = draw(20, 64)
    assert lz.which("linear", many, packed) == "torch.linear.dequantized"  # it reads the weight itself
    close(lz.linear(many, packed), oracle.matmul(many, qt), torch.float32, 64)
    assert counters.packs == 1


@pytest.mark.req("R-QUANT-07")
def test_a_backends_own_packing_is_done_once_for_all_calls(counters, tmp_path, monkeypatch):
    """On every machine: a published backend with a layout of its own, found by its entry point."""
    backend = planted_faults.install(tmp_path, "stale_parts", right=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    lz.reset()
    kernels = importlib.import_module(f"faulty_{backend}.kernels")
    runs, theirs = [], kernels.pack
    monkeypatch.setattr(kernels, "pack", lambda source: runs.append(1) or theirs(source))
    qt = weight_of("int8", granularity="channel")
    packed = lz.pack_weight(qt)
    assert packed.layout == "columns"
    for rows in (1, 2, 1, 20, 3):
        x = draw(rows, 64, seed=rows)
        assert lz.which("linear", x, packed) == f"{backend}.linear.fast"
        close(lz.linear(x, packed), oracle.matmul(x, qt), torch.float32, 64)
    assert (len(runs), packed.packs, counters.packs) == (1, 1, 1)
    qt.data.copy_(qt.data.flip(0))
    with pytest.raises(InvalidInputError) as caught:
        lz.linear(x, packed)
    assert caught.value.code == "WEIGHT_PACK_STALE"
    again = lz.pack_weight(qt, on_change="repack")
    qt.data.copy_(qt.data.flip(0))
    for _ in range(3):
        close(lz.linear(x, again), oracle.matmul(x, qt), torch.float32, 64)
    assert (len(runs), again.packs) == (3, 2)  # the first weight's, this one's, and once more after it was written to


@pytest.mark.req("R-QUANT-07")
def test_a_packed_weight_that_was_written_to_is_refused_or_packed_again(built_in, counters):
    qt = weight_of("int4")
    strict, lenient = lz.pack_weight(qt, layout="plain"), lz.pack_weight(qt)
    if lenient.layout == "plain":
        pytest.skip("no kernel on this CPU wants packed int4")
    again = lz.pack_weight(qt, on_change="repack")
    x = draw(1, 64)
    before = lz.linear(x, lenient)
    planned = lz.plan("linear", x, lenient)
    assert torch.equal(planned(x, lenient), before)
    qt.data.copy_(qt.data.flip(0))
    want = oracle.matmul(x, qt)
    assert lenient.stale and again.stale and not strict.stale
    for call in (lambda: lz.linear(x, lenient), lambda: planned(x, lenient)):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert caught.value.code == "WEIGHT_PACK_STALE"
    close(lz.linear(x, again), want, torch.float32, 64)
    close(lz.linear(x, strict), want, torch.float32, 64)
    assert (again.packs, counters.packs) == (2, 3)
    qt.scale.mul_(2.0)  # scales count as well as codes
    close(lz.linear(x, again), oracle.matmul(x, qt), torch.float32, 64)
    assert again.packs == 3
    close(lz.linear(x, lz.pack_weight(lenient)), oracle.matmul(x, qt), torch.float32, 64)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))])
def test_a_copy_of_a_packed_weight_is_stale_where_the_weight_itself_is(copied):
    qt = weight_of("int8", granularity="channel")
    qt.scale.mul_(2.0)  # written to before it is packed: torch counts it, and begins anew for a copy
    packed = PackedWeight(qt, "columns", (qt.data.t().contiguous(),))
    made = copied(packed)
    assert not made.stale and torch.equal(made.ready()[0], packed.parts[0])
    made.source.scale.mul_(2.0)
    assert made.stale and not packed.stale
    assert copied(made).stale


def test_a_stale_pack_gives_the_old_product_when_nobody_asks():
    """What the check prevents: the parts themselves know nothing of the weight they came from."""
    qt = weight_of("int4")
    parts = quantize.pack_int4_tiles(qt)
    x, old = draw(1, 64), oracle.matmul(draw(1, 64), qt)
    qt.data.copy_(qt.data.flip(0))
    blind = PackedWeight(qt, "int4_tiles", parts)  # packed before, counted after
    close(quantize.int4_tiles(x, blind, None, None), old, torch.float32, 64)


def test_inference_tensors_are_packed_without_a_counter():
    with torch.inference_mode():
        qt = weight_of("int4")
    packed = lz.pack_weight(qt)
    assert packed._counts is None and not packed.stale
    close(lz.linear(draw(1, 64), packed), oracle.matmul(draw(1, 64), qt), torch.float32, 64)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda qt: lz.pack_weight(torch.ones(4, 4)), "TYPE_INVALID"),
        (lambda qt: lz.pack_weight(qt, act="static"), "VALUE_INVALID"),
        (lambda qt: lz.pack_weight(qt, act="dynamic"), "QUANT_FORMAT_UNSUPPORTED"),
        (lambda qt: lz.pack_weight(qt, on_change="ignore"), "VALUE_INVALID"),
        (lambda qt: lz.pack_weight(qt, rows=0), "VALUE_INVALID"),
        (lambda qt: lz.pack_weight(qt, layout="marlin"), "VALUE_INVALID"),
        (lambda qt: lz.pack_weight(lz.quantize(torch.ones(2, 2, 4, 8), "int8")), "RANK_INVALID"),
        (lambda qt: lz.linear(torch.ones(1, 63), qt), "SHAPE_INVALID"),
        (lambda qt: lz.linear(torch.ones(1, 64), lz.quantize(torch.ones(2, 4, 64), "int8")), "RANK_INVALID"),
        (lambda qt: lz.linear(torch.ones(1, 64), [1.0]), "TYPE_INVALID"),
        (lambda qt: lz.linear(torch.ones(1, 64), qt, torch.ones(15)), "SHAPE_INVALID"),
        (lambda qt: lz.linear(torch.ones(1, 64, device="meta"), qt), "DEVICE_MIXED"),
    ],
)
def test_bad_calls_are_refused_with_a_reason(call, code):
    with pytest.raises(InvalidInputError) as caught:
        call(weight_of("int4"))
    assert caught.value.code == code


def test_a_layout_that_no_kernel_takes_here_names_the_reasons():
    with pytest.raises(NoKernelFoundError) as caught:
        lz.pack_weight(weight_of("int4", n=15), layout="int4_tiles")
    wanted = "DIM_NOT_MULTIPLE" if NEON else "CPU_FEATURE_MISSING"  # torch has that kernel for Arm
    assert wanted in {item.code.value for item in caught.value.reasons}


# -- activations quantized too -----------------------------------------------------------------------
def rows_of(x, fmt):
    granularity = "block" if FORMATS[QuantFormat(fmt)].block_only else "channel"
    return lz.quantize(x.float(), fmt, granularity=granularity)


@pytest.mark.req("R-QUANT-03")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4"])
def test_dynamic_activations_are_quantized_row_by_row(fmt, dtype):
    granularity = "block" if FORMATS[QuantFormat(fmt)].block_only else "channel"
    qt = weight_of(fmt, granularity=granularity)
    packed = lz.pack_weight(qt, act="dynamic")
    x = draw(5, 64, dtype=dtype) * torch.tensor([[1e-3], [1.0], [50.0], [0.0], [1.0]]).to(dtype)
    stored = torch.from_numpy(oracle.value_of(rows_of(x, fmt)))
    want = oracle.matmul(stored, qt)
    for kernel in ("reference.linear.plain", "torch.linear.dequantized"):
        got = lz.linear(x, packed, backend=kernel)
        limit = tolerance("linear", dtype, k=64)
        assert_close(got.double(), torch.from_numpy(want), limit)
    assert not np.allclose(want, oracle.matmul(x, qt), rtol=1e-6, atol=1e-9), "nothing was quantized"


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("name", ["int8_dynamic", "fp8_scaled", "fp8_rowwise"])
def test_the_adapters_for_gpus_compute_the_same_on_a_cpu(name, granularity):
    """torch has slow CPU forms of `_int_mm` and `_scaled_mm`, enough to check what is done around them."""
    fmt = "int8" if name == "int8_dynamic" else "fp8_e4m3"
    qt = weight_of(fmt, 32, 64, granularity=granularity)
    packed = PackedWeight(qt, act="dynamic")
    x, bias = draw(20, 64, dtype=torch.bfloat16), draw(32, dtype=torch.bfloat16)
    want = oracle.matmul(torch.from_numpy(oracle.value_of(rows_of(x, fmt))), qt) + bias.double().numpy()
    got = getattr(quantize, name)(x, packed, bias, "relu")
    close(got, np.maximum(want, 0), torch.bfloat16, 64)


@pytest.mark.gpu
@pytest.mark.req("R-QUANT-02")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_gpu_kernels_in_the_formats_own_arithmetic(fmt, granularity, dtype):
    qt = weight_of(fmt, 64, 128, granularity=granularity).to("cuda")
    packed = lz.pack_weight(qt, rows=32, dtype=dtype, act="dynamic")
    x, bias = draw(32, 128, dtype=dtype).cuda(), draw(64, dtype=dtype).cuda()
    want = oracle.matmul(torch.from_numpy(oracle.value_of(rows_of(x, fmt))), qt) + bias.double().cpu().numpy()
    kernels = [c.kernel_id for c in lz.explain("linear", x, packed, bias).decision.candidates if c.accepted]
    sm = torch.cuda.get_device_capability()
    if sm >= (8, 9) and (fmt == "int8" or dtype != torch.float32):  # eight-bit floats are summed too coarsely for it
        assert any(k.startswith(("torch.linear.int8_dynamic", "torch.linear.fp8_")) for k in kernels)
    for kernel in kernels:
        close(lz.linear(x, packed, bias, backend=kernel), want, dtype, 128)

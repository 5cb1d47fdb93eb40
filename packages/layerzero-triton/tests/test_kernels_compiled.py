"""Our kernels compiled for GPUs that are not here: NVIDIA's from SM 8.0 to 10.0, and ROCm's; and how well.

Triton brings its own assemblers, so this needs no GPU. Compiling takes seconds a kernel: `make check` takes a few,
LAYERZERO_PROVE=1 all.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


def blank(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def rms():
    from layerzero_triton.norm import norm

    norm(blank(16384, 8192), None, blank(8192), 1e-6, False)


def add_rms():
    from layerzero_triton.norm import norm

    norm(blank(16384, 4096), blank(16384, 4096), blank(4096), 1e-6, False)


def layer_norm():
    from layerzero_triton.layer_norm import layer_norm

    layer_norm(blank(4096, 4096), blank(4096), blank(4096), 1e-5)


def norm_backward():
    from layerzero_triton.norm import gradients

    gradients(blank(64, 4096), blank(64, 4096), blank(64, 4096), blank(4096), 1e-6, False)


def silu():
    from layerzero_triton.activation import gated

    gated(blank(16384, 28672), "silu")


def rope():
    from layerzero_triton.rope import rotate

    q, k, table = blank(1, 64, 32, 128), blank(1, 64, 8, 128), blank(64, 64, dtype=F32)
    rotate(q, k, table, table, False, "BSHD", None, False, False)


def rope_pairs():
    from layerzero_triton.rope import rotate

    q, table = blank(1, 64, 32, 128), blank(1, 64, 96, dtype=F32)
    rotate(q, None, table, table, True, "BSHD", blank(64, dtype=torch.int64), False, False)


def paged():
    from layerzero.model.kv_cache import PagedBatch
    from layerzero_triton.paged import paged_attention

    batch = PagedBatch(blank(16, 256, dtype=I32), blank(16, dtype=I32), None, (4096,) * 16, (1,) * 16)
    cache = blank(4096, 16, 8, 128)
    paged_attention(blank(16, 32, 128), cache, cache, batch, None, None, None, None, False, "NHD")


def latent():
    from layerzero.model.kv_cache import PagedBatch
    from layerzero_triton.mla import mla_paged_attention

    batch = PagedBatch(blank(16, 64, dtype=I32), blank(16, dtype=I32), None, (4096,) * 16, (1,) * 16)
    for heads in (16, 128):
        queries, caches = ((blank(*size, 512), blank(*size, 64)) for size in ((16, heads), (1024, 64)))
        mla_paged_attention(*queries, *caches, batch, 0.1, False)


def sampling():
    from layerzero_triton.sampling import _run

    _run(blank(1, 32000), None, 0.9, None, 1.0, blank(1, 1, dtype=torch.float64), blank(1, dtype=torch.int64))
    rows = blank(1, dtype=torch.int64)
    _run(blank(1, 32000), rows, 0.9, None, 1.0, blank(1, 1, dtype=torch.float64), rows)


def shortlist():
    from layerzero_triton.config import shortlist_config
    from layerzero_triton.sampling import _from_shortlist, _planned

    logits, uniform, out = blank(64, 128256, dtype=F32), blank(64, 1, dtype=torch.float64), blank(64, dtype=torch.int64)
    plan = _planned(logits, 0.9, None, 1.0, shortlist_config(64, 128256, 50, 132))
    _from_shortlist(logits, 50, 0.9, None, 1.0, uniform, out, plan)


def linear():
    from layerzero.model.enums import QuantFormat
    from layerzero.model.quant import QuantizedTensor
    from layerzero_triton.linear import dequantized

    scale = blank(4096, 1, dtype=F32)
    weight = QuantizedTensor(
        blank(4096, 4096, dtype=torch.int8), scale, QuantFormat.INT8, "channel", (4096, 4096), BF16, None, scale
    )
    dequantized(blank(16, 4096), weight, None, "silu")


def few_rows():
    from layerzero_triton.few_rows import mlp

    for rows in (1, 24):
        mlp(blank(rows, 2048), blank(16384, 2048), blank(2048, 8192), None, "silu", None, None, None)


def mxfp4():
    from layerzero.model.enums import QuantFormat
    from layerzero.model.quant import QuantizedTensor
    from layerzero_triton.linear import dequantized

    codes, scale = blank(4096, 2048, dtype=torch.uint8), blank(4096, 128, dtype=torch.float8_e8m0fnu)
    weight = QuantizedTensor(codes, scale, QuantFormat.MXFP4, "block", (4096, 4096), BF16, 32)
    dequantized(blank(16, 4096), weight, None, None)


def experts():
    from layerzero_triton.experts import moe

    for tokens in (1, 8192):
        shares, ids = blank(tokens, 8, dtype=F32), blank(tokens, 8, dtype=torch.int64)
        weights = blank(128, 1536, 2048), blank(128, 2048, 768)
        moe(blank(tokens, 2048), *weights, shares, ids, "silu", 0, None, None, 1.702, None, False)


def four_bit_rows():
    """INT4 and MXFP4: one row, experts, and a weight written out."""
    from layerzero.model.enums import QuantFormat
    from layerzero.model.quant import QuantizedTensor
    from layerzero_triton.experts import moe
    from layerzero_triton.few_rows import linear
    from layerzero_triton.linear import _widen

    def packed(fmt, block, *shape):
        kind = F32 if fmt is QuantFormat.INT4 else torch.float8_e8m0fnu
        codes, scale = (blank(*shape[:-1], shape[-1] // part, dtype=d) for part, d in ((2, torch.uint8), (block, kind)))
        return QuantizedTensor(codes, scale, fmt, "block", shape, BF16, block)

    linear(blank(1, 4096), packed(QuantFormat.INT4, 128, 4096, 4096), None, "silu")
    linear(blank(1, 4096), packed(QuantFormat.MXFP4, 32, 4096, 4096), blank(4096), None)
    for tokens in (1, 8192):
        shares, ids = blank(tokens, 8, dtype=F32), blank(tokens, 8, dtype=torch.int64)
        weights = packed(QuantFormat.MXFP4, 32, 128, 1536, 2048), packed(QuantFormat.MXFP4, 32, 128, 2048, 768)
        moe(blank(tokens, 2048), *weights, shares, ids, "silu", 0, None, None, 1.702, None, False)
    codes = blank(4096, 2048, dtype=torch.uint8), blank(4096, 128, dtype=torch.uint8)
    _widen((512, 8, 1), (*codes, blank(4096, 4096)), (4096, 128), (8, 512, True), 4)


def eight_bit_codes():
    """Rows encoded in FP8, and experts of FP8 blocks."""
    from layerzero.model.enums import QuantFormat
    from layerzero.model.quant import QuantizedTensor
    from layerzero_triton.config import LinearConfig
    from layerzero_triton.experts import moe
    from layerzero_triton.linear import _encode, dequantized

    codes = blank(4096, 4096, dtype=torch.float8_e4m3fn)
    _encode(
        (4096, 1, 1), (blank(4096, 4096), codes, blank(32, 4096, dtype=F32)), (256, 256, 4096, 32), (4096, 32, 16), 4
    )

    def blocks(*shape):
        codes, scale = blank(*shape, dtype=torch.float8_e4m3fn), blank(*shape[:-1], shape[-1] // 128, dtype=F32)
        return QuantizedTensor(codes, scale, QuantFormat.FP8_E4M3, "block", shape, BF16, 128)

    for tokens in (1, 8192):
        shares, ids = blank(tokens, 8, dtype=F32), blank(tokens, 8, dtype=torch.int64)
        weights = blocks(128, 1536, 2048), blocks(128, 2048, 768)
        moe(blank(tokens, 2048), *weights, shares, ids, "silu", 0, None, None, 1.702, None, False)
    # An inner axis that ends within a tile: what is beyond it is loaded as a number of the codes' own dtype.
    for dtype in (torch.float8_e4m3fn, torch.int8):
        fmt = QuantFormat.INT8 if dtype is torch.int8 else QuantFormat.FP8_E4M3

        def channels(*shape, dtype=dtype, fmt=fmt):
            scale = blank(*shape[:-1], 1, dtype=F32)
            return QuantizedTensor(blank(*shape, dtype=dtype), scale, fmt, "channel", shape, BF16)

        weights, chosen = (
            (channels(6, 192, 128), channels(6, 128, 96)),
            (blank(7, 3, dtype=F32), blank(7, 3, dtype=I32)),
        )
        moe(blank(7, 128), *weights, *chosen, "silu", 0, None, None, 1.702, None, False)
        dequantized(blank(3, 200), channels(64, 200), None, None, LinearConfig(16, 64, 128))


KERNELS = {
    f.__name__: f
    for f in (
        rms, add_rms, layer_norm, norm_backward, silu, rope, rope_pairs, paged, latent, sampling, shortlist, linear,
        few_rows, mxfp4, experts, four_bit_rows, eight_bit_codes,
    )
}  # fmt: skip
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
QUICK = {("rms", "sm_90"), ("layer_norm", "sm_90"), ("silu", "gfx942"), ("paged", "sm_90"), ("shortlist", "sm_90")}


def build(name, place):
    from layerzero_triton.kernels.launch import collecting
    from layerzero_triton.kernels.offline import compile_for, target

    with collecting() as launches:
        KERNELS[name]()
    assert launches
    return [compile_for(launch, target(place)) for launch in launches]


@pytest.mark.req("R-WARM-04")
def test_what_is_compiled_lies_below_our_cache_and_is_found_there_again(tmp_path, monkeypatch):
    from layerzero.jit import cache

    for name in (*cache.VENDOR_FOLDERS, *cache.DEEP_FOLDERS):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "jit"))
    assert cache.prepare() == tmp_path / "jit"

    def kept():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "jit" / "triton").rglob("*.cubin")}

    (first,) = build("rms", "sm_90")
    before = kept()
    assert [path.read_bytes() for path in before] == [first.asm["cubin"]]
    (again,) = build("rms", "sm_90")
    assert again.asm["cubin"] == first.asm["cubin"] and kept() == before, "nothing was compiled a second time"
    build("silu", "sm_90")
    assert len(kept()) == 2, "another kernel is"


EARLY = ("rms", "add_rms", "rope", "few_rows", "paged")


@pytest.mark.parametrize("name", EARLY)
def test_kernels_of_decode_steps_wait_for_the_one_in_front_where_they_are_launched_early(name, tmp_path, monkeypatch):
    """Launched so on SM 9.0 alone; what is read or written comes after the wait."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for made in build(name, "sm_90"):
        assert made.metadata.launch_pdl
        first = next(
            line for line in made.asm["ptx"].splitlines() if re.search(r"griddep.*wait|(ld|st)\.global|cp\.async", line)
        )
        assert "griddepcontrol.wait" in first
    for made in build(name, "sm_80"):
        assert not made.metadata.launch_pdl and "griddepcontrol" not in made.asm["ptx"]


# Four-bit codes are taken apart by NVIDIA's instructions; their kernels are declared for it alone.
ON_NVIDIA = {"mxfp4": "sm_", "four_bit_rows": "sm_", "eight_bit_codes": ("sm_90", "sm_100")}
PAIRS = [(name, place) for name in KERNELS for place in TARGETS if place.startswith(ON_NVIDIA.get(name, ""))]


@pytest.mark.parametrize(("name", "place"), PAIRS)
@pytest.mark.req("R-BK-TR-04")
def test_it_compiles(name, place, tmp_path, monkeypatch):
    if (name, place) not in QUICK and os.environ.get("LAYERZERO_PROVE") != "1":
        pytest.skip("LAYERZERO_PROVE=1 compiles every kernel for every target")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for made in build(name, place):
        assert made.asm["cubin" if place.startswith("sm_") else "hsaco"]
    if place == "sm_90" and name in ("rms", "add_rms", "silu", "rope"):
        code = made.asm["ptx"]
        # Between the words may stand what is to become of the line in the caches.
        assert re.search(r"ld\.global\S*\.v4", code) and "st.global.v4" in code, "16 bytes at once"
        assert not re.search(r"ld\.global\S*\.b16", code), "and never two"
    if place == "sm_90" and name == "shortlist":
        assert made.asm["ptx"].count("ld.global.v4") and ".local" not in made.asm["ptx"], "16 bytes at once, no stack"
    if place == "sm_90" and name == "paged":
        assert "cp.async.cg" in made.asm["ptx"], "pages are loaded ahead"
        assert "mma.sync" in made.asm["ptx"], "on tensor cores"

"""A small decoder on LayerZero's ops with quantized linear layers and a KV cache, against its own float64 twin."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import layerzero as lz

_spec = importlib.util.spec_from_file_location("quant_oracle", Path(__file__).with_name("quant_oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

HIDDEN, HEADS, KV_HEADS, DIM, WIDE, VOCAB, LAYERS = 64, 4, 2, 16, 96, 80, 2
NAMES = {"q": (HEADS * DIM, HIDDEN), "k": (KV_HEADS * DIM, HIDDEN), "v": (KV_HEADS * DIM, HIDDEN),
         "o": (HIDDEN, HEADS * DIM), "up": (2 * WIDE, HIDDEN), "down": (HIDDEN, WIDE)}  # fmt: skip

# How far quantized weights may move the logits, as a share of their size (root mean square over the prompt): two and
# a half times what the format itself loses on normal weights in blocks of 32 (NVFP4: 16).
LOST = {
    "int8": 0.0054, "fp8_e4m3": 0.024, "fp8_e5m2": 0.048, "int4": 0.097, "nf4": 0.088, "mxfp4": 0.116, "nvfp4": 0.095,
}  # fmt: skip
DECLARED = {fmt: 2.5 * lost for fmt, lost in LOST.items()}
# How far the ops' rounding may move them from the same quantized weights in float64.
ROUNDING = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def build(seed=0):
    """Weights of every linear layer and norm, float64."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape, scale):
        return torch.randn(shape, generator=noise, dtype=torch.float64) * scale

    blocks = [{name: normal(n, k, scale=k**-0.5) for name, (n, k) in NAMES.items()} for _ in range(LAYERS)]
    for block in blocks:
        block["norm1"], block["norm2"] = (1 + normal(HIDDEN, scale=0.1) for _ in range(2))
    head = {"embed": normal(VOCAB, HIDDEN, scale=1.0), "norm": 1 + normal(HIDDEN, scale=0.1)}
    head["out"] = normal(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
    return blocks, head


def angles(positions):
    theta = positions[:, None] * 10000.0 ** (-torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2))
    return theta.cos(), theta.sin()


def truth(blocks, head, ids):
    """The whole prompt in plain float64: no cache, no LayerZero."""
    x = head["embed"][ids]
    cos, sin = angles(torch.arange(len(ids), dtype=torch.float64))

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turn(t):  # [S, H, D], halves
        left, right = t.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((left * c - right * s, right * c + left * s), -1)

    hidden = torch.triu(torch.ones(len(ids), len(ids), dtype=torch.bool), 1)
    for block in blocks:
        y = norm(x, block["norm1"])
        q, k, v = ((y @ block[name].T).reshape(len(ids), -1, DIM) for name in ("q", "k", "v"))
        q, k = turn(q), turn(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).reshape(len(ids), -1) @ block["o"].T
        gate, up = (norm(x, block["norm2"]) @ block["up"].T).chunk(2, -1)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ block["down"].T
    return norm(x, head["norm"]) @ head["out"].T


def run(blocks, head, ids, dtype, cache, steps):
    """The same on LayerZero's ops: a prefill, then `steps` tokens one by one over the cache."""
    outs = []
    count = len(ids) - steps
    for piece in (ids[:count], *(ids[i : i + 1] for i in range(count, len(ids)))):
        start = cache.lengths()[0]
        cos, sin = (t.to(dtype) for t in angles(torch.arange(start, start + len(piece), dtype=torch.float64)))
        x = lz.embedding(piece, head["embed"])
        for number, block in enumerate(blocks):
            y = lz.rms_norm(x, block["norm1"], 1e-6)
            q, k, v = (lz.linear(y, block[n]).reshape(1, len(piece), -1, DIM) for n in ("q", "k", "v"))
            q, k = lz.rope(q, k, cos, sin, layout="BSHD")
            cache.append(k, v, layer=number, layout="BSHD")
            attended = cache.attend(q.transpose(1, 2), layer=number).transpose(1, 2).reshape(len(piece), -1)
            x = x + lz.linear(attended, block["o"])
            y = lz.silu_and_mul(lz.linear(lz.rms_norm(x, block["norm2"], 1e-6), block["up"]))
            x = x + lz.linear(y, block["down"])
        outs.append(lz.linear(lz.rms_norm(x, head["norm"], 1e-6), head["out"]))
    return torch.cat(outs)


def quantized(blocks, head, fmt, dtype, act=None, granularity="block"):
    """Blocks with quantized linear layers for LayerZero, and the numbers they stand for in float64."""
    stored, meant = [], []
    for block in (*blocks, {"out": head["out"]}):
        made, read = {}, {}
        for name, weight in block.items():
            if name not in NAMES and name != "out":
                made[name], read[name] = weight.to(dtype), weight.to(dtype).double()
                continue
            size = None if granularity != "block" else 16 if fmt == "nvfp4" else 32
            qt = lz.quantize(weight.to(dtype), fmt, granularity=granularity, block_size=size)
            made[name] = qt if act is None else lz.pack_weight(qt, act=act)
            read[name] = torch.from_numpy(oracle.value_of(qt))
        stored.append(made)
        meant.append(read)
    narrow = {name: weight.to(dtype) for name, weight in head.items()}
    wide = {name: weight.double() for name, weight in narrow.items()}
    return stored[:-1], meant[:-1], {**narrow, **stored[-1]}, {**wide, **meant[-1]}


def share(got, want):
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


IDS = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(3))


@pytest.mark.req("R-QUANT-06")
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("fmt", DECLARED)
def test_the_pipeline_stays_within_the_declared_bounds_of_its_format(fmt, dtype):
    blocks, head = build()
    stored, meant, narrow, wide = quantized(blocks, head, fmt, dtype)
    sizes = {"batch": 1, "num_kv_heads": KV_HEADS, "head_dim": DIM, "max_len": 32, "layers": LAYERS}
    got = run(stored, narrow, IDS, dtype, lz.kv_cache(dtype=dtype, page_size=4, **sizes), steps=5)
    want = truth(meant, wide, IDS)
    assert share(got, want) <= ROUNDING[dtype]  # the quantized model is computed right
    full = truth(blocks, head, IDS)
    assert share(want, full) <= DECLARED[fmt]  # and it is near the model it came from
    assert share(want, full) > DECLARED[fmt] / 4  # a bound that nothing comes near would say nothing
    if dtype is torch.float32:
        assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.req("R-QUANT-06")
@pytest.mark.parametrize(
    ("fmt", "granularity"), [("int8", "channel"), ("fp8_e4m3", "channel"), ("int4", "block"), ("nvfp4", "block")]
)
def test_every_backend_stays_within_its_bounds_through_the_whole_pipeline(fmt, granularity):
    """Each kernel of linear layers that takes the prompt or single tokens serves every call it may.

    Its bound is what rounding allows, or the error that it declares itself.
    """
    blocks, head = build(3)
    stored, meant, narrow, wide = quantized(blocks, head, fmt, torch.float32, granularity=granularity)
    want = truth(meant, wide, IDS)
    asked = [torch.zeros(rows, HIDDEN) for rows in (1, len(IDS) - 5)]
    takes = {}
    for x in asked:
        for found in lz.explain("linear", x, narrow["out"]).decision.candidates:
            takes.setdefault(found.kernel_id, []).append(found.accepted)
    kernels = {kernel: taken for kernel, taken in takes.items() if any(taken)}
    assert {"reference", "torch"} <= {kernel.split(".")[0] for kernel in kernels}
    declared = {spec.kernel_id: dict(spec.error_bounds).get(fmt, 0.0) for spec in lz.list_kernels("linear")}
    for kernel, taken in kernels.items():
        cache = lz.kv_cache(batch=1, num_kv_heads=KV_HEADS, head_dim=DIM, max_len=32, layers=LAYERS, page_size=4)
        with lz.prefer(kernel):
            assert [lz.which("linear", x, narrow["out"]) == kernel for x in asked] == taken
            got = run(stored, narrow, IDS, torch.float32, cache, steps=5)
        assert share(got, want) <= max(ROUNDING[torch.float32], declared[kernel]), kernel
        assert torch.equal(got.argmax(-1), want.argmax(-1)), kernel


@pytest.mark.req("R-QUANT-06")
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "mxfp4", "nvfp4"])
def test_activations_may_be_quantized_too(fmt):
    blocks, head = build(1)
    stored, _, narrow, _ = quantized(blocks, head, fmt, torch.float32, act="dynamic")
    cache = lz.kv_cache(batch=1, num_kv_heads=KV_HEADS, head_dim=DIM, max_len=32, layers=LAYERS)
    got = run(stored, narrow, IDS, torch.float32, cache, steps=3)
    assert DECLARED[fmt] / 4 < share(got, truth(blocks, head, IDS)) <= 2 * DECLARED[fmt]


@pytest.mark.req("R-QUANT-06", "R-QUANT-08")
@pytest.mark.parametrize("strategy", ["paged", "contiguous", "chunked"])
@pytest.mark.parametrize("quant", ["fp8_e4m3", "int8", "nf4"])
def test_the_cache_may_be_quantized_too(strategy, quant):
    blocks, head = build(2)
    stored, meant, narrow, wide = quantized(blocks, head, "int8", torch.float32)
    cache = lz.kv_cache(
        strategy, batch=1, num_kv_heads=KV_HEADS, head_dim=DIM, max_len=32, layers=LAYERS, page_size=4, chunk_size=4,
        quant=quant,
    )  # fmt: skip
    got = run(stored, narrow, IDS, torch.float32, cache, steps=6)
    error = share(got, truth(meant, wide, IDS))
    assert DECLARED[quant] / 20 < error <= DECLARED[quant]

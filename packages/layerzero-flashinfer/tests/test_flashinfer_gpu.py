"""The real library on a real GPU: every kernel in sizes that matter, captured graphs, several streams.

Modules that are not compiled yet are compiled here, 10 to 60 s each; LAYERZERO_COMPILED_ONLY=1 skips what needs one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib

import pytest
import torch

import layerzero as lz
from layerzero.errors import CudaGraphUnsafeError
from layerzero.model.context import Context
from layerzero.model.enums import Causal
from layerzero.model.kv_cache import make_paged_batch
from layerzero.numerics import assert_close, tolerance
from layerzero.registry.capabilities import load_capabilities
from layerzero.tuning.inputs import Draw
from layerzero_flashinfer import plugin
from layerzero_verify.testing.cases import drawn
from layerzero_verify.testing.kit import import_string, operation

# What the vendor warns of at its import is not ours to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

KERNELS = {spec.kernel_id: spec for spec in load_capabilities(plugin.CAPABILITIES).kernels}
DTYPES = ("float16", "bfloat16")
CUDA = torch.device("cuda", 0)


def kernels(*ops):
    return sorted(name for name, spec in KERNELS.items() if spec.op in ops and ".grouped" not in spec.function)


@pytest.fixture(autouse=True)
def real():
    """FlashInfer itself, on a device it is for."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    from layerzero_flashinfer.vendor import lib

    return lib()


def usable(kernel_id, **shape):
    """The kernel's spec; skips where this GPU or, if asked to, the set of compiled modules has none."""
    spec = KERNELS[kernel_id]
    sm = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    if sm < (spec.min_sm or 0) or sm > (spec.max_sm or 999):
        pytest.skip(f"{kernel_id} is not for SM {sm}")
    if os.environ.get("LAYERZERO_COMPILED_ONLY"):
        from layerzero_flashinfer.modules import specs_for

        missing = [s.name for s in specs_for({"op": spec.op, **shape}) if not s.is_compiled and _mine(spec, s.name)]
        if missing:
            pytest.skip(f"not compiled: {missing[0]}")
    return spec


def _mine(spec, module):
    """Whether a kernel uses this module: its template, and the decode module only where it runs on CUDA cores."""
    if spec.op not in ("attention", "paged_attention", "varlen_attention", "mla_paged_attention"):
        return True
    plain_decode = spec.kernel_id.endswith("decode")
    if "decode" in module:
        return plain_decode
    return not plain_decode and module.endswith("_sm90") == spec.kernel_id.endswith("fa3")


def wide(item):
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def moved(op, items):
    """Attention kernels take BSHD, as transposed views: nothing is copied on the way in."""
    if op != "attention":
        return items
    return tuple(x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.ndim == 4 else x for x in items)


def run(spec, args):
    found = import_string(spec.function)(*moved(spec.op, args))
    return moved(spec.op, found) if isinstance(found, tuple) else moved(spec.op, (found,))[0]


def expect(spec, args, found, dtype, k=128):
    assert_close(
        found, operation(spec.op).fallback_impl(*(wide(item) for item in args)), tolerance(spec.op, dtype, k=k)
    )


def draw(dtype, seed):
    return Draw(Context("cast", dtype=dtype), CUDA, zlib.crc32(seed.encode()))


def attention(spec, dtype, seed, **given):
    """A call of dense attention."""
    return drawn("attention", spec, dtype, CUDA, seed, rank=4, **given)


CAUSAL, LSE = {"causal": Causal.BOTTOM_RIGHT}, {"needs": {"lse"}}
# Lengths of queries and keys, heads of each, and the rest of the call.
ATTENTION = {
    "prefill": (517, 517, 8, 2, CAUSAL),
    "cached": (33, 1031, 8, 8, CAUSAL | LSE),
    "full": (100, 777, 16, 2, {}),
    "more_queries": (300, 70, 4, 4, CAUSAL | LSE),
    "window": (200, 900, 8, 2, CAUSAL | {"window": (63, 0)}),
    "softcap": (130, 130, 8, 2, {"softcap": 5.0, "scale": 0.3, "needs": {"lse", "softcap"}}),
    "turned": (65, 65, 4, 4, CAUSAL | {"scale": -0.2}),
}


@pytest.mark.req("R-BK-FI-02", "R-BK-FI-04", "R-BK-FI-07")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", sorted(ATTENTION))
@pytest.mark.parametrize("kernel_id", kernels("attention"))
def test_attention_matches_the_reference(kernel_id, name, head_dim, dtype):
    rows, cols, heads, kv_heads, options = ATTENTION[name]
    single = "single" in kernel_id
    batch = 1 if single else 3
    flags = {"window": "window" in options, "softcap": "softcap" in options}
    decode = "decode" in kernel_id
    spec = usable(kernel_id, dtype=dtype, head_dim=head_dim, batch=batch, seq_len_q=1 if decode else 99, **flags)
    sizes = {"seq_len_q": rows, "seq_len_k": cols, "num_heads": heads, "num_kv_heads": kv_heads}
    args = attention(spec, dtype, f"{name}{head_dim}", batch=batch, head_dim=head_dim, **sizes, **options)
    expect(spec, args, run(spec, args), dtype, head_dim)


@pytest.mark.parametrize("kernel_id", kernels("attention"))
def test_a_slice_of_a_longer_cache_is_read_where_it_lies(kernel_id):
    single = "single" in kernel_id
    batch, rows = (1 if single else 4), (1 if "decode" in kernel_id else 48)
    spec = usable(kernel_id, dtype="bfloat16", head_dim=128, batch=batch, seq_len_q=rows)
    source = draw("bfloat16", "slice")
    cache = [source.normal(batch, 512, 2, 128) for _ in range(2)]
    query = source.normal(batch, rows, 8, 128)
    args = (query, *(item[:, :333] for item in cache), None, 0.0, "bottom_right", None, None, None, None, True)
    found = import_string(spec.function)(*args)
    turned = [wide(item).transpose(1, 2) for item in args[:3]]
    wanted = operation("attention").fallback_impl(*turned, *args[3:])
    assert_close((found[0].transpose(1, 2), found[1]), wanted, tolerance("attention", "bfloat16", k=128))


@pytest.mark.req("R-BK-FI-02", "R-BK-FI-07")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("kernel_id", kernels("varlen_attention"))
def test_packed_sequences_match_the_reference(kernel_id, causal, head_dim, dtype):
    spec = usable(kernel_id, dtype=dtype, head_dim=head_dim)
    sizes = {"queries": (301, 0, 7, 64, 212), "keys": (301, 9, 150, 64, 70), "num_heads": 8, "num_kv_heads": 2}
    args = drawn(
        "varlen_attention", spec, dtype, CUDA, "varlen", head_dim=head_dim, causal=causal, needs={"lse"}, **sizes
    )
    expect(spec, args, run(spec, args), dtype, head_dim)


def paged(
    dtype, head_dim, layout, *, contexts=(1000, 17, 256, 0, 3), queries=None, page=16, heads=(8, 2), seed="p", kv=None
):
    source = draw(dtype, seed)
    per_row = max(-(-n // page) for n in contexts)
    count = per_row * len(contexts)
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(7))[:count]
    tables = order.to(torch.int32).to(CUDA).reshape(len(contexts), per_row)
    shape = (per_row * len(contexts) + 3, page, heads[1], head_dim)
    caches = [
        source.normal(*(shape if layout == "NHD" else (shape[0], shape[2], shape[1], shape[3]))) for _ in range(2)
    ]
    if kv is not None:
        caches = [item.to(kv) for item in caches]
    lens = torch.tensor(contexts, dtype=torch.int32, device=CUDA)
    new = None if queries is None else torch.tensor(queries, dtype=torch.int32, device=CUDA)
    query = source.normal(len(contexts) if queries is None else sum(queries), heads[0], head_dim)
    return query, *caches, (tables, lens, new)


@pytest.mark.req("R-BK-FI-02", "R-BK-FI-03", "R-KV-02", "R-KV-04")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kernel_id", kernels("paged_attention"))
def test_pages_match_the_reference(kernel_id, layout, head_dim, dtype):
    decode = "decode" in kernel_id
    spec = usable(kernel_id, dtype=dtype, head_dim=head_dim, batch=9, seq_len_q=1 if decode else 9)
    queries = None if decode else (90, 17, 1, 2, 3)
    query, keys, values, parts = paged(dtype, head_dim, layout, queries=queries)
    for page_lse in (False, True):
        args = (query, keys, values, make_paged_batch(*parts), None, None, None, None, page_lse, layout)
        expect(spec, args, run(spec, args), dtype, head_dim)


@pytest.mark.parametrize("option", ["window", "softcap"])
@pytest.mark.parametrize("kernel_id", kernels("paged_attention"))
def test_window_and_softcap_over_pages(kernel_id, option):
    decode = "decode" in kernel_id
    spec = usable(kernel_id, dtype="float16", head_dim=64, batch=9, seq_len_q=1 if decode else 9, **{option: True})
    query, keys, values, parts = paged("float16", 64, "NHD", queries=None if decode else (90, 17, 1, 2, 3))
    window, softcap = ((30, 0), None) if option == "window" else (None, 3.0)
    args = (query, keys, values, make_paged_batch(*parts), 0.4, window, softcap, None, True, "NHD")
    expect(spec, args, run(spec, args), "float16", 64)


@pytest.mark.parametrize("kernel_id", [name for name in kernels("paged_attention") if "fa3" not in name])
def test_a_cache_of_eight_bits_is_read_as_it_is(kernel_id):
    decode = "decode" in kernel_id
    fp8 = torch.float8_e4m3fn
    spec = usable(
        kernel_id, dtype="bfloat16", head_dim=128, batch=9, seq_len_q=1 if decode else 9, kv_cache_dtype="float8_e4m3fn"
    )
    query, keys, values, parts = paged(
        "bfloat16", 128, "NHD", contexts=(700, 17, 256), queries=None if decode else (90, 17, 1), kv=fp8
    )
    args = (query, keys, values, make_paged_batch(*parts), None, None, None, None, False, "NHD")
    expect(spec, args, run(spec, args), "bfloat16", 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel_id", kernels("mla_paged_attention"))
def test_latent_attention_matches_the_reference(kernel_id, dtype):
    spec = usable(kernel_id, dtype=dtype)
    for queries in (None, (40, 9, 1, 3)):
        sizes = {"num_heads": 16, "page_size": 32, "head_dim_ckv": 512, "head_dim_kpe": 64}
        lengths = {"contexts": (700, 64, 1, 33), "queries": queries}
        args = drawn(spec.op, spec, dtype, CUDA, "mla", **sizes, **lengths, scale=0.1, needs={"lse"})
        expect(spec, args, run(spec, args), dtype, 512)


# -- captured graphs -------------------------------------------------------------------------------
def captured(call):
    """The graph of a call that has run twice on a side stream, and its static result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.req("R-GRAPH-04", "R-GRAPH-07")
@pytest.mark.parametrize("kernel_id", [name for name in kernels("attention") if "single" in name])
def test_single_kernels_replay_in_a_graph(kernel_id):
    rows = 1 if "decode" in kernel_id else 65
    spec = usable(kernel_id, dtype="bfloat16", head_dim=128, batch=1, seq_len_q=rows)
    sizes = {"batch": 1, "num_heads": 8, "num_kv_heads": 2, "seq_len_q": rows, "seq_len_k": 2048, "head_dim": 128}
    static = attention(spec, "bfloat16", "static", **sizes, **CAUSAL)
    graph, out = captured(lambda: run(spec, static))
    for seed in ("one", "two", "three"):
        for kept, fresh in zip(static[:3], attention(spec, "bfloat16", seed, **sizes)[:3], strict=True):
            kept.copy_(fresh)
        graph.replay()
        expect(spec, static, out, "bfloat16")


@pytest.mark.req("R-GRAPH-04", "R-GRAPH-07")
@pytest.mark.parametrize("kernel_id", kernels("paged_attention", "mla_paged_attention"))
def test_a_paged_batch_replays_with_other_lengths(kernel_id):
    decode = "decode" in kernel_id
    spec = usable(kernel_id, dtype="bfloat16", head_dim=128, batch=9, seq_len_q=1 if decode else 9)
    latent = spec.op.startswith("mla")
    first, second, third = (1000, 17, 256, 5), (3, 999, 64, 1024), (512, 0, 1, 77)
    queries = None if decode or latent else (5, 5, 5, 5)
    query, keys, values, (tables, lens, new) = paged("bfloat16", 128, "NHD", contexts=(1024,) * 4, queries=queries)
    batch = lz.paged_batch(tables, lens, query_lens=new, capture=True)
    if latent:
        source = draw("bfloat16", "latent")
        tensors = source.normal(4, 16, 512), source.normal(4, 16, 64), *(source.normal(259, 16, n) for n in (512, 64))
        args = (*tensors, batch, 0.1, True)
    else:
        args = (query, keys, values, batch, None, None, None, None, True, "NHD")
    graph, out = captured(lambda: run(spec, args))
    assert len(batch.plans) == 1
    for contexts in (first, second, third):
        if queries is not None:
            contexts = tuple(max(n, 5) for n in contexts)
        fresh = torch.tensor(contexts, dtype=torch.int32, device=CUDA)
        batch.update(tables.flip(0), fresh, query_lens=new)
        graph.replay()
        expect(spec, args, out, "bfloat16", 512 if latent else 128)


def test_a_batch_without_a_plan_is_refused_inside_a_capture():
    spec = usable("flashinfer.paged_attention.decode_tc", dtype="bfloat16", head_dim=128, batch=9)
    query, keys, values, parts = paged("bfloat16", 128, "NHD")
    for kept in (False, True):
        batch = lz.paged_batch(*parts[:2])
        args = (query, keys, values, batch, None, None, None, None, False, "NHD")
        if kept:
            run(spec, args)
        with pytest.raises(CudaGraphUnsafeError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
            run(spec, args)
        assert caught.value.code == "BATCH_NOT_PLANNED"
        assert "capture=True" in str(caught.value)


GRAPH_SIMPLE = {
    "flashinfer.rms_norm.rows": lambda s: (s.normal(64, 4096), s.normal(4096), 1e-6),
    "flashinfer.gemma_rms_norm.rows": lambda s: (s.normal(64, 4096), s.normal(4096), 1e-6),
    "flashinfer.add_rms_norm.two_pass": lambda s: (s.normal(64, 4096), s.normal(64, 4096), s.normal(4096), 1e-6),
    "flashinfer.gemma_add_rms_norm.two_pass": lambda s: (s.normal(64, 4096), s.normal(64, 4096), s.normal(4096), 1e-6),
    "flashinfer.silu_and_mul.fused": lambda s: (s.normal(64, 2 * 14336),),
    "flashinfer.gelu_and_mul.fused": lambda s: (s.normal(64, 2 * 1024), "tanh"),
    "flashinfer.rope.tables": lambda s: (
        s.normal(2, 300, 8, 128), s.normal(2, 300, 2, 128), s.normal(512, 64), s.normal(512, 64), False, "BSHD", None,
        False,
    ),
}  # fmt: skip


@pytest.mark.req("R-GRAPH-04")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel_id", sorted(GRAPH_SIMPLE))
def test_norms_activations_and_rope_alone_and_in_a_graph(kernel_id, dtype):
    spec = usable(kernel_id, approximate="tanh")
    make = GRAPH_SIMPLE[kernel_id]
    static = make(draw(dtype, "first"))
    before = [item.clone() for item in static if isinstance(item, torch.Tensor)]
    expect(spec, static, run(spec, static), dtype)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (x for x in static if isinstance(x, torch.Tensor)), strict=True)
    )
    graph, out = captured(lambda: run(spec, static))
    for kept, fresh in zip(static, make(draw(dtype, "second")), strict=True):
        if isinstance(kept, torch.Tensor):
            kept.copy_(fresh)
    graph.replay()
    expect(spec, static, out, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("rotary", [64, 128])
def test_rope_in_both_conventions_and_in_place(interleaved, layout, rotary):
    spec = usable("flashinfer.rope.tables")
    source = draw("bfloat16", "rope")
    shape = (2, 8, 70, 128) if layout == "BHSD" else (2, 70, 8, 128)
    tables = torch.rand(600, rotary // 2, device=CUDA), torch.rand(600, rotary // 2, device=CUDA)
    ids = source.integers(600, 2, 70)
    for inplace in (False, True):
        q, k = source.normal(*shape), source.normal(*shape)
        given = (q.clone(), k.clone(), *tables, interleaved, layout, ids, False)
        found = run(spec, (q, k, *tables, interleaved, layout, ids, inplace))
        expect(spec, given, found, "bfloat16")
        assert torch.equal(q, found[0]) is inplace


@pytest.mark.req("R-SAMP-01")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel_id", kernels("sample", "sample_topk", "sampling_probs"))
def test_the_tokens_are_those_of_the_reference(kernel_id, dtype):
    """A real vocabulary, with the ties of bfloat16, bans, a NaN and an infinity."""
    spec = usable(kernel_id)
    logits = (torch.randn(16, 128256, device=CUDA, generator=torch.Generator(CUDA).manual_seed(5)) * 3).to(dtype)
    logits[1] = logits[1].round()
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    logits[4, 77] = torch.nan
    filters = {"sample_topk": (50,), "sample": (50, 0.9, 0.02), "sampling_probs": (50, 0.9, None)}[spec.op]
    both = []
    for function in (import_string(spec.function), operation(spec.op).fallback_impl):
        extra = () if spec.op == "sampling_probs" else (torch.Generator(CUDA).manual_seed(11),)
        both.append(function(logits, *filters, 0.8, *extra))
    if spec.op == "sampling_probs":
        torch.testing.assert_close(*both, rtol=1e-6, atol=1e-8)
    else:
        assert torch.equal(*both)
    # Not held to the reference: on CUDA a float32 sort puts a NaN with its sign bit set last, and so it goes unseen.
    logits[5, 78] = -torch.tensor(torch.nan)
    extra = () if spec.op == "sampling_probs" else (torch.Generator(CUDA).manual_seed(11),)
    row = import_string(spec.function)(logits, *filters, 0.8, *extra)[5]
    assert bool((row == (0.0 if spec.op == "sampling_probs" else -1)).all())


@pytest.mark.req("R-SAMP-01")
@pytest.mark.parametrize("rows", [1, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_tokens_is_drawn_as_the_reference_does(dtype, rows):
    """One launch up to 511 tokens, torch operations beyond; few rows and many take different selections."""
    spec = usable("flashinfer.sample.radix")
    logits = (torch.randn(rows, 128256, device=CUDA, generator=torch.Generator(CUDA).manual_seed(6)) * 3).to(dtype)
    logits[0, 1000:] = logits[0, 1000:].round()  # the cut goes through thousands of equals
    for k, p, least in ((1, None, None), (63, 0.9, None), (64, 0.5, 0.01), (511, 0.99, None), (512, 0.9, 0.001)):
        states = [torch.Generator(CUDA).manual_seed(k) for _ in range(2)]
        found = import_string(spec.function)(logits, k, p, least, 0.9, states[0])
        wanted = operation("sample").fallback_impl(logits, k, p, least, 0.9, states[1])
        assert torch.equal(found, wanted), (k, (found != wanted).nonzero().flatten().tolist())
        assert torch.equal(states[0].get_state(), states[1].get_state())


def test_selections_of_several_streams_do_not_meet():
    spec = usable("flashinfer.sample.radix")
    logits = torch.randn(3, 128256, device=CUDA, generator=torch.Generator(CUDA).manual_seed(7))
    wanted = operation("sample").fallback_impl(logits, 40, 0.9, None, 1.0, torch.Generator(CUDA).manual_seed(1))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for number in range(60):
        with torch.cuda.stream(streams[number % 3]):
            state = torch.Generator(CUDA).manual_seed(1)
            found.append(import_string(spec.function)(logits, 40, 0.9, None, 1.0, state))
    torch.cuda.synchronize()
    assert all(torch.equal(tokens, wanted) for tokens in found)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("gap", [0, 2, 8])
def test_rope_reads_heads_where_they_lie(layout, gap):
    """One sequence, head by head or token by token, and heads with a gap behind them that 16 bytes do not divide."""
    spec = usable("flashinfer.rope.tables")
    source = draw("bfloat16", f"heads{gap}")
    tables = torch.rand(70, 64, device=CUDA), torch.rand(70, 64, device=CUDA)
    for inplace in (False, True):
        wide = [source.normal(1, *((n, 70) if layout == "BHSD" else (70, n)), 128 + gap) for n in (8, 2)]
        q, k = (item[..., :128] for item in wide)
        given = (q.clone(), k.clone(), *tables, False, layout, None, False)
        found = run(spec, (q, k, *tables, False, layout, None, inplace))
        expect(spec, given, found, "bfloat16")
        assert torch.equal(q, found[0]) is inplace and torch.equal(k, found[1]) is inplace


def test_the_functions_behind_the_public_calls_are_known(real):
    """Else every call takes the longer way, which is right but slow."""
    from layerzero_flashinfer import rope, sampling, single

    if not real.__version__.startswith("0.6."):
        pytest.skip(f"written for 0.6, this is {real.__version__}")
    usable("flashinfer.rope.tables")
    usable("flashinfer.sample.radix")
    assert rope._inner() is not None and sampling._inner() is not None
    usable("flashinfer.attention.single_fa2", dtype="bfloat16", head_dim=128, batch=1, seq_len_q=64)
    q = torch.randn(1, 64, 8, 128, device=CUDA, dtype=torch.bfloat16)
    single.prefill_fa2(q, q, q, None, 0.0, True, None, None, None, None, False)
    assert single._run("fa2", torch.bfloat16, 128, False, False) is not None


@pytest.mark.parametrize("kernel_id", ["flashinfer.paged_attention.decode", "flashinfer.paged_attention.decode_tc"])
def test_a_planned_decode_is_launched_past_its_wrapper(kernel_id, real, monkeypatch):
    if not real.__version__.startswith("0.6."):
        pytest.skip(f"written for 0.6, this is {real.__version__}")
    spec = usable(kernel_id, dtype="bfloat16", head_dim=128, batch=9, seq_len_q=1)
    query, keys, values, parts = paged("bfloat16", 128, "NHD")
    monkeypatch.setattr(real.BatchDecodeWithPagedKVCacheWrapper, "run", lambda *_, **__: pytest.fail("its run"))
    args = (query, keys, values, make_paged_batch(*parts), None, None, None, None, True, "NHD")
    expect(spec, args, run(spec, args), "bfloat16", 128)


# -- streams, threads, and the public face -----------------------------------------------------------
@pytest.mark.parametrize("kernel_id", ["flashinfer.attention.single_decode", "flashinfer.attention.single_decode_tc"])
def test_streams_do_not_overwrite_each_others_scratch_memory(kernel_id):
    spec = usable(kernel_id, dtype="bfloat16", head_dim=128, batch=1, seq_len_q=1)
    sizes = {"batch": 1, "num_heads": 32, "num_kv_heads": 8, "seq_len_q": 1, "seq_len_k": 16384, "head_dim": 128}
    inputs = [attention(spec, "bfloat16", f"s{i}", **sizes) for i in range(4)]
    wanted = [run(spec, args) for args in inputs]
    torch.cuda.synchronize()
    problems = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                if not torch.equal(run(spec, inputs[index]), wanted[index]):
                    problems.append(index)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.req("R-BK-FI-02")
def test_one_plan_serves_all_layers_and_dropped_batches_give_their_wrapper_back():
    from layerzero_flashinfer import plans

    spec = usable("flashinfer.paged_attention.decode_tc", dtype="bfloat16", head_dim=128, batch=9)
    query, keys, values, parts = paged("bfloat16", 128, "NHD", contexts=(100, 50, 7))
    used = set()
    for _ in range(6):
        batch = lz.paged_batch(parts[0], parts[1])
        for _ in range(4):
            run(spec, (query, keys, values, batch, None, None, None, None, False, "NHD"))
        assert len(batch.plans) == 1
        (plan,) = batch.plans.values()
        used.add(id(plan._slot.wrapper))
        del batch, plan
    assert len(used) == 1
    assert all(len(slots) <= plans._SPARE for slots in plans._free.values())


@pytest.mark.req("R-BK-FI-03", "R-BK-FI-07")
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_public_face_reaches_flashinfer_and_gives_what_torch_gives(dtype, layout):
    usable("flashinfer.attention.single_fa2", dtype=dtype, head_dim=128, batch=1, seq_len_q=64)
    q, k, v = (torch.randn(1, heads, 64, 128, device=CUDA, dtype=getattr(torch, dtype)) for heads in (8, 2, 2))
    args = (q, k, v) if layout == "BHSD" else tuple(item.transpose(1, 2).contiguous() for item in (q, k, v))
    asked = {"is_causal": True, "layout": layout, "backend": "flashinfer"}
    with lz.scoped(jit="block"):
        out = lz.attention(*args, **asked)
        decision = lz.explain("attention", *args, **asked)
    assert str(decision.chosen).startswith("flashinfer.attention.single_")
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert_close(out if layout == "BHSD" else out.transpose(1, 2), wanted, tolerance("attention", dtype, k=128))


WARM = """
import sys
import torch
import layerzero as lz
x = torch.randn(4, 256, device="cuda", dtype=torch.float16, generator=torch.Generator("cuda").manual_seed(1))
if sys.argv[1] == "warm":
    with lz.scoped(allow=["flashinfer", "reference"]):
        done = lz.warmup([lz.select("silu_and_mul", x).context])
        assert done.ok and not done.failed, done
else:
    out = lz.silu_and_mul(x, backend="flashinfer")
    assert lz.which("silu_and_mul", x, backend="flashinfer") == "flashinfer.silu_and_mul.fused"
    torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :128]) * x[:, 128:], rtol=2e-3, atol=2e-3)
"""


@pytest.mark.req("R-WARM-04", "R-BK-FI-05")
def test_a_warm_up_has_the_library_compile_into_our_cache_and_a_later_process_compiles_nothing(tmp_path):
    jit = tmp_path / "jit"
    env = {**os.environ, "LAYERZERO_JIT_CACHE_DIR": str(jit), "FLASHINFER_WORKSPACE_BASE": ""}

    def kept(word):
        subprocess.run([sys.executable, "-c", WARM, word], env=env, check=True, timeout=280)
        return {path: path.stat().st_mtime_ns for path in (jit / "flashinfer").rglob("*.so")}

    made = kept("warm")
    assert any("silu" in path.name for path in made), made
    assert kept("use") == made

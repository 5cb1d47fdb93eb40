"""Our Triton kernels on a GPU: every kernel, dtype and class of shape against the reference; capture and replay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.backends.reference import feed_forward as true_linear
from layerzero.backends.reference import feed_forward as true_mlp
from layerzero.backends.reference import norm as true_norm
from layerzero.backends.reference import positional as true_positional
from layerzero.backends.reference import sampling as true_sampling
from layerzero.backends.reference.varlen import paged_attention as true_paged
from layerzero.model.kv_cache import make_paged_batch
from layerzero.numerics import assert_close, full_float32, tolerance

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
HALVES = DTYPES[:2]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with full_float32():
        yield


def close(op, got, want, dtype, **options):
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for a, b in pairs:
        if b is not None:
            assert_close(a, b, tolerance(op, dtype, **options))


def made(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def gradients(function, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*(t * 1 for t in leaves))
    out = out if isinstance(out, tuple) else (out,)
    gen = torch.Generator("cuda").manual_seed(1)
    loss = sum((t.float() * torch.randn(t.shape, generator=gen, device="cuda")).sum() for t in out if t is not None)
    loss.backward()
    return tuple(t.grad for t in leaves)


def replayed(function, *inputs):
    """Results of a captured call, replayed three times on new numbers, beside those of plain calls."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()
    for _ in range(3):
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor.float()))
        graph.replay()
        torch.cuda.synchronize()
        plain = function()
        pairs = zip(kept, plain, strict=True) if isinstance(kept, tuple) else [(kept, plain)]
        for a, b in pairs:
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 64), (7, 128), (33, 1000), (16, 4096), (3, 5, 4100), (5, 8192), (1030, 8192), (2, 32768), (0, 8)]
)
def test_norms(shape, dtype):
    from layerzero_triton import norm

    x, r, w = made(*shape, dtype=dtype), made(*shape, dtype=dtype), made(shape[-1], dtype=dtype)
    for ours, theirs, args in (
        (norm.rms_norm, true_norm.rms_norm, (x, w)),
        (norm.rms_norm, true_norm.rms_norm, (x, None)),
        (norm.add_rms_norm, true_norm.add_rms_norm, (x, r, w)),
        (norm.gemma_rms_norm, true_norm.gemma_rms_norm, (x, w)),
        (norm.gemma_add_rms_norm, true_norm.gemma_add_rms_norm, (x, r, w)),
    ):
        close("rms_norm", ours(*args, 1e-6), theirs(*args, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 64), (33, 1000), (16, 4096), (3, 5, 4100), (5, 8192), (1030, 8192), (2, 32768), (0, 8)]
)
def test_layer_norm(shape, dtype):
    from layerzero_triton.layer_norm import layer_norm

    x, w, b = made(*shape, dtype=dtype), made(shape[-1], dtype=dtype), made(shape[-1])
    for weight, bias in ((w, b), (w, None), (None, None)):
        wanted = true_norm.layer_norm(x, weight, bias, 1e-5)
        close("layer_norm", layer_norm(x, weight, bias, 1e-5), wanted, dtype)
        close("layer_norm", layer_norm(x, weight, bias, 1e-5), wanted, dtype)  # the second call finds its plan
    far = x[..., : shape[-1] // 2] + 100.0
    close("layer_norm", layer_norm(far, None, None, 1e-5), true_norm.layer_norm(far, None, None, 1e-5), dtype)


def test_norms_of_strided_and_unaligned_rows_and_wide_weights():
    from layerzero_triton import norm

    big = made(9, 3 * 1024 + 1, dtype=torch.bfloat16)
    for x in (big[:, 1024:2048], big[:, 1:1025], big[:, ::3][:, :1024], made(4, 6, 1024).transpose(0, 1)):
        w = made(1024)
        close("rms_norm", norm.rms_norm(x, w, 1e-6), true_norm.rms_norm(x, w, 1e-6), x.dtype)
        got = norm.add_rms_norm(x, x.float(), w, 1e-6)
        close("rms_norm", got, true_norm.add_rms_norm(x, x.float(), w, 1e-6), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [100, 4096, 16384])
def test_norm_gradients(width, dtype):
    from layerzero_triton import norm

    x, r, w = made(300, width, dtype=dtype), made(300, width, dtype=dtype), made(width, dtype=dtype)
    # summed over 300 rows, so bounds of a product of that length
    for ours, theirs, args in (
        (norm.rms_norm, true_norm.rms_norm, (x, w)),
        (norm.gemma_add_rms_norm, true_norm.gemma_add_rms_norm, (x, r, w)),
    ):
        got = gradients(lambda *a, f=ours: f(*a, 1e-6), args)
        want = gradients(lambda *a, f=theirs: f(*a, 1e-6), [t.double() for t in args])
        for a, b in zip(got, want, strict=True):
            scale = b.abs().max().clamp(min=1.0)
            close("linear", a.double() / scale, b / scale, dtype, k=300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (7, 100), (16, 28672), (2, 3, 22016), (5, 8200)])
def test_activations(shape, dtype):
    from layerzero_triton import activation

    x = made(*shape, dtype=dtype, scale=3.0)
    for name, rest in (("silu", ()), ("gelu", ("none",)), ("gelu", ("tanh",)), ("relu", ())):
        op = f"{name}_and_mul"
        ours, theirs = getattr(activation, op), getattr(true_mlp, op)
        close(op, ours(x, *rest), theirs(x.double(), *rest), dtype)
        got = gradients(lambda t, f=ours, r=rest: f(t, *r), (x,))
        close("backward", got, gradients(lambda t, f=theirs, r=rest: f(t, *r), (x.double(),)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary", "full"), [(128, 128, False), (128, 96, True), (80, 80, False), (256, 64, False)]
)
def test_rope(dim, rotary, full, interleaved, layout, dtype):
    from layerzero_triton import rope

    def heads(count):
        tensor = made(2, 37, count, dim, dtype=dtype)
        return tensor if layout == "BSHD" else tensor.transpose(1, 2)

    q, k = heads(5), heads(2)
    shape = (2, 50, rotary) if full else (50, rotary // 2)
    cos, sin = made(*shape), made(*shape)
    for rows in (None, torch.randint(0, 50, (37,), device="cuda"), torch.randint(0, 50, (2, 37), device="cuda")):
        rest = (cos, sin, interleaved, layout, rows)
        want = true_positional.rope(q, k, *rest, False)
        close("rope", rope.rope(q, k, *rest, False), want, dtype)
        mine = q.clone(), k.clone()
        got = rope.rope(*mine, *rest, True)
        assert got[0] is mine[0]
        close("rope", got, want, dtype)
    got = gradients(lambda a, b: rope.rope(a, b, *rest, False), (q, k))
    close("rope", got, gradients(lambda a, b: true_positional.rope(a, b, *rest, False), (q, k)), dtype)


def paged(dtype, page, layout, heads, kv_heads, dim, lengths, index=torch.int32):
    blocks = max(1, -(-max(lengths) // page))
    total = len(lengths) * blocks
    shape = (total, page, kv_heads, dim) if layout == "NHD" else (total, kv_heads, page, dim)
    table = torch.randperm(total, device="cuda").view(len(lengths), blocks).to(index)
    batch = make_paged_batch(table, torch.tensor(lengths, device="cuda", dtype=index))
    return made(len(lengths), heads, dim, dtype=dtype), made(*shape, dtype=dtype), made(*shape, dtype=dtype), batch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("page", "layout", "heads", "kv_heads", "dim", "window", "softcap", "index"),
    [
        (16, "NHD", 32, 8, 128, None, None, torch.int32),
        (1, "HND", 8, 8, 64, None, None, torch.int64),
        (128, "NHD", 8, 1, 128, (100, 0), None, torch.int32),
        (32, "HND", 16, 2, 80, None, 20.0, torch.int32),
        (16, "NHD", 96, 1, 64, None, None, torch.int32),
        (8, "NHD", 8, 2, 256, (-1, 0), None, torch.int32),
    ],
)
def test_paged_decode(page, layout, heads, kv_heads, dim, window, softcap, index, dtype):
    from layerzero_triton.paged import paged_attention

    for lengths in ((1, 17, 0, 300, 1000), (64,) * 70):
        q, k, v, batch = paged(dtype, page, layout, heads, kv_heads, dim, lengths, index)
        for slopes, lse in ((None, True), (torch.rand(heads, device="cuda"), False)):
            rest = (None, window, softcap, slopes, lse, layout)
            close("attention", paged_attention(q, k, v, batch, *rest), true_paged(q, k, v, batch, *rest), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_paged_decode_with_sinks_and_scales(dtype):
    from layerzero_triton.paged import paged_attention

    sinks = torch.linspace(-3.0, 6.0, 32, device="cuda")
    each = torch.linspace(0.5, 2.0, 8, device="cuda")
    for lengths in ((5,), (700, 20, 1), (3000,) * 40):
        q, k, v, batch = paged(dtype, 16, "NHD", 32, 8, 64, lengths)
        for last in ((sinks,), (sinks, True, each, each), (None, True, 0.5, each[:1])):
            rest = (None, None, None, None, True, "NHD", *last)
            close("attention", paged_attention(q, k, v, batch, *rest), true_paged(q, k, v, batch, *rest), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_latent_decode(heads, dtype):
    from layerzero.backends.reference.varlen import mla_paged_attention as truth
    from layerzero_triton.mla import mla_paged_attention

    for lengths in ((5,), (700, 20, 1), (2000,) * 40):
        blocks = -(-max(lengths) // 64)
        queries = [torch.randn(len(lengths), heads, dim, device="cuda", dtype=dtype) for dim in (512, 64)]
        caches = [torch.randn(len(lengths) * blocks, 64, dim, device="cuda", dtype=dtype) for dim in (512, 64)]
        table = torch.randperm(len(lengths) * blocks, device="cuda").view(len(lengths), blocks).int()
        batch = make_paged_batch(table, torch.tensor(lengths, device="cuda", dtype=torch.int32))
        given = (*queries, *caches, batch, 0.05, True)
        close("attention", mla_paged_attention(*given), truth(*given), dtype)


def test_paged_decode_stays_right_in_a_graph_whose_contexts_grow():
    from layerzero_triton.paged import paged_attention

    q, k, v, batch = paged(torch.bfloat16, 16, "NHD", 32, 8, 128, (700, 20, 1))
    rest = (None, None, None, None, False, "NHD")
    paged_attention(q, k, v, batch, *rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = paged_attention(q, k, v, batch, *rest)
    for lengths in ((701, 21, 2), (704, 100, 30)):
        batch.context_lens.copy_(torch.tensor(lengths))
        graph.replay()
        fresh = make_paged_batch(batch.block_tables, batch.context_lens)
        close("attention", kept, true_paged(q, k, v, fresh, *rest), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 128256), (7, 1000), (64, 32000), (3, 5)])
def test_sampling_draws_the_reference_token(rows, vocab, dtype):
    from layerzero_triton import sampling

    logits = made(rows, vocab, dtype=dtype, scale=3.0)
    logits[0] = logits[0].round()

    def spread(low, high):
        return torch.rand(rows, device="cuda") * (high - low) + low

    for filters in (
        (50, None, None, 1.0), (None, 0.9, None, 0.8), (50, 0.9, None, 1.0), (None, None, None, 1.0),
        (200, 0.9, None, 1.0), (1000, 0.95, 0.01, 1.2), (None, 0.0, None, 1.0), (1, None, None, 1.0),
        (torch.randint(0, 99, (rows,), device="cuda"), spread(0.1, 1.0), spread(0.0, 0.1), spread(0.0, 2.0)),
    ):  # fmt: skip
        for seed in range(5):
            got = sampling.sample(logits, *filters, torch.Generator("cuda").manual_seed(seed))
            want = true_sampling.sample(logits, *filters, torch.Generator("cuda").manual_seed(seed))
            assert torch.equal(got, want), (filters, seed)


@pytest.mark.parametrize("k", [1, 50, 200, 1000])
@pytest.mark.parametrize("vocab", [1001, 32000, 128256])
def test_sampling_of_equal_infinite_and_broken_logits(vocab, k):
    from layerzero_triton import sampling

    logits = made(8, vocab, scale=3.0)
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3] = -torch.inf
    logits[3, 7::400] = 1.0
    logits[4, vocab - 1] = torch.nan
    logits[5] = -torch.inf
    logits[6, ::97] = torch.inf
    logits[7] = logits[7].clamp(max=1.0)
    for filters in ((k, None, None, 1.0), (k, 0.9, None, 0.7), (k, 0.5, 0.1, 1.5), (None, 0.9, None, 1.0)):
        for seed in range(3):
            got = sampling.sample(logits, *filters, torch.Generator("cuda").manual_seed(seed))
            want = true_sampling.sample(logits, *filters, torch.Generator("cuda").manual_seed(seed))
            assert torch.equal(got, want), (filters, seed)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 24, 32])
def test_few_rows_times_a_weight_and_through_a_gated_block(rows, dtype):
    from layerzero.backends.reference import feed_forward
    from layerzero_triton import few_rows

    for n, k in ((256, 2048), (1000, 712), (40, 40)):
        x, weight, bias = made(rows, k, dtype=dtype), made(n, k, dtype=dtype, scale=k**-0.5), made(n, dtype=dtype)
        back = made(k, n // 2, dtype=dtype, scale=n**-0.5)
        want = true_linear.linear(x[:1].double(), weight.double(), bias.double(), "silu")
        close("linear", few_rows.linear(x[:1], weight, bias, "silu"), want, dtype, k=k)
        rest = (None, "silu", None, None, None)
        block = feed_forward.mlp(x.double(), weight.double(), back.double(), *rest)
        close("mlp", few_rows.mlp(x, weight, back, *rest), block, dtype, k=k)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_linear_with_a_quantized_weight(granularity, fmt, dtype):
    from layerzero_triton.linear import dequantized

    sizes = [(1, 4096, 4096), (33, 1000, 1280), (300, 520, 512), (17, 40, 128)]
    for rows, n, k in sizes if granularity == "block" else [*sizes, (5, 24, 100)]:
        x, bias = made(rows, k, dtype=dtype), made(n, dtype=dtype)
        for options in ({}, {"symmetric": False}) if fmt == "int8" else ({},):
            weight = lz.quantize(made(n, k, scale=0.02), fmt, granularity=granularity, **options)
            want = true_linear.linear(x.double(), weight, bias.double(), "silu")
            close("linear", dequantized(x, weight, bias, "silu"), want, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_linear_with_four_bit_codes(granularity, dtype):
    from layerzero_triton.linear import dequantized

    for rows, n, k in [(1, 4096, 4096), (33, 1000, 1280), (300, 520, 512), (17, 40, 128)]:
        x, bias = made(rows, k, dtype=dtype), made(n, dtype=dtype)
        for options in ({}, {"symmetric": False}):
            weight = lz.quantize(made(n, k, scale=0.02), "int4", granularity=granularity, **options)
            want = true_linear.linear(x.double(), weight, bias.double(), "silu")
            close("linear", dequantized(x, weight, bias, "silu"), want, dtype)


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 300])
def test_linear_with_an_mxfp4_weight(rows):
    from layerzero_triton.linear import dequantized, widened

    for n, k in [(4096, 4096), (1000, 1280), (40, 96)]:
        x, bias = made(rows, k, dtype=torch.bfloat16), made(n, dtype=torch.bfloat16)
        weight = lz.quantize(made(n, k, scale=0.02), "mxfp4")
        want = true_linear.linear(x.double(), weight, bias.double(), "silu")
        for kernel in (dequantized, widened):
            close("linear", kernel(x, weight, bias, "silu"), want, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("fmt", ["int4", "mxfp4"])
def test_linear_of_one_row_with_four_bit_codes(fmt, dtype):
    from layerzero_triton.few_rows import linear

    for n, k in [(4096, 4096), (40, 1024), (28672, 8192)]:
        x, bias = made(1, k, dtype=dtype), made(n, dtype=dtype)
        weight = lz.quantize(made(n, k, scale=0.02), fmt, granularity="block")
        for last in ((None, None), (bias, "silu")):
            want = true_linear.linear(x.double(), weight, None if last[0] is None else bias.double(), last[1])
            close("linear", linear(x, weight, *last), want, dtype)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_linear_of_rows_encoded_in_fp8(granularity):
    from layerzero.model.packed import PackedWeight
    from layerzero_triton.linear import dynamic

    for rows, n, k in [(4, 4096, 4096), (300, 528, 512), (2048, 4096, 4096)]:
        x, bias = made(rows, k, dtype=torch.bfloat16), made(n, dtype=torch.bfloat16)
        x[1] = 0.0
        weight = PackedWeight(lz.quantize(made(n, k, scale=0.02), "fp8_e4m3", granularity=granularity), act="dynamic")
        for last in ((None, None), (bias, "silu")):
            close("linear", dynamic(x, weight, *last), true_linear.linear(x, weight, *last), torch.bfloat16)


def test_rows_in_fp8_are_the_codes_of_the_reference():
    from layerzero_triton.linear import _encode

    x = made(37, 1000, dtype=torch.bfloat16)
    x[3] = 0.0
    want = lz.quantize(x, "fp8_e4m3", granularity="channel", backend="reference")
    codes, scales = torch.empty_like(want.data), torch.empty(1, 37, device="cuda")
    _encode((37, 1, 1), (x, codes, scales), (1000, 1000, 37, 1), (1024, 1, 1), 4)
    assert torch.equal(codes.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(scales.view(-1), want.scale.view(-1))
    there = lz.quantize(x.cpu(), "fp8_e4m3", granularity="channel", backend="reference")
    assert torch.equal(there.scale, want.scale.cpu())  # a GPU's scales are a CPU's


def test_every_number_of_bfloat16_under_every_peak_has_the_code_of_the_reference():
    """128 significands of the peak by those of the number and 24 exponents below it: other pairs do not differ."""
    from layerzero_triton.linear import _encode

    steps = 1 + torch.arange(128, device="cuda") / 128
    below = torch.outer(2.0 ** -torch.arange(1, 25, device="cuda"), steps).view(1, -1)
    codes, scales = torch.empty(128, 3073, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(1, 128, device="cuda")
    for factor in (1.0, -(2.0**20), 2.0**100, 2.0**-100):  # the last two where quotients are divided for
        x = (torch.cat([steps[:, None], below.expand(128, -1)], dim=1) * factor).to(torch.bfloat16)
        want = lz.quantize(x, "fp8_e4m3", granularity="channel", backend="reference")
        _encode((128, 1, 1), (x, codes, scales), (3073, 3073, 128, 1), (4096, 1, 1), 4)
        assert torch.equal(codes.view(torch.uint8), want.data.view(torch.uint8)), factor
        assert torch.equal(scales.view(-1), want.scale.view(-1))
    x[0, 5], x[1, 5], x[2, :] = float("nan"), float("inf"), 0.0
    want = lz.quantize(x[:3], "fp8_e4m3", granularity="channel", backend="reference")
    _encode((3, 1, 1), (x, codes, scales), (3073, 3073, 128, 1), (4096, 1, 1), 4)
    assert torch.equal(codes[:3].float().isnan(), want.data.float().isnan())
    assert torch.equal(scales[0, :3].isnan(), want.scale.view(-1).isnan()) and scales[0, 2] == 1.0


def experts_hold(args, dtype):
    """The table's tolerance where the shares of a token add up to one, as routers give them. With any shares no
    further from the truth than torch's own products in this dtype: hidden values are rounded once here, there twice.
    """
    from layerzero.backends.reference.moe import moe as truth
    from layerzero_triton.experts import moe

    x, gate_up, down, shares, ids, activation, offset, up_bias, down_bias, *gate = args
    whole = (x, gate_up, down, shares / shares.sum(-1, keepdim=True), *args[4:])
    close("moe", moe(*whole), truth(*whole), dtype, k=x.shape[1])

    want = truth(*(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
    gate_up, down = (w if isinstance(w, torch.Tensor) else lz.dequantize(w, dtype) for w in (gate_up, down))
    plain = torch.zeros_like(want)
    for expert in range(down.shape[0]):
        token, place = (ids == expert + offset).nonzero(as_tuple=True)
        bias, back = (None if item is None else item[expert] for item in (up_bias, down_bias))
        inner = true_linear.gated(F.linear(x[token], gate_up[expert], bias), activation, down.shape[2], *gate)
        result = F.linear(inner, down[expert], back)
        plain.index_add_(0, token, result.double() * shares[token, place, None])
    ours, theirs = (moe(*args).double() - want).abs(), (plain.to(dtype).double() - want).abs()
    assert ours.max() <= theirs.max()
    assert ours.square().mean() <= theirs.square().mean()


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 2000])
def test_experts_of_codes(tokens, fmt):
    for oss, hidden, inner in ((False, 256, 128), (True, 2880, 384)):
        if fmt != "mxfp4" and hidden % 128:
            continue
        scales = {} if fmt == "mxfp4" else {"granularity": "block" if fmt == "fp8_e4m3" else "channel"}
        weights = (made(8, 2 * inner, hidden, scale=hidden**-0.5), made(8, hidden, inner, scale=inner**-0.5))
        biases = [made(8, size, dtype=torch.bfloat16) for size in (2 * inner, hidden)] if oss else [None, None]
        args = (
            made(tokens, hidden, dtype=torch.bfloat16), *(lz.quantize(w, fmt, **scales) for w in weights),
            torch.rand(tokens, 4, device="cuda"), torch.rand(tokens, 8, device="cuda").topk(4, -1).indices,
            "swigluoai" if oss else "silu", 0, *biases, 1.702, 7.0 if oss else None, oss,
        )  # fmt: skip
        experts_hold(args, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 2000])
def test_experts(tokens, dtype):
    for oss, hidden, inner in ((False, 256, 192), (True, 288, 160), (True, 100, 36)):
        gate_up = made(8, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
        down = made(8, hidden, inner, dtype=dtype, scale=inner**-0.5)
        if oss:
            gate_up, down = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (gate_up, down))
        biases = (made(8, 2 * inner, dtype=dtype), made(8, hidden, dtype=dtype)) if oss else (None, None)
        ids = torch.rand(tokens, 24, device="cuda").topk(4, -1).indices
        args = (
            made(tokens, hidden, dtype=dtype), gate_up, down, torch.rand(tokens, 4, device="cuda"), ids,
            "swigluoai" if oss else "silu", 8 if oss else 0, *biases, 1.702, 7.0 if oss else None, oss,
        )  # fmt: skip
        experts_hold(args, dtype)


@pytest.mark.req("R-GRAPH-04")
def test_capture_and_replay():
    from layerzero_triton import activation, experts, layer_norm, norm, rope

    x, r, w = made(16, 4096, dtype=torch.bfloat16), made(16, 4096, dtype=torch.bfloat16), made(4096)
    replayed(lambda: norm.rms_norm(x, w, 1e-6), x)
    replayed(lambda: norm.add_rms_norm(x, r, w, 1e-6), x, r)
    replayed(lambda: layer_norm.layer_norm(x, w, w, 1e-5), x)
    replayed(lambda: activation.silu_and_mul(x), x)
    q, k, cos, sin = made(2, 8, 5, 64), made(2, 2, 5, 64), made(5, 32), made(5, 32)
    replayed(lambda: rope.rope(q, k, cos, sin, False, "BHSD", None, False), q, k)
    gate_up, down, shares = made(4, 64, 4096, scale=0.1), made(4, 4096, 32, scale=0.1), torch.rand(16, 2, device="cuda")
    ids = torch.randint(4, (16, 2), device="cuda")
    given = (gate_up.bfloat16(), down.bfloat16(), shares, ids, "silu", 0, None, None, 1.702, None, False)
    replayed(lambda: experts.moe(x, *given), x)


def test_a_kernel_launched_before_the_last_one_has_ended_reads_what_that_wrote():
    """Decode steps are chains of short kernels, each launched while the one in front of it runs."""
    from layerzero_triton import few_rows, norm, rope

    x, w = made(1, 2048, dtype=torch.bfloat16), made(2048, dtype=torch.bfloat16)
    weights = [made(2048, 2048, dtype=torch.bfloat16, scale=2048**-0.5) for _ in range(3)]
    blocks = [(made(8192, 2048, dtype=torch.bfloat16, scale=0.02), made(2048, 4096, dtype=torch.bfloat16, scale=0.02))]
    cos, sin = made(1, 64), made(1, 64)

    def chain(between):
        h = x
        for weight in weights * 8:
            h, _ = norm.add_rms_norm(few_rows.linear(h, weight, None, None), h, w, 1e-6)
            between()
            heads, _ = rope.rope(h.view(1, 16, 1, 128), None, cos, sin, False, "BHSD", None, False)
            between()
            h = norm.rms_norm(few_rows.mlp(heads.reshape(1, 2048), *blocks[0], None, "silu", None, None, None), w, 1e-6)
            between()
        return h

    want = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = chain(lambda: None)
    for _ in range(50):
        assert torch.equal(chain(lambda: None), want)
        kept.zero_()
        graph.replay()
        assert torch.equal(kept, want)


def test_the_second_launch_of_a_shape_does_not_go_through_triton():
    from layerzero_triton import norm
    from layerzero_triton.kernels.launch import plain_launches

    x, w = made(16, 4096, dtype=torch.bfloat16), made(4096, dtype=torch.bfloat16)
    first = norm.rms_norm(x, w, 1e-6)
    before = plain_launches[0]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())  # its inputs are made there
    with torch.cuda.stream(other):
        second = norm.rms_norm(x, w, 1e-6)
    torch.cuda.synchronize()
    assert plain_launches[0] == before
    assert torch.equal(first, second)


def test_other_batch_sizes_of_paged_decode_meet_no_compiler():
    from triton import knobs

    from layerzero_triton.paged import paged_attention

    rest = (None, None, None, None, False, "NHD")
    paged_attention(*paged(torch.float16, 16, "NHD", 16, 4, 64, (50,)), *rest)
    found = []
    listener, knobs.compilation.listener = knobs.compilation.listener, lambda **kw: found.append(kw["src"].name)
    try:
        for lengths in ((5000,), (40,) * 300, (900,) * 9):
            paged_attention(*paged(torch.float16, 16, "NHD", 16, 4, 64, lengths), *rest)
    finally:
        knobs.compilation.listener = listener
    assert found == []


def test_a_kernel_of_ones_own_runs_natively(pytestconfig):
    import subprocess
    import sys

    example = pytestconfig.rootpath / "examples" / "custom_triton_kernel.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "triton.silu_and_mul.mine on cuda" in done.stdout

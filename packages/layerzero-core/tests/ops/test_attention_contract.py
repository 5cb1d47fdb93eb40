"""What attention means, asked of every kernel: scale, odd values, head groups, causality, windows, log-sum-exp."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from layerzero.numerics import assert_close, tolerance

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KERNELS = {
    "cpu": ["reference.attention.plain", "sdpa.attention.flash_cpu", "sdpa.attention.math"],
    "cuda": [
        "reference.attention.plain", "sdpa.attention.flash", "sdpa.attention.efficient", "sdpa.attention.cudnn",
        "sdpa.attention.math",
    ],
}  # fmt: skip
PLACES = [(device, kernel) for device in DEVICES for kernel in KERNELS[device]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
everywhere = pytest.mark.parametrize(("device", "kernel"), PLACES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def qkv(rows, cols, *, batch=1, heads=4, kv_heads=4, dim=16, dtype=torch.float32, device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, rows, dim), (batch, kv_heads, cols, dim), (batch, kv_heads, cols, dim))
    return [torch.randn(shape, generator=gen).to(device, dtype) for shape in shapes]


ANSWERS: list[bool] = []
# What kernels of the CPU take in no form: torch's math kernel gives no log-sum-exp, a bias in half precision has too
# few digits for the distances of a long context.
REFUSED = {
    "test_halves_of_the_keys_merge_by_their_lse": {"sdpa.attention.math"},
    "test_alibi_over_a_long_context": {"sdpa.attention.flash_cpu", "sdpa.attention.math"},
}


@pytest.fixture(autouse=True)
def some_call_was_answered(request):
    """A kernel that refuses everything a test asks has shown nothing; on the CPU, where all kernels are known."""
    ANSWERS.clear()
    yield
    given = getattr(request.node, "callspec", None)
    if ANSWERS and not any(ANSWERS) and given is not None and given.params.get("device") == "cpu":
        assert given.params["kernel"] in REFUSED.get(request.node.originalname, ()), "it refused every call"


def run(kernel, *args, **options):
    """The kernel's result, or None where it says with a reason that it does not take the call; the reference does."""
    verdict = lz.explain("attention", *args, backend=kernel, **options).decision.candidate(kernel)
    ANSWERS.append(verdict.accepted)
    if not verdict.accepted:
        assert kernel != "reference.attention.plain", verdict.reasons
        assert verdict.reasons and verdict.reasons[0].hint
        return None
    return lz.attention(*args, backend=kernel, **options)


# -- one call for all of them --------------------------------------------------------------------------
@pytest.mark.req("R-API-01")
@pytest.mark.parametrize("backend", [None, "reference", "sdpa.attention.math"])
def test_it_is_called_as_torchs_own_is_in_the_same_places_with_the_same_defaults(oracle, backend):
    q, k, v = qkv(6, 9)
    keep = torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    tol = tolerance("attention", q.dtype)
    calls = [
        ((), {}, {}),
        ((keep,), {}, {"mask": keep}),
        ((None, 0.0, True), {}, {"causal": True}),
        ((None, 0.0, False), {"scale": 0.7}, {"scale": 0.7}),
        ((), {"attn_mask": keep, "dropout_p": 0.0, "is_causal": False, "scale": 0.7}, {"mask": keep, "scale": 0.7}),
    ]
    for _ in range(2):  # cold, then hot
        for rest, named, told in calls:
            want, _ = oracle.attention(q, k, v, **told)
            torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, *rest, **named)
            out = lz.attention(q, k, v, *rest, **named, backend=backend)
            assert_close(out, want, tol)
            assert_close(torchs, want, tol)
    found = lz.which("attention", q, k, v, backend=backend)
    assert found.startswith(backend or "") and lz.explain("attention", q, k, v, backend=backend).ran == found
    grouped = qkv(6, 6, heads=4, kv_heads=2)
    want, _ = oracle.attention(*grouped, causal=True)
    assert_close(lz.attention(*grouped, is_causal=True, enable_gqa=True, backend=backend), want, tol)
    swapped = [t.transpose(1, 2) for t in grouped]
    out = lz.attention(*swapped, is_causal=True, layout="BSHD", backend=backend)
    assert_close(out.transpose(1, 2), want, tol)


# -- scale ---------------------------------------------------------------------------------------------
@pytest.mark.req("R-OP-02")
@everywhere
@pytest.mark.parametrize("dim", [8, 16, 64, 80])
def test_the_default_scale_is_one_over_the_root_of_head_dim(oracle, device, kernel, dim):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = qkv(7, 9, dim=dim, dtype=dtype, device=device)
    tol = tolerance("attention", dtype)
    found = run(kernel, q, k, v)
    if found is not None:
        assert_close(found, oracle.attention(q, k, v, scale=dim**-0.5)[0], tol)
        assert_close(run(kernel, q, k, v, scale=dim**-0.5), found, tol)
        own = run(kernel, q, k, v, scale=0.7)
        assert_close(own, oracle.attention(q, k, v, scale=0.7)[0], tol)
        assert (own - found).abs().max() > 0.05
        level = run(kernel, q, k, v, scale=0.0)
        assert_close(level, v.double().mean(2, keepdim=True).expand_as(level), tol)


@pytest.mark.req("R-OP-02")
@everywhere
@pytest.mark.parametrize("scale", [-0.5, -3, 0.0])
@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_a_scale_of_zero_or_less_still_masks(oracle, device, kernel, scale, causal):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = qkv(7, 7, dtype=dtype, device=device)
    keep = oracle.visible(7, 7, causal).to(device)
    want, _ = oracle.attention(q, k, v, scale=scale, causal=causal)
    for options in ({"is_causal": causal}, {"attn_mask": keep}):
        out = run(kernel, q, k, v, scale=scale, **options)
        if out is not None:
            assert_close(out, want, tolerance("attention", dtype))


@pytest.mark.req("R-OP-02")
def test_a_negative_scale_masks_in_a_compiled_graph_too(oracle):
    q, k, v = (t.requires_grad_() for t in qkv(7, 7))
    compiled = torch.compile(lambda *t: lz.attention(*t, is_causal=True, scale=-0.5), fullgraph=True, backend="eager")
    assert_close(
        compiled(q, k, v), oracle.attention(q, k, v, causal=True, scale=-0.5)[0], tolerance("attention", q.dtype)
    )


# -- odd values ------------------------------------------------------------------------------------------
@pytest.mark.req("R-OP-03")
@everywhere
@every_dtype
def test_zero_in_zero_out(device, kernel, dtype):
    q, k, v = (torch.zeros_like(t) for t in qkv(5, 5, dtype=dtype, device=device))
    for options in ({}, {"is_causal": True}):
        out = run(kernel, q, k, v, **options)
        assert out is None or torch.count_nonzero(out) == 0


@pytest.mark.req("R-OP-03")
@everywhere
def test_nan_reaches_what_depends_on_it_and_nothing_else(device, kernel):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = qkv(6, 6, dtype=dtype, device=device)
    rows = torch.arange(6, device=device)
    for place in (0, 1, 2):
        args = [q.clone(), k.clone(), v.clone()]
        args[place][0, 1, 3, 0] = math.nan
        out = run(kernel, *args)
        if out is None:
            return
        assert out[0, [0, 2, 3]].isfinite().all(), "another head"
        hit = out[0, 1].isnan().any(-1)
        assert torch.equal(hit, rows == 3 if place == 0 else torch.ones_like(hit))


@pytest.mark.req("R-OP-03")
@everywhere
def test_infinite_values_and_queries(device, kernel):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = qkv(5, 5, dtype=dtype, device=device)
    big = v.clone()
    big[0, 0, 2, 1] = math.inf
    out = run(kernel, q, k, big)
    if out is not None:
        assert (out[0, 0, :, 1] == math.inf).all()
        assert out[0, 1:].isfinite().all() and out[0, 0, :, 2:].isfinite().all()
        loud = q.clone()
        loud[0, 0, 2, 1] = math.inf
        out = run(kernel, loud, k, v)
        assert out[0, 0, 2].isnan().all() or out[0, 0, 2].isfinite().all()  # inf - inf, or one key takes all
        assert out[0, 0, [0, 1, 3, 4]].isfinite().all()


@pytest.mark.req("R-OP-03")
@everywhere
@every_dtype
@pytest.mark.parametrize("size", ["denormal", "tiny", "1e4", "huge"])
def test_denormal_tiny_and_huge_values_are_handled(oracle, device, kernel, dtype, size):
    limits = torch.finfo(dtype)
    # With powers of two and head_dim 16 the scores are exact, so that keys which tie stay tied.
    magnitude = {
        "denormal": limits.smallest_normal / 4, "tiny": limits.tiny * 8, "1e4": 1e4, "huge": 2.0**14,
    }[size]  # fmt: skip
    q, k, v = (t.sign() * magnitude for t in qkv(5, 6, dtype=dtype, device=device))
    assert q.abs().max() > 0
    out = run(kernel, q, k, v)
    if out is not None:
        assert out.isfinite().all()
        assert_close(out, oracle.attention(q, k, v)[0], tolerance("attention", dtype))
        # Some CPUs flush denormals in their bfloat16 instructions, far below any tolerance.
        assert size == "denormal" or out.abs().max() > 0


# -- head groups -----------------------------------------------------------------------------------------
@pytest.mark.req("R-OP-04")
@everywhere
@every_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (8, 1), (16, 2), (6, 2)])
def test_query_heads_read_the_kv_head_of_their_group(oracle, device, kernel, dtype, heads, kv_heads):
    q, k, v = qkv(9, 11, heads=heads, kv_heads=kv_heads, dtype=dtype, device=device)
    out = run(kernel, q, k, v)
    if out is None:
        assert device == "cuda"
        return
    assert_close(out, oracle.attention(q, k, v)[0], tolerance("attention", dtype))
    other = v.clone()
    other[:, 0] += 1.0
    moved = (run(kernel, q, k, other) != out).any(-1).any(-1)[0]
    assert moved.tolist() == [h < heads // kv_heads for h in range(heads)]


# -- causality -------------------------------------------------------------------------------------------
@pytest.mark.req("R-OP-05")
@everywhere
@pytest.mark.parametrize("causal", [True, "bottom_right"])
@pytest.mark.parametrize(("rows", "cols"), [(12, 12), (5, 12), (12, 5)])
def test_the_future_has_no_influence_and_the_past_has(oracle, device, kernel, causal, rows, cols):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = qkv(rows, cols, dtype=dtype, device=device)
    before = run(kernel, q, k, v, is_causal=causal)
    if before is None:
        return
    assert_close(before, oracle.attention(q, k, v, causal=causal)[0], tolerance("attention", dtype))
    if rows <= cols:
        assert (before - run(kernel, q, k, v)).abs().max() > 0.05, "causal changes nothing"
    sees = oracle.visible(rows, cols, causal)
    for j in (0, 2, cols - 1):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, j] += 5.0
        v2[:, :, j] -= 20.0
        after = run(kernel, q, k2, v2, is_causal=causal)
        assert (after != before).any(-1)[0, 0].tolist() == sees[:, j].tolist(), f"key {j}"


# -- windows ---------------------------------------------------------------------------------------------
@pytest.mark.req("R-OP-09", "R-OP-10")
@everywhere
@pytest.mark.parametrize(("size", "cols"), [(256, 300), (1024, 1100)])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_sliding_windows_of_256_and_1024(oracle, device, kernel, size, cols, causal):
    """The last rows of a long context: exactly size + 1 keys are read, from position - size to position."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    rows = 24
    q, k, v = qkv(rows, cols, heads=2, kv_heads=1, dtype=dtype, device=device)
    before = run(kernel, q, k, v, window=size, is_causal=causal)
    if before is None:
        return
    assert_close(before, oracle.attention(q, k, v, window=size)[0], tolerance("attention", dtype))
    v2 = v.clone()
    edge = cols - 10 - size  # the first key of row rows - 10
    v2[:, :, : edge + 1] += 100.0
    moved = (run(kernel, q, k, v2, window=size, is_causal=causal) != before).any(-1)[0, 0]
    assert moved.tolist() == [i <= rows - 10 for i in range(rows)]


@pytest.mark.req("R-OP-09", "R-OP-10")
@pytest.mark.parametrize("size", [256, 1024])
def test_a_rolling_cache_of_the_window_is_enough(size):
    """Decode with the last size + 1 keys gives what the whole cache gives: dense, packed and paged."""
    length = size + 77
    q, k, v = qkv(1, length, heads=4, kv_heads=2)
    full = lz.attention(q, k, v, window=size)
    short = lz.attention(q, k[:, :, -size - 1 :], v[:, :, -size - 1 :], window=size)
    tol = tolerance("attention", torch.float32)
    assert_close(short, full, tol)
    assert (lz.attention(q, k, v) - full).abs().max() > 1e-3, "the window hides nothing"
    token, keys, values = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
    cu_q, cu_k = torch.tensor([0, 1]), torch.tensor([0, length])
    packed = lz.varlen_attention(token, keys, values, cu_q, cu_k, is_causal="bottom_right", window=size)
    pages = -(-length // 16)
    caches = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pages * 16 - length)) for t in (keys, values)]
    table = torch.arange(pages, dtype=torch.int32)[None]
    lens = torch.tensor([length], dtype=torch.int32)
    paged = lz.paged_attention(token, *(c.view(pages, 16, 2, 16) for c in caches), table, lens, window=size)
    for found in (packed, paged):
        assert_close(found, full[0].transpose(0, 1), tol)


@pytest.mark.req("R-OP-09", "R-SEL-05")
def test_a_kernel_without_windows_says_so_and_an_explicit_fallback_runs(lab):
    plain = lab.kernel("a.attention.plain", priority=99, features=frozenset({"gqa", "causal_bottom_right"}))
    lab.use(plain, only=True)
    args = qkv(20, 300)
    report = lz.explain("attention", *args, window=256)
    (why,) = report.decision.candidate("a.attention.plain").reasons
    assert (why.code, why.value) == ("WINDOW_UNSUPPORTED", "256, 0")
    assert report.chosen == "reference.attention.plain"
    assert any(note.code == "FALLBACK_USED" for note in report.decision.notes)
    assert lab.run(lz.attention, *args, window=256)[1] == ["reference.attention.plain"]


# -- log-sum-exp -----------------------------------------------------------------------------------------
@everywhere
@every_dtype
def test_halves_of_the_keys_merge_by_their_lse(oracle, device, kernel, dtype):
    q, k, v = qkv(9, 40, kv_heads=2, dtype=dtype, device=device)
    parts = [run(kernel, q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 13), slice(13, 40))]
    if parts[0] is None:
        return
    (out_a, lse_a), (out_b, lse_b) = parts
    assert lse_a.dtype is torch.float32 and lse_a.shape == q.shape[:3]
    total = torch.logaddexp(lse_a, lse_b)
    weights = [(lse - total).exp().unsqueeze(-1).double() for lse in (lse_a, lse_b)]
    want, want_lse = oracle.attention(q, k, v)
    assert_close(weights[0] * out_a.double() + weights[1] * out_b.double(), want, tolerance("attention", dtype))
    assert_close(total, want_lse, tolerance("attention", dtype))


# -- positions -------------------------------------------------------------------------------------------
@pytest.mark.req("R-OP-13", "R-POS-03", "R-SEL-19")
@everywhere
@every_dtype
def test_alibi_over_a_long_context(oracle, device, kernel, dtype):
    """At distance 4000 a bias of a thousand meets scores of one: it must not be rounded to sixteen bits."""
    q, k, v = qkv(3, 4096, heads=8, kv_heads=8, dim=8, dtype=dtype, device=device)
    slopes = lz.alibi_slopes(8, device=device)
    for causal in (False, "bottom_right"):
        out = run(kernel, q, k, v, alibi_slopes=slopes, is_causal=causal)
        if out is None:  # no kernel may fold the bias into a mask of sixteen bits
            assert dtype is not torch.float32 or device == "cuda"
            continue
        want, _ = oracle.attention(q, k, v, slopes=slopes, causal=causal)
        assert_close(out, want, tolerance("attention", dtype))


@pytest.mark.req("R-OP-13")
@pytest.mark.parametrize("interleaved", [False, True])
@every_dtype
def test_rope_and_attention_are_the_rotation_by_complex_numbers(oracle, dtype, interleaved):
    """Each pair of coordinates as one complex number, turned by its position's angle; for a decode step too."""
    q, k, v = qkv(12, 12, heads=4, kv_heads=2, dtype=dtype)
    theta = 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angles = torch.arange(12, dtype=torch.float64)[:, None] * theta
    turned = []
    for t in (q, k):
        pairs = t.double().unflatten(-1, (8, 2) if interleaved else (2, 8))
        first, second = pairs.unbind(-1 if interleaved else -2)
        spun = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        turned.append(torch.stack((spun.real, spun.imag), -1 if interleaved else -2).flatten(-2))
    want, _ = oracle.attention(*turned, v, causal=True)
    cos, sin = angles.cos().float(), angles.sin().float()
    full = lz.attention(*lz.rope(q, k, cos, sin, interleaved=interleaved), v, is_causal=True)
    assert_close(full, want, tolerance("attention", dtype))
    last = torch.tensor([11])
    step, _ = lz.rope(q[:, :, 11:], None, cos, sin, interleaved=interleaved, position_ids=last)
    _, keys = lz.rope(q, k, cos, sin, interleaved=interleaved)
    assert_close(lz.attention(step, keys, v), want[:, :, 11:], tolerance("attention", dtype))


@pytest.mark.req("R-OP-13", "R-SEL-19")
def test_fused_slopes_and_the_written_out_bias_agree():
    q, k, v = qkv(9, 33, heads=8, kv_heads=8)
    slopes = lz.alibi_slopes(8)
    fused = lz.attention(q, k, v, alibi_slopes=slopes, backend="reference")
    place = torch.arange(9)[:, None] + 24 - torch.arange(33)
    bias = -slopes[:, None, None] * place.abs()
    for backend in (None, "reference", "sdpa.attention.flash_cpu", "sdpa.attention.math"):
        assert_close(lz.attention(q, k, v, bias, backend=backend), fused, tolerance("attention", torch.float32))
        folded = lz.attention(q, k, v, alibi_slopes=slopes, backend=backend)
        assert_close(folded, fused, tolerance("attention", torch.float32))

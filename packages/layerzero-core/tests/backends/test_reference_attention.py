"""The reference attention against torch's SDPA, a loop in float64, and what must hold for any attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from layerzero.backends.reference.attention import attention
from layerzero.model.attention import slopes_of_heads as alibi_slopes
from layerzero.numerics import assert_close, tolerance

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXACT64 = tolerance("attention", "float64")


def run(q, k, v, *, mask=None, p=0.0, causal=False, scale=None, window=None, softcap=None, alibi=None, lse=False):
    return attention(q, k, v, mask, p, causal, scale, window, softcap, alibi, lse)


def qkv(batch=2, heads=4, kv_heads=4, seq_q=7, seq_k=7, dim=8, dtype=torch.float64, seed=0, dim_v=None):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    return (
        draw(batch, heads, seq_q, dim),
        draw(batch, kv_heads, seq_k, dim),
        draw(batch, kv_heads, seq_k, dim_v or dim),
    )


def loop(q, k, v, *, mask=None, causal=False, scale=None, window=None, softcap=None, alibi=None):
    """Attention one number at a time, in Python floats."""
    batch, heads, seq_q, dim = q.shape
    seq_k, group = k.shape[2], heads // k.shape[1]
    out = torch.zeros(batch, heads, seq_q, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(seq_q):
                end = i + seq_k - seq_q
                at = i if causal is True else end
                scores = {}
                for j in range(seq_k):
                    if causal and j > at:
                        continue
                    if window is not None and window[0] >= 0 and j < at - window[0]:
                        continue
                    if window is not None and window[1] >= 0 and j > at + window[1]:
                        continue
                    s = float(q[b, h, i] @ k[b, h // group, j]) * (dim**-0.5 if scale is None else scale)
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if alibi is not None:
                        s -= float(alibi[h] if alibi.dim() == 1 else alibi[b, h]) * abs(end - j)
                    if mask is not None:
                        entry = mask.expand(batch, heads, seq_q, seq_k)[b, h, i, j]
                        if mask.dtype == torch.bool:
                            if not entry:
                                continue
                        else:
                            s += float(entry)
                    scores[j] = s
                if not scores:
                    continue
                top = max(scores.values())
                total = sum(math.exp(s - top) for s in scores.values())
                lse[b, h, i] = top + math.log(total)
                out[b, h, i] = sum(math.exp(s - top) / total * v[b, h // group, j] for j, s in scores.items())
    return out, lse


def wanted(q, k, v, **kwargs):
    """SDPA in float64 on the same (rounded) inputs."""
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1], ids=["mha", "gqa2", "gqa4", "mqa8"])
@pytest.mark.req("R-OP-04", "R-TOL-01")
def test_matches_sdpa_within_the_table_for_every_head_grouping(dtype, causal, kv_heads):
    q, k, v = qkv(heads=8, kv_heads=kv_heads, seq_q=33, seq_k=33, dim=32, dtype=dtype)
    out = run(q, k, v, causal=causal)
    assert out.dtype == dtype
    assert_close(out, wanted(q, k, v, is_causal=causal), tolerance("attention", dtype))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.req("R-OP-04")
def test_a_gqa_group_shares_its_kv_head(kv_heads):
    q, k, v = qkv(heads=8, kv_heads=kv_heads)
    repeat = 8 // kv_heads
    expanded = run(q, k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1))
    assert_close(run(q, k, v), expanded, EXACT64)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 9), (9, 5), (1, 12), (6, 6)])
@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"window": (2, 0)},
        {"window": (-1, 1)},
        {"window": (0, 0)},
        {"softcap": 1.5},
        {"alibi": alibi_slopes(4)},
        {"alibi": torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])},
        {"scale": 0.7, "softcap": 3.0, "window": (3, 2), "alibi": alibi_slopes(4)},
    ],
    ids=["plain", "left", "right", "self-only", "softcap", "alibi", "alibi-batched", "all"],
)
@pytest.mark.req("R-OP-05")
def test_matches_a_loop_over_every_pair(seq_q, seq_k, causal, extra):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, seq_q=seq_q, seq_k=seq_k, dim=4)
    out, lse = run(q, k, v, causal=causal, lse=True, **extra)
    want, want_lse = loop(q, k, v, causal=causal, **extra)
    assert_close(out, want, EXACT64)
    assert_close(lse, want_lse, tolerance("attention", "float32"))
    assert lse.dtype == torch.float32


@pytest.mark.req("R-OP-05")
def test_the_two_causal_alignments_agree_only_when_lengths_are_equal():
    square = qkv(seq_q=6, seq_k=6)
    assert torch.equal(run(*square, causal=True), run(*square, causal="bottom_right"))
    q, k, v = qkv(seq_q=4, seq_k=6)
    top_left, bottom_right = run(q, k, v, causal=True), run(q, k, v, causal="bottom_right")
    assert not torch.allclose(top_left, bottom_right)
    assert_close(top_left, wanted(q, k, v, is_causal=True), EXACT64)
    assert_close(bottom_right, wanted(q, k, v, attn_mask=torch.ones(4, 6).tril(2).bool()), EXACT64)


@pytest.mark.req("R-OP-05")
def test_causal_differs_from_full_and_never_sees_the_future():
    q, k, v = qkv(seq_q=9, seq_k=9)
    causal = run(q, k, v, causal=True)
    assert not torch.allclose(causal, run(q, k, v))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 5:] += 100.0
    v2[:, :, 5:] -= 100.0
    changed = run(q, k2, v2, causal=True)
    assert torch.equal(causal[:, :, :5], changed[:, :, :5])
    assert not torch.allclose(causal[:, :, 5:], changed[:, :, 5:])


def test_decode_of_the_last_token_equals_the_last_row_of_prefill():
    q, k, v = qkv(heads=8, kv_heads=2, seq_q=16, seq_k=16, dtype=torch.float32)
    full = run(q, k, v, causal=True)
    step = run(q[:, :, -1:], k, v, causal="bottom_right")
    assert_close(step, full[:, :, -1:], tolerance("attention", "float32"))


@pytest.mark.parametrize("left", [0, 1, 4, 10])
def test_a_left_window_reads_exactly_left_plus_one_keys(left):
    q, k, v = qkv(seq_q=8, seq_k=8)
    before = run(q, k, v, causal="bottom_right", window=(left, -1))
    first = max(0, 7 - left)
    for j in range(8):
        v2 = v.clone()
        v2[:, :, j] += 1.0
        moved = not torch.equal(before[:, :, 7], run(q, k, v2, causal="bottom_right", window=(left, -1))[:, :, 7])
        assert moved == (j >= first), j


def test_an_unlimited_window_is_no_window():
    q, k, v = qkv()
    assert torch.equal(run(q, k, v, window=(-1, -1)), run(q, k, v))


@pytest.mark.req("R-OP-02")
def test_default_scale_is_one_over_sqrt_head_dim_and_a_given_scale_is_honoured():
    q, k, v = qkv(dim=16)
    assert torch.equal(run(q, k, v), run(q, k, v, scale=0.25))
    assert_close(run(q, k, v, scale=0.05), wanted(q, k, v, scale=0.05), EXACT64)
    assert not torch.allclose(run(q, k, v, scale=0.05), run(q, k, v))
    uniform = run(q, k, v, scale=0.0)
    assert_close(uniform, v.mean(dim=2, keepdim=True).expand_as(uniform), EXACT64)


@pytest.mark.parametrize("shape", [(7, 9), (1, 9), (2, 1, 7, 9), (1, 4, 1, 9), (2, 4, 7, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast_like_in_sdpa(shape, kind):
    q, k, v = qkv(heads=4, kv_heads=2, seq_q=7, seq_k=9)
    gen = torch.Generator().manual_seed(1)
    mask = torch.randn(shape, generator=gen, dtype=torch.float64)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True
    assert_close(run(q, k, v, mask=mask), wanted(q, k, v, attn_mask=mask), EXACT64)


def test_a_mask_and_a_causal_triangle_combine():
    q, k, v = qkv(seq_q=6, seq_k=6)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(2)) > 0.3
    want, _ = loop(q, k, v, mask=mask, causal=True)
    assert_close(run(q, k, v, mask=mask, causal=True), want, EXACT64)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_fully_masked_row_gives_zeros_and_clean_gradients(kind):
    q, k, v = (t.requires_grad_() for t in qkv(seq_q=3, seq_k=5))
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    if kind == "float":
        mask = torch.zeros(3, 5, dtype=torch.float64).masked_fill(~mask, -math.inf)
    out, lse = run(q, k, v, mask=mask, lse=True)
    assert torch.count_nonzero(out[:, :, 1]) == 0
    assert torch.count_nonzero(out[:, :, 0]) > 0
    assert (lse[:, :, 1] == -math.inf).all()
    assert lse[:, :, 0].isfinite().all()
    out.sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad.isfinite().all()
    assert torch.count_nonzero(q.grad[:, :, 1]) == 0


def test_rows_before_the_first_key_are_fully_masked_when_bottom_right():
    q, k, v = qkv(seq_q=5, seq_k=2)
    out, lse = run(q, k, v, causal="bottom_right", lse=True)
    assert torch.count_nonzero(out[:, :, :3]) == 0
    assert (lse[:, :, :3] == -math.inf).all()
    assert torch.allclose(out[:, :, 3], v[:, :, 0])


def test_no_keys_at_all_gives_zeros():
    q, k, v = qkv(seq_q=3, seq_k=0)
    out, lse = run(q, k, v, lse=True)
    assert out.shape == q.shape and torch.count_nonzero(out) == 0
    assert (lse == -math.inf).all()


def test_an_empty_batch_gives_an_empty_result():
    q, k, v = qkv(batch=0)
    assert run(q, k, v).shape == q.shape


def test_value_head_dim_may_differ():
    q, k, v = qkv(dim=8, dim_v=12)
    assert_close(run(q, k, v), wanted(q, k, v), EXACT64)


@pytest.mark.req("R-OP-03")
def test_zero_input_gives_zero_output():
    q, k, v = (torch.zeros(1, 2, 4, 8) for _ in range(3))
    assert torch.count_nonzero(run(q, k, v)) == 0


@pytest.mark.req("R-OP-03")
def test_nan_in_a_query_reaches_its_own_row_only():
    q, k, v = qkv()
    q[0, 1, 3, 0] = math.nan
    out = run(q, k, v)
    assert out[0, 1, 3].isnan().all()
    out[0, 1, 3] = 0.0
    assert out.isfinite().all()


@pytest.mark.req("R-OP-03")
@pytest.mark.parametrize("source", ["key", "value"])
def test_nan_in_key_or_value_reaches_every_row_of_its_head(source):
    q, k, v = qkv()
    (k if source == "key" else v)[1, 2, 0, 0] = math.nan
    out = run(q, k, v)
    assert out[1, 2].isnan().any(dim=-1).all()
    assert out[0].isfinite().all()


@pytest.mark.req("R-OP-03")
@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e-6, 2.0**13, 2.0**15], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_and_huge_values_stay_finite_and_right(magnitude, dtype):
    if magnitude < 1e-7 and dtype == torch.float16:
        magnitude = 6e-8  # the smallest denormal of float16
    # head_dim 16 and powers of two keep huge scores exact, so that tied keys stay tied
    q, k, v = (t.sign().to(dtype) * magnitude for t in qkv(seq_q=5, seq_k=5, dim=16, dtype=torch.float32))
    out = run(q, k, v)
    assert out.isfinite().all()
    assert_close(out, wanted(q, k, v), tolerance("attention", dtype))


@pytest.mark.req("R-OP-03")
def test_an_infinite_value_reaches_the_output():
    q, k, v = qkv()
    v[0, 0, 2, 1] = math.inf
    out = run(q, k, v)
    assert (out[0, 0, :, 1] == math.inf).all()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_lse_is_the_natural_log_sum_exp_of_the_scores(causal):
    q, k, v = qkv(seq_q=4, seq_k=6)
    _, lse = run(q, k, v, causal=causal, lse=True)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~torch.ones(4, 6).tril(0 if causal is True else 2).bool(), -math.inf)
    assert_close(lse, scores.exp().sum(-1).log(), tolerance("attention", "float32"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "bottom_right", "window": (1, 0)},
        {"softcap": 2.0, "alibi": alibi_slopes(2)},
    ],
    ids=["plain", "causal", "window", "softcap-alibi"],
)
def test_gradients_pass_gradcheck(options):
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, kv_heads=1, seq_q=3, seq_k=4, dim=2))
    assert torch.autograd.gradcheck(lambda *t: run(*t, **options), (q, k, v))


def test_gradient_flows_into_a_float_mask():
    q, k, v = qkv(batch=1, heads=1, kv_heads=1, seq_q=2, seq_k=3, dim=2)
    mask = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: run(q, k, v, mask=m), (mask,))


def test_dropout_keeps_the_mean_drops_the_share_and_follows_the_seed():
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 256, 8)
    v = torch.ones(1, 1, 256, 1)
    torch.manual_seed(0)
    first = run(q, k, v, p=0.25)
    torch.manual_seed(0)
    assert torch.equal(first, run(q, k, v, p=0.25))
    assert not torch.equal(first, run(q, k, v, p=0.25))
    assert abs(first.mean().item() - 1.0) < 0.02
    kept = first * 256 * 0.75  # how many of the 256 weights survived in each row
    assert torch.allclose(kept, kept.round(), atol=1e-2)
    assert abs(kept.mean().item() / 256 - 0.75) < 0.02


def test_strided_inputs_give_the_same_result_and_stay_untouched():
    q, k, v = qkv()
    want = run(q, k, v)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    copies = [t.clone() for t in strided]
    assert_close(run(*strided), want, EXACT64)
    assert all(torch.equal(a, b) for a, b in zip(strided, copies, strict=True))


def test_autocast_does_not_narrow_the_arithmetic():
    q, k, v = qkv(dtype=torch.float32, seq_q=16, seq_k=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(q, k, v)
    assert torch.equal(out, run(q, k, v))


def test_is_traceable_in_one_graph():
    traced = torch.compile(run, fullgraph=True, backend="eager", dynamic=False)
    q, k, v = qkv(heads=4, kv_heads=2, seq_q=3, seq_k=5, dtype=torch.float32)
    options = {"causal": "bottom_right", "window": (2, 0), "softcap": 5.0, "alibi": alibi_slopes(4), "lse": True}
    out, lse = traced(q, k, v, **options)
    want, want_lse = run(q, k, v, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)

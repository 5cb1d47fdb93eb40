"""Attention as models use it: prefill and decode, encoder and decoder, cross-attention, vision."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.numerics import assert_close, tolerance

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTHS = [128, 512, 2048, 8192, 32768]
# On the CPU a whole prefill of the longer ones takes hours; there the last rows of it are computed, over all keys.
WHOLE = 512 if PROVE else 128


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def rows_by_formula(oracle, q, k, v, rows):
    """Rows of one causal pass over all tokens, in float64, KV head by KV head."""
    group = q.shape[1] // k.shape[1]
    found = []
    for head in range(k.shape[1]):
        mine = slice(head * group, (head + 1) * group)
        parts = []
        for i in rows:
            seen = slice(0, i + 1)
            parts.append(
                oracle.attention(q[:, mine, i : i + 1], k[:, head : head + 1, seen], v[:, head : head + 1, seen])[0]
            )
        found.append(torch.cat(parts, dim=2))
    return torch.cat(found, dim=1)


# -- prefill and decode ----------------------------------------------------------------------------------
@pytest.mark.req("R-OP-06", "R-SEL-09")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", LENGTHS if PROVE else LENGTHS[:1])
def test_prefill_then_decode_is_one_causal_pass(oracle, device, dtype, length):
    """H=32, Hkv=8: the prompt in one call (its tail on the CPU when long), then three tokens one by one."""
    whole = device == "cuda" or length <= WHOLE
    dim, steps = (128 if device == "cuda" else 16), 3
    total = length + steps
    q = draw(1, 32, total, dim, dtype=dtype, device=device)
    k, v = (draw(1, 8, total, dim, seed=s, dtype=dtype, device=device) for s in (1, 2))
    first = 0 if whole else length - 8
    prompt = (q[:, :, first:length], k[:, :, :length], v[:, :, :length])
    options = {"is_causal": "bottom_right"}
    report = lz.explain("attention", *prompt, **options)
    assert not report.decision.is_fallback, "a kernel made for this shape is here"
    prefill = lz.attention(*prompt, **options)
    rows = sorted({*range(first, min(first + 3, length)), (first + length) // 2, length - 2, length - 1})
    got = prefill[:, :, [i - first for i in rows]]
    assert_close(got, rows_by_formula(oracle, q, k, v, rows), tolerance("attention", dtype), path="prefill")
    for i in range(length, total):
        step = (q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
        assert lz.which("attention", *step) != "reference.attention.plain"
        out = lz.attention(*step)
        assert_close(out, rows_by_formula(oracle, q, k, v, [i]), tolerance("attention", dtype), path=f"step {i}")


@pytest.mark.req("R-OP-06")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_the_end_of_a_long_prompt_and_the_steps_after_it_are_rows_of_one_causal_pass(device, length):
    """H=32, Hkv=8: the last four rows of the prompt in one call, then two tokens one by one.

    Each key is a code of its own and each query looks for one of them: the first, the next one to come, some between.
    Few digits: both formats hold them exactly, so that one result in float64 is that of both.
    """
    tail, total, dim = 4, length + 2, 16
    number = torch.arange(total) * 40_503 + torch.arange(8)[:, None]
    k = (number[..., None] >> torch.arange(dim) & 1).float().mul(2).sub(1)
    v = draw(8, total, dim).mul(16).round().div(16)
    place = torch.arange(length - tail, total)
    sought = (torch.arange(32)[:, None] * (place + 1) // 31).clamp(max=total - 1)
    q = k[torch.arange(32)[:, None] // 4, sought] * 24
    q, k, v, place = (t.to(device) for t in (q, k, v, place))
    scores = torch.einsum("hgrd,hcd->hgrc", q.double().unflatten(0, (8, 4)), k.double()) / dim**0.5
    shares = scores.masked_fill(torch.arange(total, device=device) > place[:, None], -torch.inf).softmax(-1)
    want = torch.einsum("hgrc,hcd->hgrd", shares, v.double()).flatten(0, 1)[None]
    for dtype in (torch.float16, torch.bfloat16):
        query, key, value = (t[None].to(dtype) for t in (q, k, v))
        assert torch.equal(key.float()[0], k) and torch.equal(value.float()[0], v)
        calls = [(slice(0, tail), length), *((slice(tail + i, tail + i + 1), length + i + 1) for i in range(2))]
        for rows, seen in calls:
            args = (query[:, :, rows], key[:, :, :seen], value[:, :, :seen])
            assert lz.which("attention", *args, is_causal="bottom_right") != "reference.attention.plain"
            out = lz.attention(*args, is_causal="bottom_right")
            assert out.dtype is dtype
            assert_close(out, want[:, :, rows], tolerance("attention", dtype), path=f"{dtype}, {seen} keys")


@pytest.mark.req("R-OP-06")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_step_of_a_decode_loop_is_the_row_of_prefill(dtype):
    q, k, v = draw(2, 8, 40, 16, dtype=dtype), draw(2, 2, 40, 16, seed=1, dtype=dtype), draw(2, 2, 40, 16, seed=2)
    v = v.to(dtype)
    full = lz.attention(q, k, v, is_causal=True)
    for i in range(40):
        out = lz.attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
        assert_close(out, full[:, :, i : i + 1].double(), tolerance("attention", dtype))


# -- encoder and decoder ---------------------------------------------------------------------------------
class Decoder(torch.nn.Module):
    """Self- and cross-attention of one decoder layer, with or without caches."""

    def __init__(self, heads=4, dim=8):
        super().__init__()
        width = heads * dim
        self.heads, self.dim = heads, dim
        gen = torch.Generator().manual_seed(9)
        self.weights = [torch.randn(width, width, generator=gen) / width**0.5 for _ in range(6)]

    def split(self, x, weight):
        return (x @ weight).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)

    def encode(self, memory):
        return tuple(self.split(memory, w) for w in self.weights[4:])

    def forward(self, x, cross, padding, cache=None):
        sq, sk, sv, cq = self.weights[:4]
        k, v = self.split(x, sk), self.split(x, sv)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        own = lz.attention(self.split(x, sq), k, v, is_causal="bottom_right").transpose(1, 2).flatten(2)
        seen = lz.attention(self.split(own + x, cq), *cross, attn_mask=padding)
        return seen.transpose(1, 2).flatten(2) + own, (k, v)

    def by_formula(self, oracle, x, memory, lengths):
        """The same in float64, each sequence cut to its own length instead of masked."""
        x, memory = x.double(), memory.double()
        w = [weight.double() for weight in self.weights]
        own, _ = oracle.attention(*(self.split(x, w[i]) for i in range(3)), causal=True)
        own = own.transpose(1, 2).flatten(2)
        outs = []
        for b, n in enumerate(lengths):
            q = self.split(own[b : b + 1] + x[b : b + 1], w[3])
            seen, _ = oracle.attention(q, *(self.split(memory[b : b + 1, :n], w[i]) for i in (4, 5)))
            outs.append(seen.transpose(1, 2).flatten(2))
        return torch.cat(outs) + own


@pytest.mark.req("R-OP-08")
@pytest.mark.parametrize("length", [128, 512, 2048])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_decoder_with_and_without_caches(oracle, length, kind):
    """Encoder lengths with padding, caches of encoder and decoder apart: both ways the same, and the formula's."""
    layer, steps = Decoder(), 6
    x, memory = draw(3, steps, 32), draw(3, length, 32, seed=1)
    lengths = [length, length // 2 + 1, 3]
    padding = (torch.arange(length) < torch.tensor(lengths)[:, None])[:, None, None]
    if kind == "float":
        padding = torch.zeros(padding.shape).masked_fill(~padding, -torch.inf)
    cross = layer.encode(memory)
    kept = tuple(t.clone() for t in cross)
    want = layer.by_formula(oracle, x, memory, lengths)
    tol = tolerance("attention", torch.float32)
    whole, _ = layer(x, cross, padding)
    assert_close(whole, want, tol, path="without caches")
    cache, outs = (cross[0][:, :, :0], cross[1][:, :, :0]), []
    for i in range(steps):
        out, cache = layer(x[:, i : i + 1], cross, padding, cache)
        assert cache[0].shape[2] == i + 1
        outs.append(out)
    assert_close(torch.cat(outs, 1), want, tol, path="with caches")
    assert all(torch.equal(a, b) for a, b in zip(cross, kept, strict=True)), "the encoder's cache was written"
    assert cross[0].data_ptr() != cache[0].data_ptr()


@pytest.mark.req("R-OP-08", "R-SEL-07")
@pytest.mark.parametrize("backend", [None, "reference", "sdpa.attention.flash_cpu", "sdpa.attention.math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cross_attention_with_masks_over_a_long_context(oracle, backend, dtype):
    """A few image queries over a long text, each sample with a padding of its own."""
    q = draw(2, 4, 7, 16, dtype=dtype)
    k, v = (draw(2, 4, 1500, 16, seed=s, dtype=dtype) for s in (1, 2))
    keep = torch.arange(1500) < torch.tensor([1500, 77])[:, None]
    for mask in (keep[:, None, None], draw(2, 1, 7, 1500, seed=3, dtype=dtype)):
        want, _ = oracle.attention(q, k, v, mask=mask)
        assert_close(lz.attention(q, k, v, mask, backend=backend), want, tolerance("attention", dtype))
    with pytest.raises(lz.errors.InvalidInputError) as caught:
        lz.attention(q, k, v, keep[:, None, None], is_causal=True, backend=backend)
    assert caught.value.code == "MASK_WITH_CAUSAL"


# -- vision ----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("built_in")
@pytest.mark.req("R-OP-11", "R-SEL-20")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_patches_in_either_memory_format(oracle, dtype):
    """Patch embedding, then attention over its channels: contiguous and channels-last maps give the same numbers."""
    image = draw(2, 3, 28, 28, dtype=dtype)
    weight = draw(48, 3, 4, 4, seed=1, dtype=dtype) / 7
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        patches = F.conv2d(image.to(memory_format=form), weight.to(memory_format=form), stride=4)  # [2, 48, 7, 7]
        tokens = patches.flatten(2).unflatten(1, (3, 16)).transpose(2, 3)  # [2, 3 heads, 49, 16], a view where it can
        results.append((patches, tokens, lz.attention(tokens, tokens, tokens)))
        want, _ = oracle.attention(tokens, tokens, tokens)
        assert_close(results[-1][2], want, tolerance("attention", dtype), path=str(form))
    (plain, tokens, _), (last, strided, _) = results
    assert plain.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)
    # In a contiguous map the channels of a token lie apart, in a channels-last one side by side.
    for given, code in ((tokens, "STRIDE_LAST_DIM"), (strided, None)):
        verdict = lz.explain("attention", given, given, given).decision.candidate("sdpa.attention.flash_cpu")
        assert [r.code for r in verdict.reasons if r.code != "ADAPTED"] == ([code] if code else [])
        assert verdict.accepted is (code is None)


@pytest.mark.req("R-OP-11")
def test_channels_last_pixels_straight_into_attention(oracle):
    """A map [B, C, H, W] as B·H·W tokens without any copy, as diffusion models have it."""
    x = draw(2, 32, 6, 6).to(memory_format=torch.channels_last)
    tokens = x.flatten(2).transpose(1, 2).unflatten(2, (4, 8))  # BSHD view of the channels-last storage
    assert tokens.data_ptr() == x.data_ptr()
    want, _ = oracle.attention(*(tokens.transpose(1, 2) for _ in range(3)))
    out = lz.attention(tokens, tokens, tokens, layout="BSHD")
    assert_close(out.transpose(1, 2), want, tolerance("attention", torch.float32))

"""Grouped attention over FlashAttention 4: groups as sequences that share keys, and the call that is made."""

from __future__ import annotations

import itertools
import math
import sys
import types

import pytest
import torch

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.varlen import grouped_attention as reference
from layerzero.errors import InvalidInputError
from layerzero.model.grouped import make_grouped_batch
from layerzero.numerics import assert_close, tolerance
from layerzero_flashattn.fa4 import grouped
from layerzero_flashattn.fa4.grouped import grouped_attention, sequences


def batch_of(q_lens, seq_lens, kv_lens, device="cpu"):
    host = [0, *itertools.accumulate(itertools.chain(*q_lens))], [0, *itertools.accumulate(seq_lens)], kv_lens
    return make_grouped_batch(*(torch.tensor(n, dtype=torch.int32, device=device) for n in host), host_lens=host)


def test_every_group_is_a_sequence_whose_keys_begin_with_the_shared_ones():
    found = sequences(batch_of(((3, 5), (4, 2)), (9, 13), ((5, 6), (9, 13))).segments(), True)
    assert (found.starts_q, found.lens_q) == ((0, 3, 8, 12), (3, 5, 4, 2))
    assert (found.starts_k, found.lens_k, found.blind) == ((0, 9, 0, 9), (5, 6, 9, 13), ())


def test_rows_that_see_no_key_are_left_out():
    batch = batch_of(((8, 5), (4, 0)), (9, 13), ((5, 0), (9, 13)))
    found = sequences(batch.segments(), True)
    assert (found.starts_q, found.lens_q, found.blind) == ((3, 13), (5, 4), ((0, 3), (8, 13)))
    full = sequences(batch.segments(), False)
    assert (full.starts_q, full.lens_q, full.blind) == ((0, 13), (8, 4), ((8, 13),))


class Library(types.SimpleNamespace):
    """Computes each sequence from where its queries and keys begin and how many are used; rows left out hold NaN."""

    def _flash_attn_fwd(self, *args, **kwargs):
        given = self.signature.bind(*args, **kwargs).arguments
        q, k, v = given["q"], given["k"], given["v"]
        starts_q, starts_k, lens_k = (given[n].tolist() for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
        used = given["seqused_q"]
        lens_q = [b - a for a, b in itertools.pairwise(starts_q)] if used is None else used.tolist()
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[1::-1], math.nan)
        for at_q, at_k, n, m in zip(starts_q, starts_k, lens_q, lens_k, strict=False):
            mine, keys = slice(at_q, at_q + n), slice(at_k, at_k + m)
            parts = (t.transpose(0, 1)[None] for t in (q[mine], k[keys], v[keys]))
            causal = "bottom_right" if given["causal"] else False
            found = attention(*parts, None, 0.0, causal, given["softmax_scale"], None, None, None, True)
            out[mine], lse[:, mine] = found[0][0].transpose(0, 1), found[1][0]
        return out, lse if given["return_lse"] else None, None, None, None


@pytest.mark.parametrize("scale", [None, 0.3, -0.5, 0.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_lens", [((5, 6), (9, 13)), ((2, 0), (9, 13))])
@pytest.mark.req("R-GRP-01", "R-GRP-05")
def test_the_call_fits_the_library_and_gives_the_reference(monkeypatch, recorded, kv_lens, causal, scale):
    interface = Library(signature=recorded("flash_attn.json", "flash_attn.cute.interface._flash_attn_fwd"))
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    gen = torch.Generator().manual_seed(0)
    query = torch.randn(17, 4, 128, generator=gen)
    key, value = torch.randn(22, 2, 128, generator=gen), torch.randn(22, 2, 128, generator=gen)
    batch = batch_of(((8, 5), (4, 0)), (9, 13), kv_lens)
    out, lse = grouped_attention(query, key, value, batch, causal, scale, True)
    want, logs = reference(query, key, value, batch, causal, scale, True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, logs)


SHAPES = {
    "nested": ([[256], [256]], [2048], [[1024], [2048]]),
    "odd": ([[100], [133]], [1000], [[333], [999]]),
    "sequences": ([[64, 7, 0], [30, 200, 5]], [500, 300, 17], [[250, 9, 0], [480, 300, 17]]),
    "more_queries": ([[300], [20]], [200], [[100], [200]]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.req("R-GRP-01", "R-GRP-02")
def test_on_a_gpu_it_is_the_reference(shape, dim):
    pytest.importorskip("flash_attn.cute")
    batch = batch_of(*SHAPES[shape], device="cuda")
    gen = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(n, h, dim, generator=gen, device="cuda").bfloat16()
        for n, h in ((batch.total_q, 8), (batch.total_k, 2), (batch.total_k, 2))
    )
    for causal in (True, False):
        out, lse = grouped_attention(query, key, value, batch, causal, None, True)
        for s in batch.segments():
            q = query[s.q_start : s.q_start + s.q_len].double().transpose(0, 1)
            k, v = (
                t[s.k_start : s.k_start + s.kv_len].double().transpose(0, 1).repeat_interleave(4, 0)
                for t in (key, value)
            )
            scores = q @ k.transpose(1, 2) / math.sqrt(dim)
            if causal:
                rows = torch.arange(s.q_len, device="cuda")[:, None]
                hidden = torch.arange(s.kv_len, device="cuda")[None, :] > rows + s.kv_len - s.q_len
                scores = scores.masked_fill(hidden, -math.inf)
            log = torch.logsumexp(scores, -1)
            want = torch.where(log.isneginf()[..., None], 0.0, (scores - log[..., None]).exp()) @ v
            mine = slice(s.q_start, s.q_start + s.q_len)
            assert_close(out[mine].transpose(0, 1), want, tolerance("grouped_attention", torch.bfloat16))
            seen = ~log.isneginf()
            assert torch.equal(lse[mine].t().isneginf(), ~seen)
            torch.testing.assert_close(lse[mine].t()[seen].double(), log[seen], rtol=1e-3, atol=2e-3)


WRONG = [
    ((18, 4, 64), (22, 2, 64)),
    ((17, 4, 64), (21, 2, 64)),
    ((17, 4, 264), (22, 2, 264)),
    ((17, 4, 60), (22, 2, 60)),
    ((17, 3, 64), (22, 2, 64)),
]


@pytest.mark.parametrize("shapes", WRONG)
def test_a_wrong_call_raises_before_anything_is_launched(monkeypatch, shapes):
    monkeypatch.setattr(grouped, "_tables", lambda *args: pytest.fail("planned"))
    query, key = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(InvalidInputError):
        grouped_attention(query, key, key, batch_of(((8, 5), (4, 0)), (9, 13), ((5, 6), (9, 13))), True, None, False)

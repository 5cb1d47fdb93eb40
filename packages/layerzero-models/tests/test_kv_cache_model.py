"""Any history of appends, cuts, forks and conversions leaves a KV cache with what a plain list of tensors holds."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
BATCH, HEADS, DIM, DIM_V, LAYERS, MAX = 3, 2, 8, 4, 2, 24


def expected(keys, values, query):
    """Causal attention in float64, the query's tokens being the last; keys [L, H, D], query [n, Hq, D]."""
    group = query.shape[1] // keys.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) / query.shape[-1] ** 0.5
    ahead = torch.arange(len(k)) > torch.arange(len(query))[:, None] + len(k) - len(query)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


class History(RuleBasedStateMachine):
    """The cache beside two lists: `kept[layer][seq]` is the list of (key, value) of each token."""

    @initialize(
        strategy=st.sampled_from(["paged", "contiguous", "chunked"]),
        layout=st.sampled_from(["NHD", "HND"]),
        quant=st.sampled_from([None, None, "int8", "fp8_e4m3", "fp8_e5m2"]),
        fixed=st.booleans(),
        page_size=st.sampled_from([1, 2, 4, 5]),
        num_pages=st.sampled_from([None, 9, 14]),
        seed=st.integers(0, 2**20),
    )
    def begin(self, strategy, layout, quant, fixed, page_size, num_pages, seed):
        scales = {"k_scale": 0.01, "v_scale": 0.02} if fixed and quant in ("fp8_e4m3", "fp8_e5m2") else {}
        self.cache = lz.kv_cache(
            strategy, batch=BATCH, num_kv_heads=HEADS, head_dim=DIM, head_dim_v=DIM_V, max_len=MAX, layout=layout,
            layers=LAYERS, page_size=page_size, num_pages=num_pages, chunk_size=3, quant=quant, **scales,
        )  # fmt: skip
        self.quant = quant
        self.noise = torch.Generator().manual_seed(seed)
        self.kept = [[[] for _ in range(BATCH)] for _ in range(LAYERS)]

    def normal(self, *shape):
        return torch.randn(shape, generator=self.noise)

    def stored(self, key, value):
        """What the cache is meant to keep of a token: it, or its quantized form."""
        codecs = (self.cache.key_codec, self.cache.value_codec)
        return tuple(codec.decode(codec.encode(t)) for codec, t in zip(codecs, (key, value), strict=True))

    @rule(
        lens=st.lists(st.integers(0, 6), min_size=BATCH, max_size=BATCH),
        form=st.sampled_from(["packed", "BHSD", "BSHD"]),
    )
    def append(self, lens, form):
        """To all layers or none: out of room means nothing has changed."""
        width = max(lens)
        for layer in range(LAYERS):
            key, value = self.normal(sum(lens), HEADS, DIM), self.normal(sum(lens), HEADS, DIM_V)
            sent = [key, value]
            if form != "packed":
                padded = [torch.full((BATCH, width, *t.shape[1:]), 77.0) for t in sent]
                start = 0
                for seq, count in enumerate(lens):
                    for target, source in zip(padded, sent, strict=True):
                        target[seq, :count] = source[start : start + count]
                    start += count
                sent = padded if form == "BSHD" else [t.transpose(1, 2) for t in padded]
            layout = "BSHD" if form == "BSHD" else "BHSD"
            before = (self.cache.lengths(layer), self.cache.free_pages)
            if self.no_room(lens, layer):
                with contextlib.suppress(InvalidInputError):  # unless the last holder of a page needs no copy of it
                    self.cache.append(*sent, layer=layer, lens=lens, layout=layout)
                if self.cache.lengths(layer) == before[0]:
                    assert self.cache.free_pages == before[1]
                    return
            else:
                self.cache.append(*sent, layer=layer, lens=lens, layout=layout)
            start = 0
            for seq, count in enumerate(lens):
                for i in range(start, start + count):
                    self.kept[layer][seq].append(self.stored(key[i : i + 1], value[i : i + 1]))
                start += count

    def no_room(self, lens, layer):
        """Whether tokens really do not fit: too long, or too few pages, those for copies of shared ones included."""
        starts = [len(tokens) for tokens in self.kept[layer]]
        ends = [start + n for start, n in zip(starts, lens, strict=True)]
        if max(ends) > MAX or self.cache.free_pages is None:
            return max(ends) > MAX
        pool = self.cache.storage
        owned, page_size = pool.owned, pool.page_size
        new = sum(max(0, -(-end // page_size) - len(pages)) for end, pages in zip(ends, owned, strict=True))
        written = [
            pages[start // page_size]
            for start, n, pages in zip(starts, lens, owned, strict=True)
            if n and start // page_size < len(pages)
        ]
        copies = sum(sum(page in pages for pages in owned) > 1 for page in written)
        return new + copies > self.cache.free_pages

    @rule(data=st.data())
    def truncate(self, data):
        lens = [data.draw(st.integers(0, max(len(layer[s]) for layer in self.kept) + 1)) for s in range(BATCH)]
        self.cache.truncate(lens)
        for layer in self.kept:
            for tokens, length in zip(layer, lens, strict=True):
                del tokens[length:]

    @rule(seq=st.integers(0, BATCH - 1))
    def free(self, seq):
        self.cache.free(seq)
        for layer in self.kept:
            layer[seq].clear()

    @rule(source=st.integers(0, BATCH - 1), step=st.integers(1, BATCH - 1))
    def fork(self, source, step):
        target = (source + step) % BATCH
        self.cache.fork(source, target)
        for layer in self.kept:
            layer[target] = list(layer[source])

    @rule(strategy=st.sampled_from(["paged", "contiguous", "chunked"]), layout=st.sampled_from(["NHD", "HND"]))
    def convert(self, strategy, layout):
        self.cache = self.cache.to(strategy=strategy, layout=layout, num_pages=None)

    @rule(layer=st.integers(0, LAYERS - 1), data=st.data(), padded=st.booleans())
    def attend(self, layer, data, padded):
        lengths = self.cache.lengths(layer)
        lens = [data.draw(st.integers(0, min(3, length))) for length in lengths]
        if not any(lens):
            return
        query = self.normal(sum(lens), 2 * HEADS, DIM)
        parts, start = [], 0
        for seq, count in enumerate(lens):
            if count:
                keys, values = (torch.cat(t) for t in zip(*self.kept[layer][seq], strict=True))
                parts.append(expected(keys, values, query[start : start + count]))
            start += count
        sent, got = query, None
        if padded:
            sent = torch.zeros(BATCH, max(lens), 2 * HEADS, DIM)
            start = 0
            for seq, count in enumerate(lens):
                sent[seq, :count] = query[start : start + count]
                start += count
            out = self.cache.attend(sent.transpose(1, 2), layer=layer, lens=lens).transpose(1, 2)
            got = torch.cat([out[seq, :count] for seq, count in enumerate(lens)])
            assert all(not out[seq, count:].any() for seq, count in enumerate(lens))
        else:
            got = self.cache.attend(sent, layer=layer, lens=lens)
        assert_close(got.double(), torch.cat(parts), tolerance("attention", torch.float32))

    @invariant()
    def holds_the_same_tokens(self):
        if not hasattr(self, "cache"):
            return
        for layer in range(LAYERS):
            assert self.cache.lengths(layer) == tuple(len(tokens) for tokens in self.kept[layer])
            for seq, tokens in enumerate(self.kept[layer]):
                keys, values = self.cache.tokens(seq, layer)
                assert keys.shape == (len(tokens), HEADS, DIM) and values.shape == (len(tokens), HEADS, DIM_V)
                if tokens:
                    assert torch.equal(keys, torch.cat([k for k, _ in tokens]))
                    assert torch.equal(values, torch.cat([v for _, v in tokens]))

    @invariant()
    def no_page_is_lost(self):
        if hasattr(self, "cache") and self.cache.free_pages is not None:
            pool = self.cache.storage
            used = {page for seq in range(BATCH) for page in pool.owned[seq]}
            assert len(used) + self.cache.free_pages == pool.num_pages


History.TestCase.settings = settings(
    max_examples=250 if PROVE else 14,
    stateful_step_count=30 if PROVE else 14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.mark.correctness
@pytest.mark.req("R-KV-01", "R-KV-02")
class TestHistory(History.TestCase):
    """Run by pytest."""

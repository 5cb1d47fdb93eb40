"""Grouped attention over FlashInfer: groups as requests that share keys."""

from __future__ import annotations

import itertools
import math
import os
import sys
import types

import pytest
import torch

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.varlen import grouped_attention as reference
from layerzero.errors import InvalidInputError
from layerzero.model.grouped import make_grouped_batch
from layerzero.numerics import assert_close, tolerance
from layerzero_flashinfer import grouped
from layerzero_flashinfer.grouped import grouped_attention, requests


def batch_of(q_lens, seq_lens, kv_lens, device="cpu"):
    host = [0, *itertools.accumulate(itertools.chain(*q_lens))], [0, *itertools.accumulate(seq_lens)], kv_lens
    return make_grouped_batch(*(torch.tensor(n, dtype=torch.int32, device=device) for n in host), host_lens=host)


def test_every_group_is_a_request_whose_keys_begin_with_the_shared_ones():
    found = requests(batch_of(((3, 5), (4, 2)), (9, 13), ((5, 6), (9, 13))).segments(), True)
    assert found == ((0, 3, 8, 12, 14), (0, 9, 0, 9), (5, 6, 9, 13))


def test_rows_that_see_no_key_are_requests_without_keys():
    batch = batch_of(((8, 5), (4, 0)), (9, 13), ((5, 0), (9, 13)))
    assert requests(batch.segments(), True) == ((0, 3, 8, 13, 17), (0, 0, 9, 0), (0, 5, 0, 9))
    assert requests(batch.segments(), False) == ((0, 8, 13, 17), (0, 9, 0), (5, 0, 9))


class Module:
    """The vendor's module: keeps the plan's lists and computes each request; log-sum-exp in base 2."""

    def plan(
        self,
        floats,
        ints,
        pinned,
        offsets_q,
        starts_k,
        lens_k,
        rows,
        count,
        heads,
        kv_heads,
        page,
        graph,
        dim,
        dim_v,
        causal,
        window,
    ):
        assert (offsets_q[-1], len(lens_k), page, graph, window) == (rows, count, 1, False, -1)
        return offsets_q.tolist(), starts_k.tolist(), lens_k.tolist(), causal

    def ragged_run(self, floats, ints, info, q, k, v, qo, kv, out, lse, mode, layout, window, pdl, *rest):
        offsets, starts, lens, causal = info
        *nothing, cap, scale, _, _, _ = rest
        assert (mode, layout, window, nothing, cap) == (int(causal), 0, -1, [None] * 6, 0.0)
        for (a, b), start, count in zip(itertools.pairwise(offsets), starts, lens, strict=False):
            parts = (t.transpose(0, 1)[None] for t in (q[a:b], k[start : start + count], v[start : start + count]))
            side = "bottom_right" if causal else False
            found = attention(*parts, None, 0.0, side, scale, None, None, None, True)
            out[a:b] = found[0][0].transpose(0, 1)
            if lse is not None:
                logs = found[1][0].transpose(0, 1) / math.log(2)
                lse[a:b] = logs.masked_fill(logs.isneginf(), -5e4)  # as the Hopper kernel was seen to do


@pytest.mark.parametrize("scale", [None, -0.5, 0.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_lens", [((5, 6), (9, 13)), ((2, 0), (9, 13))])
@pytest.mark.req("R-GRP-01", "R-GRP-05")
def test_the_plan_gives_the_reference(monkeypatch, kv_lens, causal, scale):
    vendor = types.ModuleType("flashinfer.prefill")
    vendor.get_batch_prefill_module = lambda backend, *args: Module() if backend == "fa3" else None
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", vendor)
    monkeypatch.setattr(grouped, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    grouped._planned.cache_clear()
    gen = torch.Generator().manual_seed(0)
    query = torch.randn(17, 4, 64, generator=gen)
    key, value = torch.randn(22, 2, 64, generator=gen), torch.randn(22, 2, 64, generator=gen)
    batch = batch_of(((8, 5), (4, 0)), (9, 13), kv_lens)
    out, lse = grouped_attention(query, key, value, batch, causal, scale, True)
    grouped._planned.cache_clear()
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
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.req("R-GRP-01", "R-GRP-02")
def test_on_a_gpu_it_is_the_reference(shape):
    pytest.importorskip("flashinfer")
    if os.environ.get("LAYERZERO_COMPILED_ONLY"):
        from layerzero_flashinfer.modules import specs_for

        wanted = specs_for({"op": "varlen_attention", "dtype": "bfloat16", "head_dim": 128})
        missing = [spec.name for spec in wanted if spec.name.endswith("_sm90") and not spec.is_compiled]
        if missing:
            pytest.skip(f"not compiled: {missing[0]}")
    batch = batch_of(*SHAPES[shape], device="cuda")
    gen = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(n, h, 128, generator=gen, device="cuda").bfloat16()
        for n, h in ((batch.total_q, 8), (batch.total_k, 2), (batch.total_k, 2))
    )
    for causal in (True, False):
        out, lse = grouped_attention(query, key, value, batch, causal, None, True)
        want, logs = reference(query.double(), key.double(), value.double(), batch, causal, None, True)
        assert_close(out, want, tolerance("grouped_attention", torch.bfloat16))
        assert torch.equal(lse.isneginf(), logs.isneginf())
        seen = ~logs.isneginf()
        torch.testing.assert_close(lse[seen].double(), logs[seen].double(), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("shapes", [((18, 4, 64), (22, 2, 64)), ((17, 4, 64), (21, 2, 64)), ((17, 4, 96), (22, 2, 96)),
                                    ((17, 3, 64), (22, 2, 64))])  # fmt: skip
def test_a_wrong_call_raises_before_anything_is_launched(monkeypatch, shapes):
    monkeypatch.setattr(grouped, "_planned", lambda *args: pytest.fail("planned"))
    query, key = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(InvalidInputError):
        grouped_attention(query, key, key, batch_of(((8, 5), (4, 0)), (9, 13), ((5, 6), (9, 13))), True, None, False)

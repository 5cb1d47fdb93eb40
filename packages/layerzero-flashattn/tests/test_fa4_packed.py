"""FlashAttention 4 over packed sequences and pages, against a stand-in that takes what the recorded signatures take."""

from __future__ import annotations

import contextlib
import math
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from layerzero.backends.reference.attention import attention as reference
from layerzero.backends.reference.varlen import paged_attention, varlen_attention
from layerzero.model.kv_cache import make_paged_batch

CALLS = Path(__file__).with_name("signatures").joinpath("calls.txt").read_text(encoding="utf-8").split()
# These two libraries are built from source; where they cannot be built, signatures are read off their sources.
SOURCE_CALLS = [
    f"{library}.{name}"
    for library in ("flash_attn.flash_attn_interface", "flash_attn_interface")
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def computed(given):
    """(out, lse) of a call by the reference, heads first in the log-sum-exp, +inf where nothing is attended."""
    get = given.get
    sides = tuple(
        -1 if get(f"window_size_{side}") is None else given[f"window_size_{side}"] for side in ("left", "right")
    )
    if "window_size" in given:
        sides = tuple(-1 if side is None else side for side in given["window_size"])
    causal, scale = "bottom_right" if get("causal") else False, given["softmax_scale"]
    if get("page_table") is not None:
        assert given["seqused_k"].dtype is torch.int32 and given["page_table"].dtype is torch.int32
        packed = get("cu_seqlens_q")
        count = given["page_table"].shape[0]
        lens = torch.ones(count, dtype=torch.int32) if packed is None else packed.diff()
        query = given["q"].squeeze(1) if packed is None else given["q"]
        batch = make_paged_batch(given["page_table"], given["seqused_k"], lens)
        out, lse = paged_attention(query, given["k"], given["v"], batch, scale, sides, None, None, True, "NHD")
        if packed is None:
            return out.unsqueeze(1), lse.unsqueeze(-1)
    elif get("cu_seqlens_q") is not None:
        assert given["cu_seqlens_q"].dtype is torch.int32 and given["cu_seqlens_k"].dtype is torch.int32
        offsets = (given["cu_seqlens_q"], given["cu_seqlens_k"])
        out, lse = varlen_attention(
            given["q"], given["k"], given["v"], *offsets, 0, 0, causal, scale, sides, None, None, True
        )
    else:
        heads_first = (given[name].transpose(1, 2) for name in "qkv")
        out, lse = reference(*heads_first, None, 0.0, causal, scale, sides, None, None, True)
        return out.transpose(1, 2), lse
    return out, lse.masked_fill(lse == -math.inf, math.inf).transpose(0, 1)


@pytest.fixture
def fa4(monkeypatch, recorded):
    """The adapters over a forward that keeps no compiled kernels, so that nothing can be replayed."""
    calls = []

    def function(name, extra):
        signature = recorded("flash_attn.json", f"flash_attn.cute.interface.{name}")

        def called(*args, **kwargs):
            given = dict(signature.bind(*args, **kwargs).arguments)
            calls.append((name, given))
            out, lse = computed(given)
            return out, lse if given.get("return_lse") else None, *extra

        return called

    library = ModuleType("flash_attn.cute.interface")
    library._flash_attn_fwd = function("_flash_attn_fwd", (None, None, None))
    library.flash_attn_func = function("flash_attn_func", ())
    library.flash_attn_varlen_func = function("flash_attn_varlen_func", ())
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    names = [f"layerzero_flashattn.fa4.{name}" for name in ("kernels", "paged")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    kernels, paged = (import_module(name) for name in names)
    monkeypatch.setattr(kernels, "_on_device", lambda device: contextlib.nullcontext())
    yield SimpleNamespace(kernels=kernels, paged=paged, calls=calls)
    for name in names:
        sys.modules.pop(name, None)


def close(found, expected):
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)


OPTIONS = [(False, None, None), ("bottom_right", 0.3, None), ("bottom_right", -0.3, (3, 0)), (False, 0.0, (2, -1))]


@pytest.mark.parametrize(("causal", "scale", "window"), OPTIONS)
def test_packed_sequences(fa4, causal, scale, window):
    offsets_q, offsets_k = torch.tensor([0, 3, 3, 9]), torch.tensor([0, 4, 6, 6])  # the last has no keys
    q, k, v = randn(9, 4, 8), randn(6, 2, 8, seed=1), randn(6, 2, 8, seed=2)
    call = (q, k, v, offsets_q, offsets_k, 6, 4, causal, scale, window, None, None)
    expected, expected_lse = varlen_attention(*call, True)
    out, lse = fa4.kernels.varlen_attention(*call, True)
    close(out, expected)
    close(lse, expected_lse)
    close(fa4.kernels.varlen_attention(*call, False), expected)
    # Short and long queries are compiled together, once for (out, lse) and once for out alone.
    assert [given["max_seqlen_q"] for _, given in fa4.calls] == [6, 1, 256, 6, 1, 256]
    q.requires_grad_()
    out, lse = fa4.kernels.deterministic_varlen_attention(*call, True)
    close(out, expected)
    close(lse, expected_lse)
    assert fa4.calls[-1][0] == "flash_attn_varlen_func" and fa4.calls[-1][1]["deterministic"] is True


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(("scale", "window"), [(None, None), (-0.3, (4, 0))])
def test_a_paged_cache(fa4, prefill, scale, window):
    cache = [randn(12, 4, 2, 8, seed=seed) for seed in (1, 2)]
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4)
    queries = torch.tensor([2, 1, 5]) if prefill else None
    batch = make_paged_batch(tables, torch.tensor([3, 9, 14]), queries)
    query = randn(batch.total_q, 4, 8)
    run = fa4.paged.paged_prefill if prefill else fa4.paged.paged_decode
    expected, expected_lse = paged_attention(query, *cache, batch, scale, window, None, None, True, "NHD")
    out, lse = run(query, *cache, batch, scale, window, None, None, True, "NHD")
    close(out, expected)
    close(lse, expected_lse)
    close(run(query, *cache, batch, scale, window, None, None, False, "NHD"), expected)


def test_a_library_that_keeps_its_kernels_elsewhere_is_called_as_a_whole(fa4):
    q, k, v = (randn(2, 5, 4, 8, seed=seed) for seed in range(3))
    for _ in range(3):
        out = fa4.kernels.attention(q, k, v, None, 0.0, "bottom_right", None, None, None, None, False)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    expected = reference(*heads_first, None, 0.0, "bottom_right", None, None, None, None, False)
    close(out, expected.transpose(1, 2))
    assert [name for name, _ in fa4.calls] == ["_flash_attn_fwd"] * 3


@pytest.mark.parametrize("name", [*CALLS, *SOURCE_CALLS])
def test_every_named_call_has_a_recorded_signature(recorded, name):
    library = name.split(".")[0]
    file = "flash_attn_2.json" if name.startswith("flash_attn.flash_attn_interface") else f"{library}.json"
    assert recorded(file, name).parameters

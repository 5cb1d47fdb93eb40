"""What a call does beside the vendor's launch, counted: torch operations, events, streams. Nothing is timed here.

The functions that FlashInfer's calls end in are replaced by ones that do nothing, so every operation counted is ours.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero_flashinfer import paged, rope, sampling, single

BF = torch.bfloat16


class Counted(TorchDispatchMode):
    """The operations inside the block, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def counted(call):
    """Of the second call: the first one binds."""
    with torch.no_grad():
        call()
        with Counted() as found:
            call()
    return sorted(found.names)


@pytest.fixture
def quiet(vendor):
    """The launches of one sequence, without their arithmetic."""
    launched = []

    def prefill(
        q, k, v, tmp, o, maybe_lse, mask_mode, layout, window_left, maybe_packed_custom_mask, maybe_alibi_slopes,
        logits_soft_cap, sm_scale, scale_q, scale_k, scale_v, rope_scale, rope_theta,
    ):  # fmt: skip
        launched.append((q.shape, o.shape, mask_mode))

    vendor.module("flashinfer.prefill").get_single_prefill_module = lambda *_: SimpleNamespace(run=prefill)
    return launched


def test_one_sequence_takes_three_views_a_result_and_its_view(quiet):
    q, k = torch.empty(1, 6, 4, 64, dtype=BF), torch.empty(1, 6, 2, 64, dtype=BF)
    names = counted(lambda: single.prefill_fa3(q, k, k, None, 0.0, "bottom_right", None, None, None, None, False))
    assert names == ["empty_like", "select", "select", "select", "unsqueeze"]
    assert quiet == [((6, 4, 64), (6, 4, 64), 1)] * 2


def test_a_result_has_no_gaps_whatever_the_strides_of_the_query(quiet):
    q, k = torch.empty(1, 4, 6, 64, dtype=BF).transpose(1, 2), torch.empty(1, 6, 2, 64, dtype=BF)
    assert single.prefill_fa3(q, k, k, None, 0.0, False, None, None, None, None, False).is_contiguous()


def test_options_are_worked_out_once_and_kept_within_bounds(quiet, monkeypatch):
    asked = []
    real = single.options
    monkeypatch.setattr(single, "options", lambda *args: asked.append(args) or real(*args))
    monkeypatch.setattr(single, "_MOST", 4)
    q, k = torch.empty(1, 6, 4, 64, dtype=BF), torch.empty(1, 6, 2, 64, dtype=BF)
    for _ in range(3):
        single.prefill_fa2(q, k, k, None, 0.0, False, 0.5, (3, 0), None, None, False)
    assert len(asked) == 1
    for step in range(1, 10):
        single.prefill_fa2(q, k, k, None, 0.0, False, step / 8, None, None, None, False)
    assert len(single._calls) <= 4


@pytest.mark.parametrize("kernel", [paged.decode, paged.decode_tc])
def test_a_planned_decode_makes_its_result_and_nothing_else(vendor, monkeypatch, kernel):
    batch = lz.paged_batch(torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([33, 5], dtype=torch.int32))
    query, cache = torch.empty(2, 8, 64, dtype=BF), torch.empty(6, 16, 2, 64, dtype=BF)
    wrapper = vendor.module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    launched = []
    monkeypatch.setattr(wrapper, "run", lambda self, *args, **kwargs: launched.append(kwargs["out"]))
    found = []
    names = counted(lambda: found.append(kernel(query, cache, cache, batch, None, None, None, None, False, "NHD")))
    assert names == ["empty_like"]
    assert len(launched) == 2 and all(a is b for a, b in zip(launched, found, strict=True))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_rope_joins_the_tables_and_copies_neither_queries_nor_keys(vendor, monkeypatch, layout):
    def inner(q, k, q_rope, k_rope, cos_sin_cache, pos_ids, interleave):
        assert q_rope.stride() == q.stride() and k_rope.stride() == k.stride()

    monkeypatch.setattr(rope, "_inner", lambda: inner)
    q, k = (torch.empty(1, *((9, n) if layout == "BSHD" else (n, 9)), 64, dtype=BF) for n in (4, 2))
    cos = torch.empty(9, 32, dtype=BF)
    names = counted(lambda: rope.rope(q, k, cos, cos, False, layout, None, False))
    turns = ["transpose"] * (4 if layout == "BHSD" else 0)
    views = ["select", "select", *turns, "unsqueeze", "unsqueeze"]
    assert names == ["_to_copy", "cat", "empty_like", "empty_like", *views]
    wide = cos.float()
    assert "_to_copy" not in counted(lambda: rope.rope(q, k, wide, wide, False, layout, None, False))
    names = counted(lambda: rope.rope(q, k, wide, wide, False, layout, None, True))
    assert names == ["cat", "select", "select", *turns]


def test_heads_that_begin_between_two_reads_of_the_kernel_are_gathered(vendor):
    """16 bytes at a time: a head 66 numbers after the last one would be read across a border."""
    torch.manual_seed(0)
    wide = torch.randn(1, 9, 4, 66).to(BF)
    q, k = wide[..., :64], torch.randn(1, 9, 2, 64).to(BF)
    cos, sin = torch.rand(9, 32), torch.rand(9, 32)
    found = rope.rope(q, k, cos, sin, False, "BSHD", None, False)
    wanted = rope.rope(q.contiguous(), k, cos, sin, False, "BSHD", None, False)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    rope.rope(q, k, cos, sin, False, "BSHD", None, True)
    assert torch.equal(wide[..., :64], wanted[0]) and torch.equal(k, wanted[1])


def test_a_sample_is_a_selection_a_largest_a_number_and_one_launch(vendor, monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append((grid, constants["SLOTS"]))

    monkeypatch.setattr(sampling, "_kernel", lambda host: Kernel())
    monkeypatch.setattr(sampling, "_inner", lambda: lambda *args: None)
    logits = torch.zeros(3, 1000)
    names = counted(lambda: sampling.sample(logits, 50, 0.9, None, 1.0, None))
    assert names == ["amax", "empty", "empty", "rand"]
    sampling.sample(logits, 63, None, None, 1.0, None)
    sampling.sample(logits, 64, None, None, 1.0, None)
    assert launched == [((3,), 64)] * 3 + [((3,), 512)]  # one place more than tokens wanted


def test_without_a_compiler_for_the_launch_torch_operations_take_its_place(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    sampling._kernel.cache_clear()
    assert (sampling._kernel(True), sampling._kernel(False)) == (None, None)
    monkeypatch.setenv("CC", "somewhere/else")
    sampling._kernel.cache_clear()
    assert sampling._kernel(True) is None and sampling._kernel(False) is not None
    sampling._kernel.cache_clear()


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def record_event(self):
        self.log.append(f"record {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def test_selections_of_one_stream_need_no_event_and_another_stream_waits_once(vendor, monkeypatch):
    log = []
    streams = {1: Stream(log, "one"), 2: Stream(log, "two")}
    now = [1]

    def current(device):
        log.append("asked")
        return streams[now[0]]

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(sampling, "place", lambda values: (0, now[0]))
    monkeypatch.setattr(sampling, "_orders", {})
    values = torch.randn(2, 30)

    def on(stream):
        log.clear()
        now[0] = stream
        sampling.select(values, 5)
        return list(log)

    assert (on(1), on(1)) == (["asked"], [])
    assert (on(2), on(2)) == (["asked", "record one", "two waits for event of one"], [])
    assert on(1) == ["asked", "record two", "one waits for event of two"]

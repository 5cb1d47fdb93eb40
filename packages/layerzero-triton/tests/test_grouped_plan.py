"""The work list of grouped attention: nothing is left out or done twice, and what it reads is what the model says."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import pytest
import torch

from layerzero.model.grouped import make_grouped_batch
from layerzero_triton.grouped.plan import make_plan
from layerzero_triton.grouped.tables import backward_tables, forward_tables

CPU = torch.device("cpu")


def batch_of(q_lens, seq_lens, kv_lens):
    host = [0, *itertools.accumulate(itertools.chain(*q_lens))], [0, *itertools.accumulate(seq_lens)], kv_lens
    parts = (torch.tensor(item, dtype=torch.int32) for item in host)
    return make_grouped_batch(*parts, host_lens=host)


def zigzag(rank, world, chunk):
    """One rank of zigzag context parallelism: chunks r and 2W-1-r ask, each over everything up to its own end."""
    late = 2 * world - 1 - rank
    return batch_of(((chunk,), (chunk,)), (2 * world * chunk,), (((rank + 1) * chunk,), ((late + 1) * chunk,)))


class KeyReads(NamedTuple):
    """Tokens of keys, times KV heads: those every program loads, and those that have to come from memory at all."""

    loaded: int
    unique: int


def key_reads(plan, ratio):
    """What the items of a plan read; `ratio` is query heads for each KV head."""
    loaded, seen = 0, {}
    for item in plan.items:
        loaded += item.high - item.low
        start = plan.tiles[item.tile].key_start
        kv_head = item.head if plan.packed else item.head // ratio
        seen.setdefault(kv_head, set()).update(range(start + item.low, start + item.high))
    return KeyReads(loaded, sum(map(len, seen.values())))


SHAPES = {
    "two groups, two sequences": (((3, 5), (4, 2)), (9, 13), ((5, 6), (9, 13))),
    "more queries than keys": (((8, 5), (4, 15)), (9, 13), ((5, 6), (9, 13))),
    "empty parts": (((0, 5), (4, 2)), (0, 13), ((0, 6), (0, 13))),
    "long": (((300,), (40,), (7,)), (700,), ((310,), (500,), (700,))),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.req("R-GRP-04")
def test_every_row_meets_every_key_it_sees_exactly_once(shape, together, causal):
    batch = batch_of(*SHAPES[shape])
    heads, kv_heads = 4, 2
    tables = forward_tables(batch, causal, heads, kv_heads, CPU, block_m=16, block_n=16, together=together)
    plan = tables.plan
    tokens = tables.tokens.reshape(len(plan.tiles), -1)
    limits = tables.limits.reshape(len(plan.tiles), -1)
    met: Counter[tuple[int, int, int]] = Counter()
    for tile, head, low, high, _, start, free, _ in tables.items.tolist():
        shared = range(head * 2, head * 2 + 2) if plan.packed else (head,)
        for token, limit in zip(tokens[tile].tolist(), limits[tile].tolist(), strict=True):
            if token >= 0:
                assert free <= max(limit, low)  # what is not masked is seen by every row
                met.update((token, h, start + key) for h in shared for key in range(low, min(high, limit)))
    want: Counter[tuple[int, int, int]] = Counter()
    for s in batch.segments():
        for row in range(s.q_len):
            limit = s.kv_len - s.q_len + row + 1 if causal else s.kv_len
            want.update((s.q_start + row, h, s.k_start + key) for h in range(heads) for key in range(limit))
    assert met == want


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.req("R-GRP-12", "R-GRP-13")
def test_one_list_reads_the_share_of_bytes_that_the_formula_says(rank):
    """Counted from the items of the list itself, against lists made for each group alone."""
    world, chunk = 4, 256
    batch = zigzag(rank, world, chunk)
    options = dict(causal=True, heads=32, kv_heads=8, block_m=128, block_n=128, processors=132)
    once = key_reads(make_plan(batch, **options), 4).unique
    alone = 0
    for s in batch.segments():
        single = batch_of(((s.q_len,),), (world * 2 * chunk,), ((s.kv_len,),))
        alone += key_reads(make_plan(single, **options), 4).unique
    assert 1 - once / alone == pytest.approx((rank + 1) / (2 * world + 1), abs=1e-12)
    traffic = batch.kv_traffic(8, 128, 2)
    assert (alone * 2 * 128 * 2, once * 2 * 128 * 2) == (traffic.separate, traffic.grouped)


@pytest.mark.req("R-GRP-12")
def test_shared_tiles_load_each_key_once_for_all_groups():
    batch = batch_of(((16,), (16,)), (65_536,), ((32_768,), (65_536,)))
    options = dict(causal=True, heads=32, kv_heads=8, block_m=128, block_n=128)
    together = key_reads(make_plan(batch, together=True, **options), 4)
    apart = key_reads(make_plan(batch, together=False, **options), 4)
    token = 2 * 128 * 2
    assert together.loaded == together.unique == 8 * 65_536
    assert together.loaded * token / 1e6 == pytest.approx(268.4, abs=0.1)
    assert apart.loaded * token / 4 / 1e6 == pytest.approx(402.7, abs=0.1)  # four query heads share a KV head


def test_kv_heads_are_outermost_and_the_longest_come_first():
    plan = make_plan(zigzag(1, 4, 512), causal=True, heads=8, kv_heads=2, split=False)
    kv_heads = [item.head // 4 for item in plan.items]
    assert kv_heads == sorted(kv_heads)
    for _, items in itertools.groupby(plan.items, key=lambda item: item.head // 4):
        lengths = [item.high for item in items]
        assert lengths == sorted(lengths, reverse=True)


def test_ranges_are_cut_only_where_processors_would_idle():
    few = batch_of(((64,), (64,)), (65_536,), ((32_768,), (65_536,)))
    options = dict(causal=True, heads=4, kv_heads=1)
    whole = make_plan(few, split=False, **options)
    cut = make_plan(few, **options)
    assert (len(whole.items), whole.merges) == (8, ())
    assert len(cut.items) > 100 and cut.slots == sum(count for *_, count in cut.merges)
    assert {item.slot for item in cut.items if item.slot >= 0} == set(range(cut.slots))
    many = make_plan(batch_of(((128,),), (4096,), ((4096,),)), causal=True, heads=132, kv_heads=132)
    assert many.merges == ()


@pytest.mark.parametrize("causal", [True, False])
def test_the_backward_table_has_every_key_once(causal):
    batch = batch_of(*SHAPES["two groups, two sequences"])
    tables = backward_tables(batch, causal, CPU, block_n=4)
    keys = [start + key for _, start, low, length in tables.blocks.tolist() for key in range(low, min(low + 4, length))]
    assert sorted(keys) == list(range(batch.total_k))
    assert tables.segments.shape == (4, 4)


def test_the_same_lengths_are_planned_once():
    first, second = (batch_of(*SHAPES["long"]) for _ in range(2))
    options = dict(block_m=16, block_n=16, together=False)
    assert forward_tables(first, True, 4, 2, CPU, **options) is forward_tables(second, True, 4, 2, CPU, **options)


LONG = {
    "2 groups of 64K": (2, 65_536, 1),
    "16 groups of 32K": (16, 32_768, 1),
    "32 sequences": (2, 0, 32),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.req("R-GRP-02", "R-GRP-08")
def test_long_plans_hold_every_row_once_and_stay_inside_the_keys(name):
    """Shapes in which every token asks: what the kernels are told must lie inside the tensors, in 32 bits."""
    groups, tokens, count = LONG[name]
    lens = [tokens] if tokens else [512 + 96 * b for b in range(count)]
    steps = [[n // groups for n in lens]] * groups
    batch = batch_of(steps, lens, [[n // groups * (g + 1) for n in lens] for g in range(groups)])
    tables = forward_tables(batch, True, 32, 8, CPU, block_m=128, block_n=128, together=False)
    rows = tables.tokens[tables.tokens >= 0]
    assert torch.equal(rows.sort().values, torch.arange(batch.total_q, dtype=torch.int32))
    tile, head, low, high, slot, start, free, _ = tables.items[tables.items[:, 3] > tables.items[:, 2]].unbind(1)
    tokens, limits = (table.reshape(-1, 128)[tile] for table in (tables.tokens, tables.limits))
    asked = (tokens >= 0).sum(1)
    last = limits.gather(1, asked[:, None] - 1)[:, 0]
    assert (asked > 0).all() and tokens.max() < batch.total_q
    assert (head >= 0).all() and (head < 32).all()
    assert (low >= 0).all() and (low < high).all() and (start + high <= batch.total_k).all()
    assert ((low <= free) & (free <= high) & ((free - low) % 128 == 0)).all()
    assert (free <= torch.maximum(limits[:, 0], low)).all()  # what needs no mask is seen by the first row
    assert (last >= high).all()  # and something is seen by the last one
    assert (slot < tables.plan.slots).all()
    assert asked.sum() == 32 * batch.total_q if not tables.plan.merges else asked.sum() > 32 * batch.total_q

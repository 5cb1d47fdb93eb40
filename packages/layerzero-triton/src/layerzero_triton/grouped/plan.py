"""The work list of a grouped attention call, made of numbers only: tiles of queries, and which keys each has to read.

A tile is a block of query rows that one program holds in registers while keys stream past. Two ways to form tiles:

apart     rows of one group and one query head. Right when every group has many queries: the products dominate.
together  the rows of all groups of a sequence, and of all query heads that share a KV head, packed into the same tile.
          Each block of keys and values is then loaded once for all groups. Right when groups have few queries: the
          reads dominate.

Every row carries its own limit, the number of keys it sees, so both ways are the same kernel. Items are ordered with
the KV head outermost, so that what runs at the same time reads the same keys, and the longest first inside a head, so
that short ones fill the end. Where whole tiles would leave processors idle, the key ranges of the last KV heads are
cut into pieces whose results are merged afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from layerzero.model.grouped import GroupedBatch, Segment

# One piece costs about as much as this many blocks of keys on top of its own: it starts, ends, and may be merged.
_PIECE_COST = 3
_SHORTEST_PIECE = 4  # blocks of keys; shorter pieces are all start and end
_WORTH = 1.05  # cutting has to promise this much: pieces also spoil the sharing of keys, which is not counted here
_MOST_ITEMS = 16384  # beyond this many, what the last ones leave idle is not worth a search


class Span(NamedTuple):
    """Consecutive query tokens; the first sees `limit` keys, each next one `step` more."""

    token: int
    size: int
    limit: int
    step: int


class Tile(NamedTuple):
    """Rows that one program holds: spans of query tokens of one sequence, whose keys begin at `key_start`."""

    spans: tuple[Span, ...]
    key_start: int
    shortest: int
    longest: int


class Item(NamedTuple):
    """One program: a tile for one head, and the keys [low, high) to read. `slot` is -1, or where a piece is put."""

    tile: int
    head: int
    low: int
    high: int
    slot: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All programs of one launch, in order; `merges` are (tile, head, first slot, number of pieces).

    `head` counts KV heads where `packed` (rows then run over the query heads of that KV head too), else query heads.
    """

    tiles: tuple[Tile, ...]
    items: tuple[Item, ...]
    merges: tuple[tuple[int, int, int, int], ...]
    packed: bool
    tokens_per_tile: int
    block_n: int

    @property
    def slots(self) -> int:
        """How many pieces have to be put aside."""
        return sum(count for *_, count in self.merges)


def make_plan(
    batch: GroupedBatch,
    *,
    causal: bool,
    heads: int,
    kv_heads: int,
    block_m: int = 128,
    block_n: int = 128,
    together: bool = False,
    processors: int = 132,
    split: bool = True,
) -> Plan:
    """The work list of `batch` for a device with that many processors."""
    ratio = heads // kv_heads
    tokens = max(1, block_m // ratio) if together else block_m
    tiles = tuple(_together(batch, causal, tokens) if together else _apart(batch, causal, tokens))
    order = sorted(range(len(tiles)), key=lambda index: -tiles[index].longest)
    shares = 1 if together else ratio
    count = len(tiles) * shares * kv_heads
    cut_heads, piece = (0, 0)
    if split and 0 < count <= _MOST_ITEMS:
        cut_heads, piece = _best_cut(
            [_blocks(tiles[index].longest, block_n) for index in order for _ in range(shares)], kv_heads, processors
        )
    items: list[Item] = []
    merges: list[tuple[int, int, int, int]] = []
    slots = 0
    for kv_head in range(kv_heads):
        cut = kv_head >= kv_heads - cut_heads
        for index in order:
            for share in range(shares):
                head = kv_head * shares + share
                ranges = _pieces(tiles[index].longest, piece * block_n if cut else 0, block_n)
                if len(ranges) == 1:
                    items.append(Item(index, head, *ranges[0], -1))
                    continue
                merges.append((index, head, slots, len(ranges)))
                items.extend(Item(index, head, low, high, slots + at) for at, (low, high) in enumerate(ranges))
                slots += len(ranges)
    return Plan(tiles, tuple(items), tuple(merges), together, tokens, block_n)


def _limits(segment: Segment, causal: bool) -> tuple[int, int]:
    """Keys the first query of a segment sees, which may be below 1, and how that grows from query to query."""
    return (segment.kv_len - segment.q_len + 1, 1) if causal else (segment.kv_len, 0)


def _tile(spans: Iterable[Span], key_start: int) -> Tile:
    found = tuple(spans)
    last = [span.limit + span.step * (span.size - 1) for span in found]
    return Tile(found, key_start, max(0, min(span.limit for span in found)), max(0, *last))


def _apart(batch: GroupedBatch, causal: bool, tokens: int) -> Iterator[Tile]:
    for segment in batch.segments():
        limit, step = _limits(segment, causal)
        for at in range(0, segment.q_len, tokens):
            count = min(tokens, segment.q_len - at)
            yield _tile([Span(segment.q_start + at, count, limit + step * at, step)], segment.k_start)


def _together(batch: GroupedBatch, causal: bool, tokens: int) -> Iterator[Tile]:
    by_sequence = sorted(batch.segments(), key=lambda segment: (segment.sequence, segment.kv_len))
    for _, segments in groupby(by_sequence, key=lambda segment: segment.sequence):
        spans: list[Span] = []
        room, start = tokens, 0
        for segment in segments:
            start = segment.k_start
            limit, step = _limits(segment, causal)
            at = 0
            while at < segment.q_len:
                count = min(room, segment.q_len - at)
                spans.append(Span(segment.q_start + at, count, limit + step * at, step))
                at += count
                room -= count
                if room == 0:
                    yield _tile(spans, start)
                    spans, room = [], tokens
        if spans:
            yield _tile(spans, start)


def _blocks(keys: int, block_n: int) -> int:
    return -(-keys // block_n)


def _pieces(longest: int, piece: int, block_n: int) -> list[tuple[int, int]]:
    """[0, longest) in equal parts of whole blocks, none longer than `piece`; 0 leaves it whole."""
    blocks = _blocks(longest, block_n)
    if not piece or blocks * block_n <= piece:
        return [(0, longest)]
    parts = -(-blocks * block_n // piece)
    edges = [blocks * index // parts * block_n for index in range(parts)]
    return list(zip(edges, [*edges[1:], longest], strict=True))


def _best_cut(blocks: list[int], kv_heads: int, processors: int) -> tuple[int, int]:
    """For how many of the last KV heads to cut tiles, and into pieces of how many blocks; (0, 0) for not at all."""
    best = (_makespan(blocks * kv_heads, processors), 0, 0)
    even = sum(count + _PIECE_COST for count in blocks) * kv_heads / processors
    longest = max(blocks)
    for cut_heads in sorted({1, (kv_heads + 1) // 2, kv_heads}):
        if best[0] < even * _WORTH:
            break
        head = blocks * (kv_heads - cut_heads)
        for parts in (2, 3, 4, 6, 8, 16, 32, 64):
            piece = -(-longest // parts)
            if piece < _SHORTEST_PIECE:
                break
            cut = [high - low for count in blocks for low, high in _pieces(count, piece, 1)]
            extra = sum(1 for count in blocks if count > piece) * cut_heads * _PIECE_COST / processors
            cost = _makespan([*head, *(cut * cut_heads)], processors) + extra
            if cost * _WORTH < best[0]:
                best = (cost, cut_heads, piece)
    return best[1], best[2]


def _makespan(blocks: list[int], processors: int) -> float:
    """When the last processor is done if each takes the next item of the list as soon as it is free."""
    free = [0] * processors
    for count in blocks:
        heapq.heapreplace(free, free[0] + count + _PIECE_COST)
    return float(max(free))

"""The batch description of grouped attention, and how many bytes of keys and values a grouped call spares.

The queries of a call form G groups over the same B sequences. Group g attends the first `kv_lens[g, b]` keys of
sequence b, so the groups of one sequence read prefixes of the same keys, and the prefixes overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from layerzero.errors import invalid
from layerzero.model.describe import check_devices

if TYPE_CHECKING:
    from torch import Tensor

Lengths = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""cu_seqlens_q, cu_seqlens_k and kv_lens (flat, group-major) as the host has them."""
_INDEX_DTYPES = ("torch.int32", "torch.int64")
_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "kv_lens")
_RANKS = (1, 1, 2)


class Segment(NamedTuple):
    """The queries of one group in one sequence, and the keys they attend."""

    group: int
    sequence: int
    q_start: int
    q_len: int
    k_start: int
    kv_len: int


class KvTraffic(NamedTuple):
    """Bytes of keys and values that must come from memory: once for each group, or once for all of them."""

    separate: int
    grouped: int

    @property
    def saved(self) -> int:
        """What reading each byte only once spares."""
        return self.separate - self.grouped

    @property
    def share(self) -> float:
        """The part of the separate traffic that is spared, between 0 and 1."""
        return self.saved / self.separate if self.separate else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class GroupedBatch:
    """One grouped batch, checked and planned once; make it with `make_grouped_batch`.

    cu_seqlens_q [G * B + 1]  where each segment of queries begins, group-major: first group 0 of every sequence, then
                              group 1 of every sequence, and so on
    cu_seqlens_k [B + 1]      where each sequence begins in the packed keys and values, which all groups share
    kv_lens [G, B]            how many of the first keys of a sequence a group attends

    The `_host` tuples hold the same numbers (`kv_lens_host` flat, group-major), so that no kernel has to ask the
    device for them.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    kv_lens: Tensor
    cu_seqlens_q_host: tuple[int, ...]
    cu_seqlens_k_host: tuple[int, ...]
    kv_lens_host: tuple[int, ...]

    @classmethod
    def of_lengths(cls, lengths: Lengths) -> GroupedBatch:
        """A batch of host numbers alone, to plan with."""
        import torch

        empty = torch.empty(0, dtype=torch.int32)
        return cls(empty, empty, empty, *lengths)

    @property
    def lengths(self) -> Lengths:
        """The host numbers: what a plan depends on."""
        return self.cu_seqlens_q_host, self.cu_seqlens_k_host, self.kv_lens_host

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise unless the tensors fit each other and the batch: libraries look at shapes, not at what offsets mean."""
        (tokens, heads, dim), (total_k, kv_heads, _) = query.shape, key.shape
        fits = key.shape == value.shape and key.shape[2] == dim and kv_heads > 0 and heads % kv_heads == 0
        if not fits or (tokens, total_k) != (self.total_q, self.total_k):
            given = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            raise invalid("SHAPE_INVALID", given, f"[{self.total_q}, Hq, D] and twice [{self.total_k}, Hkv, D]")

    @property
    def batch_size(self) -> int:
        return len(self.cu_seqlens_k_host) - 1

    @property
    def num_groups(self) -> int:
        return len(self.kv_lens_host) // self.batch_size if self.batch_size else 0

    @property
    def total_q(self) -> int:
        return self.cu_seqlens_q_host[-1]

    @property
    def total_k(self) -> int:
        return self.cu_seqlens_k_host[-1]

    @property
    def max_query_len(self) -> int:
        """Most query tokens of one segment; 0 for an empty batch."""
        return max((end - start for start, end in pairwise(self.cu_seqlens_q_host)), default=0)

    @property
    def max_kv_len(self) -> int:
        """Most keys one segment attends; 0 for an empty batch."""
        return max(self.kv_lens_host, default=0)

    def segments(self) -> tuple[Segment, ...]:
        """Every segment in the order of the packed queries; those without queries are left out."""
        found = []
        size = self.batch_size
        for index, kv_len in enumerate(self.kv_lens_host):
            start, end = self.cu_seqlens_q_host[index : index + 2]
            if end > start:
                group, row = divmod(index, size)
                found.append(Segment(group, row, start, end - start, self.cu_seqlens_k_host[row], kv_len))
        return tuple(found)

    def spans(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Where the queries and the keys of each segment begin and end."""
        return [((s.q_start, s.q_start + s.q_len), (s.k_start, s.k_start + s.kv_len)) for s in self.segments()]

    def kv_traffic(self, num_kv_heads: int, head_dim: int, element_bytes: int) -> KvTraffic:
        """Bytes of K and V that a call for each group reads, against those that have to be read at all.

        Caches are left out: this is the traffic of an ideal kernel, a bound on what grouping can spare.
        """
        token = 2 * num_kv_heads * head_dim * element_bytes
        longest: dict[int, int] = {}
        total = 0
        for segment in self.segments():
            total += segment.kv_len
            longest[segment.sequence] = max(longest.get(segment.sequence, 0), segment.kv_len)
        return KvTraffic(total * token, sum(longest.values()) * token)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.cu_seqlens_q, self.cu_seqlens_k, self.kv_lens)

    def hot_key(self) -> tuple[object, ...]:
        """What a kernel choice may depend on: index dtypes, device, groups and sequences; never the lengths."""
        lens = self.kv_lens
        return (
            type(lens), lens.dtype, self.cu_seqlens_q.dtype, self.cu_seqlens_k.dtype, lens.is_cpu, lens.get_device(),
            tuple(lens.shape),
        )  # fmt: skip


def make_grouped_batch(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_lens: Tensor,
    host_lens: tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]] | None = None,
) -> GroupedBatch:
    """Check the metadata and bring the lengths to the host, once per batch.

    `host_lens` spares the device-to-host copy when the caller knows the numbers already: the same three as Python
    numbers. They are trusted to equal the tensors.
    """
    given = (cu_seqlens_q, cu_seqlens_k, kv_lens)
    for name, tensor, rank in zip(_NAMES, given, _RANKS, strict=True):
        dtype = getattr(tensor, "dtype", None)
        if dtype is None:
            raise invalid("TYPE_INVALID", f"{name}: {type(tensor).__name__}", "a torch.Tensor")
        if str(dtype) not in _INDEX_DTYPES:
            raise invalid("TYPE_INVALID", f"{name} of {dtype}", "int32 or int64")
        if tensor.dim() != rank:
            raise invalid("RANK_INVALID", tensor.dim(), rank, f"{name} has rank {tensor.dim()}")
    check_devices(**dict(zip(_NAMES, given, strict=True)))
    groups, rows = kv_lens.shape
    _check_size("cu_seqlens_k", cu_seqlens_k, rows + 1, f"{rows} + 1 for kv_lens of {rows} sequences")
    words = f"{groups} * {rows} + 1 for {groups} groups of {rows} sequences"
    _check_size("cu_seqlens_q", cu_seqlens_q, groups * rows + 1, words)
    q_host, k_host, lens_host = _host(given, host_lens)
    _check_offsets("cu_seqlens_q", q_host)
    _check_offsets("cu_seqlens_k", k_host)
    for index, length in enumerate(lens_host):
        group, row = divmod(index, rows)
        known = k_host[row + 1] - k_host[row]
        if not 0 <= length <= known:
            shown = f"kv_lens[{group}, {row}] = {length}"
            raise invalid("VALUE_INVALID", shown, f"between 0 and the {known} keys of the sequence")
    return GroupedBatch(*given, q_host, k_host, lens_host)


def _check_size(name: str, tensor: Any, size: int, words: str) -> None:
    if tensor.shape[0] != size:
        raise invalid("SHAPE_INVALID", str(tuple(tensor.shape)), words, f"{name} has {tensor.shape[0]} entries")


def _host(given: tuple[Tensor, Tensor, Tensor], host_lens: Any) -> tuple[tuple[int, ...], ...]:
    """The three as flat tuples, from the caller or from the device."""
    if host_lens is None:
        return tuple(tuple(tensor.flatten().tolist()) for tensor in given)
    try:
        offsets_q, offsets_k, lens = host_lens
        found = tuple(map(int, offsets_q)), tuple(map(int, offsets_k)), tuple(int(n) for row in lens for n in row)
    except (TypeError, ValueError):
        raise invalid("TYPE_INVALID", f"host_lens {host_lens!r}", "cu_seqlens_q, cu_seqlens_k and kv_lens") from None
    for name, tensor, numbers in zip(_NAMES, given, found, strict=True):
        if len(numbers) != tensor.numel():
            raise invalid("SHAPE_INVALID", f"host_lens of {len(numbers)}", f"{tensor.numel()}, as in {name}")
    return found


def _check_offsets(name: str, offsets: tuple[int, ...]) -> None:
    if offsets[0] != 0 or any(start > end for start, end in pairwise(offsets)):
        shown = f"{name} {list(offsets[:8])}{' ...' if len(offsets) > 8 else ''}"
        raise invalid("VALUE_INVALID", shown, "ascending from 0")

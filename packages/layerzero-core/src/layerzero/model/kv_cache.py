"""The batch description of paged attention: which pages belong to which sequence, and how long each one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from layerzero.errors import InvalidInputError
from layerzero.reasons import ReasonCode

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PagedBatch", "make_paged_batch"]

_INDEX_DTYPES = ("torch.int32", "torch.int64")


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """One batch over a paged KV cache, checked and planned once; make it with `make_paged_batch`.

    block_tables [B, max_blocks] holds page numbers, context_lens [B] the KV length of each sequence including its
    new tokens, query_lens [B] the number of new tokens (None: one each). The `_host` tuples hold the same lengths,
    so that no kernel has to ask the device for them.
    """

    block_tables: Tensor
    context_lens: Tensor
    query_lens: Tensor | None
    context_lens_host: tuple[int, ...]
    query_lens_host: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.context_lens_host)

    @property
    def total_q(self) -> int:
        """Number of query tokens, all sequences together."""
        return sum(self.query_lens_host)

    @property
    def max_query_len(self) -> int:
        """Most query tokens of one sequence; 0 for an empty batch."""
        return max(self.query_lens_host, default=0)

    @property
    def max_context_len(self) -> int:
        """Longest KV length; 0 for an empty batch."""
        return max(self.context_lens_host, default=0)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return all(length == 1 for length in self.query_lens_host)

    def page_indices(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same batch as FlashInfer plans it: (indptr [B + 1], indices, last_page_len [B]), int32.

        Page numbers of all sequences one after another, where each begins, and how full each last page is (0 for a
        sequence without tokens).
        """
        import torch

        counts = [-(-length // page_size) for length in self.context_lens_host]
        starts = [0, *accumulate(counts)]
        last = [(length - 1) % page_size + 1 if length else 0 for length in self.context_lens_host]
        device = self.block_tables.device
        columns = torch.arange(self.block_tables.shape[1], device=device)
        inside = columns < torch.tensor(counts, device=device).unsqueeze(-1)
        indices = self.block_tables[inside].to(torch.int32)
        return (
            torch.tensor(starts, dtype=torch.int32, device=device),
            indices,
            torch.tensor(last, dtype=torch.int32, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The device tensors inside, for device and mode checks."""
        extra = () if self.query_lens is None else (self.query_lens,)
        return (self.block_tables, self.context_lens, *extra)

    def hot_key(self) -> tuple[object, ...]:
        """What a kernel choice may depend on: index dtypes, batch size, decode or prefill; never the lengths."""
        tables = self.block_tables
        return (
            type(tables), tables.dtype, self.context_lens.dtype, tables.is_cpu, tables.get_device(),
            len(self.context_lens_host), self.is_decode, tables.is_contiguous(),
        )  # fmt: skip


def make_paged_batch(
    block_tables: Tensor,
    context_lens: Tensor,
    query_lens: Tensor | None = None,
    host_lens: Sequence[int] | tuple[Sequence[int], Sequence[int]] | None = None,
) -> PagedBatch:
    """Check the metadata and bring the lengths to the host, once per batch.

    `host_lens` spares the device-to-host copy when the caller knows the lengths already: the context lengths, or a
    pair (context lengths, query lengths). They are trusted to equal the tensors.
    """
    for name, tensor, rank in (("block_tables", block_tables, 2), ("context_lens", context_lens, 1)):
        _check_tensor(name, tensor, rank)
    if query_lens is not None:
        _check_tensor("query_lens", query_lens, 1)
    _check_together(block_tables, context_lens, query_lens)

    known_context, known_query = _split_host_lens(host_lens)
    batch = int(block_tables.shape[0])
    contexts = tuple(context_lens.tolist()) if known_context is None else known_context
    if known_query is not None:
        queries = known_query
    else:
        queries = (1,) * batch if query_lens is None else tuple(query_lens.tolist())
    _check_lengths(contexts, queries, batch, has_query_lens=query_lens is not None)
    return PagedBatch(block_tables, context_lens, query_lens, contexts, queries)


def _check_tensor(name: str, tensor: Tensor, rank: int) -> None:
    dtype = getattr(tensor, "dtype", None)
    if dtype is None:
        raise InvalidInputError(code=ReasonCode.TYPE_INVALID, value=f"{name} {type(tensor).__name__}", limit="a Tensor")
    if str(dtype) not in _INDEX_DTYPES:
        raise InvalidInputError(code=ReasonCode.BLOCK_TABLE_DTYPE, value=f"{name} {dtype}", limit="int32 or int64")
    if tensor.dim() != rank:
        shape = "[B, max_blocks]" if rank == 2 else "[B]"
        raise _invalid(f"{name} {tuple(tensor.shape)}", shape)


def _check_together(block_tables: Tensor, context_lens: Tensor, query_lens: Tensor | None) -> None:
    given = {"block_tables": block_tables, "context_lens": context_lens}
    if query_lens is not None:
        given["query_lens"] = query_lens
    if len({tensor.device for tensor in given.values()}) > 1:
        places = [f"{name} on {tensor.device}" for name, tensor in given.items()]
        raise InvalidInputError(code=ReasonCode.DEVICE_MIXED, value=places)
    batch = block_tables.shape[0]
    for name, tensor in given.items():
        if tensor.shape[0] != batch:
            raise _invalid(f"of {batch} rows", f"{name} {tuple(tensor.shape)}")


def _split_host_lens(
    host_lens: Sequence[int] | tuple[Sequence[int], Sequence[int]] | None,
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    if host_lens is None:
        return None, None
    items: list[Any] = list(host_lens)
    try:
        if len(items) == 2 and isinstance(items[0], Sequence) and isinstance(items[1], Sequence):
            return tuple(int(n) for n in items[0]), tuple(int(n) for n in items[1])
        return tuple(int(n) for n in items), None
    except (TypeError, ValueError):
        raise InvalidInputError(
            code=ReasonCode.TYPE_INVALID,
            value=f"host_lens {host_lens!r}",
            limit="ints, or a pair of int sequences",
        ) from None


def _check_lengths(contexts: tuple[int, ...], queries: tuple[int, ...], batch: int, *, has_query_lens: bool) -> None:
    for name, lengths in (("context_lens", contexts), ("query_lens", queries)):
        if len(lengths) != batch:
            raise _invalid(f"of {batch} rows", f"{len(lengths)} {name}")
        if any(length < 0 for length in lengths):
            raise _invalid(f"with {name} {min(lengths)}", "lengths >= 0")
    if not has_query_lens and any(length != 1 for length in queries):
        raise _invalid("without query_lens", "host query lengths other than 1")
    for row, (context, query) in enumerate(zip(contexts, queries, strict=True)):
        # A sequence without any context is a padding row (a captured graph has a fixed batch): it yields zeros.
        if query > context > 0:
            raise _invalid(f"row {row} with {query} query tokens", f"a context of {context}, new tokens included")


def _invalid(value: str, limit: str) -> InvalidInputError:
    return InvalidInputError(code=ReasonCode.BLOCK_TABLE_INVALID, value=value, limit=limit)

"""The batch description of paged attention: which pages belong to which sequence, and how long each one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from layerzero.errors import invalid
from layerzero.model.describe import check_devices
from layerzero.reasons import ReasonCode

if TYPE_CHECKING:
    from torch import Tensor

_INDEX_DTYPES = ("torch.int32", "torch.int64")
_invalid = partial(invalid, ReasonCode.BLOCK_TABLE_INVALID)


class BatchPlan(Protocol):
    """What a kernel prepared for one batch and keeps in `PagedBatch.plans`."""

    def replan(self, batch: PagedBatch) -> None:
        """Prepare it again, in the same buffers, after the numbers of the batch have changed."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PagedBatch:
    """One batch over a paged KV cache, checked and planned once; make it with `make_paged_batch`.

    block_tables [B, max_blocks] holds page numbers, context_lens [B] the KV length of each sequence including its
    new tokens, query_lens [B] the number of new tokens (None: one each). The `_host` tuples hold the same lengths, so
    that no kernel has to ask the device for them; who makes a batch for one kernel that reads them there may give
    bounds. `plans` is where kernels keep what they prepared for this batch,
    for the layers that follow. A batch made for a capture owns its tensors; `update` writes other numbers into them.
    """

    block_tables: Tensor
    context_lens: Tensor
    query_lens: Tensor | None
    context_lens_host: tuple[int, ...]
    query_lens_host: tuple[int, ...]
    capture: bool = False
    plans: dict[Any, BatchPlan] = field(default_factory=dict, repr=False)
    # Read at every call, hence counted once: sequences, query tokens, the longest of both, one new token each, more
    # queries than context in one of them.
    batch_size: int = field(init=False, repr=False)
    total_q: int = field(init=False, repr=False)
    max_query_len: int = field(init=False, repr=False)
    max_context_len: int = field(init=False, repr=False)
    is_decode: bool = field(init=False, repr=False)
    is_cross: bool = field(init=False, repr=False)
    # What `check_page_numbers` has looked at, for the layers that follow.
    _looked_at: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._count()

    def _count(self) -> None:
        contexts, queries = self.context_lens_host, self.query_lens_host
        object.__setattr__(self, "batch_size", len(contexts))
        object.__setattr__(self, "total_q", sum(queries))
        object.__setattr__(self, "max_query_len", max(queries, default=0))
        object.__setattr__(self, "max_context_len", max(contexts, default=0))
        object.__setattr__(self, "is_decode", all(length == 1 for length in queries))
        more = any(query > context > 0 for context, query in zip(contexts, queries, strict=True))
        object.__setattr__(self, "is_cross", more)

    def update(
        self,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        query_lens: Tensor | None = None,
        host_lens: Sequence[int] | tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Other numbers for a batch made with `capture=True`, before the next replay of its graph.

        The shapes and the number of query tokens stay as they were captured. Lengths come to the host and every plan
        is made again, so this is called between replays, never inside a capture.
        """
        if not self.capture:
            raise invalid(ReasonCode.VALUE_INVALID, "a batch made without capture=True", "capture=True")
        fresh = make_paged_batch(block_tables, context_lens, query_lens, host_lens, cross=self.is_cross)
        kept = (tuple(self.block_tables.shape), self.query_lens is None, self.total_q, self.is_decode)
        given = (tuple(fresh.block_tables.shape), fresh.query_lens is None, fresh.total_q, fresh.is_decode)
        if kept != given:
            wanted = f"{kept[0]} with {kept[2]} query tokens, as captured"
            raise _invalid(f"{given[0]} with {given[2]} query tokens", wanted)
        self.block_tables.copy_(fresh.block_tables)
        self.context_lens.copy_(fresh.context_lens)
        if self.query_lens is not None and fresh.query_lens is not None:
            self.query_lens.copy_(fresh.query_lens)
        object.__setattr__(self, "context_lens_host", fresh.context_lens_host)
        object.__setattr__(self, "query_lens_host", fresh.query_lens_host)
        self._count()
        for plan in self.plans.values():
            plan.replan(self)

    def check_page_numbers(self, page_size: int, blocks: int) -> None:
        """Refuse page numbers in use outside 0 … blocks - 1, where looking costs no wait: on the CPU."""
        tables = self.block_tables
        if not tables.is_cpu or tables.numel() == 0:
            return
        version = None if tables.is_inference() else tables._version
        looked_at = (version, page_size, blocks, self.context_lens_host)
        if version is not None and self._looked_at == looked_at:
            return
        lowest, highest = (int(item) for item in tables.aminmax())
        if lowest < 0 or highest >= blocks:
            for row, length in enumerate(self.context_lens_host):  # places beyond a context may hold anything
                for number in tables[row, : -(-length // page_size)].tolist():
                    if not 0 <= number < blocks:
                        raise _invalid(f"page {number} of row {row}", f"pages 0 to {blocks - 1} of the cache")
        object.__setattr__(self, "_looked_at", looked_at)

    def as_on_device(self) -> PagedBatch:
        """The batch with the lengths that its tensors hold now, where the host was given bounds; waits for them."""
        contexts = tuple(self.context_lens.tolist())
        return self if contexts == self.context_lens_host else replace(self, context_lens_host=contexts, plans={})

    def page_places(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The batch as FlashInfer plans it: indptr [B + 1], where the flat tables hold each page, last_page_len [B].

        The first and the last (0 for a sequence without tokens) are int32 on the host. All come from the lengths of
        the host, so nobody waits for the device; the places are counted on it, because torch shares out even small
        work between threads of the host.
        """
        import torch

        counts = [-(-length // page_size) for length in self.context_lens_host]
        starts = [0, *accumulate(counts)]
        last = [(length - 1) % page_size + 1 if length else 0 for length in self.context_lens_host]
        width, device = self.block_tables.shape[1], self.block_tables.device
        shifts = [row * width - start for row, start in enumerate(starts[:-1])]
        both = torch.tensor([shifts, counts], dtype=torch.int64).to(device, non_blocking=True)
        shift = torch.repeat_interleave(both[0], both[1], output_size=starts[-1])
        return (
            torch.tensor(starts, dtype=torch.int32),
            torch.arange(starts[-1], device=device) + shift,
            torch.tensor(last, dtype=torch.int32),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        extra = () if self.query_lens is None else (self.query_lens,)
        return (self.block_tables, self.context_lens, *extra)

    def hot_key(self) -> tuple[object, ...]:
        """What a kernel choice may depend on: index dtypes, batch size, decode or prefill; never the lengths."""
        tables = self.block_tables
        return (
            type(tables), tables.dtype, self.context_lens.dtype, tables.is_cpu, tables.get_device(),
            len(self.context_lens_host), self.is_decode, tables.is_contiguous(), self.is_cross,
        )  # fmt: skip


def make_paged_batch(
    block_tables: Tensor,
    context_lens: Tensor,
    query_lens: Tensor | None = None,
    host_lens: Sequence[int] | tuple[Sequence[int], Sequence[int]] | None = None,
    capture: bool = False,
    cross: bool = False,
) -> PagedBatch:
    """Check the metadata and bring the lengths to the host, once per batch.

    `host_lens` spares the device-to-host copy when the caller knows the lengths already: the context lengths, or a
    pair (context lengths, query lengths). They are trusted to equal the tensors. `capture` makes a batch whose tensors
    are its own and stay where they are, for calls inside a CUDA graph. `cross` allows more queries than context.
    """
    given = {"block_tables": block_tables, "context_lens": context_lens}
    if query_lens is not None:
        given["query_lens"] = query_lens
    for name, tensor in given.items():
        dtype = getattr(tensor, "dtype", None)
        if dtype is None:
            raise invalid(ReasonCode.TYPE_INVALID, f"{name} {type(tensor).__name__}", "a Tensor")
        if str(dtype) not in _INDEX_DTYPES:
            raise invalid(ReasonCode.BLOCK_TABLE_DTYPE, f"{name} {dtype}", "int32 or int64")
        rank, shape = (2, "[B, max_blocks]") if name == "block_tables" else (1, "[B]")
        if tensor.dim() != rank:
            raise _invalid(f"{name} {tuple(tensor.shape)}", shape)
    check_devices(**given)
    batch = int(block_tables.shape[0])
    for name, tensor in given.items():
        if tensor.shape[0] != batch:
            raise _invalid(f"of {batch} rows", f"{name} {tuple(tensor.shape)}")

    known_context, known_query = _split_host_lens(host_lens)
    contexts = tuple(context_lens.tolist()) if known_context is None else known_context
    if known_query is not None:
        queries = known_query
    else:
        queries = (1,) * batch if query_lens is None else tuple(query_lens.tolist())
    _check_lengths(contexts, queries, batch, has_query_lens=query_lens is not None, cross=cross)
    if not capture:
        return PagedBatch(block_tables, context_lens, query_lens, contexts, queries)
    own = None if query_lens is None else query_lens.clone()
    return PagedBatch(block_tables.clone(), context_lens.clone(), own, contexts, queries, True)


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
        raise invalid(ReasonCode.TYPE_INVALID, f"host_lens {host_lens!r}", "ints, or a pair of int sequences") from None


def _check_lengths(
    contexts: tuple[int, ...], queries: tuple[int, ...], batch: int, *, has_query_lens: bool, cross: bool
) -> None:
    for name, lengths in (("context_lens", contexts), ("query_lens", queries)):
        if len(lengths) != batch:
            raise _invalid(f"of {batch} rows", f"{len(lengths)} {name}")
        if any(length < 0 for length in lengths):
            raise _invalid(f"with {name} {min(lengths)}", "lengths >= 0")
    if not has_query_lens and any(length != 1 for length in queries):
        raise _invalid("without query_lens", "host query lengths other than 1")
    for row, (context, query) in enumerate(zip(contexts, queries, strict=True)):
        # A sequence without any context is a padding row (a captured graph has a fixed batch): it yields zeros.
        if query > context > 0 and not cross:
            raise _invalid(f"row {row} with {query} query tokens", f"a context of {context}, new tokens included")


def pages_in_use(batch: PagedBatch, page_size: int) -> tuple[Tensor, PagedBatch]:
    """Numbers of the pages a batch reads, and the same batch for a cache that holds just these, in this order.

    A page that two sequences share stands twice. What lies in the tables beyond a sequence's context is not read.
    """
    import torch

    tables = batch.block_tables
    needed = -(-batch.max_context_len // page_size)
    counts = (batch.context_lens + (page_size - 1)) // page_size
    columns = torch.arange(needed, device=tables.device)
    pages = torch.where(columns < counts.unsqueeze(-1), tables[:, :needed], 0).reshape(-1)
    own = torch.arange(pages.numel(), dtype=tables.dtype, device=tables.device).view(batch.batch_size, needed)
    return pages, PagedBatch(own, batch.context_lens, batch.query_lens, batch.context_lens_host, batch.query_lens_host)

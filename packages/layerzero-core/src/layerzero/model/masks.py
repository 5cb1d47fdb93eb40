"""Masks that are values: what `attn_mask=` may be besides a tensor.

A kernel that declares the feature (`block_mask`, `chunk_mask`) takes the value as it is; for every other kernel it is
written out as a boolean mask, which the trace of the decision says. Positions are those of `lz.attention`: query row i
stands at key position i + (Sk - Sq).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from layerzero.errors import invalid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Span = tuple[int, int, int, int]
"""First and last query row, first and last key of one piece of work; the last ones are not part of it."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """A boolean mask of blocks; make it with `lz.block_mask`."""

    blocks: Tensor
    block_size: tuple[int, int]

    feature: ClassVar[str] = "block_mask"
    requires_grad: ClassVar[bool] = False

    @property
    def ndim(self) -> int:
        return self.blocks.ndim

    def unsqueeze(self, axis: int) -> BlockMask:
        """With an axis more, as a tensor would have it."""
        return BlockMask(self.blocks.unsqueeze(axis), self.block_size)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors inside, for device and mode checks."""
        return (self.blocks,)

    def hot_key(self) -> tuple[object, ...]:
        """Everything a choice may depend on; never which blocks are on."""
        it = self.blocks
        order = it.is_contiguous() or it.stride()
        return (BlockMask, type(it), it.shape, it.dtype, it.is_cpu or ~it.get_device(), order, self.block_size)

    def dims(self) -> dict[str, int]:
        """Sizes that a kernel's limits may name."""
        return {"mask_block_q": self.block_size[0], "mask_block_k": self.block_size[1]}

    def check(self, dims: Mapping[str, int], rank: int, window: Any) -> None:
        """Refuse blocks that do not cover the scores exactly; a window beside them is fine."""
        full = [dims["batch"], dims["num_heads"]] if rank == 4 else [dims["batch"]]
        full += [-(-dims[f"seq_len_{axis}"] // size) for axis, size in zip("qk", self.block_size, strict=True)]
        shape = tuple(self.blocks.shape)
        # The grid itself does not broadcast: a grid of one block would be no mask at all.
        fits = 2 <= len(shape) <= rank and shape[-2:] == tuple(full[-2:])
        if not fits or not all(m in (1, f) for m, f in zip(reversed(shape), reversed(full), strict=False)):
            rows, cols = self.block_size
            raise invalid("MASK_NOT_BROADCASTABLE", f"{shape} in blocks of {rows}x{cols}", str(tuple(full)))

    def dense(self, rows: int, cols: int, device: torch.device | None = None) -> Tensor:
        """The boolean mask [.., rows, cols]: True may be attended."""
        tall = self.blocks.repeat_interleave(self.block_size[0], dim=-2)[..., :rows, :]
        return tall.repeat_interleave(self.block_size[1], dim=-1)[..., :cols]

    def __str__(self) -> str:
        return f"{self.block_size[0]}x{self.block_size[1]}"


@dataclass(frozen=True, slots=True)
class ChunkMask:
    """Causal attention within chunks of `size` tokens; make it with `lz.chunk_mask`."""

    size: int

    feature: ClassVar[str] = "chunk_mask"
    requires_grad: ClassVar[bool] = False

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def hot_key(self) -> tuple[object, ...]:
        """The size, which limits of kernels may name."""
        return (ChunkMask, self.size)

    def dims(self) -> dict[str, int]:
        return {"mask_chunk": self.size}

    def check(self, dims: Mapping[str, int], rank: int, window: Any) -> None:
        """Refuse a window beside it: either says how far back a query may look, and which one is meant is a guess."""
        if window is not None:
            raise invalid("MASK_WITH_WINDOW", "chunk_mask", str(window))

    def dense(self, rows: int, cols: int, device: torch.device | None = None) -> Tensor:
        import torch

        query = torch.arange(rows, device=device).unsqueeze(-1) + (cols - rows)
        key = torch.arange(cols, device=device)
        return (key <= query) & (query // self.size == key // self.size)

    def spans(self, rows: int, cols: int) -> tuple[Span, ...]:
        """One piece per chunk that has queries; within it attention is causal and aligned to the bottom right.

        Rows before the first key (more queries than keys) are in no piece: they attend nothing.
        """
        shift = cols - rows
        found = []
        first = max(0, shift)  # position of the first query that has keys
        while first < cols:
            start = first // self.size * self.size
            stop = min(start + self.size, cols)
            found.append((first - shift, stop - shift, start, stop))
            first = stop
        return tuple(found)

    def __str__(self) -> str:
        return str(self.size)


MASK_VALUES = (BlockMask, ChunkMask)


def block_mask(blocks: Tensor, block_size: int | tuple[int, int]) -> BlockMask:
    """A block-sparse mask for `lz.attention`: True where the queries of a block may attend the keys of a block.

    `blocks` is boolean [.., nq, nk], its leading axes broadcast against batch and heads. `block_size` is tokens per
    block, one number or (query, key); the last blocks may be partly beyond the end. Not together with `is_causal`.
    """
    dtype = str(getattr(blocks, "dtype", type(blocks).__name__)).removeprefix("torch.")
    if not hasattr(blocks, "stride"):
        raise invalid("TYPE_INVALID", f"blocks: {dtype}", "a boolean torch.Tensor")
    if dtype != "bool":
        raise invalid("MASK_DTYPE_INVALID", dtype, "bool, for blocks")
    if not 2 <= blocks.ndim <= 4 or 0 in blocks.shape:
        raise invalid("SHAPE_INVALID", str(tuple(blocks.shape)), "[.., nq, nk]")
    pair = (block_size, block_size) if isinstance(block_size, int) else block_size
    right = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not right or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise invalid("VALUE_INVALID", f"block_size={block_size}", "a positive number, or two (query, key)")
    return BlockMask(blocks, (pair[0], pair[1]))


def chunk_mask(size: int) -> ChunkMask:
    """Chunked attention (as in Llama 4) for `lz.attention`: causal, and only within the query's chunk of `size` keys.

    Chunks count from the first key, so that prefill and decode with a cache see the same ones. Not together with
    `is_causal`, which it implies, nor with `window`.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise invalid("VALUE_INVALID", f"size={size}", "a positive number of tokens")
    return ChunkMask(size)


def dense_mask(mask: Any, rows: int, cols: int, device: torch.device) -> Any:
    """A mask as a tensor, whatever it was; None stays None."""
    return mask.dense(rows, cols, device) if isinstance(mask, MASK_VALUES) else mask

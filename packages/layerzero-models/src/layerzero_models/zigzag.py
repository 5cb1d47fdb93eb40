"""Zigzag context parallelism (zigzag_llama3): one causal sequence over several ranks, all of them equally busy.

Every sequence is cut into 2W chunks for W ranks, and rank r owns chunks r and 2W-1-r: an early one with few keys to
attend and a late one with many. Queries stay where they are; keys and values are gathered from all ranks, each rank
attends with its two chunks, and in the backward the gradients of keys and values go back to their owners.

    plan = zigzag_plan(cu_seqlens)                     # once per batch, the same cu_seqlens on every rank
    x = plan.shard(tokens)                             # this rank's rows; plan.positions are theirs, for RoPE
    out = zigzag_attention(q, k, v, plan)              # [local tokens, Hq, D]

The two chunks of a rank read prefixes of the same keys, which `lz.grouped_attention` knows;
`use_grouped_attention=False` makes a call for each chunk instead, to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero import grouped_attention, varlen_attention
from layerzero.errors import invalid
from layerzero.model.grouped import GroupedBatch, make_grouped_batch
from layerzero_models.tensor_parallel import differentiable, place_of

# What a call of its own for one of the two chunks takes: its queries, its keys, and how they are packed.
_Chunk = tuple[slice, Tensor | slice, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class ZigzagPlan:
    """One rank's share of a packed batch; make it with `zigzag_plan`.

    The local tokens lie chunk by chunk: the early chunk of every sequence, then the late one of every sequence.

    tokens     [local]  which rows of the packed batch they are
    positions  [local]  where each stands in its sequence
    order      [total]  brings what was gathered from all ranks, one after the other, into the order of the batch
    batch               the grouped attention of the two chunks
    """

    rank: int
    world: int
    tokens: Tensor
    positions: Tensor
    order: Tensor
    batch: GroupedBatch
    chunks: list[_Chunk]

    def shard(self, packed: Tensor) -> Tensor:
        """This rank's rows of a packed tensor [total, ...]."""
        return packed.index_select(0, self.tokens)

    def restore(self, gathered: Tensor) -> Tensor:
        """The packed tensor [total, ...] from the shards of all ranks, one after the other along the first axis."""
        return gathered.index_select(0, self.order)


def zigzag_plan(
    cu_seqlens: Tensor | Sequence[int],
    *,
    rank: int | None = None,
    world: int | None = None,
    group: Any = None,
    device: torch.device | str | None = None,
) -> ZigzagPlan:
    """Who owns what of sequences that begin at `cu_seqlens` [B + 1]; each length must be a multiple of 2 * world.

    Rank and world are those of the process group unless given; without a group the world is this process.
    """
    own = place_of(group) if rank is None or world is None else (0, 1)
    rank, world = own[0] if rank is None else rank, own[1] if world is None else world
    if world < 1 or not 0 <= rank < world:
        raise invalid("VALUE_INVALID", f"rank {rank} of {world}", "0 <= rank < world")
    place = device if device is not None else cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
    offsets = [int(n) for n in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    if not offsets or offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
        raise invalid("VALUE_INVALID", str(offsets[:8]), "ascending from 0", "cu_seqlens does not hold offsets")
    lengths = [b - a for a, b in pairwise(offsets)]
    for row, length in enumerate(lengths):
        if length % (2 * world):
            message = f"sequence {row} has {length} tokens, which {world} ranks cannot share evenly; pad it"
            raise invalid("DIM_NOT_MULTIPLE", length, 2 * world, message)
    return _build(offsets, [n // (2 * world) for n in lengths], rank, world, torch.device(place))


def _build(offsets: list[int], sizes: list[int], rank: int, world: int, device: torch.device) -> ZigzagPlan:
    """The plan for sequences of 2 * world chunks of these sizes."""
    pairs = [(owner, 2 * world - 1 - owner) for owner in range(world)]
    mine = pairs[rank]
    everyone = torch.cat([_rows(pair, offsets, sizes) for pair in pairs])
    order = torch.empty_like(everyone)
    order[everyone] = torch.arange(len(everyone))
    kv_lens = [[(chunk + 1) * size for size in sizes] for chunk in mine]
    offsets_q = [0, *accumulate(sizes * 2)]
    batch = make_grouped_batch(
        _offsets(offsets_q, device),
        _offsets(offsets, device),
        _offsets(kv_lens, device).reshape(2, len(sizes)),
        (offsets_q, offsets, kv_lens),
    )
    half = offsets_q[len(sizes)]
    chunks: list[_Chunk] = []
    for index, lens in enumerate(kv_lens):
        # One sequence is cut without a copy; several lie apart in the packed keys.
        keys = slice(0, lens[0]) if len(lens) == 1 else _ranges(offsets, lens).to(device)
        packing = {
            "cu_seqlens_q": _offsets([0, *accumulate(sizes)], device),
            "cu_seqlens_k": _offsets([0, *accumulate(lens)], device),
            "max_seqlen_q": max(sizes, default=0),
            "max_seqlen_k": max(lens, default=0),
        }
        chunks.append((slice(index * half, (index + 1) * half), keys, packing))
    tokens, positions = _rows(mine, offsets, sizes), _rows(mine, [0] * len(sizes), sizes)
    return ZigzagPlan(rank, world, tokens.to(device), positions.to(device), order.to(device), batch, chunks)


def _offsets(numbers: Any, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _ranges(starts: list[int], lengths: list[int]) -> Tensor:
    """The numbers from each start on, one range after the other."""
    found = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return torch.cat([torch.arange(0), *found])


def _rows(pair: tuple[int, int], starts: list[int], sizes: list[int]) -> Tensor:
    """The rows of a rank's two chunks of every sequence, in its local order."""
    firsts = [start + chunk * size for chunk in pair for start, size in zip(starts, sizes, strict=False)]
    return _ranges(firsts, sizes * 2)


def zigzag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ZigzagPlan,
    *,
    scale: float | None = None,
    group: Any = None,
    use_grouped_attention: bool = True,
    kv_heads_at_once: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal attention of this rank's queries [local, Hq, D] over the whole sequences, whose keys all ranks hold.

    key and value [local, Hkv, D] are this rank's own. `kv_heads_at_once` gathers that many KV heads at a time, which
    bounds the memory for keys of other ranks and costs a collective each. Gradients of keys and values are summed over
    the ranks in float32.
    """
    rank, world = place_of(group)
    if (rank, world) != (plan.rank, plan.world):
        message = "the plan was made for another place"
        expected = f"one for rank {rank} of {world}"
        raise invalid("VALUE_INVALID", f"a plan for rank {plan.rank} of {plan.world}", expected, message)
    kv_heads = key.shape[1]
    step = kv_heads if kv_heads_at_once is None else kv_heads_at_once
    if kv_heads == 0 or query.shape[1] % kv_heads:
        raise invalid("GQA_RATIO_INVALID", query.shape[1], kv_heads)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise invalid("VALUE_INVALID", f"kv_heads_at_once={step}", "1 or more")
    ratio = query.shape[1] // kv_heads
    outs = [
        zigzag_attention_gathered(
            query[:, first * ratio : (first + step) * ratio],
            _gathered(key[:, first : first + step], world, group),
            _gathered(value[:, first : first + step], world, group),
            plan,
            scale=scale,
            use_grouped_attention=use_grouped_attention,
            backend=backend,
        )
        for first in range(0, kv_heads, step)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def zigzag_attention_gathered(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: ZigzagPlan,
    *,
    scale: float | None = None,
    use_grouped_attention: bool = True,
    backend: str | None = None,
) -> Tensor:
    """The same once keys and values [total, Hkv, D] of all ranks are here, one rank after the other."""
    keys, values = plan.restore(keys), plan.restore(values)
    if use_grouped_attention:
        out: Tensor = grouped_attention(query, keys, values, plan.batch, causal=True, scale=scale, backend=backend)
        return out
    words: dict[str, Any] = {"is_causal": "bottom_right", "scale": scale, "backend": backend}
    outs = [
        varlen_attention(query[queries], keys[chosen], values[chosen], **packing, **words)
        for queries, chosen, packing in plan.chunks
    ]
    return torch.cat(outs)


# -- between the ranks -----------------------------------------------------------------------------
# torch 2.13 renamed the two and warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def _gathered(local: Tensor, world: int, group: Any) -> Tensor:
    """The rows of all ranks, one after the other; each rank's gradient is the sum of what all ranks find for it."""

    def gather(local: Tensor) -> Tensor:
        whole = local.new_empty((world * local.shape[0], *local.shape[1:]))
        _all_gather(whole, local.contiguous(), group=group)
        return whole

    def scatter(grad: Tensor) -> Tensor:
        wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
        own = grad.new_empty((grad.shape[0] // world, *grad.shape[1:]), dtype=wide)
        _reduce_scatter(own, grad.to(wide).contiguous(), group=group)
        return own.to(grad.dtype)

    return local if world == 1 else differentiable(local, gather, scatter)

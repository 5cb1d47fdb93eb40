"""`lz.column_linear`, `lz.row_linear`, `lz.shard_weight`: linear layers split over the ranks of a process group.

The usual pair: the first layer splits its output (columns), what follows works on each rank's part, and the second
layer splits its input (rows) and sums. Each rank calls `lz.linear` on its own shard, so the kernel is selected as
ever; the collectives around it are differentiable. Without an initialised process group the world is this process.

A weight is split as evenly as it goes: of `size` rows over `world` ranks the first `size % world` have one more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero import linear
from layerzero.errors import invalid
from layerzero.model.checks import expect_shape, expect_tensor

Collective = Callable[[Tensor], Tensor]


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    group: Any = None,
    gather_output: bool = False,
    out_features: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`lz.linear` whose output is split: x [..., K] is the same on every rank, `weight` [N / world, K] is a shard.

    The result is this rank's part of the output, or all of it [..., N] on every rank with `gather_output`; where N does
    not divide evenly, `out_features` has to say what it is. The gradient of x is summed over the ranks.
    """
    rank, world = place_of(group)
    width = expect_tensor(weight, "weight").shape[0]
    widths = [width] * world if out_features is None else _widths(out_features, world, "out_features")
    if widths[rank] != width:
        message = f"rank {rank} of {world} holds {width} of {out_features} output features"
        raise invalid("SHAPE_INVALID", width, f"{widths[rank]} rows, as lz.shard_weight cuts them", message)
    if world == 1:
        return linear(x, weight, bias, activation, backend=backend)
    # The same tensor on every rank: its gradient is the sum of what each rank finds.
    same = differentiable(x, lambda x: x.view_as(x), lambda grad: _sum(grad, group, None))
    part = linear(same, weight, bias, activation, backend=backend)
    if not gather_output:
        return part
    return differentiable(part, lambda x: _gather(x, group, widths), lambda grad: _part(grad, widths, rank))


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any = None,
    split_input: bool = False,
    reduce_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """`lz.linear` whose input is split: x [..., K / world] and `weight` [N, K / world] are this rank's shards.

    The products of all ranks are summed, then `bias` [N], the same on every rank, is added once: [..., N] everywhere.
    With `split_input` x is whole on every rank and each takes its part. 16-bit products are summed in float32 unless
    `reduce_dtype` says otherwise: their own dtype halves the traffic and costs a rounding per rank.
    """
    rank, world = place_of(group)
    expect_shape(bias, "bias", (expect_tensor(weight, "weight").shape[0],))
    if world == 1:
        return linear(x, weight, bias, backend=backend)
    if split_input:
        widths = _widths(expect_tensor(x, "x").shape[-1], world, "the last axis of x")
        x = differentiable(x, lambda x: _part(x, widths, rank), lambda grad: _gather(grad, group, widths))
    product = linear(x, weight, backend=backend)
    total = differentiable(product, lambda x: _sum(x, group, reduce_dtype), lambda grad: grad)
    return total if bias is None else total + bias.to(total.dtype)


def shard_weight(weight: Tensor, dim: int, rank: int, world: int, *, parts: int | Sequence[int] = 1) -> Tensor:
    """The shard of one rank, in memory of its own: `dim` 0 for `lz.column_linear`, 1 for `lz.row_linear`.

    A weight that packs several along `dim` is cut within each: `parts` says how many equal ones there are (2 for gate
    and up), or how long each is ((q, k, v) of a fused projection).
    """
    expect_tensor(weight, "weight")
    for name, value in (("dim", dim), ("rank", rank), ("world", world)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid("TYPE_INVALID", f"{name}: {type(value).__name__}", "an int")
    if not -weight.ndim <= dim < weight.ndim:
        raise invalid("VALUE_INVALID", f"dim={dim}", f"an axis of {tuple(weight.shape)}")
    if world < 1 or not 0 <= rank < world:
        raise invalid("VALUE_INVALID", f"rank {rank} of {world}", "0 <= rank < world")
    size = weight.shape[dim]
    if isinstance(parts, int) and parts > 0:
        sizes = [size // parts] * parts
    elif isinstance(parts, Sequence) and parts and all(isinstance(n, int) and n > 0 for n in parts):
        sizes = list(parts)
    else:
        raise invalid("VALUE_INVALID", f"parts={parts}", "a count, or the lengths of the parts")
    if sum(sizes) != size:
        raise invalid("SHAPE_INVALID", f"parts={parts}", f"{size} in all", f"the parts do not make up axis {dim}")
    pieces = [torch.split(part, _widths(length, world, f"axis {dim}"), dim)[rank]
              for part, length in zip(torch.split(weight, sizes, dim), sizes, strict=True)]  # fmt: skip
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def _widths(size: Any, world: int, name: str) -> list[int]:
    """How many of `size` each rank holds; none may hold nothing."""
    if isinstance(size, bool) or not isinstance(size, int) or size < world:
        raise invalid("SHAPE_INVALID", size, f"{world} or more", f"{name} cannot be split over {world} ranks")
    each, more = divmod(size, world)
    return [each + (rank < more) for rank in range(world)]


def place_of(group: Any) -> tuple[int, int]:
    """Rank and size of the group; 0 and 1 where no process group was initialised."""
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            message = "a group was given, but torch.distributed is not initialised"
            raise invalid("VALUE_INVALID", "group", "None before init_process_group", message)
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        message = f"rank {dist.get_rank()} is not in the group"
        expected = f"one of {dist.get_process_group_ranks(group)}"
        raise invalid("VALUE_INVALID", f"rank {dist.get_rank()}", expected, message)
    return rank, dist.get_world_size(group)


# -- collectives with a gradient -----------------------------------------------------------------------
class _Differentiable(torch.autograd.Function):
    """A collective, and what its gradient goes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Collective, back: Collective) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def differentiable(x: Tensor, there: Collective, back: Collective) -> Tensor:
    """`there(x)`, whose gradient is `back` of the gradient that reaches it."""
    return _Differentiable.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


def _sum(x: Tensor, group: Any, dtype: torch.dtype | None) -> Tensor:
    """The sum over the group; 16-bit addends in float32 unless another dtype is given."""
    wide = dtype or (torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype)
    total = x.to(wide, memory_format=torch.contiguous_format, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def _gather(x: Tensor, group: Any, widths: Sequence[int]) -> Tensor:
    """The parts of all ranks side by side on the last axis; a collective wants equal ones, so the short are padded."""
    widest = max(widths)
    mine = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
    found = [torch.empty_like(mine) for _ in widths]
    dist.all_gather(found, mine, group=group)
    return torch.cat([part[..., :width] for part, width in zip(found, widths, strict=True)], dim=-1)


def _part(x: Tensor, widths: Sequence[int], rank: int) -> Tensor:
    return torch.split(x, list(widths), dim=-1)[rank].contiguous()

"""How much memory a kernel takes for a call, and whether there is so much.

An estimate has two parts: the scratch memory the kernel declares (`workspace` of its descriptor), and the copies that
adapting the inputs to it makes. The result itself is left out: whichever kernel runs has to make it.

Free memory comes in with the World, by device; what the policy's `memory_headroom_mb` keeps free is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from layerzero.model.context import Context, element_bytes
from layerzero.model.decision import Transform
from layerzero.model.kernel import KernelSpec
from layerzero.reasons import Reason, reason
from layerzero.selection.transforms import ISOLATED, cached
from layerzero.selection.world import World

_MIB = 1 << 20


class Estimate(NamedTuple):
    """Bytes a kernel takes besides inputs and result. `declared`: whether its descriptor says anything of scratch."""

    workspace: int
    temporaries: int
    declared: bool

    @property
    def total(self) -> int:
        return self.workspace + self.temporaries


def estimate(kernel: KernelSpec, ctx: Context, transforms: Iterable[Transform] = ()) -> Estimate:
    """What this kernel would take for this call, adapted by these steps."""
    copies = sum(_copied(step.name, ctx) for step in transforms)
    return Estimate(kernel.workspace_bytes(ctx), copies, kernel.workspace is not None)


def device_label(kind: str, index: int | None) -> str:
    """cpu, cuda:0."""
    return kind if kind == "cpu" else f"{kind}:{index or 0}"


def device_name(ctx: Context) -> str:
    """The device of a call as free memory is kept by."""
    return device_label(ctx.device.device_type, ctx.device.index)


def free_on(ctx: Context, world: World) -> int | None:
    """Free bytes on the device of a call; None where nobody asked."""
    found = world.free_memory
    return found.get(device_name(ctx)) if isinstance(found, Mapping) else found


def objection(kernel: KernelSpec, ctx: Context, transforms: Iterable[Transform], world: World) -> Iterator[Reason]:
    """MEMORY_HEADROOM_EXCEEDED with need and room, where there is too little."""
    free, found = free_on(ctx, world), estimate(kernel, ctx, transforms)
    limit = math.inf if free is None else max(0, free - int((world.policy.memory_headroom_mb or 0) * _MIB))
    if found.total > limit:
        detail = f"{found.temporaries} of them to adapt inputs" if found.temporaries else ""
        yield reason("MEMORY_HEADROOM_EXCEEDED", found.total, limit, detail=detail)


def leaner(
    failed: str, steps: Iterable[tuple[str, tuple[Transform, ...]]], ctx: Context, world: World
) -> tuple[str, ...]:
    """Which accepted kernels to try after one ran out of memory.

    Where the failed one declares its scratch, only those that take less. Where it does not, nothing is known of it:
    all the others. In their own order, the fastest first.
    """
    kernels = world.registry.kernels
    known = {name: estimate(kernels[name], ctx, how) for name, how in steps if name in kernels}
    mine = known.get(failed)
    others = tuple(name for name in known if name != failed)
    if mine is None or not mine.declared:
        return others
    return tuple(name for name in others if known[name].total < mine.total)


# -- copies that adapting makes -------------------------------------------------------------------------------------
def _copied(step: str, ctx: Context) -> int:
    kind, _, how = step.partition(":")
    size = element_bytes(ctx.dtype)
    if kind in ("contiguous", "aligned_copy"):
        return _inputs(ctx) * size
    if kind == "cast":
        return _inputs(ctx) * element_bytes(how.partition("->")[2])
    if kind == "expand_kv":
        return 2 * _product(ctx, "batch", "num_heads", "seq_len_k", "head_dim") * size
    if kind == "cast_kv":
        return cached(ctx) * element_bytes(how.partition("->")[2])
    if kind == "mask":
        heads = _product(ctx, "batch", "num_heads") if how in ("alibi", "mask") else 1
        return heads * _product(ctx, "seq_len_q", "seq_len_k") * {"causal": 1, "window": 2}.get(how, size)
    if kind == ISOLATED:
        return 2 * _inputs(ctx) * size  # what is sent, and as much again for what comes back
    return 0  # a change of layout is a view


_COUNTED = ("batch", "rows", "tokens", "seq_len_q", "num_heads")


def _inputs(ctx: Context) -> int:
    """Elements of the inputs a step may copy."""
    if ctx.dim("seq_len_q") is not None and ctx.dim("num_heads") is not None:
        width = ctx.head_dim or 1
        queries = _product(ctx, "batch", "num_heads", "seq_len_q") * width
        return queries + 2 * _product(ctx, "batch", "num_kv_heads", "seq_len_k") * width
    counts, widths = 1, 0
    for name, value in ctx.dims:
        if name in _COUNTED:
            counts *= max(1, value)
        else:
            widths += value
    return counts * max(1, widths)


def _product(ctx: Context, *names: str) -> int:
    return math.prod(ctx.dim(name) or 1 for name in names)

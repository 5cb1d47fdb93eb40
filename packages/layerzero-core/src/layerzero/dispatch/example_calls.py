"""For a check of a first use: what a call costs on plain torch, and a made-up call that a given kernel takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound, bind
from layerzero.dispatch.decide import describe
from layerzero.model.context import Context
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Op, OperationSpec
from layerzero.model.situation import kind_of
from layerzero.selection.engine import select
from layerzero.selection.world import World, measurement_settings
from layerzero.tuning.inputs import build, buildable, conditions

_COUNTS = {"batch": 2, "rows": 64, "tokens": 64, "seq_len_q": 64, "seq_len_k": 64}
_WIDTHS = ("intermediate", "in_features", "out_features", "vocab", "num_embeddings", "num_blocks")
_LIGHT = 2e8  # operations; an example need not be larger


def example(
    spec: OperationSpec, ctx: Context, world: World, kernel: KernelSpec
) -> tuple[Bound, tuple[Any, ...], Context] | None:
    """The kernel bound for an example of the kind of `ctx`, its arguments and its description.

    None where none can be made: an op whose inputs nobody can draw, or a kernel that refuses every smaller call.
    """
    if not buildable(spec.op_id):
        return None
    measuring = measurement_settings(world, jit="off")
    measuring = measuring.changed(proofs=None)  # whether it is proven is the question
    for wanted in _smaller(spec, ctx):
        with conditions(ctx):
            call = build(wanted, seed=7)
            described = describe(spec, call.args, call.layout, kernel.kernel_id, measuring)
        if kind_of(described) != kind_of(ctx):
            continue
        decision = select(replace(described, backend=kernel.kernel_id), measuring)
        if decision.chosen == kernel.kernel_id:
            return bind(spec, decision, measuring, kernel.kernel_id), call.args, replace(described, backend=None)
    return None


def _smaller(spec: OperationSpec, ctx: Context) -> list[Context]:
    """Contexts of the same kind, the smallest first; the call's own sizes last, where those are not large."""
    sizes = dict(ctx.dims)
    small = {name: min(size, _COUNTS.get(name, size)) for name, size in ctx.dims}
    if ctx.seq_relation != "equal" and small.get("seq_len_q") == small.get("seq_len_k"):
        short = "seq_len_q" if sizes["seq_len_q"] < sizes["seq_len_k"] else "seq_len_k"
        small[short] = min(sizes[short], max(1, small[short] // 2))
    tried = [small]
    narrow = dict(small)
    for name in _WIDTHS:
        while narrow.get(name, 0) > 512 and narrow[name] % 2 == 0:
            narrow[name] //= 2
    if narrow != small:
        tried.insert(0, narrow)
    if operations(spec, ctx) <= _LIGHT and sizes not in tried:
        tried.append(sizes)
    return [replace(ctx, dims=tuple(each.items()), backend=None) for each in tried]


# -- the price of a call: is it worth running it once more to compare? -----------------------------------------------
# Operations and bytes per µs that plain torch code reaches with some ease; in half precision a CPU computes slower.
_CPU_OPS, _CPU_HALF_OPS, _CPU_BYTES = 2e4, 5e3, 2e3
_GPU_OPS, _GPU_BYTES = 1e7, 3e5
_PASSES = 4.0  # over its inputs, of a formula written in torch


def price_us(op: OperationSpec, ctx: Context, args: tuple[Any, ...]) -> float:
    """Estimated µs of the call as torch code; 0 for what has no tensors."""
    held = sum(item.numel() * item.element_size() for item in modes.tensors_of(args))
    work = operations(op, ctx)
    if ctx.device.platform is Platform.CPU:
        rate = _CPU_HALF_OPS if ctx.dtype in ("float16", "bfloat16") else _CPU_OPS
        return work / rate + _PASSES * held / _CPU_BYTES
    return work / _GPU_OPS + _PASSES * held / _GPU_BYTES


def operations(op: OperationSpec, ctx: Context) -> float:
    """Multiplications and additions of a call; 0 for an op that does not say."""
    return float(op.cost(ctx).flops) if isinstance(op, Op) and op.cost is not None else 0.0

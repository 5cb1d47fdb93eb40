"""A made-up call of a given kind: small, with random numbers, and one that a given kernel takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerzero.dispatch.bind import Bound, bind
from layerzero.dispatch.describe import describe
from layerzero.dispatch.price import operations
from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.model.proof import kind_of
from layerzero.selection.engine import select
from layerzero.selection.world import World

__all__ = ["example"]

_COUNTS = {"batch": 2, "rows": 64, "tokens": 64, "seq_len_q": 64, "seq_len_k": 64}
_WIDTHS = ("intermediate", "in_features", "out_features", "vocab", "num_embeddings", "num_blocks")
_LIGHT = 2e8  # operations; an example need not be larger


def example(
    spec: OperationSpec, ctx: Context, world: World, kernel: KernelSpec
) -> tuple[Bound, tuple[Any, ...], Context] | None:
    """The kernel bound for an example of the kind of `ctx`, its arguments and its description.

    None where none can be made: an op whose inputs nobody can draw, or a kernel that refuses every smaller call.
    """
    from layerzero.tuning.inputs import build, buildable, conditions
    from layerzero.tuning.measurement_settings import measurement_settings

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
    small = dict(sizes)
    for name, most in _COUNTS.items():
        if name in small and small[name] > most:
            small[name] = most
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

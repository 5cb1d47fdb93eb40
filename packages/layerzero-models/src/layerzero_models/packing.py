"""`lz.pack_weight`: a quantized weight brought into the order of the kernel that will use it, once."""

from __future__ import annotations

from dataclasses import replace
from pkgutil import resolve_name

import torch
from torch import Tensor

from layerzero._ops.linear import LINEAR
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import NoKernelFoundError, invalid
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.kernel import KernelSpec
from layerzero.model.packed import PLAIN, PackedWeight, Packer, activation_scheme
from layerzero.model.quant import QuantizedTensor
from layerzero.reasons import Reason
from layerzero.runtime.state import state
from layerzero.selection.world import World


def pack_weight(
    weight: QuantizedTensor | PackedWeight,
    *,
    rows: int = 1,
    dtype: torch.dtype | None = None,
    act: str | None = None,
    layout: str | None = None,
    on_change: str = "refuse",
    backend: str | None = None,
) -> PackedWeight:
    """Pack a weight [N, K] of `lz.quantize` for `lz.linear`, for calls with `rows` rows of activations in `dtype`.

    The layout is that of the kernel which selection would choose if the weight were packed for it; "plain" where none
    gains by packing. Calls of other sizes stay right: kernels that want another layout read the weight itself.
    `act="dynamic"` quantizes the activations too, row by row, to the weight's format. When the weight is written to in
    place later, the next call is refused, or packs again with `on_change="repack"`.
    """
    source = weight.source if isinstance(weight, PackedWeight) else weight
    if not isinstance(source, QuantizedTensor):
        raise invalid("TYPE_INVALID", type(weight).__name__, "a QuantizedTensor")
    if act not in (None, "dynamic"):
        raise invalid("VALUE_INVALID", f"act {act!r}", "None or 'dynamic'")
    if on_change not in ("refuse", "repack"):
        raise invalid("VALUE_INVALID", f"on_change {on_change!r}", "'refuse' or 'repack'")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise invalid("VALUE_INVALID", f"rows {rows!r}", "a whole number from 1")
    if act is not None:
        activation_scheme(source.fmt)  # refuses formats that activations cannot have
    if len(source.shape) == 3:  # experts, whose kernels read codes as they are
        return PackedWeight(source, act=act)
    world = current_world()
    width = source.shape[-1] if source.shape else 1
    sample = source.data.new_empty((rows, width), dtype=dtype or source.dtype)
    ctx = describe(LINEAR, (sample, PackedWeight(source, act=act), None, None), None, backend, world)
    kernel = _asked(layout, ctx, world) if layout is not None else _best(ctx, world)
    if kernel is None:
        return PackedWeight(source, act=act)
    assert kernel.weight_layout is not None and kernel.packer is not None
    pack = _counting(kernel.packer)
    again = pack if on_change == "repack" else None
    return PackedWeight(source, kernel.weight_layout, pack(source), act, again)


def _packing(world: World) -> dict[str, KernelSpec]:
    """Every layout some kernel has a packer for, with one such kernel."""
    kernels = world.registry.by_op("linear")
    return {k.weight_layout: k for k in kernels if k.weight_layout is not None and k.packer is not None}


def _best(ctx: Context, world: World) -> KernelSpec | None:
    """The kernel with a packer that outscores every kernel that takes the weight as it is; None when none does."""
    found: KernelSpec | None = None
    highest = _score(decide(LINEAR, ctx, world))
    for layout, kernel in sorted(_packing(world).items()):
        decision = decide(LINEAR, replace(ctx, weight_layout=layout), world)
        chosen = world.registry.kernels.get(decision.chosen)
        if chosen is not None and chosen.weight_layout == layout and _score(decision) > highest:
            found, highest = (chosen if chosen.packer is not None else kernel), _score(decision)
    return found


def _score(decision: Decision) -> float:
    score = decision.winner.score if decision.chosen else None
    return float("-inf") if score is None else score


def _asked(layout: str, ctx: Context, world: World) -> KernelSpec | None:
    """The kernel of a layout that the caller names."""
    if layout == PLAIN:
        return None
    known = _packing(world)
    if layout not in known:
        limit = ", ".join([PLAIN, *sorted(known)])
        raise invalid("VALUE_INVALID", f"layout {layout!r}", limit)
    decision = decide(LINEAR, replace(ctx, weight_layout=layout), world)
    refused: list[Reason] = []
    for candidate in decision.candidates:
        kernel = world.registry.kernels[candidate.kernel_id]
        if kernel.weight_layout == layout:
            if candidate.accepted:
                return kernel if kernel.packer is not None else known[layout]
            refused.extend(candidate.reasons)
    raise NoKernelFoundError(f"no kernel takes this weight packed as {layout}", reasons=refused)


def _counting(path: str) -> Packer:
    """The packer "module:name", counted at each run."""
    pack: Packer = resolve_name(path)

    def packed(source: QuantizedTensor) -> tuple[Tensor, ...]:
        state.counters.packs += 1
        return pack(source)

    return packed

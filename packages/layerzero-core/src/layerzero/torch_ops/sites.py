"""Attention as one opaque op of a compiled graph, at the price of a lookup: `torch.ops.layerzero.attention.call`.

What stands beside the tensors of a call is known when it is traced, and so are their shapes, strides and dtypes where
no size is open. All of that is spelled into one string, a constant of the graph. The first run of such a call goes the
way of every call; the kernel it was given is then kept under that string for the World it was chosen in, so that the
next runs look up a string instead of describing the tensors once more. The string says everything by itself: a graph
that another process has cached means the same here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.hot import aside
from layerzero.dispatch.late import current_world, recover
from layerzero.dispatch.run import decide, describe
from layerzero.model.shapes import ordered, ordered_empty
from layerzero.runtime.current import now, scope
from layerzero.selection.world import unchecked
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.lowering import CAUSAL, pair
from layerzero.torch_ops.opaque import bare, present

_SIGNATURE = "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, str call) -> Tensor"

_LIMIT = 16_384
_scope = scope.get
_any_autocast = torch._C._is_any_autocast_enabled


class _Site:
    """One traced call: its options, and the kernel it was given last."""

    __slots__ = ("backend", "bound", "layout", "on", "options", "strides", "world")

    def __init__(self, call: str) -> None:
        found = json.loads(call)
        # As they stand among canonical arguments: is_causal, scale, window, softcap.
        self.options = (CAUSAL[found["causal"]], found["scale"], pair(found["window"]), found["softcap"])
        self.layout: str = found["layout"]
        self.backend: str | None = found["backend"]
        self.on: str = found["on"]
        self.world: Any = None
        self.bound: Any = None
        self.strides: tuple[int, ...] = ()


_sites: dict[str, _Site] = {}


def spelled(
    tensors: Sequence[Tensor | None], causal: str, scale: Any, layout: str, window: Any, softcap: Any, backend: Any
) -> str:
    """The string of a traced call; "" where one of its numbers is open. Sizes that are open are left out of it."""
    numbers = (scale, softcap, *(window or ()))
    if any(isinstance(item, (torch.SymInt, torch.SymFloat)) for item in numbers):
        return ""
    words = {"causal": causal, "scale": scale, "layout": layout, "window": window, "softcap": softcap}
    return json.dumps({**words, "backend": backend, "on": _metadata(tensors)}, sort_keys=True)


def _metadata(tensors: Sequence[Tensor | None]) -> str:
    """What a choice can depend on, of tensors that are all of known sizes and not under autocast; else ""."""
    if _any_autocast():
        return ""
    parts = []
    for item in tensors:
        if item is None:
            parts.append("-")
            continue
        if any(isinstance(size, torch.SymInt) for size in (*item.shape, *item.stride())):
            return ""
        parts.append(f"{item.dtype}{list(item.shape)}{list(item.stride())}{item.device}")
    return " ".join(parts) + (" deterministic" if torch.are_deterministic_algorithms_enabled() else "")


def _run(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None, call: str
) -> Tensor:
    site = _sites.get(call)
    if site is None:
        if len(_sites) >= _LIMIT:
            _sites.clear()
        site = _sites[call] = _Site(call)
    active = _scope()
    world = now.world if active is None else active.world()
    bound = site.bound
    if site.world is not world or (bound.guard is not None and not bound.guard()) or _any_autocast():
        return _first(site, query, key, value, attn_mask, alibi_slopes)
    args = (query, key, value, attn_mask, 0.0, *site.options, alibi_slopes, False)
    try:
        out: Tensor = bound.run(*args)
    except Exception as error:
        out = recover(world.ops["attention"], world, bound, args, site.layout, site.backend, error)
    return out if out.stride() == site.strides else ordered(out, query)


# The result is like the query, as wide as the value: a graph folds leading axes before it calls.
CALL = (_SIGNATURE, _run, lambda query, key, value, *rest: ordered_empty(query, value.shape[-1]))


def _first(site: _Site, *tensors: Any) -> Tensor:
    """A call by the public function; afterwards the kernel is kept, where the call is what its string says."""
    query, key, value, attn_mask, alibi_slopes = (bare(item) for item in tensors)
    backend = site.backend if site.backend is None else present(site.backend)
    causal, scale, window, softcap = site.options
    words = {"layout": site.layout, "window": window, "softcap": softcap, "backend": backend}
    with aside.quietly():  # torch has seen this op
        out = functions.fastest("attention")(
            query, key, value, attn_mask, 0.0, causal, scale, alibi_slopes=alibi_slopes, **words
        )
    result = ordered(out, query)
    if (
        site.on
        and site.on == _metadata((query, key, value, attn_mask, alibi_slopes))
        and modes.plain([item for item in tensors if item is not None])
    ):
        _keep(site, (query, key, value, attn_mask, 0.0, *site.options, alibi_slopes, False), backend, result)
    return result


def _keep(site: _Site, args: tuple[Any, ...], backend: str | None, result: Tensor) -> None:
    """Remember the kernel, if it is one that a hot call would find: no switch off, no capture, no odd pointer."""
    world = current_world()
    if world.tally is not None:
        return  # recorded calls are counted by the hot table
    spec = world.ops["attention"]
    ctx = describe(spec, args, site.layout, backend, world)
    if ctx.switched_off or ctx.capturing or not ctx.aligned_pointers or ctx.needs_grad:
        return
    decision = decide(spec, ctx, world)
    steps = tuple(step.name for step in decision.transforms(decision.chosen)) if decision.chosen else ()
    bound = world.memo.get("bound", {}).get((decision.context, decision.chosen, steps, False))
    if bound is not None and bound.decision is decision and not unchecked(spec, bound.kernel, ctx, world):
        site.bound, site.strides, site.world = bound, tuple(result.stride()), world

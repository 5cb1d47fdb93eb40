"""What a step costs: measured in the database, measured here, or estimated.

An estimate is a roofline (`Op.cost`): bytes and operations, at rates that are only good for comparing. It decides where
nothing was measured; `plan_block(measure=True)` measures. On a GPU a step measured here costs what takes longer, its
kernel or its launch: in a layer of short kernels the device waits for the host, and a kernel of 5 µs that takes 90 µs
to launch is not a fast one. On a CPU a kernel timed by itself finds its weight where its last call has left it, so what
was timed at its place in the block counts before anything else.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch.bind import Bound
from layerzero.dispatch.modes import tensors_of
from layerzero.model.context import Context
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Op
from layerzero.numerics import compare, tolerance
from layerzero.selection.world import World
from layerzero.tuning.truth import flat
from layerzero_tune.timing.clock import clock_for
from layerzero_tune.timing.launches import with_launch
from layerzero_tune.timing.race import without_common_mode

# µs of a call, bytes and operations a µs
_ON_CPU, _ON_GPU = (8.0, 8_000.0, 60_000.0), (6.0, 2_000_000.0, 400_000_000.0)
_TURNS = 5
_VIEWS = frozenset({"heads", "split", "turn", "turn back"})


@dataclass(frozen=True, slots=True)
class Cost:
    """µs, and where they are from: "in place", "perfdb", "measured" or "estimated"."""

    us: float
    source: str


class Meter:
    """Costs of steps; with `measure` every kernel is checked against the reference and timed once for each shape."""

    def __init__(self, world: World, *, measure: bool) -> None:
        self.world = world
        self.measure = measure
        self._known: dict[Any, Cost] = {}
        self._right: dict[Any, bool] = {}
        self._placed: dict[Any, Cost] = {}
        self._turns: dict[Any, list[Sequence[float]]] = {}
        self._shares: dict[str, dict[Any, float]] = {}

    def kernels(self, candidates: Sequence[Bound], ctx: Context, args: tuple[Any, ...]) -> list[Cost]:
        """The price of each kernel for one call, adapting its inputs included.

        What has to be timed is timed in turns: a machine that slows down for a second does so for all of them.
        """
        keys = [_key(item.kernel, ctx, args) for item in candidates]
        stored = [self.world.measurements.lookup(item.kernel.kernel_id, ctx) for item in candidates]
        if self.measure:
            news = [
                (key, item.run)
                for key, item, us in zip(keys, candidates, stored, strict=True)
                if us is None and key not in self._known
            ]
            times = self._times([run for _, run in news], args)
            self._known.update((key, Cost(us, "measured")) for (key, _), us in zip(news, times, strict=True))
        alone: list[Cost] = []
        for key, item, us in zip(keys, candidates, stored, strict=True):
            transforms_us = sum(step.cost_us for step in item.decision.transforms(item.kernel_id))
            if us is not None:
                alone.append(Cost(us + transforms_us, "perfdb"))
            elif self.measure:
                alone.append(self._known[key])
            else:
                alone.append(Cost(self._estimate(item.kernel, ctx, args) + transforms_us, "estimated"))
        return self._at_their_places(keys, ctx.op, alone) if self._placed else alone

    def _at_their_places(self, keys: Sequence[Any], op: str, alone: Sequence[Cost]) -> list[Cost]:
        """Prices as taken in place. A kernel that was not timed there is thought to change as the others did, or as
        others of its op; else whoever was never looked at closely would seem the cheapest."""
        shares = self._shares.setdefault(op, {})
        here = {
            key: self._placed[key].us / cost.us for key, cost in zip(keys, alone, strict=True) if key in self._placed
        }
        shares.update(here)
        known = list((here or shares).values())
        usual = statistics.median(known) if known else 1.0
        return [
            self._placed.get(key, Cost(cost.us * usual, cost.source)) for key, cost in zip(keys, alone, strict=True)
        ]

    def place(
        self, kernels: Sequence[KernelSpec], ctx: Context, args: tuple[Any, ...], turns: Sequence[Sequence[float]]
    ) -> None:
        """From now on kernels cost what they took at their place in a block: µs of each, turn by turn, added to those
        of earlier calls. What all had in common in a turn is the machine's."""
        keys = tuple(_key(kernel, ctx, args) for kernel in kernels)
        known = self._turns.setdefault(keys, [])
        known.extend(turns)
        columns = dict(zip(keys, map(list, zip(*known, strict=True)), strict=True))
        for key, taken in without_common_mode(columns).items():
            self._placed[key] = Cost(statistics.median(taken), "in place")

    def right(self, kernel: KernelSpec, ctx: Context, run: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether a kernel may be timed: with `measure`, one that the database does not know has to agree with the
        reference on these very tensors."""
        if not self.measure or self.world.measurements.lookup(kernel.kernel_id, ctx) is not None:
            return True
        key = _key(kernel, ctx, args)
        if key not in self._right:
            self._right[key] = self._agrees(kernel, ctx, run, args)
        return self._right[key]

    def glue(self, op: str, run: Callable[[], Any], args: tuple[Any, ...]) -> Cost:
        """The price of a step without a kernel."""
        tensors = tensors_of(args)
        device = tensors[0].device.type if tensors else "cpu"
        if self.measure:
            looks = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
            key = (op, looks, tuple(item for item in args if isinstance(item, (int, str))))
            if key not in self._known:
                self._known[key] = Cost(self._times([lambda *_: run()], args)[0], "measured")
            return self._known[key]
        call, rate, _ = _ON_CPU if device == "cpu" else _ON_GPU
        if op in _VIEWS:
            return Cost(1.0, "estimated")
        return Cost(call + 3 * max((t.nbytes for t in tensors), default=0) / rate, "estimated")

    def _times(self, runs: Sequence[Callable[..., Any]], args: tuple[Any, ...]) -> list[float]:
        tensors = tensors_of(args)
        device = tensors[0].device if tensors else torch.device("cpu")
        clock = clock_for(device)
        calls = [functools.partial(run, *args) for run in runs]
        with torch.no_grad():
            counts = [max(1, min(50, int(300.0 / max(clock(call, 1), 0.1)))) for call in calls]
            best = [math.inf] * len(calls)
            for _ in range(_TURNS):
                for place, call in enumerate(calls):
                    best[place] = min(best[place], clock(call, counts[place]))
            if device.type == "cuda":
                best = [with_launch(us, call) for us, call in zip(best, calls, strict=True)]
        return best

    def _agrees(self, kernel: KernelSpec, ctx: Context, run: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """No kernel wins before it is right."""
        spec = self.world.ops[ctx.op]
        if kernel.kernel_id == spec.fallback_id or spec.fallback_impl is None or ctx.quant_format is not None:
            return True
        swap = ctx.op == "attention" and ctx.layout is not None and ctx.layout.value != "BHSD"
        given = tuple(t.transpose(1, 2) if swap and isinstance(t, Tensor) and t.ndim == 4 else t for t in args)
        with torch.no_grad():
            found, expected = run(*args), spec.fallback_impl(*given)
        if swap:
            expected = expected.transpose(1, 2)
        bound = tolerance(ctx.op, ctx.dtype, k=ctx.dim("inner") or ctx.dim("k") or ctx.dim("hidden"))
        pairs = zip(flat(found), flat(expected), strict=True)
        return all(compare(one, other, bound).ok for one, other in pairs)

    def _estimate(self, kernel: KernelSpec, ctx: Context, args: tuple[Any, ...]) -> float:
        call, rate, speed = _ON_CPU if ctx.device.platform is Platform.CPU else _ON_GPU
        op = self.world.ops[ctx.op]
        if isinstance(op, Op) and op.cost is not None:
            moved, work = op.cost(ctx)
        else:
            moved, work = 2 * sum(t.nbytes for t in tensors_of(args)), 0
        us = call + moved / rate + work / speed
        # Authors' priorities order kernels of one op where nothing else is known.
        return us * (1.0 - max(-0.5, min(0.5, kernel.priority / 1000.0)))


def _key(kernel: KernelSpec, ctx: Context, args: tuple[Any, ...]) -> Any:
    return kernel.kernel_id, ctx, tuple((t.shape, t.stride()) for t in tensors_of(args))

"""Kernels timed at their places in a block.

By itself a kernel finds its weight where its last call has left it; in a layer the other steps have been there since,
and of two kernels that were alike the one that reads its weight better is ahead. So the block is run step by step with
a clock at each step, and the kernels that may stand there take turns. Only on a CPU: the clock of a GPU overwrites the
cache between calls as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.dispatch.bind import Bound
from layerzero.dispatch.modes import tensors_of
from layerzero.errors import from_outside
from layerzero_tune.blocks.block import Block, arguments, glue, results, unread
from layerzero_tune.blocks.cost import Meter
from layerzero_tune.blocks.search import Path, Taken
from layerzero_tune.timing.clock import Clock, clock_for

_SPENT_US = 1e6
_FEWEST, _MOST = 7, 150  # turns, by how long the block takes


@dataclass(frozen=True)
class _Place:
    """Steps that are the same call, and the kernels that may run it."""

    steps: tuple[int, ...]
    args: tuple[Any, ...]
    kernels: tuple[Bound, ...]


def in_place(path: Path) -> bool:
    """Whether every kernel of a path has the price of its place."""
    return all(item.cost.source == "in place" for item in path.taken if item.bound is not None)


def time_in_place(block: Block, tensors: Mapping[str, Any], path: Path, meter: Meter) -> None:
    """Tell the meter what the kernels of a path, and those that may stand in their places, take there.

    Steps that are the same call count as one place, so that a layer does not end up with two kernels for two halves of
    one projection. A kernel that raises ends it: nothing is told, and the plan itself moves on when it is called.
    """
    clock = clock_for("cpu")
    with torch.no_grad():
        walk = _Walk(block, tensors, path.taken, clock)
        try:
            places = walk.places()
            most = max((len(place.kernels) for place in places), default=0)
            if not most:
                return
            once = clock(lambda: walk({}), 1)
            count = max(_FEWEST, min(_MOST, int(_SPENT_US / max(once * most, 1.0))))
            found = _turns(walk, places, most, count)
        except Exception as error:
            if from_outside(error):
                raise
            return
    for place, turns in zip(places, found, strict=True):
        meter.place([bound.kernel for bound in place.kernels], place.kernels[0].decision.context, place.args, turns)


def _turns(walk: _Walk, places: Sequence[_Place], most: int, count: int) -> list[list[list[float]]]:
    """For every place, turn by turn, µs of each of its kernels; who comes first in a turn is drawn anew."""
    draw = random.Random(0)
    found: list[list[list[float]]] = [[] for _ in places]
    for _ in range(count):
        orders = [draw.sample(range(len(place.kernels)), len(place.kernels)) for place in places]
        turn = [[0.0] * len(place.kernels) for place in places]
        for number in range(most):
            now = [order[number % len(order)] for order in orders]
            bounds = {step: place.kernels[who] for place, who in zip(places, now, strict=True) for step in place.steps}
            taken = walk(bounds)
            for place, who, samples in zip(places, now, turn, strict=True):
                samples[who] = sum(taken[step] for step in place.steps) / len(place.steps)
        for samples, turns in zip(turn, found, strict=True):
            turns.append(samples)
    return found


class _Walk:
    """A path run step by step, with a clock at each kernel."""

    def __init__(self, block: Block, tensors: Mapping[str, Any], taken: Sequence[Taken], clock: Clock) -> None:
        self._known = {name: tensors.get(name) for name in (*block.inputs, *block.weights)}
        for item in taken:
            if item.step.op == "pack":
                self._known.update(zip(item.step.outputs, glue("pack", arguments(item.step, self._known)), strict=True))
        self._taken = [item for item in taken if item.step.op != "pack"]
        steps = [item.step for item in self._taken]
        self._unread = [unread(block, steps, number) for number in range(len(steps))]
        self._clock = clock

    def __call__(self, bounds: Mapping[int, Bound], seen: Callable[[int, Any], None] | None = None) -> list[float]:
        """µs of each step's kernel, 0 for glue; `bounds` has the kernels of steps that do not run the path's own."""
        tensors, found = dict(self._known), []
        out: Any = None
        for number, item in enumerate(self._taken):
            args = arguments(item.step, tensors)
            if seen is not None:
                seen(number, args)
            bound = bounds.get(number, item.bound)
            if bound is None:
                found.append(0.0)
                outs = glue(item.step.op, args)
            else:
                run = bound.run

                def call() -> None:
                    nonlocal out
                    out = run(*args)  # noqa: B023  (called right here)

                found.append(self._clock(call, 1))
                outs, out = results(item.step, out), None
            tensors.update(zip(item.step.outputs, outs, strict=True))
            for name in self._unread[number]:
                del tensors[name]
        return found

    def places(self) -> list[_Place]:
        """The calls of the path, each with its kernels; run once to see the arguments."""
        groups: dict[Any, tuple[list[int], tuple[Any, ...], dict[str, Bound]]] = {}

        def seen(number: int, args: tuple[Any, ...]) -> None:
            item = self._taken[number]
            if item.bound is None:
                return
            looks = tuple((t.shape, t.stride()) for t in tensors_of(args))
            steps, _, kernels = groups.setdefault((item.bound.decision.context, looks), ([], args, {}))
            steps.append(number)
            for bound in (item.bound, *item.rivals):
                kernels.setdefault(bound.kernel_id, bound)

        self({}, seen)
        return [
            _Place(tuple(steps), args, tuple(kernels[name] for name in sorted(kernels)))
            for steps, args, kernels in groups.values()
        ]

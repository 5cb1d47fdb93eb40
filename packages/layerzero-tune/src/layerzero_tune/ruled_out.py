"""Who need not be raced: kernels of which shipped measurements, or the roofline through them, expect far too little.

Before a call is tuned, a kernel is ruled out where a `margin` less than what is expected of it would still be longer
than what is expected of the fastest, or of torch's own code. After the race the same is asked of what was measured:
whoever might be faster than the fastest that raced, by the margin, is raced after all. So a kernel stays out only where

    expected time of it / margin  >  time of the fastest that raced, both as multiples of torch's in that race

and, whatever else the shipped measurements say, the fastest kernel is missed only if they give it more than a margin
times what it takes. Kernels of which nothing is known, what is chosen now and torch's own code always race.
"""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.dispatch.decide import decide
from layerzero.model.context import Context
from layerzero.model.decision import SHIPPED, Expectation
from layerzero.selection.engine import select
from layerzero.selection.world import Measurements, World

# Left out one by one, 98 of 100 times of the H200's calls were at least a third of what the others said of them, and no
# kernel so far behind was the fastest (tests/test_ruled_out.py), none 1.2 times with a measured call within an octave.
_MARGIN, _MARGIN_BESIDE = 3.0, 1.5
_NEAR, _BESIDE = 3.0, 1.0  # octaves: a measured call further away than _NEAR says no more than the roofline


def margin(expected: Expectation) -> float:
    """How many times faster than expected a kernel may be: more where the measuring machine was busy, and the further
    the nearest measured call is; most where none was taken on such a device."""
    own = _MARGIN_BESIDE if expected.source == SHIPPED and expected.octaves <= _BESIDE else _MARGIN
    own *= (1.0 + expected.noise) ** 2
    return own if expected.source == SHIPPED and expected.octaves <= _NEAR else own * own


def slower(told: Mapping[str, Expectation], ratio: float) -> dict[str, Expectation]:
    """Those that are expected to take longer than `ratio` times torch's code, with all the margin they have."""
    return {name: found for name, found in told.items() if found.ratio / margin(found) > ratio}


def chosen_now(ctx: Context, world: World) -> str:
    """The kernel that runs such a call today; empty where none does."""
    return decide(world.ops[ctx.op], ctx, world.changed(ranks=None, tally=None)).chosen


def ruled_out(ctx: Context, world: World, measuring: World) -> dict[str, Expectation]:
    """Kernels that need not race for a call in `measuring`, with what `world` knows to expect of them."""
    if world.measurements.expected is None:
        return {}
    asked = measuring.changed(measurements=Measurements(expected=world.measurements.expected))
    candidates = select(ctx, asked).candidates
    told = {item.kernel_id: item.expected for item in candidates if item.accepted and item.expected is not None}
    found = slower(told, min([1.0, *(item.ratio for item in told.values())]))
    found.pop(chosen_now(ctx, world), None)
    return found

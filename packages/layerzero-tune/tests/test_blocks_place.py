"""Kernels priced at their places in a block: what a kernel takes by itself is not always what it takes in a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.dispatch.run import describe
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements
from layerzero_tune.blocks import cost as blocks_cost
from layerzero_tune.blocks import plan as public_blocks
from layerzero_tune.blocks import search as blocks_place
from layerzero_tune.blocks.cost import Meter
from layerzero_tune.blocks.search import fastest_each, in_place, time_in_place
from layerzero_tune.timing.clock import cpu_clock
from tests import own_time
from tests.decoder import BLOCK, inputs, layer, truth


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_place, "_MOST", 9)  # kernels here are far apart


def cached_and_steady(lab: Any) -> None:
    """Two linear kernels, and a reference that nobody would take."""
    slow = lab.recording(lab.builtin.kernels["reference.linear.plain"], own_time.taking(9e-3, lab.reference("linear")))
    lab.use(
        lab.kernel("fond.linear.cached", fond_of_its_weight(lab, 1.5e-3, 4e-3), priority=90.0),
        lab.kernel("even.linear.steady", own_time.taking(2e-3, lab.reference("linear")), priority=80.0),
        only=True,
    )
    state.use(lab.registry.replace([slow]))


def fond_of_its_weight(lab: Any, again: float, first: float) -> Any:
    """A linear kernel that is quick where its last call had the same weight."""
    plain, last = lab.reference("linear"), [0]

    def run(x: Any, weight: Any, *rest: Any) -> Any:
        own_time.spend(again if last[0] == id(weight) else first)
        last[0] = id(weight)
        return plain(x, weight, *rest)

    return run


def linears(path: Any) -> set[str]:
    return {item.kernel_id for item in path.taken if item.step.op == "linear"}


@pytest.mark.req("R-PLAN-01")
def test_a_kernel_that_is_fast_by_itself_and_slow_in_the_layer_is_not_taken(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_time.use_own_time(monkeypatch)
    cached_and_steady(lab)
    t = layer()
    with torch.no_grad():
        alone = fastest_each(BLOCK, t, state.world, Meter(state.world, measure=True))
        plan = lz.plan_block(BLOCK, t, measure=True)
    assert linears(alone) == {"fond.linear.cached"}  # seen by itself it is the faster one
    assert linears(plan.report.path) == {"even.linear.steady"}
    torch.testing.assert_close(plan(*inputs(t)).double(), truth(t), rtol=1e-5, atol=1e-5)
    report = plan.explain()
    assert report.plan_us is not None and report.alone_us is not None and report.plan_us < 0.75 * report.alone_us
    # What was rejected is told with the price of its place as well, so the report does not contradict itself.
    other = [row for row in report.rejected() if "fond.linear.cached" in row["way"] and row["steps"] == ["linear"]]
    assert other and all(row["extra_us"] > 0 for row in other)


def test_what_the_database_says_of_a_kernel_by_itself_gives_way_to_its_place(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_time.use_own_time(monkeypatch)
    cached_and_steady(lab)
    times = {"fond.linear.cached": 1500.0, "even.linear.steady": 2000.0}
    state.publish(measurements=Measurements(lookup=lambda kernel_id, ctx: times.get(kernel_id), fingerprint="warm"))
    with torch.no_grad():
        plan = lz.plan_block(BLOCK, layer(), measure=True)
    assert linears(plan.report.alone) == {"fond.linear.cached"}
    assert linears(plan.report.path) == {"even.linear.steady"}


def test_steps_that_are_the_same_call_are_one_place(lab: Any) -> None:
    lab.use(lab.kernel("lab.linear.other", priority=90.0))
    t = layer()
    with torch.no_grad():
        path = fastest_each(BLOCK, t, state.world, Meter(state.world, measure=False))
        walk = blocks_place._Walk(BLOCK, t, path.taken, cpu_clock)
        places = walk.places()
    made = [item.step.outputs[0] for item in path.taken]
    steps = {tuple(made[number] for number in place.steps) for place in places}
    # Alike in a square layer: the projections to and from the heads, those to keys and values, gate and up, both norms.
    assert {("q_flat", "projected"), ("k_flat", "v_flat"), ("gate", "up"), ("normed", "normed2")} <= steps
    kernels = [number for number, item in enumerate(path.taken) if item.bound is not None]
    assert sorted(number for place in places for number in place.steps) == kernels
    for place in places:
        assert len({bound.kernel_id for bound in place.kernels}) == len(place.kernels)
    wide = next(place for place in places if place.steps == tuple(made.index(name) for name in ("gate", "up")))
    assert "lab.linear.other" in {bound.kernel_id for bound in wide.kernels} and len(wide.kernels) > 1


@pytest.mark.req("R-PLAN-01")
def test_places_are_priced_by_all_their_turns_without_the_pace_of_the_machine(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_cost, "clock_for", lambda device: lambda call, count: 5.0)
    first, second, third = (lab.kernel(f"lab.linear.{name}") for name in ("first", "second", "third"))
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    args = (x, weight, None, None)
    ctx = describe(state.world.ops["linear"], args, None, None, state.world)
    meter = Meter(state.world, measure=True)

    def prices() -> list[float]:
        no_steps = SimpleNamespace(transforms=lambda kernel_id: ())
        found = [
            SimpleNamespace(kernel=kernel, kernel_id=kernel.kernel_id, run=lambda *a: None, decision=no_steps)
            for kernel in (first, second, third)
        ]
        return [cost.us for cost in meter.kernels(found, ctx, args)]

    assert prices() == [5.0, 5.0, 5.0]
    meter.place([first, second], ctx, args, [[10.0, 8.0]] * 3)
    # The third was not timed in place; it is thought to change as the others did.
    assert prices() == pytest.approx([10.0, 8.0, 9.0])
    meter.place([first, second], ctx, args, [[100.0, 70.0]] * 4)  # ten times slower, and another order of things
    one, other, _ = prices()
    assert 1.25 < one / other < 1.43  # between what the two sittings say of them


def test_a_kernel_that_raises_in_its_place_is_not_believed_and_the_plan_goes_on(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.use(lab.kernel("lab.rms_norm.moody", priority=99.0))
    told: list[Any] = []
    monkeypatch.setattr(Meter, "place", lambda self, *args: told.append(args))
    t = layer()
    with torch.no_grad():
        meter = Meter(state.world, measure=True)
        path = fastest_each(BLOCK, t, state.world, meter)
        time_in_place(BLOCK, t, path, meter)
        assert told
        told.clear()
        plan = lz.plan_block(BLOCK, t)
        lab.faults["lab.rms_norm.moody"] = RuntimeError("not today")
        time_in_place(BLOCK, t, plan.report.alone, meter)
        assert not told
        found = plan(*inputs(t))
    torch.testing.assert_close(found.double(), truth(t), rtol=1e-5, atol=1e-5)


def test_only_a_measured_plan_is_timed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []
    inner = public_blocks.time_in_place
    monkeypatch.setattr(public_blocks, "time_in_place", lambda *args: (timed.append(args[2]), inner(*args)))
    t = layer()
    with torch.no_grad():
        lz.plan_block(BLOCK, t)
        assert not timed
        lz.plan_block(BLOCK, t, measure=True)
    assert timed and not in_place(timed[0])


@pytest.mark.gpu
def test_on_a_gpu_whose_clock_empties_the_cache_nothing_is_timed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_blocks, "time_in_place", lambda *args: pytest.fail("timed in place"))
    t = {name: item.cuda() for name, item in layer(dtype=torch.bfloat16).items()}
    with torch.no_grad():
        lz.plan_block(BLOCK, t, measure=True)

"""The kernels of one call: who may race, and how long each takes.

Every kernel is first held against the reference. Those that are right race, and torch's own code for the call in the
same rounds (`default`); those that come out close are raced again: on a GPU in several places of memory and with their
launches, on a CPU over several seconds, and on both at other sizes of the bucket, since one time speaks for all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.companions import PARTS, names, part
from layerzero.dispatch.bind import bind
from layerzero.dispatch.run import describe
from layerzero.errors import BackendNotAvailableError, LayerZeroError, TuningError, from_outside
from layerzero.measurements.believed import NOISE
from layerzero.model.context import Context
from layerzero.model.op import OperationSpec
from layerzero.model.variants import twins
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero.selection.filter import artifact_for
from layerzero.selection.world import World, measurement_settings
from layerzero.tuning.inputs import Call, build
from layerzero.tuning.truth import Gate, Verdict, flat
from layerzero_tune.draws import gate as gate_of
from layerzero_tune.timing.allocations import Places, room
from layerzero_tune.timing.baselines import TORCH_DEFAULT, Make, maker, result_of
from layerzero_tune.timing.bucket_edges import confirmed, far_apart, other_end, tied, weighed, within
from layerzero_tune.timing.clock import Clock, clock_for, cpu_clock, cuda_clock, graphed
from layerzero_tune.timing.launches import LAUNCH_LOOKS, SAME, with_launches
from layerzero_tune.timing.race import LOOKS, Times, over_time, pass_screening, race, screened

_A_PLACE = 8  # rounds in each place of memory, between those who are close
_CLOSE_ON_A_CPU = 0.25  # so near the fastest, the mood of the machine may have decided
_UNSTEADY = 0.10  # a fastest kernel that spreads wider is not yet told from those two spreads further behind
_SPREAD = 3.0  # times the seconds of a call, for such a race


class Bench:
    """The kernels of one call: who may race, and their times. Where it is not `thorough`, those who are close on a GPU
    are looked at once where they would be looked at several times."""

    thorough = True

    def __init__(
        self, spec: OperationSpec, ctx: Context, call: Callable[[], Call], world: World,
        late: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._spec, self._ctx, self._call, self._world = spec, ctx, call, world
        self._decision = select(ctx, world)
        if not self._decision.chosen:
            raise TuningError(code="TUNING_IMPOSSIBLE", value=ctx.op, limit=str(self._decision.refusal))
        same = twins({name: world.registry.kernels[name] for name in self._decision.ranking}) if late else {}
        self.late = {name for name in self._decision.ranking if name in late or same.get(name) in late}
        self.errors: dict[str, float] = {}
        self.wrong: dict[str, Verdict] = {}
        self.absent: dict[str, str] = {}
        self.plain_error: float | None = None  # of torch's own code, where that takes part
        self._plain: Make | None = None
        self._seconds = 0.0
        self._gate: Gate | None = None

    def must_compile(self, kernel_id: str) -> bool:
        kernel = self._world.registry.kernels[kernel_id]
        return kernel.jit and artifact_for(kernel, self._ctx, self._world) not in state.world.ready

    def admit(self, only: frozenset[str] | None, without: Collection[str] = ()) -> None:
        """Hold every kernel against the reference that was not yet. Kernels that compile do it here."""
        done = {*self.errors, *self.wrong, *self.absent, *self.late}
        asked = [name for name in self._decision.ranking if name not in {*done, *without}]
        asked = [name for name in asked if only is None or name in only]
        for kernel_id, why in _cheats(_foreign(asked, self._world), self._ctx.device.device_type).items():
            self.wrong[kernel_id] = Verdict(False, why=why)
        for kernel_id in asked:
            if kernel_id in self.wrong:
                continue
            kernel = self._world.registry.kernels[kernel_id]
            try:
                run = bind(self._spec, self._decision, self._world, kernel_id).run
            except BackendNotAvailableError as error:
                self.absent[kernel_id] = str(error)
                continue
            if self._gate is None:
                self._gate = self._made_gate()
            verdict = self._gate.check(kernel, run)
            if verdict.ok:
                self.errors[kernel_id] = verdict.max_error
            elif "OutOfMemory" in verdict.why or "can't allocate memory" in verdict.why:
                self.absent[kernel_id] = verdict.why  # a matter of the moment, not of the kernel
            else:
                self.wrong[kernel_id] = verdict
        if self._gate is not None and self.errors and self._plain is None:  # torch's own code, where it is right
            made = self._call()
            layout = made.layout or made.kwargs.get("layout")
            plain = maker(self._spec, self._ctx, layout)
            if plain is not None and (verdict := self._gate.check(None, result_of(self._spec, layout, plain))).ok:
                self._plain, self.plain_error = plain, verdict.max_error
        if not self.errors:
            reasons = self.absent | {name: verdict.why for name, verdict in self.wrong.items()}
            reasons |= dict.fromkeys(sorted(self.late), "not compiled in time")
            raise TuningError(
                code="TUNING_IMPOSSIBLE", value=self._ctx.op,
                limit="; ".join(f"{name}: {why}" for name, why in reasons.items()) or "no kernel is asked for",
            )  # fmt: skip

    def _made_gate(self) -> Gate:
        try:
            return gate_of(self._spec, self._ctx, self._call)
        except LayerZeroError:
            raise
        except Exception as error:
            if from_outside(error):
                raise
            why = f"the reference fails: {error}"
            raise TuningError(code="TUNING_IMPOSSIBLE", value=self._ctx.op, limit=why) from error

    def timed(self, seconds: float, least: int) -> tuple[dict[str, Times], bool]:
        """Race those that are right; whoever is hopeless by the fastest of three samples has only those."""
        same = {} if self._ctx.needs_grad else twins({name: self._world.registry.kernels[name] for name in self.errors})
        self._seconds = seconds
        clock = clock_for(self._ctx.device.device_type)
        places = self._places(clock)
        calls = {name: self._step(name, places) for name in self.errors if name not in same}
        if self._plain is not None:
            plain = self._plain
            calls[TORCH_DEFAULT] = self._as_called(lambda at: at.prepared(plain), places)
        calls, clock = self._graphs(calls, clock)
        first = screened(calls, clock)
        kernels = pass_screening({name: found for name, found in first.items() if name != TORCH_DEFAULT})
        # Torch's own code too, unless all of them leave it far behind.
        racing = {name: calls[name] for name in (*kernels, *{TORCH_DEFAULT}.intersection(pass_screening(first)))}
        # Seconds-long calls cannot be sampled a dozen times each; three show the middle one.
        a_round = sum(min(first[name]) for name in racing) / 1e6
        few = max(3, round(1.5 * seconds / max(a_round, 1e-9)))
        outcome = race(
            racing, least=min(least, few), seconds=seconds, noise=NOISE, clock=clock, warmup=1, settle=True,
            each_round=places.move,
        )  # fmt: skip
        slow = {name: Times.of(found) for name, found in first.items() if name not in racing}
        raced: Mapping[str, Times] = outcome.times
        if clock is cuda_clock:
            rounds = min(_A_PLACE * len(places), few) if self.thorough else 0
            raced = _final(raced, racing, places, rounds, seconds)
        elif clock is cpu_clock:
            raced = _spread(raced, racing, seconds)
        times = {**self._told_apart(raced, clock), **slow}
        return times | {name: times[other] for name, other in same.items() if other in times}, outcome.clear

    def _told_apart(self, times: Mapping[str, Times], clock: Clock) -> Mapping[str, Times]:
        """Those who tie here, raced once more at other sizes of the bucket."""
        on_cpu = clock is cpu_clock
        near = _near(times, _CLOSE_ON_A_CPU if on_cpu else None)
        if len(near) < 2:
            return times
        end = other_end(self._ctx)
        others = [*([] if end is None else [end]), *(within(self._ctx) if on_cpu else [])]
        raced = [self._surely(ctx, near, clock) for ctx in others]
        return weighed(times, *(found for found in raced if found))

    def _surely(self, ctx: Context, near: list[str], clock: Clock) -> Mapping[str, Times]:
        """`_elsewhere`; where someone is far behind on a GPU, with a second look. On a CPU one look is long."""
        first = self._elsewhere(ctx, near, clock)
        if clock is cpu_clock or not self.thorough or not far_apart(first):
            return first
        return confirmed(first, self._elsewhere(ctx, near, clock))

    def _elsewhere(self, ctx: Context, near: list[str], clock: Clock) -> Mapping[str, Times]:
        """Some kernels raced on another call; nothing where there is no room for it, or it is not for everyone."""
        try:
            made = [build(ctx)]
            decision = select(describe(self._spec, made[0].args, made[0].layout, None, self._world), self._world)
            places = Places(lambda: (made.pop() if made else build(ctx)).args, room() if clock is cuda_clock else 0)
            calls = {
                name: places.step(bind(self._spec, decision, self._world, name).run)
                for name in near
                if name in decision.ranking
            }
            if TORCH_DEFAULT in near and self._plain is not None:
                calls[TORCH_DEFAULT] = places.prepared(self._plain)
            if len(calls) < 2:
                return {}
            if clock is cpu_clock:
                return over_time(calls, _SPREAD * self._seconds / 2, LOOKS // 2).times
            found = race(
                calls, least=max(6, _A_PLACE // 2 * len(places)) if self.thorough else 6, seconds=self._seconds / 2,
                noise=NOISE, clock=clock, warmup=1, settle=True, each_round=places.move,
            ).times  # fmt: skip
        except (LayerZeroError, RuntimeError):  # the first race stands
            return {}
        return with_launches(found, calls, same=SAME, looks=LAUNCH_LOOKS if self.thorough else 0, each_turn=places.move)

    def _graphs(self, calls: dict[str, Callable[[], Any]], clock: Clock) -> tuple[dict[str, Callable[[], Any]], Clock]:
        """For a captured call: replays of a graph, and a clock that asks each for its own time."""
        if not self._ctx.capturing or self._ctx.device.device_type != "cuda":
            return calls, clock
        replays: dict[str, Callable[[], Any]] = {}
        for name, step in calls.items():
            try:
                replays[name] = graphed(step)
            except Exception as error:
                if from_outside(error):
                    raise
                if name == TORCH_DEFAULT:
                    self._plain = self.plain_error = None
                    continue
                self.wrong[name] = Verdict(False, why=f"cannot be captured: {error}")
                self.errors.pop(name)
        return replays, lambda replay, count: sum(replay() for _ in range(count)) / count

    def _places(self, clock: Clock) -> Places:
        """The tensors that everybody is timed on: where in memory they came to lie must not decide the race."""
        ctx = self._ctx
        several = clock is cuda_clock and not (ctx.needs_grad or ctx.capturing or "inplace" in ctx.needs)
        return Places(lambda: self._call().args, room() if several else 0)

    def _step(self, kernel_id: str, places: Places) -> Callable[[], Any]:
        # Bound again: what compiled above is ready now and needs no wrapper any more.
        world = self._world
        if world.ready != state.world.ready:
            world = measurement_settings(state.world, jit=world.policy.jit)
        decision = self._decision if world is self._world else select(self._ctx, world)
        if kernel_id not in decision.ranking:
            world, decision = self._world, self._decision
        run = bind(self._spec, decision, world, kernel_id).run
        return self._as_called(lambda at: at.step(run), places)

    def _as_called(self, made: Callable[[Places], Callable[[], Any]], places: Places) -> Callable[[], Any]:
        """A step on tensors of its own where kernels write into theirs; with the way back where a gradient is asked."""
        if "inplace" in self._ctx.needs:  # nobody finds what another has written
            places = Places(lambda: self._call().args)
        call = made(places)
        return _there_and_back(call, places.args) if self._ctx.needs_grad else call


def _foreign(kernels: Collection[str], world: World) -> frozenset[str]:
    """Kernels of packages that are not ours; none where layerzero-hostile, which looks at them, is not installed."""
    asked = names(PARTS).get("hostile.outside")
    if asked is None:
        return frozenset()
    outside, backends = asked.load(), world.registry.backends
    found = ((name, backends.get(world.registry.kernels[name].backend)) for name in kernels)
    return frozenset(name for name, backend in found if backend is not None and outside(backend))


@functools.cache  # once a process: nothing here is raced that was not looked at
def _cheats(kernels: frozenset[str], device: str) -> Mapping[str, str]:
    """Those of them that pass checks by cheating, with what they did."""
    return part("hostile.refusals")(kernels, device) if kernels else {}


def _there_and_back(call: Callable[[], Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    leaves = [item for item in args if isinstance(item, Tensor) and item.requires_grad]

    def run() -> None:
        outs = [item for item in flat(call()) if item.requires_grad]
        if outs:
            torch.autograd.grad(outs, leaves, [torch.ones_like(item) for item in outs], allow_unused=True)

    return run


def _near(times: Mapping[str, Times], close: float | None = None) -> list[str]:
    """Kernels near the fastest of them; where there are several, torch's own code too, if it is as near.

    For torch's sake alone nobody is raced again: a kernel that is not behind it may be chosen, and where the choice is
    behind it the whole race is run again.
    """
    kernels = {name: found for name, found in times.items() if name != TORCH_DEFAULT}
    near = tied(kernels, close)
    plain = times.get(TORCH_DEFAULT)
    if plain is not None and len(near) > 1:
        first = min(kernels, key=lambda name: kernels[name].median_us)
        if len(tied({first: kernels[first], TORCH_DEFAULT: plain}, close)) == 2:
            near.append(TORCH_DEFAULT)
    return near


def _final(
    times: Mapping[str, Times], calls: Mapping[str, Callable[[], Any]], places: Places, rounds: int, seconds: float
) -> Mapping[str, Times]:
    """With their launches; those who are close raced so many rounds more among themselves, as often in every place."""
    told = with_launches(times, calls, same=SAME, looks=LAUNCH_LOOKS if rounds else 1, each_turn=places.move)
    near = _near(told)
    if len(near) < 2 or len(places) == 1 or not rounds:
        return told
    some = {name: calls[name] for name in near}
    again = race(some, least=rounds, seconds=seconds, noise=NOISE, clock=cuda_clock, warmup=1, each_round=places.move)
    return told | with_launches(again.times, some, same=SAME, each_turn=places.move)


def _spread(times: Mapping[str, Times], calls: Mapping[str, Callable[[], Any]], seconds: float) -> Mapping[str, Times]:
    """Those who are close on a CPU raced once more, with pauses between the rounds.

    A machine that is shared runs fast for a second and slow for the next, and not all kernels become slower by as much.
    A fastest kernel that was unsteady races again with those further behind: selection believes a wide spread less.
    """
    best = min((item for name, item in times.items() if name != TORCH_DEFAULT), key=lambda item: item.median_us)
    spread = math.sqrt(best.steady) / best.median_us
    near = _near(times, _CLOSE_ON_A_CPU + (2.0 * spread if spread > _UNSTEADY else 0.0))
    pause_us = 1e6 * _SPREAD * seconds / LOOKS
    if len(near) < 2 or max(times[name].median_us for name in near) > pause_us:  # long calls last through its moods
        return times
    again = over_time({name: calls[name] for name in near}, _SPREAD * seconds).times
    # How steady a kernel is shows in the look where it was steadier: what a machine does to it only adds.
    return {**times, **{name: _as_steady(found, times[name]) for name, found in again.items()}}


def _as_steady(found: Times, before: Times) -> Times:
    share = (found.median_us / before.median_us) ** 2
    variance, steady = min(found.variance, before.variance * share), min(found.steady, before.steady * share)
    return replace(found, variance=variance, steady=steady)

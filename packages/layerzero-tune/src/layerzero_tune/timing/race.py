"""Head-to-head timing: all contestants in every round, so that drift hits them alike, until the winner is clear.

Who races is told by three samples of everyone, in turns: only whoever is far behind by the fastest of them is left out.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.errors import InvalidInputError
from layerzero.perfdb.measurement import SURE, alike, median_error
from layerzero.runtime.current import collector_paused
from layerzero.selection.score import tie
from layerzero_tune.timing.clock import Clock, clock_for, cpu_clock, cuda_clock
from layerzero_tune.timing.host_load import quick_core

LOOKS = 40  # rounds of a race that is spread over time

_FEW_LOOKS = 6  # of one whose calls are longer than the pauses
_LEAST_SAMPLE_US = 200.0  # a shorter sample would be timed by the clock's own grain and the interpreter's moods
_QUARTILES = 1.349  # between the quartiles of a normal distribution lie so many standard deviations
_DROP_AT = 3.0  # so much slower than the leader, a contestant leaves after the least number of rounds
_DROP_COLD_AT = 1.5  # the same where the device times each call by itself: a dozen such samples are alike
_SHORT_US = 20.0  # where the fastest takes less, a launch that comes late is a large part of a sample
_SHORT_ROUNDS, _MANY_ROUNDS = 3, 36  # times as many rounds there, up to so many: who is to have more has enough
_COLD_SAMPLE_US = 1_500.0  # of wall time, for calls that are timed one by one with the cache overwritten between them
_COLD_CALL_US = 65.0  # what overwriting it takes
_COLD_CALLS = 15  # most calls of such a sample; more rounds, in turns with the others, tell more than longer samples
_BRIEF_US = 2_000.0  # a longer call outlasts what the threads of another leave behind
_SETTLE_NS = 1_500_000
_WILD = 0.25  # a spread at which selection believes a time only half
_PATIENCE = 3.0  # times the seconds, where those who may have won are too unsteady to be told apart
_HOPELESS = 4.0  # a kernel whose fastest sample takes so many times the best one's is not raced
_NEAR_US = 100.0  # but whoever is no further behind than this is: a late launch or an interruption is of that size
_SAMPLES = 3  # of everyone, before anyone is left out: one sample is at the mercy of one interruption
_TOGETHER, _TOGETHER_US = 5, 4_000.0  # calls of such a sample, where they are short


@dataclass(frozen=True, slots=True)
class Times:
    """What one contestant took, in µs a call. `steady` is the variance that the middle half of the samples speaks of:
    one interruption by the system among fifty samples does not make a kernel unsteady."""

    median_us: float
    p95_us: float
    p99_us: float
    variance: float
    samples: int
    steady: float = 0.0

    @staticmethod
    def of(samples: list[float]) -> Times:
        """Summarise samples; none gives an error, since a time that was never taken is no time."""
        if not samples:
            raise InvalidInputError("no samples", code="VALUE_INVALID", value=0, limit="at least 1")
        ordered = sorted(samples)
        return Times(
            statistics.median(ordered), _percentile(ordered, 0.95), _percentile(ordered, 0.99),
            statistics.pvariance(ordered), len(ordered),
            ((_percentile(ordered, 0.75) - _percentile(ordered, 0.25)) / _QUARTILES) ** 2,
        )  # fmt: skip

    @property
    def error_us(self) -> float:
        """Standard error of the median, by the steady part of the samples."""
        return median_error(self.steady, self.samples)

    def near(self, best: Times, noise: float) -> bool:
        return alike(best.median_us, best.error_us, self.median_us, self.error_us, noise)


@dataclass(frozen=True, slots=True)
class Race:
    """The outcome: times by name, the winner, and whether it was clear before the rounds ran out."""

    times: Mapping[str, Times]
    winner: str
    clear: bool
    rounds: int
    seconds: float


def free_device_memory() -> None:
    """Give back what hangs in circles of the last calls' objects, where it fills a twentieth of the device: looking
    through the whole heap takes as long as a race."""
    if torch.cuda.is_initialized() and torch.cuda.memory_allocated() > 0.05 * torch.cuda.mem_get_info()[1]:  # type: ignore[no-untyped-call]
        gc.collect()


def race(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    device: torch.device | str = "cpu",
    least: int = 12,
    most: int = 120,
    warmup: int = 3,
    seconds: float = 5.0,
    noise: float = 0.02,
    clock: Clock | None = None,
    settle: bool = False,
    each_round: Callable[[], None] | None = None,
    rounds: int | None = None,
) -> Race:
    """Time callables against each other.

    Each round takes one sample of everyone, in alternating order. It ends when the leader is clear of all others, after
    `most` rounds, or when `seconds` have passed and everyone has `least` samples. Kernels of a few µs get three times
    as many rounds, up to 36, and first places too unsteady to be told apart three times the seconds. Inside the noise
    band, which the spread may widen, the name decides. With `settle`, short calls on a CPU are run for a moment before
    each sample, until the threads of the one before sleep. `each_round` is called before every round, untimed. With
    `rounds` there are just so many, for everybody, and what all have in common in a round is taken out of their spread.
    """
    if not contestants:
        raise InvalidInputError("nobody to time", code="VALUE_INVALID", value=0, limit="at least 1")
    clock = clock_for(device) if clock is None else clock
    with contextlib.ExitStack() as until_the_end:
        if clock is cuda_clock:  # the host's part of a short call must not depend on the core it happens to run on
            for call in contestants.values():
                call()  # whatever starts threads does so before this one is bound to a core
            until_the_end.enter_context(quick_core())
        start = time.perf_counter()
        once = {name: _once(clock, call, warmup) for name, call in contestants.items()}
        batch = {name: calls_a_sample(us, cold=clock is cuda_clock) for name, us in once.items()}
        short = min(once.values()) < _SHORT_US
        enough = max(least, min(_SHORT_ROUNDS * least, _MANY_ROUNDS)) if short else least
        most = max(most, enough)
        if rounds is not None:
            least, enough, most = rounds, rounds, rounds
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        running, done, clear = list(contestants), 0, False
        behind = _DROP_COLD_AT if clock is cuda_clock else _DROP_AT
        gc.collect(1)  # what the last calls left behind; all that a large program holds would take longer than the race
        until_the_end.enter_context(collector_paused())
        for done in range(1, most + 1):
            if each_round is not None:
                each_round()
            for name in running if done % 2 else running[::-1]:
                if settle and clock is cpu_clock and once[name] < _BRIEF_US:
                    # Until the threads of the one before have gone to sleep: OpenMP's wait a while on the cores.
                    end = time.perf_counter_ns() + _SETTLE_NS
                    while time.perf_counter_ns() < end:
                        contestants[name]()
                samples[name].append(clock(contestants[name], batch[name]))
            if done < least:
                continue
            medians = {name: statistics.median(found) for name, found in samples.items()}
            best = min(medians.values())
            if rounds is None:
                running = [name for name in running if medians[name] <= behind * best]
            if done < enough:
                continue
            clear = _clear(samples, medians, noise)
            spent = time.perf_counter() - start
            if clear or spent > _PATIENCE * seconds or (spent > seconds and not _unsure(samples, medians, noise)):
                break
    if rounds is not None:
        samples = without_common_mode(samples)
        clear = _clear(samples, {name: statistics.median(found) for name, found in samples.items()}, noise)
    times = {name: Times.of(found) for name, found in samples.items()}
    return Race(times, winner_of(times, noise), clear, done, time.perf_counter() - start)


def over_time(contestants: Mapping[str, Callable[[], Any]], seconds: float, looks: int = LOOKS) -> Race:
    """A race on a CPU whose rounds are spread over some seconds; a few rounds in a row, where calls are longer than the
    pauses between them would be.

    Between the rounds the contestants run untimed: a virtual machine that sleeps has to wait for its cores afterwards,
    for each of them by itself, and who needs them all seems slow.
    """
    pause, begin = seconds / looks, time.perf_counter()
    for call in contestants.values():
        call()
    if time.perf_counter() - begin > pause * len(contestants):
        looks, pause = min(looks, _FEW_LOOKS), 0.0
    return race(
        contestants, rounds=looks, clock=cpu_clock, warmup=1, settle=True,
        each_round=lambda: _keep_busy(contestants, pause),
    )  # fmt: skip


def leader(medians: Mapping[str, float], noise: float) -> str:
    """The fastest; of those within the noise band of the fastest, the first as selection breaks ties."""
    best = min(medians.values())
    return min((name for name, us in medians.items() if us <= best * (1.0 + noise)), key=tie)


def winner_of(times: Mapping[str, Times], noise: float) -> str:
    """The fastest; of those that cannot be told from it, the first as selection breaks ties."""
    best = min(times.values(), key=lambda item: item.median_us)
    return min((name for name, item in times.items() if item.near(best, noise)), key=tie)


def _unsure(samples: Mapping[str, list[float]], medians: Mapping[str, float], noise: float) -> bool:
    """Whether someone may be the fastest, or seem so, only because the times are unsteady."""
    found = {name: Times.of(values) for name, values in samples.items()}
    best = min(found.values(), key=lambda item: item.median_us)
    if len(found) > 1 and math.sqrt(best.steady) > _WILD * best.median_us:
        return True
    for name, item in found.items():
        wide = SURE * math.hypot(best.error_us, item.error_us)
        if item is not best and wide > noise * best.median_us and medians[name] - wide <= best.median_us:
            return True
    return False


def _clear(samples: Mapping[str, list[float]], medians: Mapping[str, float], noise: float) -> bool:
    """Whether three quarters of the leader's samples are faster than three quarters of anyone else's."""
    if len(samples) == 1:
        return True
    first = min(medians, key=lambda name: medians[name])
    slow_end = _percentile(sorted(samples[first]), 0.75)
    others = [name for name in samples if name != first]
    return all(
        _percentile(sorted(samples[name]), 0.25) > slow_end and medians[name] > medians[first] * (1.0 + noise)
        for name in others
    )


def _percentile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _keep_busy(contestants: Mapping[str, Callable[[], Any]], seconds: float) -> None:
    """Everybody in turn, untimed, for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for call in contestants.values():
            call()


def _once(clock: Clock, call: Callable[[], Any], warmup: int) -> float:
    """Warm up, and about how long a call takes."""
    for _ in range(max(1, warmup)):
        call()
    return min(clock(call, 1) for _ in range(2))


def calls_a_sample(us: float, *, cold: bool) -> int:
    """How many calls make one sample: in a row until the clock's grain does not matter, or, where each call is timed
    by itself (`cold`), so many that their median is not at the mercy of one late launch."""
    if cold:
        return max(1, min(_COLD_CALLS, round(_COLD_SAMPLE_US / (us + _COLD_CALL_US))))
    return max(1, min(1000, round(_LEAST_SAMPLE_US / max(us, 0.01))))


def without_common_mode(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The samples of each kernel without what the kernels have in common in a turn; all have one in every turn.

    When the machine slows down it does so for all of them. That would count as spread of each, and a kernel that is a
    tenth behind in every single turn could not be told from the first. Of two kernels, how they differ stays.
    """
    if len(found) < 2:
        return dict(found)
    usual = {name: statistics.median(turns) for name, turns in found.items()}
    turns = zip(*([us / usual[name] for us in taken] for name, taken in found.items()), strict=True)
    common = [statistics.median(shares) for shares in turns]
    return {name: [us / share for us, share in zip(taken, common, strict=True)] for name, taken in found.items()}


def screened(calls: Mapping[str, Callable[[], Any]], clock: Clock) -> dict[str, list[float]]:
    """Three samples of everyone, in turns, so that what disturbs one sample does not disturb all of a kernel's."""
    for step in calls.values():
        step()  # warm: the first call of a bound kernel may set up a workspace
    found = {name: [clock(step, 1)] for name, step in calls.items()}
    for _ in range(_SAMPLES - 1):
        for name, step in calls.items():
            # On a GPU the first launch after a pause is a late one; several in a row show the kernel.
            found[name].append(clock(step, _TOGETHER if found[name][0] < _TOGETHER_US else 1))
    return found


def pass_screening(samples: Mapping[str, list[float]]) -> list[str]:
    """Who may win: the fastest sample of each, against the middle one of the best. One sample that came late does not
    send its kernel away, one that met an idle machine for once does not send away the others."""
    best = min(statistics.median(found) for found in samples.values())
    return [name for name, found in samples.items() if min(found) <= max(_HOPELESS * best, best + _NEAR_US)]

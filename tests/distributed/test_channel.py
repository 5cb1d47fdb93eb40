"""The rounds in which ranks talk, played by threads over an in-memory store: whoever is late, lost or confused."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import layerzero as lz
from layerzero.distributed import Channel, Facts, judge
from layerzero.distributed import channel as channels
from layerzero.distributed.agreement import Agreement
from layerzero.distributed.choice import RankChoices, call_key
from layerzero.errors import DistributedError, InvalidInputError
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.runtime.state import state
from tools.threads import run_threads, wait_until

FACTS = Facts(0, "1", "2.13", "hw", "cpu", "kernels", "policy", "", "", 8 << 30)


@pytest.fixture(autouse=True)
def only_built_in_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LAYERZERO_PLUGINS", "")
    lz.reset()
    yield
    lz.reset()


class SharedTime:
    """The time of some threads that wait by sleeping only: once all of them sleep, it is the hour of the first to wake.

    So a slow machine makes nobody late, and a deadline of a minute passes at once.
    """

    def __init__(self, threads: int = 1) -> None:
        self.now = 0.0
        self._awake, self._hours = threads, list[float]()
        self._turn = threading.Condition()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._turn:
            hour = self.now + seconds
            self._hours.append(hour)
            self._rest()
            assert self._turn.wait_for(lambda: self.now >= hour, 90), "somebody waits in another way"

    def leave(self) -> None:
        """A thread has come to its end."""
        with self._turn:
            self._rest()

    def _rest(self) -> None:
        self._awake -= 1
        if not self._awake and self._hours:
            self.now = min(self._hours)
            self._awake = sum(hour <= self.now for hour in self._hours)
            self._hours = [hour for hour in self._hours if hour > self.now]
            self._turn.notify_all()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], SharedTime]:
    """From here on the channels of so many ranks live in a time of their own."""

    def begin(ranks: int = 1) -> SharedTime:
        clock = SharedTime(ranks)
        monkeypatch.setattr(channels, "time", clock)
        return clock

    return begin


def play(
    size: int, part: Callable[[Channel], Any], timeout: float = 60.0, clock: SharedTime | None = None
) -> list[Any]:
    """What each of `size` ranks found: its result, or the DistributedError it met."""
    store, out = HashStore(), [None] * size

    def run(rank: int) -> None:
        try:
            out[rank] = part(Channel(store, rank, tuple(range(size)), timeout))
        except DistributedError as error:
            out[rank] = error
        finally:
            if clock is not None:
                clock.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a rank waits without end"
    return out


@pytest.mark.req("R-DIST-03")
def test_everybody_hears_everybody_and_nothing_is_left_behind() -> None:
    sizes = []

    def part(channel: Channel) -> list[dict[int, Any]]:
        found = [channel.gather("roll call", [channel.rank, number]) for number in range(50)]
        channel.barrier("end")
        if channel.rank == 0:
            sizes.append(channel.store.num_keys())  # type: ignore[attr-defined]
        return found

    for found in play(5, part):
        assert found == [{rank: [rank, number] for rank in range(5)} for number in range(50)]
    assert sizes[0] <= 2 * 6 + 1  # the last two rounds; the others were swept


def test_a_channel_of_one_talks_to_nobody() -> None:
    assert Channel(None, 3, (3,)).gather("x", 7) == {3: 7}  # type: ignore[arg-type]
    with pytest.raises(DistributedError, match="not a member"):
        Channel(HashStore(), 1, (0, 2))


@pytest.mark.req("R-DIST-03")
def test_a_barrier_holds_until_the_last_has_come(at_once: Any) -> None:
    come: list[int] = []
    clock = at_once(3)

    def part(channel: Channel) -> int:
        if channel.rank == 2:
            clock.sleep(0.3)
        come.append(channel.rank)
        channel.barrier("x")
        return len(come)

    assert play(3, part, clock=clock) == [3, 3, 3] and clock.now >= 0.3


def test_different_questions_are_named_on_every_rank() -> None:
    found = play(3, lambda channel: channel.gather("tables" if channel.rank == 1 else "facts", 0))
    assert {error.code for error in found} == {"RANK_DISAGREEMENT"}
    assert all("rank 1: tables" in str(error) for error in found)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_member_that_never_comes_is_named_by_all_others(absent: int, at_once: Any) -> None:
    clock = at_once(3)
    found = play(3, lambda c: None if c.rank == absent else c.gather("x", 0), timeout=30.0, clock=clock)
    assert [None if item is None else item.ranks for item in found] == [
        None if rank == absent else (absent,) for rank in range(3)
    ]
    assert all(item is None or item.code == "RANK_LOST" for item in found)
    # Those who wait for a leader give it the time it may itself be waiting in; nobody waits longer than that.
    assert 30.0 <= clock.now < 31.0 if absent else 60.0 <= clock.now < 61.0


def test_those_who_are_left_go_on_without_the_lost(at_once: Any) -> None:
    clock = at_once(5)

    def part(channel: Channel) -> Any:
        if channel.rank in (0, 3):
            return "dead"
        while True:  # the leader is missed first, then the other
            try:
                return channel.gather("x", channel.rank)
            except DistributedError as error:
                channel = channel.without(error.ranks)

    left = {1: 1, 2: 2, 4: 4}
    assert play(5, part, timeout=30.0, clock=clock) == ["dead", left, left, "dead", left]


def test_whoever_is_late_all_who_come_read_the_same_verdict(at_once: Any) -> None:
    """Delays around both deadlines: the leader's own, and that of those who wait for it."""
    chance, outcomes = random.Random(11), set()
    for _ in range(60):
        size, limit = chance.randrange(2, 5), 0.15
        clock = at_once(size)
        delays = [chance.choice([0.0, 0.0, limit * chance.uniform(0.8, 2.6)]) for _ in range(size)]

        def part(channel: Channel, delays: list[float] = delays, clock: SharedTime = clock) -> Any:
            clock.sleep(delays[channel.rank])
            try:
                return "all", tuple(sorted(channel.gather("x", 0)))
            except DistributedError as error:
                return error.code.value, error.ranks

        found = play(size, part, timeout=limit, clock=clock)
        assert len(set(found)) == 1, (delays, found)
        outcomes.add(found[0][0])
    assert outcomes == {"all", "RANK_LOST"}


class Gone(HashStore):
    """A store whose server has died."""

    def check(self, keys: list[str]) -> bool:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    def compare_set(self, *args: Any) -> bytes:
        raise torch.distributed.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_is_our_error_at_once(at_once: Any) -> None:
    clock = at_once(1)
    for rank in (0, 1):
        with pytest.raises(DistributedError, match="Connection reset") as caught:
            Channel(Gone(), rank, (0, 1), 30.0).gather("x", 0)
        assert caught.value.code == "RANK_LOST"
    assert clock.now == 0.0


# -- what differences mean ---------------------------------------------------------------------------
def facts(rank: int, **changes: Any) -> Facts:
    return replace(FACTS, rank=rank, **changes)


@pytest.mark.req("R-DIST-07")
def test_mixed_hardware_forms_groups_each_with_its_own_first_rank() -> None:
    found = judge({
        0: facts(0, hardware="h100", kernels_hash="a", kernels={"fa.x": "1", "sdpa.y": "1"}),
        1: facts(1, hardware="a100", kernels_hash="b", kernels={"sdpa.y": "1"}),
        2: facts(2, hardware="h100", kernels_hash="a", kernels={"fa.x": "1", "sdpa.y": "1"}),
        3: facts(3, hardware="a100", kernels_hash="b", kernels={"sdpa.y": "1"}),
    })  # fmt: skip
    assert found.groups == ((0, 2), (1, 3)) and found.group_of(3) == (1, 3)
    assert found.alike  # a kernel that one kind of rank lacks is no error


@pytest.mark.req("R-DIST-01")
def test_versions_that_differ_are_named_and_left_out() -> None:
    found = judge({
        0: facts(0, kernels_hash="a", kernels={"fa.x": "1", "sdpa.y": "1"}),
        1: facts(1, kernels_hash="b", kernels={"fa.x": "2", "sdpa.y": "1"}, torch="2.12"),
    })  # fmt: skip
    assert set(found.excluded) == {"fa.x"} and found.excluded["fa.x"].code == "VERSION_DISAGREEMENT"
    assert found.versions[0] == "torch 2.13 on rank 0; 2.12 on rank 1" and "fa.x" in found.versions[1]
    assert found.groups == ((0, 1),) and not found.alike


@pytest.mark.req("R-DIST-05")
def test_memory_is_the_least_of_a_group_and_unknown_where_one_does_not_know() -> None:
    assert judge({0: facts(0), 1: facts(1, free_memory=5)}).free_memory == {0: 5}
    assert judge({0: facts(0), 1: facts(1, free_memory=None)}).free_memory == {0: None}
    mixed = judge({0: facts(0), 1: facts(1, hardware="other", free_memory=5)})
    assert mixed.free_memory == {0: 8 << 30, 1: 5}


def test_tables_and_policies_that_differ_are_found() -> None:
    found = judge({0: facts(0), 1: facts(1, table="t"), 2: facts(2, policy="p")})
    assert found.tables == (0,) and found.policies and not found.alike


def test_facts_travel_and_anything_else_is_refused() -> None:
    assert Facts.from_json(FACTS.to_json()) == FACTS
    for odd in (None, [], {}, {**FACTS.to_json(), "more": 1}, {**FACTS.to_json(), "rank": "0"}, "facts"):
        with pytest.raises(DistributedError, match="something else"):
            Facts.from_json(odd)


# -- choosing alike ----------------------------------------------------------------------------------
X, W = torch.ones(4, 8), torch.ones(8)


def choices(rank: int, store: Any, **more: Any) -> RankChoices:
    return RankChoices(store, rank, (0, 1), 2, "t", f"f{rank}", wait_s=more.pop("wait_s", 0.2), **more)


def decided(chosen: str, **settings: Any) -> Any:
    lz.reset()
    if settings:
        lz.configure(**settings)
    found = lz.select("rms_norm", X, W)
    lz.reset()
    assert found.chosen == chosen
    return found


NATIVE, PLAIN = "torch.rms_norm.native", "reference.rms_norm.plain"


@pytest.mark.req("R-DIST-02")
def test_the_first_ranks_choice_counts_and_without_it_the_first_written(at_once: Any) -> None:
    native, plain = decided(NATIVE), decided(PLAIN, avoid=["torch"])
    store = HashStore()
    assert choices(0, store).settle(native).chosen == NATIVE
    assert choices(1, store).settle(plain).chosen == NATIVE
    store, clock = HashStore(), at_once(1)
    assert choices(1, store).settle(plain).chosen == PLAIN  # the first rank does not come
    assert 0.2 <= clock.now < 0.3
    followed = choices(0, store).settle(native)
    assert followed.chosen == PLAIN and followed.ranking[0] == PLAIN and followed.notes[-1].code == "RANK_CHOICE"


@pytest.mark.req("R-DIST-07")
def test_each_group_takes_the_word_of_its_own_first_rank() -> None:
    """Ranks 0 and 2 of one kind, 1 and 3 of another, over one store and for one and the same call."""
    native, plain = decided(NATIVE), decided(PLAIN, avoid=["torch"])
    store, found = HashStore(), {}
    for rank, group, own in ((0, (0, 2), native), (1, (1, 3), plain), (2, (0, 2), plain), (3, (1, 3), native)):
        found[rank] = replace(choices(rank, store), group=group, size=4).settle(own)
    assert {rank: item.chosen for rank, item in found.items()} == {0: NATIVE, 1: PLAIN, 2: NATIVE, 3: PLAIN}
    told = {rank: [note.code.value for note in item.notes] for rank, item in found.items()}
    assert ["RANK_CHOICE" in told[rank] for rank in range(4)] == [False, False, True, True]


def test_locks_wishes_refusals_and_independence_are_left_alone() -> None:
    store = HashStore()
    choices(0, store).settle(decided(NATIVE))
    for mine in (decided(PLAIN, locks={"rms_norm": PLAIN}), lz.select("rms_norm", X, W, backend="reference")):
        assert choices(1, store).settle(mine) is mine
    plain = decided(PLAIN, avoid=["torch"])
    assert choices(1, store, broadcast=False).settle(plain) is plain
    assert choices(1, None).settle(plain) is plain
    assert replace(choices(1, store), group=(1,)).settle(plain) is plain
    lz.reset()


@pytest.mark.req("R-DIST-02")
def test_a_rank_that_cannot_follow_raises_in_training() -> None:
    store = HashStore()
    choices(0, store).settle(decided(NATIVE))
    denied = decided(PLAIN, deny=["torch"])
    alone = choices(1, store)
    assert alone.settle(denied).notes[-1].code == "RANK_DISAGREEMENT" and alone.disagreements == 1
    with pytest.raises(DistributedError) as caught:
        choices(1, store, training=True).settle(denied)
    assert caught.value.code == "RANK_DISAGREEMENT" and caught.value.ranks == (1,)


def test_a_lost_store_costs_a_warning_in_inference_and_is_an_error_in_training(caplog: Any) -> None:
    native = decided(NATIVE)
    alone = choices(1, Gone())
    assert alone.settle(native) is native and alone.disagreements == 1 and "chooses for itself" in caplog.text
    with pytest.raises(DistributedError) as caught:
        choices(1, Gone(), training=True).settle(native)
    assert caught.value.code == "RANK_LOST"


@pytest.mark.req("R-DIST-08")
def test_a_call_has_one_name_on_all_ranks_and_split_sizes_are_left_out_where_they_are_split() -> None:
    here, there = DeviceSpec.detect("cpu"), replace(DeviceSpec.detect("cpu"), index=3)
    dims = {"batch": 1, "num_heads": 3, "num_kv_heads": 3, "seq_len_q": 4, "seq_len_k": 4, "head_dim": 16}
    one = Context("attention", here, dims=tuple(dims.items()), tp_rank=0)
    two = Context("attention", there, dims=tuple({**dims, "num_heads": 2}.items()), tp_rank=1, scale=0.5)
    assert call_key(one) == call_key(replace(one, device=there, tp_rank=1, scale=0.5))
    assert call_key(one) != call_key(two) and call_key(one, split=True) == call_key(two, split=True)
    assert call_key(one, split=True) != call_key(replace(one, dtype="float16"), split=True)


def _heads(part: int) -> tuple[Any, ...]:
    return torch.ones(1, 2 * part, 4, 8), torch.ones(1, part, 4, 8), torch.ones(1, part, 4, 8)


def _experts(part: int) -> tuple[Any, ...]:
    gate_up, down = torch.ones(4, 2 * part, 8), torch.ones(4, 8, part)
    return torch.ones(4, 8), gate_up, down, torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.long)


@pytest.mark.req("R-DIST-04")
@pytest.mark.parametrize(
    ("op", "shard"),
    [
        ("attention", _heads),
        ("linear", lambda part: (torch.ones(4, 8), torch.ones(part, 8))),  # by columns
        ("linear", lambda part: (torch.ones(4, part), torch.ones(8, part))),  # by rows
        ("mlp", lambda part: (torch.ones(4, 8), torch.ones(2 * part, 8), torch.ones(8, part))),
        ("moe", _experts),
        ("cross_entropy", lambda part: (torch.ones(4, part), torch.zeros(4, dtype=torch.long))),
    ],
)  # fmt: skip
def test_shards_of_unlike_sizes_are_one_call_to_a_tensor_parallel_group(op: str, shard: Callable[..., Any]) -> None:
    five, six = (lz.explain(op, *shard(part)).context for part in (5, 6))
    assert call_key(five) != call_key(six) and call_key(five, split=True) == call_key(six, split=True)


@pytest.mark.req("R-DIST-04", "R-DIST-06")
def test_without_an_invariant_kernel_the_reference_runs_with_a_warning(caplog: Any) -> None:
    lz.reset()
    registry = state.world.registry
    others = [kernel for kernel in registry.by_op("rms_norm") if kernel.backend != "reference"]
    dependent = [replace(kernel, tp_invariant=False) for kernel in others]
    state.publish(registry=registry.replace(dependent), ranks=choices(0, None, tp_invariant=True))
    with caplog.at_level(logging.WARNING, "layerzero.selection"):
        lz.rms_norm(X, W)
    report = lz.explain("rms_norm", X, W)
    assert report.ran == report.chosen == PLAIN and report.is_fallback
    assert [item.code for item in report.reasons[NATIVE]] == ["TP_INVARIANCE_REQUIRED"]
    assert "no kernel fits, the reference runs" in caplog.text and "TP_INVARIANCE_REQUIRED" in caplog.text
    state.publish(ranks=None)
    assert lz.which("rms_norm", X, W) == NATIVE
    lz.reset()


@pytest.mark.req("R-DIST-03")
def test_no_rank_goes_on_from_a_comparison_before_the_last_has_settled() -> None:
    """Hashes of the calls first, a barrier last: the last rank comes to it once the others wait there or are gone."""
    asked: list[str] = []
    gone: list[int] = []
    gone_early: list[list[int]] = []

    class Late(HashStore):
        def set(self, key: str, value: str) -> None:
            what, here, rank = json.loads(value)[0], *key.rsplit("/", 1)
            if rank == "2":
                asked.append(what)
            if rank == "2" and what.startswith("barrier"):
                wait_until(lambda: all(other in gone or self.check([f"{here}/{other}"]) for other in (0, 1)))
                gone_early.append(list(gone))
            super().set(key, value)

    store, found = Late(), {rank: facts(rank) for rank in range(3)}
    lz.select("rms_norm", X, W)  # the kernels are there before the threads are

    def compare(rank: int) -> None:
        agreement = Agreement(Channel(store, rank, (0, 1, 2), 60.0), found, judge(found), False)
        assert agreement.confirm("rms_norm", X, W, 1e-6) == NATIVE
        gone.append(rank)

    run_threads(3, compare)
    assert asked == ["confirm rms_norm", "barrier: confirm rms_norm"]
    assert gone_early == [[]] and sorted(gone) == [0, 1, 2]


@pytest.mark.req("R-DIST-03")
@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(5, 8), W),
        (X.bfloat16(), W.bfloat16()),
        (X.double(), W.double()),
        (torch.ones(8, 4).T, W),
        (torch.ones(4, 8, requires_grad=True), W),
        (X, None),
    ],
    ids=["rows", "bfloat16", "float64", "strides", "gradient", "no weight"],
)
def test_calls_that_differ_in_anything_a_choice_sees_are_refused_on_every_rank_before_the_barrier(other: Any) -> None:
    lz.select("rms_norm", X, W)  # the kernels are there before the threads are
    found, store = {rank: facts(rank) for rank in range(2)}, HashStore()
    met: list[str] = []

    def compare(rank: int) -> None:
        agreement = Agreement(Channel(store, rank, (0, 1), 60.0), found, judge(found), False)
        with pytest.raises(DistributedError, match="ranks call rms_norm differently") as caught:
            agreement.confirm("rms_norm", *(other if rank else (X, W)), 1e-6)
        met.append(caught.value.code)
        assert agreement.channel.round == 1, "nobody waits at a barrier that the other may never reach"

    run_threads(2, compare)
    assert met == ["RANK_DISAGREEMENT"] * 2


def test_one_process_agrees_with_itself_and_wrong_arguments_are_refused() -> None:
    found = lz.agree()
    assert found.size == 1 and found.findings.alike and found.choices is None
    assert found.confirm("rms_norm", X, W, 1e-6) == NATIVE
    for wrong in ({"timeout": 0}, {"timeout": "soon"}, {"timeout": True}, {"group": object()}):
        with pytest.raises(InvalidInputError):
            lz.agree(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError):
        found.confirm("rms_nrom", X, W)
    found.leave()
    lz.reset()

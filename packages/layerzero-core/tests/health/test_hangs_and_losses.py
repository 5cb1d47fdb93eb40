"""A kernel that hangs and one that loses its device, from the public function on: set aside, said, got over."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.errors import DeviceLostError
from layerzero.health.breaker import BreakerPhase
from layerzero.health.quarantine import Quarantine
from layerzero.model.enums import Platform
from layerzero.runtime import timers
from layerzero.runtime.state import state
from tools.threads import wait_until

X, W = torch.linspace(-1, 1, 24).reshape(3, 8), torch.ones(8)
POISONED = RuntimeError("CUDA error: an illegal memory access was encountered")
LOST = RuntimeError("CUDA error: uncorrectable ECC error encountered")


def phase(name: str) -> BreakerPhase:
    return state.health.snapshot().state(name).phase


@pytest.mark.req("R-FAIL-10")
def test_a_call_that_hangs_just_as_the_watching_thread_ends_is_seen(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends when it has found no call twenty times; the call begins while it sleeps after the last look."""
    lab.use(lab.kernel("slow.rms_norm.hangs", priority=90))
    spec = state.world.registry.kernels["slow.rms_norm.hangs"]
    gate, inside, seen, watchdog, looks = *(threading.Event() for _ in range(3)), timers.Watchdog(), 0

    def hangs() -> None:
        inside.set()
        gate.wait(60)

    quick, stuck = watchdog.watched(lambda: seen.wait(60), spec, 60.0), watchdog.watched(hangs, spec, 0.05)

    def sleep(seconds: float) -> None:
        nonlocal looks
        if not seen.is_set():  # after the first look, which found the quick call
            seen.set()
            wait_until(lambda: not watchdog._under_way)
            return
        looks += 1
        if looks == 20:
            threading.Thread(target=stuck, daemon=True).start()
            assert inside.wait(60)
        time.sleep(0.001)

    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    quick()
    wait_until(lambda: watchdog.overdue == 1)
    assert phase("slow.rms_norm.hangs") is BreakerPhase.OPEN
    gate.set()
    wait_until(lambda: not watchdog._under_way and watchdog._thread is None)  # and it ends when there is nothing left


@pytest.mark.req("R-HLTH-03", "R-FAIL-10")
def test_a_kernel_that_hung_is_tried_again_after_the_cooldown_and_used_once_it_answers(lab: Any) -> None:
    gate = threading.Event()

    def waits(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        gate.wait(60)
        return torch.rms_norm(x, (8,), weight, eps)

    name = "slow.rms_norm.hangs"
    lab.use(lab.kernel(name, waits, priority=90), breaker={"deadline_s": 0.05, "cooldown_s": 3600.0})
    stuck = threading.Thread(target=lz.rms_norm, args=(X, W))
    stuck.start()
    wait_until(lambda: phase(name) is BreakerPhase.OPEN)
    gate.set()
    stuck.join(60)
    assert phase(name) is BreakerPhase.OPEN, "that it came back late is no proof that it is well"
    assert lab.run(lz.rms_norm, X, W)[1] == ["torch.rms_norm.native"]
    lz.configure(breaker={"deadline_s": 3600.0, "cooldown_s": 0.0, "probe": False})  # the cooldown is over
    state.health.tick()
    assert phase(name) is BreakerPhase.HALF_OPEN
    assert lab.run(lz.rms_norm, X, W)[1] == [name]
    assert phase(name) is BreakerPhase.CLOSED and not lz.validate(name, X, W)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(POISONED, "DEVICE_POISONED", marks=pytest.mark.req("R-FAIL-02", "R-HLTH-03")),
        pytest.param(LOST, "DEVICE_LOST", marks=pytest.mark.req("R-FAIL-11", "R-HLTH-03")),
    ],
    ids=["poisoned", "lost"],
)
def test_a_call_during_which_its_device_is_lost_says_so_and_the_next_one_there_starts_nothing(
    lab: Any, kept: Quarantine, error: Exception, code: str
) -> None:
    """From the public function on. The device that is lost is meta, which every machine has beside its CPU."""
    places = frozenset({Platform.CPU, Platform.META})
    bad = lab.kernel("bad.rms_norm.pokes", lambda x, *rest: torch.empty_like(x), priority=90, platforms=places)
    lab.use(bad)
    there = torch.empty(3, 8, device="meta"), torch.empty(8, device="meta")
    assert lab.run(lz.rms_norm, *there)[1] == [bad.kernel_id]
    lab.faults[bad.kernel_id] = error
    lab.clear()
    with pytest.raises(DeviceLostError, match=bad.kernel_id) as caught:
        lz.rms_norm(*there)
    assert caught.value.code == code and caught.value.__cause__ is error
    assert lab.tries == [bad.kernel_id], "no other kernel is tried on a device that is gone"
    assert [(entry.kernel_id, entry.code) for entry in kept.entries()] == [(bad.kernel_id, code)]
    lab.clear()
    with pytest.raises(DeviceLostError) as caught:
        lz.rms_norm(there[0][:2], there[1])
    assert caught.value.code == code and not lab.tries
    lab.faults.clear()
    out, ran = lab.run(lz.rms_norm, X, W)
    assert ran == ["torch.rms_norm.native"], "the CPU computes on, without the suspect"
    assert [why.code for why in lz.validate(bad.kernel_id, X, W)] == ["QUARANTINED"]
    torch.testing.assert_close(out, torch.rms_norm(X, (8,), W, 1e-6))

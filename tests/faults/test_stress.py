"""A hundred threads, changing policies, failing kernels, forks: no error, no stale choice (make prove NAME=stress)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.runtime.state import state
from tools.load import Load

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    monkeypatch.setenv("LAYERZERO_PLUGINS", "")
    yield Load()
    Load.end()


@pytest.mark.req("R-CONC-01", "R-CACHE-03")
def test_threads_changes_and_failures_give_no_error_and_no_stale_choice(load: Load) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for calls in (2_000, 8_000, 32_000):  # a quick machine is done before much has changed
            found = load.run(20, calls, change_every_s=0.005, least_swaps=6 if calls == 32_000 else 0)
            assert not found.errors, found.errors[:3]
            assert found.calls == 20 * calls and found.stale == 0
            if found.swaps > 5:
                break
    finally:
        sys.setswitchinterval(interval)
    assert found.swaps > 5


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.req("R-CONC-01", "R-CACHE-03", "R-CACHE-07")
def test_a_hundred_threads_times_a_hundred_thousand_calls(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    calls = 100_000 if PROVE else 500
    idle = load.run(1, 20_000, quiet=True)
    found = load.run(100, calls, change_every_s=0.02, least_swaps=11)
    with capsys.disabled():
        print(
            f"\n100 threads x {calls} calls in {found.seconds:.0f} s, {found.swaps} changes, {found.failures} failed, "
            f"{found.stale} stale, {len(found.errors)} errors; p99 idle {idle.percentile(0.99):.1f} us, "
            f"under load {found.percentile(0.99):.1f} us"
        )
    assert not found.errors, found.errors[:3]
    assert found.calls == 100 * calls and found.stale == 0
    assert found.swaps > 10 and found.failures > 0


@pytest.mark.req("R-CONC-03")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_in_the_middle_of_everything_goes_on_by_itself(load: Load) -> None:
    """Timers, an open breaker, crash markers, memory watched: the child has all of it anew and fails over itself."""
    x, w = torch.ones(3, 8), torch.ones(8)
    lz.configure(memory_headroom_mb=0, breaker={"cooldown_s": 0.2, "deadline_s": 20.0})
    load.failing.add("load0.rms_norm.tagged")
    lz.rms_norm(x, w)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "failed"
        try:
            load.failing.add("load1.rms_norm.tagged")
            outs = [float(lz.rms_norm(torch.ones(rows, 8), w)[0]) for rows in (3, 4, 40)]
            load.failing.clear()
            import time

            end = time.monotonic() + 60
            while float(lz.rms_norm(x, w)[0]) != 0.0 and time.monotonic() < end:
                lz.rms_norm(torch.ones(int(time.monotonic() * 100) % 900 + 50, 8), w)  # cold calls see to the clock
                time.sleep(0.01)
            said = f"{outs} {float(lz.rms_norm(x, w)[0])}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "[2.0, 2.0, 2.0] 0.0"
    assert float(lz.rms_norm(x, w)[0]) == 1.0  # the parent knows nothing of the child's failures
    assert "load1.rms_norm.tagged" not in state.health.snapshot().kernels


def computed(rows: int) -> list[tuple[str, Any]]:
    """The kernel that ran and its result for some calls, by what is installed; small: torch's threads do not fork."""
    x, w = torch.linspace(-2, 2, rows * 16).view(rows, 16), torch.linspace(0.5, 1.5, 16)
    q, angles = x.view(1, 1, rows, 16).expand(1, 2, rows, 16), torch.linspace(0, 1, rows * 8).view(rows, 8)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("rms_norm", (x, w)), ("layer_norm", (x, w, w)), ("silu_and_mul", (x,)), ("linear", (x, x[:1].expand(8, 16))),
        ("attention", (q, q, q)), ("rope", (q, q, angles.cos(), angles.sin())), ("sample_topk", (x, 1)),
    ]  # fmt: skip
    return [(lz.which(op, *args), getattr(lz, op)(*args)) for op, args in calls]


@pytest.mark.req("R-CONC-03")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_forked_after_the_backends_ran_computes_the_same_with_the_same_kernels(tmp_path: Path) -> None:
    """Calls that are hot in the parent, calls that neither has made, and both again from the beginning."""
    lz.reset()
    hot = computed(5)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(100)  # a child that hangs is ended
            found = [computed(5), computed(6)]
            lz.reset()
            torch.save([*found, computed(5)], tmp_path / "child.pt")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    cold = computed(6)
    for theirs, ours in zip(torch.load(tmp_path / "child.pt"), (hot, cold, hot), strict=True):
        assert [kernel for kernel, _ in theirs] == [kernel for kernel, _ in ours]
        torch.testing.assert_close([out for _, out in theirs], [out for _, out in ours], rtol=0, atol=0)
    assert {kernel.partition(".")[0] for kernel, _ in hot} - {"reference"}  # no mere fallbacks
    lz.reset()

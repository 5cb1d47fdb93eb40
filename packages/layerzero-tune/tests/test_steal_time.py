"""Time that the host gave to others: read as the system counts it, and what was timed meanwhile is timed again; and
what other programs took of the cores: said wherever the times are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.measurements.believed import NOISE, REFUSED
from layerzero.model.enums import Platform
from layerzero.perfdb.store import PerfDB
from layerzero.recording.traffic import Recorded
from layerzero.tables.file import load_table
from layerzero_cli.root import cli
from layerzero_tune import trial as trial_module
from layerzero_tune.cli.tune import _shared
from layerzero_tune.report.data import figures
from layerzero_tune.report.perfdb import cases_of
from layerzero_tune.rows import surroundings
from layerzero_tune.timing import host_load as stolen
from layerzero_tune.timing.baselines import loses
from layerzero_tune.timing.host_load import BUSY, LIMIT, Load, Ticks, load, others, ticks, with_little_steal
from layerzero_tune.tuning_run import Outcome

pytestmark = pytest.mark.usefixtures("built_in")


def said(who, outcomes):
    """The line of `lz tune` on who else had the machine; empty where there is none."""
    return next((line for line in _shared(outcomes) if who in line), "")


PAUSES = stolen._PAUSES


class Machine:
    """Ticks of a machine on which each try wants a hundred, of which so many are stolen."""

    def __init__(self, *stolen: int) -> None:
        self.stolen, self.now, self.waits, self.runs = list(stolen), Ticks(1000, 9000), [], 0

    def read(self) -> Ticks:
        return self.now

    def run(self) -> str:
        taken = self.stolen[self.runs]
        self.now = Ticks(self.now.stolen + taken, self.now.wanted + 100)
        self.runs += 1
        return f"try {self.runs}"

    def with_little_steal(self) -> tuple[str, float]:
        return with_little_steal(self.run, self.read, self.waits.append)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """As it is for users; conftest.py takes it away, so that a busy host does not lengthen every test that tunes."""
    monkeypatch.setattr(stolen, "_PAUSES", PAUSES)


@pytest.mark.req("R-TUNE-03")
def test_what_was_timed_while_the_host_served_others_is_timed_again():
    calm, once, always, little = Machine(0), Machine(30, 1), Machine(30, 11, 20), Machine(4)
    assert calm.with_little_steal() == ("try 1", 0.0) and not calm.waits
    assert once.with_little_steal() == ("try 2", 0.0) and len(once.waits) == 1
    assert always.with_little_steal() == ("try 2", 0.11) and always.runs == 3  # the calmest, and no fourth
    assert little.with_little_steal() == ("try 1", 0.0)  # a tick or two in a moment are no share
    hurried = Machine(30, 1)
    assert with_little_steal(hurried.run, hurried.read, pytest.fail, patient=False) == ("try 1", 0.3)


def test_a_system_that_does_not_count_is_believed_at_once(tmp_path):
    assert with_little_steal(lambda: 7, lambda: None, pytest.fail) == (7, 0.0)
    assert ticks(str(tmp_path / "absent")) is None
    for text in ("", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "intr 1 2 3 4 5 6 7 8\n"):
        (tmp_path / "stat").write_text(text)
        assert ticks(str(tmp_path / "stat")) is None
    (tmp_path / "stat").write_text("cpu  10 20 30 4000 500 6 7 80 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert ticks(str(tmp_path / "stat")) == Ticks(80, 10 + 20 + 30 + 6 + 7 + 80)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux counts it")
def test_this_machine_counts_what_was_wanted():
    before = ticks()
    assert before is not None
    while ticks().wanted == before.wanted:  # spins until a tick of work is counted
        pass
    assert ticks().stolen >= before.stolen


@pytest.mark.req("R-TUNE-03", "R-PDB-01")
def test_a_trial_says_how_much_was_stolen_and_marks_its_rows(monkeypatch):
    """The rows say that the machine was shared, and `lz tune` names the calls."""
    ctx = lz.select("rms_norm", torch.randn(4, 64), torch.ones(64)).context

    def told(share):
        monkeypatch.setattr(trial_module, "with_little_steal", lambda run, patient: (run(), share))
        return trial_module.trial(ctx, seconds=0.02, jit="off")

    found = told(0.25)
    assert found.stolen == 0.25 and found.to_json()["stolen"] == 0.25
    assert all(row.surroundings.shared and row.surroundings.bucket.endswith("/shared") for row in found.rows)
    line = said("the host", [Outcome("norm", Recorded(ctx), found)])
    assert line.startswith("1 of 1 calls were timed while the host gave up to 25% of the time to others: norm;")
    assert said("the host", [Outcome("norm", Recorded(ctx), told(LIMIT))]) == ""


@pytest.mark.req("R-PDB-04")
@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="Linux says how much memory there is")
def test_what_is_tuned_is_stored_with_the_memory_that_was_in_use(tmp_path):
    """Without a thermometer for a CPU the rest is unknown, not zero."""

    def used():
        told = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        return 1.0 - int(told["MemAvailable:"]) / int(told["MemTotal:"])

    ctx = lz.select("rms_norm", torch.randn(4, 64), torch.ones(64)).context
    before = used()
    lz.tune([ctx], database=tmp_path / "p.db", seconds=0.02, compile=False)
    low, high = sorted((before, used()))
    rows = PerfDB(tmp_path / "p.db").all()
    assert rows
    for row in rows:
        around = row.surroundings
        assert (around.temperature_c, around.power_w) == (None, None)
        assert around.memory_used is not None and max(0.0, low - 0.25) <= around.memory_used <= min(1.0, high + 0.25)
        assert around.bucket.split("/")[:3] == ["unknown", "unknown", "full" if around.memory_used >= 0.9 else "free"]


@pytest.mark.req("R-PDB-04")
def test_a_gpu_is_asked_for_degrees_watts_and_its_memory(monkeypatch):
    """What torch's management library answers, played: degrees as they are, milliwatts as watts, bytes as a share."""
    ctx = lz.select("rms_norm", torch.randn(4, 64), torch.ones(64)).context
    there = replace(ctx, device=replace(ctx.device, device_type="cuda", platform=Platform.CUDA))
    monkeypatch.setattr(torch.cuda, "temperature", lambda: 83)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 412_500)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 120 << 30))
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda: "GPU:0\nprocess  7 uses 1 MB\nprocess  8 uses 1 MB")
    found = surroundings(there)
    assert found == (83.0, 412.5, 0.75, True) and found.bucket == "hot/400 W/free/shared"
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda: "GPU:0\nprocess  7 uses 1 MB")
    assert surroundings(there).shared is False and surroundings(there, busy=0.9).shared is True

    def absent():
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    for name in ("temperature", "power_draw", "list_gpu_processes"):
        monkeypatch.setattr(torch.cuda, name, absent)
    assert surroundings(there) == (None, None, 0.75, None)


# -- other programs ------------------------------------------------------------------------------------
@pytest.mark.fault(26)
def test_what_others_use_is_what_worked_less_what_was_ours():
    calm = Load(1000, 500.0, 4000)
    assert others(calm, Load(1200, 700.0, 4400)) == 0.0  # it was all ours
    assert others(calm, Load(1300, 600.0, 4400)) == 0.5
    assert others(calm, Load(1009, 500.0, 4020)) == 0.0  # a few ticks in a moment are no share
    assert others(calm, Load(9000, 500.0, 4400)) == 1.0 and others(calm, Load(900, 600.0, 4400)) == 0.0
    assert others(None, calm) == others(calm, None) == others(calm, calm) == 0.0


@pytest.mark.fault(26)
def test_only_the_cores_of_this_process_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 7 7 7 7 7 7 7 7\ncpu1 10 1 2 90 5 0 1 4 0 0\ncpu2 1 0 0 99 0 0 0 0\n"
    )
    found = load(str(stat))
    assert found is not None and (found.worked, found.total) == (10 + 1 + 2 + 0 + 1 + 4 + 1, 113 + 100)
    for text in ("", "cpu1 a b c d e f g h\n", "cpu1 1 2 3\n", "intr 5\n"):
        stat.write_text(text)
        assert load(str(stat)) is None
    assert load(str(tmp_path / "absent")) is None


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux counts it")
def test_this_machine_counts_what_is_ours():
    before = load()
    assert before is not None
    while load().own < before.own + 20:  # works until twenty ticks of it are counted
        sum(range(10_000))
    after = load()
    assert after.worked >= before.worked + 10 and others(before, after) <= 1.0


@pytest.mark.fault(26)
def test_a_busy_machine_is_said_by_tune_in_the_rows_in_the_table_and_in_the_report(monkeypatch, tmp_path):
    ctx = lz.select("rms_norm", torch.randn(1, 64), torch.ones(64)).context
    looks = [Load(0, 0.0, 0), Load(500, 100.0, 1000)]
    monkeypatch.setattr(trial_module, "load", lambda: looks.pop(0))
    tuned = lz.tune([ctx], database=tmp_path / "p.db", seconds=0.02, compile=False)
    (outcome,) = tuned.outcomes
    assert outcome.trial.busy == 0.4 and outcome.to_json()["busy"] == 0.4
    line = said("other programs", tuned.outcomes)
    assert line.startswith("1 of 1 calls were timed while other programs used up to 40% of the cores: rms_norm")
    rows = PerfDB(tmp_path / "p.db").all()
    assert rows and all(row.surroundings.bucket.endswith("/shared") for row in rows)
    answer = CliRunner().invoke(
        cli, ["solve", "--database", str(tmp_path / "p.db"), "--device", "cpu", "--out", str(tmp_path / "t.json")]
    )
    assert answer.exit_code == 0 and "1 rest on times that were taken while others used the machine" in " ".join(
        answer.stdout.split()
    )
    table = load_table(tmp_path / "t.json")
    assert [entry.busy for entry in table.entries] == [True] and table.hardware.threads == torch.get_num_threads()
    (case,) = cases_of(PerfDB(tmp_path / "p.db"))
    assert case.busy and case.torch_us == outcome.trial.torch.median_us
    assert figures([case]).to_json()["busy_cases"] == 1
    # Alone again, and everything is said no more.
    looks[:] = [Load(0, 0.0, 0), Load(500, 499.0, 1000)]
    calm = lz.tune([ctx], database=tmp_path / "p.db", seconds=0.02, compile=False)
    assert said("other programs", calm.outcomes) == "" and not cases_of(PerfDB(tmp_path / "p.db"))[0].busy


@pytest.mark.slow
@pytest.mark.fault(26)
@pytest.mark.usefixtures("held_against_torch")
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux counts it")
def test_what_is_stored_under_load_holds_against_torch(tmp_path):
    """As many programs as there are cores, each busy all the time; none of them knows of the tuning."""
    burn = "print(flush=True)\nwhile True: sum(range(10000))"
    burners = [
        subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE)
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    try:
        for burner in burners:
            burner.stdout.readline()  # it runs
        with torch.no_grad():
            x = torch.randn(64, 512)
            calls = {"rms_norm": (x, torch.ones(512)), "linear": (x, torch.randn(256, 512))}
            contexts = [lz.select(op, *args).context for op, args in calls.items()]
        tuned = lz.tune(contexts, database=tmp_path / "p.db", seconds=0.2, compile=False)
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()
    rows = PerfDB(tmp_path / "p.db").all()
    assert len(tuned.outcomes) == 2 and said("other programs", tuned.outcomes)
    for outcome in tuned.outcomes:
        found = outcome.trial
        assert found.torch is not None and found.busy > BUSY
        stored = {row.kernel_id: row for row in rows if row.op == found.context.op and row.mode != REFUSED}
        assert bool(stored) is not found.lost  # nothing, or what holds
        if stored:
            assert not loses(found.times[found.choice], found.torch, NOISE)
            assert all(row.surroundings.shared for row in stored.values())
            assert lz.which(found.context.op, *calls[found.context.op]) == found.choice

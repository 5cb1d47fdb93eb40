"""Kernels are compiled ahead of the races, several at a time; what is under way is told; Ctrl-C keeps what is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.dispatch import compiling as jit
from layerzero.isolation import process
from layerzero.isolation.compilers import compilers
from layerzero.jit import cache as jit_cache
from layerzero.jit.index import Index
from layerzero.perfdb.store import PerfDB
from layerzero.recording.traffic import Recorded, Traffic, add_to_file
from layerzero_tune import ahead
from layerzero_tune.cli import tune as tuning_cli
from layerzero_tune.trial import trial
from layerzero_tune.tuning_run import Outcome, Progress
from tests import own_time

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled kernels, with three compilers at a time."""
    folder = tmp_path / "jit"
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(folder))
    monkeypatch.setenv("LAYERZERO_JIT_WORKERS", "3")
    for name in {**jit_cache.VENDOR_FOLDERS, **jit_cache.DEEP_FOLDERS}:
        monkeypatch.setenv(name, "")
    for module, name in ((jit, "_queue"), (ahead, "_helpers")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(process, "_step_back", lambda pid: None)  # whose turn would not come on a busy machine
    monkeypatch.syspath_prepend(str(HERE))
    own_time.use_own_time(monkeypatch)
    jit_cache.prepare()
    yield folder
    assert not jit.queue().wait(timeout_s=90)
    compilers.end_idle(-1.0)


def call(hidden):
    return torch.randn(4, hidden), torch.randn(hidden)


def context(hidden):
    with torch.no_grad():
        return lz.select("rms_norm", *call(hidden)).context


def planted(lab, *names):
    import planted_slow

    lab.use(*planted_slow.kernels(*names), only=True)
    return planted_slow


def overlaps(notes):
    """How many were under way at a time, at most."""
    under_way, most = 0, 0
    for word, *_ in notes:
        under_way += 1 if word == "begin" else -1
        most = max(most, under_way)
    return most


@pytest.mark.req("R-TUNE-05")
def test_compilers_run_beside_each_other_and_beside_what_only_this_process_can_compile(
    lab, cache, tmp_path, monkeypatch
):
    monkeypatch.setenv("MEET", "3")
    told, seen = planted(lab, "one", "two", "here", "told"), []
    found = lz.tune([context(32)], database=tmp_path / "p.db", seconds=0.02, progress=seen.append)
    notes = told.notes()
    assert overlaps(notes) == 3
    by = {what: pid for word, what, pid in notes if word == "end"}
    assert by["here_32"] == by["told_32"] == os.getpid()
    assert len({by["one_32"], by["two_32"], os.getpid()}) == 3
    (outcome,) = found.outcomes
    names = {f"lab.rms_norm.{name}" for name in ("one", "two", "here", "told")}
    assert names < outcome.trial.times.keys() and not outcome.trial.refused
    waited = [item for item in seen if item.to_compile]
    assert waited and all(item.done == 0 and item.total == 1 and not item.name for item in waited)
    assert {"lab.rms_norm.one", "lab.rms_norm.two", "lab.rms_norm.here"} <= {
        name for item in waited for name in item.compiling
    }
    assert not jit.queue().wait(timeout_s=60)
    entries = {entry.kernel_id: entry for entry in Index(cache).entries()}
    assert entries.keys() >= names
    assert any(path.endswith("one_32.compiled") for path in entries["lab.rms_norm.one"].evidence)
    # With the artifacts there nobody compiles anything.
    lz.tune([context(32)], database=tmp_path / "q.db", seconds=0.02)
    assert told.notes() == notes


def test_a_call_is_raced_as_soon_as_its_own_kernels_are_ready(lab, cache):
    told = planted(lab, "one")
    gate = told.folder() / "one_32.gate"
    gate.touch()
    calls = [("held", Recorded(context(32), 1)), ("free", Recorded(context(16), 1))]
    under_way = ahead.Ahead(calls, thorough=True)
    assert under_way.on_cpu
    under_way.on_cpu = False  # as on a GPU: compilers are not in the way of what is timed
    assert under_way.next(["held", "free"], lambda: None) == 1
    assert under_way.left == 1 and under_way.compiling == ("lab.rms_norm.one",) and under_way.seconds_left >= 0.0
    under_way.load(*calls[1])
    assert ("end", "one_16") in [note[:2] for note in told.notes()]

    def opened():
        gate.unlink(missing_ok=True)

    under_way.on_cpu = True
    assert under_way.next(["held"], opened) == 0 and under_way.left == 0
    assert sorted(what for word, what, _ in told.notes() if word == "end") == ["one_16", "one_32"]


def test_what_a_budget_does_not_reach_is_not_begun(lab, cache):
    told = planted(lab, "one")
    calls = [(str(hidden), Recorded(context(hidden), 1)) for hidden in (16, 32, 48, 64, 80, 96)]
    gates = [told.folder() / f"one_{hidden}.gate" for hidden in (16, 32, 48)]
    for gate in gates:
        gate.touch()
    under_way = ahead.Ahead(calls, thorough=True, limit_s=1e-6)
    deadline = time.monotonic() + 60
    while len(told.notes()) < 3:  # all three compilers are busy
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def opened():
        for gate in gates:
            gate.unlink(missing_ok=True)

    assert under_way.next([name for name, _ in calls], opened) == 0
    assert {what for _, what, _ in told.notes()} == {"one_16", "one_32", "one_48"}


def test_a_call_is_raced_without_what_is_not_compiled_in_time(lab, cache):
    told = planted(lab, "one", "two")
    gate = told.folder() / "one_32.gate"
    gate.touch()
    held = Recorded(context(32), 1)
    under_way = ahead.Ahead([("held", held)], thorough=True, limit_s=1000.0)
    under_way.on_cpu = False  # as on a GPU: compilers are not in the way of what is timed

    def spent():
        if ("end", "two_32") in [note[:2] for note in told.notes()]:
            ahead._helpers.wait([key for key, name in under_way._elsewhere["held"].items() if "two" in name])
            under_way._until = 0.0

    assert under_way.next(["held"], spent) == 0
    under_way.load("held", held)
    late = under_way.late("held", held)
    found = trial(held.context, seconds=0.02, late=late)
    assert late == {"lab.rms_norm.one"} and found.late == ("lab.rms_norm.one",)
    assert found.to_json()["not_compiled_in_time"] == ["lab.rms_norm.one"]
    assert "lab.rms_norm.two" in found.times and "lab.rms_norm.one" not in {**found.times, **found.refused}
    (line,) = tuning_cli._late([Outcome("a norm", held, found)])
    assert line.startswith("lab.rms_norm.one was not measured for a norm: still compiling; run it again")
    # It goes on being compiled, and who comes later finds it.
    gate.unlink()
    assert not ahead._helpers.wait(timeout_s=60) and not under_way.late("held", held)
    assert ("end", "one_32") in [note[:2] for note in told.notes()]


def test_a_thorough_run_waits_for_every_compiler(lab, cache, tmp_path, monkeypatch):
    from layerzero_tune import tuning_run

    given = []
    monkeypatch.setattr(tuning_run, "Ahead", lambda calls, **words: given.append(words) or ahead.Ahead(calls, **words))
    planted(lab, "one")
    for words in ({}, {"thorough": True}, {"thorough": True, "compile_seconds": 7.0}, {"budget": 10.0}):
        lz.tune([context(32)], database=tmp_path / "p.db", seconds=0.02, **words)
    assert [words["limit_s"] for words in given] == [tuning_run.COMPILE_S, None, 7.0, 5.0]
    with pytest.raises(lz.errors.InvalidInputError, match="compile_seconds=0"):
        lz.tune([context(32)], compile_seconds=0)
    with pytest.raises(lz.errors.InvalidInputError, match="seconds=nan"):
        lz.tune([context(32)], seconds=float("nan"))


# -- what is told --------------------------------------------------------------------------------------
def test_lines_say_what_is_compiled_how_much_is_left_and_how_long_it_may_take(capsys, monkeypatch):
    monkeypatch.setattr(tuning_cli, "_PLAIN_EVERY_S", 0.0)
    say = tuning_cli._Lines()
    kernels = tuple(f"lab.rms_norm.{letter}" for letter in "abcd")
    say(Progress(0, 19, "", None, kernels, 7))
    say(Progress(2, 19, "rms_norm rows=4", 83.0, kernels[:1], 1))
    say(Progress(3, 19, "rms_norm rows=8", 70.0))
    say(Progress(19, 19, "", 0.0))
    assert capsys.readouterr().err.splitlines() == [
        "0 of 19: compiling lab.rms_norm.a, lab.rms_norm.b, lab.rms_norm.c and 1 more (7 left)",
        "2 of 19, 1:23 left: rms_norm rows=4; compiling lab.rms_norm.a (1 left)",
        "3 of 19, 1:10 left: rms_norm rows=8",
    ]


# -- Ctrl-C --------------------------------------------------------------------------------------------
def run(tmp_path, cache, names, **variables):
    """`lz tune` of two calls, as a process."""
    file = tmp_path / "traffic.json"
    if not file.exists():
        add_to_file(Traffic((Recorded(context(32), 9), Recorded(context(64), 1))), file)
    command = [sys.executable, str(HERE / "planted_slow.py"), "tune", str(file), "--json", "--seconds", "0.02",
               "--database", str(tmp_path / "p.db"), "--device", "cpu"]  # fmt: skip
    given = {**os.environ, "PLANTED": names, "OMP_NUM_THREADS": "1", **variables}
    path = os.pathsep.join([str(HERE), given.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command, env={**given, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupt(child, when, after=lambda: None):
    deadline = time.monotonic() + 120
    while not when():
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            raise AssertionError(child.communicate())
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    after()
    out, err = child.communicate(timeout=240)
    assert child.returncode == 130, err
    return json.loads(out), err


@pytest.mark.req("R-TUNE-05")
def test_ctrl_c_in_a_race_keeps_what_is_done_and_the_next_run_goes_on(lab, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_JIT_WORKERS", "1")
    told, _ = interrupt(run(tmp_path, cache, "stuck"), lambda: (cache / "triton" / "stuck").exists())
    assert [item["sizes"]["hidden"] for item in told["calls"]] == [32] and len(told["left"]) == 1
    kept = PerfDB(tmp_path / "p.db").all()
    assert len(kept) == told["rows"] > 0 and len({row.bucket for row in kept}) == 1
    assert (tmp_path / "p.db.calls.json").exists()
    rest = run(tmp_path, cache, "")
    out, err = rest.communicate(timeout=240)
    told = json.loads(out)
    assert rest.returncode == 0, err
    assert [item["sizes"]["hidden"] for item in told["calls"]] == [64] and len(told["resumed"]) == 1


def test_ctrl_c_while_kernels_compile_ends_the_compilers(lab, cache, tmp_path):
    (cache / "triton").mkdir(exist_ok=True)
    notes = cache / "triton" / "notes"
    (cache / "triton" / "one_32.gate").touch()
    told, _ = interrupt(run(tmp_path, cache, "one"), lambda: notes.exists() and "begin one_32" in notes.read_text())
    assert told["calls"] == [] and len(told["left"]) == 2 and not Index(cache).failed()
    pid = int(notes.read_text().splitlines()[0].split()[2])
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_is_heard_where_a_compiler_in_this_process_has_taken_its_signal(lab, cache, tmp_path):
    """NVRTC's handler ends the process with a code of its own."""
    (cache / "triton").mkdir(exist_ok=True)
    notes = cache / "triton" / "notes"
    gate = cache / "triton" / "hijack_32.gate"
    gate.touch()
    child = run(tmp_path, cache, "hijack", LAYERZERO_JIT_WORKERS="2")
    told, _ = interrupt(child, lambda: notes.exists() and "begin hijack_32" in notes.read_text(), gate.unlink)
    assert told["calls"] == [] and len(told["left"]) == 2

"""The reports of workers, and what `lz vllm explain` prints of them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from layerzero_vllm import report
from layerzero_vllm.choice import OURS, THEIRS, LayerKind, choose_one
from layerzero_vllm.cli import vllm
from layerzero_vllm.report import Report

KIND = LayerKind("cpu", "bfloat16", 8, 2, 64, 128, window=64)


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setenv(report.FOLDER, str(tmp_path))
    monkeypatch.setattr(report, "breakers", dict)  # other tests of this process may have opened some
    return tmp_path


def test_a_worker_writes_its_choices_and_explain_prints_them(reports):
    mine = Report(1, 2, "some-model", {"vllm": "0.32.0"})
    times = {"decode B1": {OURS: 50.0, THEIRS: 80.0}}
    mine.choices += [one.to_json() for one in choose_one(KIND, times, {"decode B1": "cpu.paged_attention.flash"})]
    mine.changed()
    ran = CliRunner().invoke(vllm, ["explain"], catch_exceptions=False)
    assert ran.exit_code == 0
    for words in ("rank 1 of 2", "some-model", "window 64", "cpu.paged_attention.flash", "1.60x", "decode B1"):
        assert words in ran.output
    as_json = json.loads(CliRunner().invoke(vllm, ["explain", "--json"]).stdout)
    assert as_json["workers"][0]["choices"][0]["winner"] == OURS


@pytest.mark.parametrize("field", ["linears", "experts", "norms"])
def test_explain_prints_what_was_chosen_for_other_ops(reports, field):
    told = {"kind": "8 of 32 somethings", "phase": "64 at once", "kernel": "cpu.some.kernel", "winner": OURS}
    mine = Report()
    getattr(mine, field).append(told | {"reason": "1.21x as quick", "times": {OURS: 10.0, THEIRS: 12.1}})
    mine.changed()
    shown = CliRunner().invoke(vllm, ["explain"], catch_exceptions=False).output
    assert "8 of 32 somethings" in shown and "cpu.some.kernel" in shown and "1.21x" in shown


def test_the_first_step_of_each_kind_is_written_at_once(reports):
    mine = Report()
    mine.changed()
    (file,) = reports.glob("*.json")
    for phase, told in (("prefill", {"prefill": 1}), ("decode", {"prefill": 1, "decode": 1})):
        mine.step(phase)
        assert json.loads(file.read_text())["steps"] == told
    mine.step("decode")
    assert json.loads(file.read_text())["steps"] == told  # nothing new, and the file is young


def test_a_kernel_that_is_set_aside_is_written_at_the_next_step_and_shown(reports, monkeypatch):
    mine = Report()
    mine.step("decode")
    (file,) = reports.glob("*.json")
    monkeypatch.setattr(report, "breakers", lambda: {"cpu.paged_attention.flash": "open: RuntimeError: broke"})
    mine.step("decode")
    data = json.loads(file.read_text())
    assert data["steps"] == {"decode": 2} and "RuntimeError: broke" in str(data["breakers"])
    ran = CliRunner().invoke(vllm, ["explain"])
    assert ran.exit_code == 1 and "set aside: cpu.paged_attention.flash" in ran.output


def test_a_breaker_that_opens_in_this_process_is_named():
    import layerzero as lz
    from layerzero.runtime.state import state

    lz.list_ops()  # loads the world
    state.health.kernel_failed("sdpa.attention.flash", RuntimeError("broke"))
    try:
        assert "broke" in report.breakers()["sdpa.attention.flash"]
    finally:
        state.health.reset("sdpa.attention.flash")


def test_only_the_newest_engine_is_shown_unless_all_are_asked_for(reports):
    for pid, (engine, updated) in enumerate([(10, 1.0), (20, 2.0), (20, 3.0)]):
        data = {"format": 1, "engine": engine, "updated": updated, "rank": pid % 2, "pid": pid, "world_size": 2}
        data |= {"model": f"model-{engine}", "versions": {}, "choices": [], "linears": [], "steps": {}}
        data |= {"breakers": {}, "warnings": []}
        (reports / f"worker-{pid}.json").write_text(json.dumps(data))
    (reports / "worker-9.json").write_text("no JSON")
    shown = CliRunner().invoke(vllm, ["explain"]).output
    assert "model-20" in shown and "model-10" not in shown
    assert "model-10" in CliRunner().invoke(vllm, ["explain", "--all"]).output


def test_without_a_report_it_says_how_to_get_one(reports):
    ran = CliRunner().invoke(vllm, ["explain"])
    assert ran.exit_code == 1 and "LAYERZERO_VLLM=on" in ran.output


def test_a_folder_that_cannot_be_written_does_not_stop_a_worker(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(report.FOLDER, str(tmp_path / "file" / "below"))
    Report().changed()
    assert "cannot be written" in caplog.text

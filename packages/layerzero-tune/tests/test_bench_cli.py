"""`lz bench`: who is timed, who is not and why, and the files it writes."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.errors import ConfigurationError
from layerzero.measurements.believed import TORCH_DEFAULT
from layerzero_cli.calls import context
from layerzero_cli.root import cli
from layerzero_tune.bench import contest
from layerzero_tune.bench.contest import Entry, Outcome, compete, svg
from layerzero_tune.report.data import from_json
from layerzero_tune.report.page import render
from layerzero_tune.timing.clock import RULES
from layerzero_tune.timing.host_load import Load

NORM = ("rms_norm", "--shape", "4,64", "--dtype", "fp32", "--device", "cpu", "--seconds", "0.02")


def run(*words: str):
    return CliRunner().invoke(cli, ["bench", *words])


def small(lab, *kernels) -> None:
    """A World of the reference, one good kernel, and whoever else is asked for: no compiler runs."""
    lab.use(lab.kernel("alpha.rms_norm.x"), *kernels, only=True)


def asked(**more):
    return context("rms_norm", {"shape": (4, 64), "dtype": "fp32", "device": "cpu", **more})


@pytest.mark.parametrize(("typed", "near"), [("cpuu", "cpu"), ("alpha.rms_norm.y", "alpha.rms_norm.x")])
def test_a_kernel_that_nobody_has_is_an_error_that_names_the_nearest(lab, typed, near):
    small(lab, lab.kernel("cpu.rms_norm.z"))
    answer = run(*NORM, "--kernel", typed)
    assert answer.exit_code == 2 and f"no kernel or backend {typed!r}" in answer.stderr
    assert f"did you mean {near}?" in answer.stderr


def test_rounds_can_be_spread_over_time(lab, monkeypatch):
    small(lab)
    pauses = []
    monkeypatch.setattr(
        "layerzero_tune.timing.race._keep_busy", lambda who, seconds: pauses.append((len(who), seconds))
    )
    monkeypatch.setattr("layerzero_tune.bench.contest.with_little_steal", lambda run: (run(), 0.125))
    found = compete("norm", asked(), seconds=0.02, spread=4.0)
    assert pauses == [(4, 0.1)] * 40  # two kernels, torch and the public call
    assert found.kernels["alpha.rms_norm.x"].samples == 40 and found.to_json()["stolen"] == 0.125


@pytest.mark.req("R-TUNE-03")
def test_every_kernel_is_timed_and_held_against_the_reference(lab):
    small(lab)
    found = compete("norm", asked(), seconds=0.02, least=3)
    assert set(found.times) == {"reference.rms_norm.plain", "alpha.rms_norm.x"}
    assert all(item.samples >= 3 and item.error is not None for item in found.kernels.values())
    assert found.torch.us > 0 and found.call.us > 0 and found.chosen == lz.which("rms_norm", torch.ones(4, 64))
    assert found.best in found.times and found.times[found.best] == min(found.times.values())


def test_a_fast_but_wrong_kernel_is_named_and_never_timed(lab):
    small(lab, lab.kernel("liar.rms_norm.zero", lambda x, weight, eps: torch.zeros_like(x)))
    found = compete("norm", asked(), seconds=0.02, least=3)
    assert found.kernels["liar.rms_norm.zero"].why.startswith("wrong:")
    assert "liar.rms_norm.zero" not in found.times and found.best != "liar.rms_norm.zero"


def test_a_kernel_that_raises_is_named_with_its_error(lab):
    def broken(x, weight, eps):
        raise ValueError("no such tile\nsecond line")

    small(lab, lab.kernel("bad.rms_norm.x", broken))
    found = compete("norm", asked(), seconds=0.02, least=3)
    assert found.kernels["bad.rms_norm.x"].why == "ValueError: no such tile"
    assert found.to_json()["kernels"]["bad.rms_norm.x"] == {"why": "ValueError: no such tile"}


def test_a_wish_of_the_policy_keeps_nobody_out_but_decides_what_is_chosen(lab):
    small(lab)
    lz.lock("rms_norm", "reference.rms_norm.plain")
    found = compete("norm", asked(), seconds=0.02, least=3)
    assert found.chosen == "reference.rms_norm.plain" and "alpha.rms_norm.x" in found.times


def test_only_some_kernels_are_timed_when_asked(lab):
    small(lab)
    by_backend = compete("norm", asked(), seconds=0.02, least=3, only=["alpha"])
    assert set(by_backend.kernels) == {"alpha.rms_norm.x"}


def test_a_hopeless_one_gets_a_few_samples_only(lab, monkeypatch):
    from layerzero_tune.timing import race

    spent = [0]

    def slow(x, weight, eps):
        spent[0] += 20_000
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def clock(call, count):
        """Every call takes 20 µs, and whatever it says it spends: what the machine does meanwhile does not count."""
        before = spent[0]
        for _ in range(count):
            call()
        return 20.0 + (spent[0] - before) / count

    for module in (contest, race):
        monkeypatch.setattr(module, "clock_for", lambda device: clock)
    small(lab, lab.kernel("slow.rms_norm.x", slow))
    found = compete("norm", asked(), seconds=0.05, least=9)
    assert found.kernels["slow.rms_norm.x"].samples == 3
    assert found.kernels["alpha.rms_norm.x"].samples >= 9


@pytest.mark.fault(26)
def test_where_launches_count_they_count_for_everybody(monkeypatch):
    """On a GPU, run eagerly: every call takes 5 µs of the device, and the host 40 µs to launch it."""
    from layerzero_tune.timing import race
    from layerzero_tune.timing.launches import with_launches

    names = ("alpha.rms_norm.x", TORCH_DEFAULT, contest.CALL)
    calls = {name: (lambda: None) for name in names}
    for module in (contest, race):
        monkeypatch.setattr(module, "clock_for", lambda device: lambda call, count: 5.0)
    launched = functools.partial(with_launches, clock=lambda call, count: 40.0, pacer=lambda: 1.0)
    monkeypatch.setattr(contest, "with_launches", launched)
    entries = {"alpha.rms_norm.x": Entry(error=0.0)}
    timed, _ = contest._timed(calls, entries, "cuda", "eager", 0.01, 3)
    assert {name: timed[name].us for name in names} == dict.fromkeys(names, 40.0)
    monkeypatch.setattr(contest, "graphed", lambda call: lambda: 5.0)  # a replay has no launches, whoever is replayed
    timed, _ = contest._timed(calls, entries, "cuda", "graph", 0.01, 3)
    assert {name: timed[name].us for name in names} == dict.fromkeys(names, 5.0)


@pytest.mark.fault(26)
def test_the_rule_and_a_busy_machine_are_said(lab, monkeypatch, tmp_path: Path):
    looks = iter([Load(0, 0.0, 0), Load(500, 100.0, 1000)])
    monkeypatch.setattr(contest, "load", lambda: next(looks))
    small(lab)
    found = run(*NORM, "--out", str(tmp_path / "bench.json"))
    assert "other programs used 40% of the cores meanwhile" in " ".join(found.stdout.split())
    assert RULES["cpu/eager"] in " ".join(found.stdout.split())
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["cases"][0]["busy"] == 0.4 and data["cases"][0]["rule"] == RULES["cpu/eager"]
    (case,) = from_json(data, "bench.json")
    page = render([case], {})
    assert case.busy and "1 of 1 cases were measured while others used the machine" in page
    assert f"eager: {RULES['cpu/eager']}" in page
    del data["cases"][0]["rule"], data["cases"][0]["busy"]  # a file of before
    (older,) = from_json(data, "bench.json")
    page = render([older], {})
    assert not older.busy and "others used the machine" not in page and "before one rule held for all" in page
    with pytest.raises(ConfigurationError, match="busy"):
        from_json({**data, "cases": [{**data["cases"][0], "busy": "very"}]}, "bench.json")


@pytest.mark.req("R-TUNE-03", "R-TUNE-09")
def test_the_verb_writes_json_csv_and_svg(tmp_path: Path, lab):
    small(lab)
    out, table, plot = tmp_path / "a.json", tmp_path / "a.csv", tmp_path / "a.svg"
    result = run(*NORM, "--out", str(out), "--csv", str(table), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "alpha.rms_norm.x" in result.stdout and "torch default" in result.stdout and "chosen" in result.stdout
    (case,) = from_json(json.loads(out.read_text()), "a.json")
    assert case.op == "rms_norm" and case.torch_us and case.sizes == {"rows": 4, "hidden": 64}
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert {row["kernel"] for row in rows} >= {"alpha.rms_norm.x", "torch default", "lz.rms_norm"}
    assert all(float(row["median_us"]) > 0 for row in rows) and sum(row["chosen"] == "yes" for row in rows) == 1
    took = {row["kernel"]: float(row["median_us"]) for row in rows}
    for row in rows:  # how many times as fast as plain torch
        assert float(row["times_torch"]) == pytest.approx(took["torch default"] / took[row["kernel"]], abs=0.006)
    drawn = ElementTree.parse(plot).getroot()
    bars = [item for item in drawn.iter() if item.tag.endswith("rect")]
    assert len(bars) == len(case.kernels) + 1 and sum("chosen" in item.get("class") for item in bars) == 1


def test_json_on_standard_output_is_the_same_document(lab):
    small(lab)
    result = run(*NORM, "--json")
    assert result.exit_code == 0 and from_json(json.loads(result.stdout), "stdout")


def test_a_grid_is_measured_case_by_case(tmp_path: Path, lab):
    small(lab)
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'schema_version = "1.0"\n[[case]]\nname = "norm {n}"\nop = "rms_norm"\ntags = ["norm"]\n'
        'each = { n = [2, 4] }\nshape = "{n},32"\ndtype = "fp32"\n'
        '[[case]]\nname = "elsewhere"\nop = "rms_norm"\ndevices = ["cuda"]\nshape = "2,32"\n'
    )
    result = run("--grid", str(grid), "--tag", "norm", "--seconds", "0.02", "--device", "cpu", "--json")
    assert [case["name"] for case in json.loads(result.stdout)["cases"]] == ["norm 2", "norm 4"]
    none = run("--grid", str(grid), "--tag", "other", "--device", "cpu")
    assert none.exit_code == 2 and "no case for cpu" in none.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs an op"),
        (("rms_norm", "--shape", "4,64", "--tag", "x", "--device", "cpu"), "--tag goes with --grid"),
        (("rms_norm", "--shape", "4,64", "--device", "h100"), "only a device of this machine"),
        (("rms_norm", "--shape", "4,64", "--device", "cpu", "--mode", "graph"), "needs a CUDA device"),
        (("rms_norm", "--device", "cpu"), "needs --shape"),
        (("--grid", "none.toml", "--device", "cpu"), "no such file"),
        (("rms_nrom", "--shape", "4,64", "--device", "cpu"), "unknown op"),
    ],
)
def test_a_wrong_command_is_one_clear_error(words, says):
    result = run(*words)
    assert result.exit_code != 0 and says in result.output and "Traceback" not in result.output


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, lab):
    small(lab)
    (tmp_path / "file").write_text("in the way")
    result = run(*NORM, "--csv", str(tmp_path / "file" / "a.csv"))
    assert result.exit_code == 2 and "could not be written" in result.output


def test_the_picture_escapes_names():
    found = Outcome("<b>&", asked(), "eager", "a.b.c", {"a.b.c": Entry(1.0), "<x>.b.c": Entry(2500.0)})
    text = svg([found])
    assert re.search(r"<b>|<x>", text) is None and ElementTree.fromstring(text) is not None
    assert "2.5 ms" in text and svg([]).startswith("<svg")


@pytest.mark.gpu
def test_on_a_gpu_both_clocks_time_every_kernel():
    ctx = context("rms_norm", {"shape": (64, 4096), "device": "cuda"})
    for mode in ("eager", "graph"):
        found = compete("norm", ctx, seconds=0.2, mode=mode)
        assert "torch.rms_norm.native" in found.times and found.torch.us is not None, mode
        assert found.times["torch.rms_norm.native"] > 0

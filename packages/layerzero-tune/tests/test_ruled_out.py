"""Kernels that shipped measurements rule out do not race, are named, and are missed only beyond the margin."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.device.probe import probe_device
from layerzero.device.signature import family_of
from layerzero.measurements.between import Kind
from layerzero.measurements.shipped import shipped_by
from layerzero.model.decision import MEASURED, ROOFLINE, SHIPPED, Expectation
from layerzero.model.kernel import BackendSpec
from layerzero.perfdb.store import PerfDB
from layerzero.recording.traffic import Recorded, Traffic, add_to_file
from layerzero.registry.proofs import sealed
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements
from layerzero_cli import root
from layerzero_tune.ruled_out import margin, slower
from layerzero_tune.timing import baselines
from layerzero_tune.trial import trial
from tests import own_time
from tools import shipped as shipping

FAST, OTHER, FAR = (f"lab.rms_norm.{name}" for name in ("fast", "other", "far"))
MS = 1e-3
MARGIN, FURTHER = 1.5 * 1.03**2, 3.0 * 1.03**2  # with a measured call within an octave, and with none so near


def normed(x, weight, eps):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def call():
    torch.manual_seed(0)
    return torch.randn(16, 64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)


@pytest.fixture
def told(lab, tmp_path, monkeypatch, held_against_torch):
    """Torch's own code takes a millisecond. Give each kernel what is said of it and what it takes, as multiples."""
    monkeypatch.delenv("LAYERZERO_PERFDB_SHIPPED")
    own_time.use_own_time(monkeypatch)
    plain = own_time.taking(MS, normed)
    monkeypatch.setitem(
        baselines.BASELINES, "rms_norm", lambda given: lambda: plain(given["x"], given["weight"], given["eps"])
    )

    def plant(policy=None, /, **kernels):
        names = [f"lab.rms_norm.{name}" for name in kernels]
        group = {"op": "rms_norm", "kind": "float64", "axes": ["rows", "hidden"], "kernels": names,
                 "errors": [None] * len(names),
                 "points": [[16, 64, 16896, 4096, 1000.0, *(said for said, _ in kernels.values())]]}  # fmt: skip
        entry = {"device": "Abacus", "commit": "0123abc", "version": "1.0", "vendor": "", "torch": "2.11.0",
                 "threads": 1, "capped": "", "busy": 0.0, "groups": [group]}  # fmt: skip
        families = {family_of(probe_device("cpu")): entry}
        file = tmp_path / "measurements.json"
        file.write_text(json.dumps(sealed({"schema_version": "1.0", "backend": "lab", "families": families})))
        lab.use(only=True, deny=["reference"], **policy or {})
        made = [
            lab.kernel(name, own_time.taking(real * MS, normed))
            for name, (_, real) in zip(names, kernels.values(), strict=True)
        ]
        registry = lab.registry.add(made, BackendSpec(name="lab", version="1.0", measurements=str(file)))
        state.use(registry)
        state.publish(measurements=Measurements(expected=shipped_by(registry, state.world.ops)))
        with torch.no_grad():
            return lz.select("rms_norm", *call()).context

    return plant


def tuned(ctx, path, **options):
    (outcome,) = lz.tune([ctx], database=path, seconds=0.05, compile=False, **options).outcomes
    return outcome.trial


@pytest.mark.req("R-TUNE-01")
def test_kernels_far_behind_are_named_and_not_raced_and_a_thorough_run_races_them(told, tmp_path):
    ctx = told(fast=(0.5, 0.5), other=(0.7, 0.7), far=(4.0, 4.0))
    found = tuned(ctx, tmp_path / "p.db")
    assert found.ruled_out.keys() == {FAR} and FAR not in found.times and found.choice == FAST
    assert OTHER in found.times and found.torch is not None
    said = found.to_json()["ruled_out"][FAR]
    assert said["ratio"] == 4.0 and said["source"] == SHIPPED and "Abacus" in said["why"]
    assert said["margin"] == pytest.approx(MARGIN, abs=1e-3)
    assert FAR not in {row.kernel_id for row in PerfDB(tmp_path / "p.db").all()}
    with torch.no_grad():
        report = lz.explain("rms_norm", *call())
    assert report.chosen == FAST and report.to_dict()["ranked_by"] == MEASURED
    assert report.decision.candidate(FAR).measured_us is None and report.decision.candidate(OTHER).measured_us > 0
    # Shipped measurements still speak where nothing was measured here, and the next run rules out again.
    assert tuned(ctx, tmp_path / "p.db").ruled_out.keys() == {FAR}
    every = tuned(ctx, tmp_path / "q.db", thorough=True)
    assert not every.ruled_out and every.times[FAR].median_us > every.times[FAST].median_us


def test_the_command_names_them_and_says_what_was_won(told, tmp_path):
    ctx = told(fast=(0.5, 0.5), far=(4.0, 4.0))
    add_to_file(Traffic((Recorded(ctx, 3),)), tmp_path / "t.json")
    given = ["tune", str(tmp_path / "t.json"), "--database", str(tmp_path / "p.db"), "--seconds", "0.05",
             "--no-compile", "--device", "cpu"]  # fmt: skip
    text = CliRunner().invoke(root.cli, given).output
    words = " ".join(text.split())
    assert f"{FAR} was not raced for" in words and "4.0 × torch's time is expected" in words and "Abacus" in words
    assert "1 call: 2× torch, 0 choices changed" in words or "1 call: 1.9× torch, 0 choices changed" in words
    told_ = json.loads(CliRunner().invoke(root.cli, [*given, "--json", "--thorough"]).output)
    assert FAR in told_["calls"][0]["kernels"] and told_["calls"][0]["ruled_out"] == {}
    assert told_["against_torch"] > 1.5 and told_["changed"] == {}


def test_the_present_choice_races_whatever_is_said_of_it(told, tmp_path):
    found = tuned(told({"prefer": [FAR]}, fast=(0.5, 0.5), far=(9.0, 9.0)), tmp_path / "p.db")
    assert not found.ruled_out and FAR in found.times and found.before == FAR and found.choice == FAST


# -- what is promised ----------------------------------------------------------------------------------
def test_wrong_measurements_hide_the_fastest_kernel_only_beyond_the_margin(told, tmp_path):
    """The file says 4 times torch of a kernel that takes a little more than that over the margin; then much less."""
    real = 4.0 / MARGIN
    found = tuned(told(fast=(0.5, 0.5), far=(4.0, 1.1 * real)), tmp_path / "a.db")
    assert found.ruled_out.keys() == {FAR} and found.times[FAST].median_us < 1.1 * real * 1e3
    # Wrong by less than the margin: it could be the fastest, so it races, and it is found.
    found = tuned(told(fast=(1.0, 1.0), far=(0.95 * MARGIN, 0.96)), tmp_path / "b.db")
    assert not found.ruled_out and found.winner == FAR
    # Wrong by more: only a thorough run finds it. That is what is promised, and no more.
    ctx = told(fast=(0.5, 0.5), far=(4.0, 0.1))
    assert tuned(ctx, tmp_path / "c.db").ruled_out.keys() == {FAR}
    assert tuned(ctx, tmp_path / "d.db", thorough=True).winner == FAR


def test_who_may_be_faster_than_what_was_measured_races_after_all(told, tmp_path):
    """The file says 0.1 of the first, which takes 2: what was ruled out for its sake comes back."""
    found = tuned(told(fast=(0.1, 2.0), other=(0.6, 0.6), far=(9.0, 9.0)), tmp_path / "p.db")
    assert found.ruled_out.keys() == {FAR} and found.winner == OTHER

    # Where the only one left in is wrong and cannot race, all the others do.
    def liar(x, weight, eps):
        return 2 * normed(x, weight, eps)

    ctx = told(fast=(0.1, 0.1), other=(0.6, 0.6), far=(9.0, 9.0))
    registry = state.world.registry
    module, _, name = registry.kernels[FAST].function.partition(":")
    setattr(__import__(module, fromlist=[name]), name, liar)
    found = tuned(ctx, tmp_path / "q.db")
    assert FAST in found.refused and found.winner == OTHER and FAR in found.times


def test_who_comes_back_when_the_time_of_compilers_is_over_is_named_and_not_compiled(told, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "jit"))
    ctx = told(fast=(0.1, 2.0), other=(0.6, 0.6))
    registry = state.world.registry
    compiled = replace(registry.kernels[OTHER], jit=True)
    state.publish(registry=registry.without(kernels=[OTHER]).add([compiled]))
    found = trial(ctx, seconds=0.05, thorough=False, compile_until=0.0)
    assert found.late == (OTHER,) and found.times.keys() == {FAST} and not found.ruled_out
    found = trial(ctx, seconds=0.05, thorough=False, compile_until=math.inf)
    assert found.winner == OTHER and not found.late


def test_estimates_without_a_near_measurement_and_of_busy_machines_have_more_margin():
    def expectation(source, noise, ratio=1.0, octaves=2.0):
        return Expectation(ratio, 10.0, source, "Abacus", "0", "2", (("rows", 4),), octaves, noise)

    near, busy = expectation(SHIPPED, 0.03), expectation(SHIPPED, 0.5)
    assert margin(near) == pytest.approx(FURTHER) and margin(busy) == pytest.approx(6.75)
    assert margin(expectation(SHIPPED, 0.03, octaves=1.0)) == pytest.approx(MARGIN)
    far, roofline = expectation(SHIPPED, 0.03, octaves=3.1), expectation(ROOFLINE, 0.03, octaves=0.5)
    assert margin(far) == margin(roofline) == pytest.approx(FURTHER**2)
    told = {"in": expectation(SHIPPED, 0.03, 3.1), "out": expectation(SHIPPED, 0.03, 3.3)}
    assert slower(told, 1.0).keys() == {"out"}


@pytest.mark.parametrize(("machine", "noise", "least"), [("h200", 0.03, 0.25), ("x86-avx512", 0.03, 0.15)])
def test_of_calls_left_out_one_by_one_no_fastest_kernel_is_missed(machine, noise, least):
    """Each measured call told from the others of its kind, as a call that nobody measured would be."""
    file = Path(shipping.ROOT) / "benchmarks" / "results" / machine / "factory.jsonl"
    header, calls = shipping.records(file)
    halves = not header["family"].startswith("cpu")
    kinds: dict[tuple[str, ...], list[dict]] = {}
    for item in calls:
        dtype, _, words = item["kind"].partition(" ")
        merged = "float16" if halves and dtype.endswith("float16") else dtype
        kinds.setdefault((item["op"], merged, words, *item["sizes"]), []).append(item)
    out, every = 0, 0
    for found in kinds.values():
        points = [shipping._point(item) for item in found]
        for index, point in enumerate(points) if len(points) > 1 else ():
            names = [name for name in point.ratios if not name.startswith("reference.")]
            cost = point.bytes, point.flops
            around = Kind(points[:index] + points[index + 1 :], tuple(found[index]["sizes"]))
            others = around.estimates(names, point.sizes, point.dtype, cost)
            told = {
                name: Expectation(
                    item.ratio, item.base_us, SHIPPED if item.near else ROOFLINE, "", "", "", (), item.octaves, noise
                )
                for name, item in others.items()
            }
            without = slower(told, min([1.0, *(item.ratio for item in told.values())]))
            raced = min([1.0, *(point.ratios[name] for name in names if name not in without)])
            without = slower(without, raced)
            fastest = min([1.0, *(point.ratios[name] for name in names if name not in without)])
            assert all(point.ratios[name] >= fastest for name in without), found[index]["name"]
            out, every = out + len(without), every + len(names)
    assert least < out / every < 0.6 and math.isfinite(out)


def test_measurements_that_ship_are_still_known_after_tuning_into_a_database(told, tmp_path):
    ctx = told(fast=(0.5, 0.5), far=(30.0, 30.0))
    before = state.world.measurements.expected
    tuned(ctx, tmp_path / "times.db")
    assert before and state.world.measurements.expected == before

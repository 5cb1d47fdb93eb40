"""The kept measurements: the page says what the files say, and the files say what the budget asks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEPT = sorted(BENCHMARKS.glob("results/*/overhead.json"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_rendered_from_the_kept_files():
    assert KEPT
    assert (BENCHMARKS / "README.md").read_text() == load("page").render()


def test_the_page_shows_untuned_choices_beside_the_tuned_ones():
    page = load("page")
    parts = {part.partition("\n")[0]: part for part in page.render().split("## ")}
    kept = sorted(BENCHMARKS.glob("results/*/untuned.json"))
    assert kept
    for path in kept:
        shown, data = parts[f"{path.parent.name}: untuned choice"], json.loads(path.read_text())
        tuned = path.with_name("tuned.json")
        beside = json.loads(tuned.read_text())["figures"]["random"] if tuned.exists() else None
        for figure, place in (("chosen ÷ oracle, geomean", "geomean"), ("chosen ÷ oracle, worst", "worst")):
            item = data["figures"][figure]
            after = "" if beside is None else beside["tuned_over_oracle"][place]
            verdict = "within" if item["met"] else "over"
            assert f"| {figure} | {item['value']} | ≤ {item['at_most']} | {verdict} | {after} |" in shown
        assert f"seed {data['seed']}" in shown


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_file_names_its_commit_machine_and_command(path):
    data = json.loads(path.read_text())
    assert data["commit"] not in ("", "unknown")
    assert {"cpu", "cores", "python", "torch", "load"} <= set(data["machine"])
    assert data["command"].startswith("python benchmarks/")


@pytest.mark.req("R-SEL-11", "R-SEL-12", "R-SEL-13", "R-CTX-16", "R-CACHE-07")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_measured_lookups_are_inside_the_seeds_bounds(path):
    """Figures of a measured run, kept with its machine; nothing is timed here."""
    data = json.loads(path.read_text())
    parts, threads = data["parts"], data["threads"]
    assert parts["hot lookup median"] < 5.0
    assert parts["hot lookup p99"] < 10.0
    assert parts["lookups per second"] > 10_000
    assert 0 < parts["context build"] < data["limits"]["cold selection, 60 kernels"]  # it is a part of one
    assert parts.get("hot table hit", 0.0) < 1.0
    if threads is not None:
        assert (threads["threads"], threads["lookups_each"]) == (100, 10_000)
        assert (threads["errors"], threads["stale"]) == (0, 0)


@pytest.mark.req("R-CACHE-08")
def test_a_hit_in_the_hot_table_was_measured_below_a_microsecond():
    parts = [json.loads(path.read_text())["parts"] for path in KEPT]
    hits = [part["hot table hit"] for part in parts if "hot table hit" in part]
    assert hits and max(hits) < 1.0


@pytest.mark.req("R-SEL-12", "R-CACHE-07")
def test_some_kept_run_had_a_hundred_threads():
    runs = [json.loads(path.read_text())["threads"] for path in KEPT]
    assert any(run is not None and (run["threads"], run["errors"], run["stale"]) == (100, 0, 0) for run in runs)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_growing_tables_and_decode_loops_cost_nothing_more(path):
    data = json.loads(path.read_text())
    figures = data["figures"]
    for op in ("rms_norm", "attention"):
        few, many = figures[f"{op} hot"], figures[f"{op} hot, many keys"]
        assert abs(many / few - 1) <= 0.10
    assert data["keys"]["many"] >= 10_000
    assert data["decode"]["steps"] == 4096
    assert data["decode"]["selections"] < 20

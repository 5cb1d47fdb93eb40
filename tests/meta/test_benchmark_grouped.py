"""The benchmark of grouped attention: its cases, its bytes, and what it writes. No figure here is a measurement."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "grouped.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmarks_grouped", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up by name
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    yield module
    del sys.modules[spec.name]


@pytest.mark.req("R-GRP-11")
def test_the_cases_are_those_that_were_asked_for(benchmark):
    found = {(case.model, case.tokens, case.groups) for case in benchmark.CASES}
    assert {("Llama3-8B", n * 1024, 2) for n in (8, 16, 32, 64)} <= found
    assert {("Llama3-70B", n * 1024, 2) for n in (8, 16)} <= found
    assert ("Llama3-8B", 16_384, 4) in found  # beside 2 groups of the same length
    assert {(c.heads, c.kv_heads, c.head_dim) for c in benchmark.CASES} == {(32, 8, 128), (64, 8, 128)}


@pytest.mark.req("R-GRP-11", "R-GRP-12")
def test_a_run_writes_a_table_json_and_csv_with_the_bytes_of_the_model(benchmark, tmp_path, capsys):
    path = tmp_path / "out" / "grouped.json"
    assert benchmark.main(["--quick", "--divisor", "512", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    rows = data["rows"]
    assert [row["case"] for row in rows] == [case.name for case in benchmark.CASES]
    shown = capsys.readouterr().out
    for row in rows:
        assert row["ratio"] == pytest.approx(row["separate_ms"] / row["grouped_ms"], rel=0.02, abs=6e-4)
        assert row["saved_share"] == pytest.approx((row["groups"] - 1) / (row["groups"] + 1), abs=1e-4)
        assert row["kernels_ms"] and row["chosen"] in row["kernels_ms"]
    with path.with_suffix(".csv").open() as file:
        written = list(csv.DictReader(file))
    nested = ("kernels_ms", "refused")
    assert written == [{name: str(value) for name, value in row.items() if name not in nested} for row in rows]
    for row, case in zip(rows, benchmark.CASES, strict=True):
        assert (row["model"], row["tokens"], row["groups"]) == (case.model, case.tokens, case.groups)
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{row['case']} "))
        assert f"{row['separate_ms']:.3f} ms" in line and f"{row['grouped_ms']:.3f} ms" in line
    assert {"cpu", "cores", "python", "torch", "load"} <= set(data["machine"]) and data["command"].startswith("python ")


@pytest.mark.req("R-GRP-12")
def test_the_65k_case_reads_403_and_268_megabytes_in_16_bits(benchmark):
    case = next(case for case in benchmark.CASES if case.tokens == 65_536)
    _, keys = benchmark.lengths(case, 1)
    token = 2 * case.kv_heads * case.head_dim * 2
    assert (round(sum(keys) * token / 1e6, 1), round(max(keys) * token / 1e6, 1)) == (402.7, 268.4)


def test_a_kernel_that_is_wrong_is_not_timed(benchmark, monkeypatch, tmp_path):
    wrong = {"separate": lambda q, k, v: q, "grouped": lambda q, k, v: q + 1.0}
    monkeypatch.setattr(benchmark, "contestants", lambda *args: wrong)
    monkeypatch.setattr(benchmark, "interleaved", lambda *args, **options: pytest.fail("it was timed"))
    with pytest.raises(AssertionError, match="abs error"):
        benchmark.main(["--quick", "--divisor", "512", "--json", str(tmp_path / "grouped.json")])


def test_a_count_of_bytes_that_misses_the_formula_stops_the_run(benchmark, monkeypatch, tmp_path):
    plain = benchmark.lengths
    monkeypatch.setattr(benchmark, "lengths", lambda case, divisor: (plain(case, divisor)[0], [64] * case.groups))
    with pytest.raises(SystemExit, match="formula"):
        benchmark.main(["--quick", "--divisor", "512", "--json", str(tmp_path / "grouped.json")])


def test_gradients_are_timed_where_asked(benchmark):
    tensors, batch = benchmark.scene(benchmark.CASES[0], 256, "cpu", torch.float32)
    seen = []

    def function(*leaves):
        seen.append([leaf.requires_grad for leaf in leaves])
        return benchmark.lz.grouped_attention(*leaves, batch)

    for backward in (False, True):
        benchmark.timed(function, tensors, backward)()
    assert seen == [[False] * 3, [True] * 3]

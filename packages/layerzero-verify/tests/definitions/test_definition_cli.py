"""`lz definitions`: list, show and check, to read and as JSON, with every option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layerzero_cli.root import cli
from layerzero_verify.definitions import read_traces
from layerzero_verify.definitions.trace import Status

pytestmark = pytest.mark.usefixtures("clean")


def run(*args: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["definitions", *map(str, args)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def data(*args: Any, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code).stdout)


@pytest.fixture
def root(sets: Any) -> Path:
    """A norm, a product and rotations."""
    names = ("rmsnorm_h32", "gemm_n24_k64", "rope_with_cos_sin_cache_neox_style_d16_rd8")
    return Path(sets.put(sets.root / "data", *(sets.samples()[name] for name in names)))


def checked(root: Path, *args: Any, code: int = 0) -> Any:
    return data("check", "--root", root, "--backend", "reference", "--sizes", "small", *args, code=code)


def names(report: Any) -> set[str]:
    return {outcome["definition"] for outcome in report["outcomes"]}


@pytest.mark.req("R-DEF-18", "R-DEF-01")
def test_definitions_are_listed_with_our_op(root: Path) -> None:
    found = data("list", "--root", root)
    assert [(item["name"], item["op"]) for item in found["definitions"]] == [
        ("gemm_n24_k64", "linear"), ("rmsnorm_h32", "rms_norm"),
        ("rope_with_cos_sin_cache_neox_style_d16_rd8", "rope"),
    ]  # fmt: skip
    assert "rms_norm" in run("list", "--root", root, "--op-type", "rmsnorm").stdout
    (root / "definitions" / "gemm" / "bad.json").write_text("{", encoding="utf-8")
    assert "bad.json" in data("list", "--root", root, code=1)["problems"][0]


def test_one_definition_is_shown_with_its_code_and_whether_it_may_run(root: Path) -> None:
    text = run("show", "rmsnorm_h32", "--root", root).stdout
    assert "def run(hidden_states, weight):" in text and "not in a trusted place" in text
    assert data("show", "rmsnorm_h32", "--root", root)["trusted"] is False
    assert data("show", "rmsnorm_h32", "--root", root, "--trust", root)["trusted"] is True
    assert "it may run" in run("show", "rmsnorm_h32", "--root", root, "--trust", root).stdout
    assert data("show", "rmsnorm_h33", "--root", root, code=2)["error"]["code"] == "VALUE_INVALID"


@pytest.mark.req("R-DEF-18")
def test_what_to_check_is_given_by_name_by_op_type_or_all(root: Path) -> None:
    assert names(checked(root, "--name", "rmsnorm_h32", "--trust", root)) == {"rmsnorm_h32"}
    assert names(checked(root, "--op-type", "gemm", "--trust", root)) == {"gemm_n24_k64"}
    assert len(names(checked(root, "--all", "--trust", root))) == 3
    assert data("check", "--root", root, code=2)["error"]["code"] == "VALUE_INVALID"
    assert data("check", "--root", root, "--name", "nothing", code=2)["error"]["code"] == "VALUE_INVALID"
    assert data("check", "--root", root, "--all", "--backend", "sdpaa", code=2)["error"]["code"] == "BACKEND_UNKNOWN"


@pytest.mark.req("R-DEF-18", "R-DEF-06")
def test_sizes_are_chosen_and_unknown_ones_refused(root: Path) -> None:
    def sizes(*words: str) -> set[int]:
        arguments = ("--name", "gemm_n24_k64", "--trust", root, "--backend", "reference")
        found = data("check", "--root", root, *arguments, *(("--sizes", *words) if words else ()))
        return {outcome["workload"]["axes"]["M"] for outcome in found["outcomes"]}

    assert (
        sizes("small") == {1, 16}
        and sizes("medium") == {64, 128, 256}
        and sizes("small,medium") == {1, 16, 64, 128, 256}
    )
    assert sizes("runner") == {16, 32, 64, 128}
    assert sizes() == {1, 16, 64, 128, 256}, "small and medium, unless others are asked for"
    found = data("check", "--root", root, "--all", "--sizes", "huge", code=2)
    assert found["error"]["code"] == "VALUE_INVALID"


@pytest.mark.req("R-DEF-18")
def test_bounds_can_be_given(sets: Any) -> None:
    code = "def run(A, B):\n    return (A.double() @ B.double().T * 1.0004).to(A.dtype)\n"
    root = sets.only("gemm_n24_k64", lambda item: item.update(reference=code))
    assert checked(root, "--all", "--trust", root)["ok"], "within the bounds of the table"
    strict = checked(root, "--all", "--trust", root, "--rtol", "1e-5", "--atol", "1e-5", code=1)
    assert any(outcome["status"] == "INCORRECT_NUMERICAL" for outcome in strict["outcomes"])
    assert checked(root, "--all", "--trust", root, "--rtol", "0.1", "--atol", "0.1")["ok"]
    run("check", "--root", root, "--all", "--rtol", "-1", code=2)


@pytest.mark.req("R-DEF-12", "R-DEF-18")
def test_traces_are_written_and_counted(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "traces.jsonl"
    report = checked(root, "--all", "--trust", root, "--out", out)
    traces, bad = read_traces(out)
    assert not bad and len(traces) == report["traces_written"] > 0
    assert {trace.evaluation.status for trace in traces if trace.evaluation} == {Status.PASSED}
    text = run(
        "check", "--root", root, "--name", "rmsnorm_h32", "--trust", root, "--sizes", "small", "--out", out
    ).stdout
    assert "traces appended" in text and "against reference" in text and "2/2 passed" in text


def test_without_trust_the_code_does_not_run_and_other_truths_are_used(root: Path) -> None:
    report = checked(root, "--op-type", "gemm")
    own = [outcome for outcome in report["outcomes"] if outcome["solution"] == "reference"]
    assert own and all(outcome["reason"]["code"] == "PATH_NOT_TRUSTED" for outcome in own)
    assert any(outcome["against"] == "pytorch" and outcome["status"] == "PASSED" for outcome in report["outcomes"])


def test_a_check_that_compared_nothing_is_no_success(root: Path) -> None:
    result = run("check", "--root", root, "--op-type", "rope", "--backend", "reference", "--sizes", "small", code=1)
    assert "nothing was compared" in result.stdout and "PATH_NOT_TRUSTED" in result.stdout


def test_failures_are_shown_with_the_difference_and_end_with_1(sets: Any) -> None:
    code = "def run(A, B):\n    return A @ B.T * 2\n"
    root = sets.only("gemm_n24_k64", lambda item: item.update(reference=code))
    text = run("check", "--root", root, "--all", "--trust", root, "--sizes", "small", code=1).stdout
    assert "INCORRECT_NUMERICAL" in text and "abs error" in text and "fail" in text


def test_tested_ones_are_left_out_unless_forced(root: Path) -> None:
    tests = root / "tests" / "references"
    tests.mkdir(parents=True)
    (tests / "test_it.py").write_text("rmsnorm_h32", encoding="utf-8")
    arguments = ("--name", "rmsnorm_h32", "--trust", root)
    assert set(checked(root, *arguments)["left_out"]) == {"rmsnorm_h32"}
    assert names(checked(root, *arguments, "--force")) == {"rmsnorm_h32"}


def test_the_seed_and_the_datasets_own_workloads_are_options(root: Path) -> None:
    def ids(*more: str) -> set[str]:
        found = checked(root, "--name", "gemm_n24_k64", "--trust", root, *more)
        return {outcome["workload"]["uuid"] for outcome in found["outcomes"]}

    assert ids() == ids() and ids().isdisjoint(ids("--seed", "7"))
    file = root / "workloads" / "gemm" / "gemm_n24_k64.jsonl"
    file.parent.mkdir(parents=True)
    line = {"definition": "gemm_n24_k64", "workload": {"uuid": "mine", "axes": {"M": 3}, "inputs": {}}}
    file.write_text(json.dumps(line), encoding="utf-8")
    assert "mine" in ids() and "mine" not in ids("--no-workloads")


def test_no_dataset_is_a_problem_with_a_hint() -> None:
    assert "FIB_DATASET_PATH" in data("list", code=1)["error"]["hint"]


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = next(parent for parent in Path(__file__).parents if (parent / "docs").is_dir()) / "docs" / "definitions.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(page), "exec"), {})
    text = capsys.readouterr().out
    assert "reference.rms_norm.plain against reference: 5/5 passed" in text and "PASSED" in text

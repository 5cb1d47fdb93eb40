"""Lanes: who is in which, kept in a file that knows every test it names and stays inside its budget."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

from tools.lanes import BUDGET, Lanes, divide, main, measured, render, sharing, watched
from tools.prove import lanes
from tools.pytest_lanes import _LONG, lane
from tools.requirements_doc import ROOT

JUNIT = """<testsuites><testsuite>
<testcase classname="packages.a.tests.test_x" name="test_many[1]" time="6.0" />
<testcase classname="packages.a.tests.test_x" name="test_many[2]" time="5.0" />
<testcase classname="packages.a.tests.test_x.TestIt" name="test_one" time="3.0" />
<testcase classname="tests.meta.test_y" name="test_mended" time="9.0"><properties><property name="fault" value="7" />
</properties></testcase></testsuite></testsuites>"""


def defined() -> set[str]:
    """Every test of the workspace, named as the lanes name it."""
    names: set[str] = set()
    for path in (*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names.add(f"{path.name}::{getattr(node, 'name', '')}")
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                names.add(f"{path.name}::{node.name}::{getattr(inner, 'name', '')}")
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":  # the kit's tests
                names.add(f"{path.name}::*")
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith(".TestCase") for base in node.bases):
                names.add(f"{path.name}::{node.name}::runTest")  # a state machine of hypothesis
    return names


def test_the_file_names_only_tests_that_exist() -> None:
    known = defined()
    unknown = {name for name in Lanes.read().check if name not in known and f"{name.split('::')[0]}::*" not in known}
    assert not unknown, "renamed or gone: run `make check`, then `python -m tools.lanes`"


def test_the_short_lane_is_inside_its_budget() -> None:
    assert 0 < Lanes.read().short <= BUDGET, "make tests cheaper, or run `python -m tools.lanes` after `make check`"


def test_the_file_is_as_the_tool_writes_it() -> None:
    assert (ROOT / "tests" / "lanes.toml").read_text(encoding="utf-8") == render(Lanes.read())


def test_the_slowest_leave_the_short_lane_until_the_rest_fits(tmp_path: Path) -> None:
    file, again = tmp_path / "a.xml", tmp_path / "b.xml"
    file.write_text(JUNIT)
    again.write_text(JUNIT.replace('"5.0"', '"7.0"').replace('"3.0"', '"2.0"'))
    seconds, faults = measured([file, again])
    assert seconds == {"test_x.py::test_many": 11.0, "test_x.py::TestIt::test_one": 2.0, "test_y.py::test_mended": 9.0}
    assert faults == {"test_y.py::test_mended": {"7"}}
    assert divide(seconds, faults, budget=15.0) == Lanes(11.0, {"test_x.py::test_many": 11.0})
    assert divide(seconds, faults, budget=10.0).check.keys() == {"test_x.py::test_many", "test_x.py::TestIt::test_one"}
    assert divide(seconds, (), budget=12.0) == Lanes(11.0, {"test_x.py::test_many": 11.0})
    assert divide(seconds, (), budget=100.0).check == {}


def test_the_quickest_test_of_each_fault_stays_short_and_others_while_they_fit() -> None:
    seconds = {"a": 5.0, "b": 3.0, "c": 1.0, "d": 50.0, "e": 2.0, "plain": 4.0}
    faults = {"a": {"1"}, "b": {"1", "2"}, "c": {"3"}, "d": {"4"}, "e": {"3"}}
    stay = watched(seconds, faults, budget=57.0)
    assert stay == {"b", "c", "d", "e"}  # 1 and 2, 3, 4; then e, while a is too much
    assert watched(seconds, faults, budget=0.0) == {"b", "c", "d"}
    assert divide(seconds, stay, faults, budget=100.0) == Lanes(60.0, {"a": 5.0})
    assert divide(seconds, stay, faults, budget=57.0).check.keys() == {"a", "plain"}


def test_tests_that_share_an_expensive_fixture_go_together(tmp_path: Path) -> None:
    rows = (("first", 9.0, "slow"), ("next", 0.1, "slow"), ("cheap", 0.2, "quick"), ("own", 4.0, ""))
    cases = "".join(
        f'<testcase classname="tests.test_x" name="test_{name}" time="{time}"><properties>'
        + (f'<property name="shares" value="{fixture}" />' if fixture else "")
        + "</properties></testcase>"
        for name, time, fixture in rows
    )
    file = tmp_path / "a.xml"
    file.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    seconds, _ = measured([file])
    first, after, cheap, own = (f"test_x.py::test_{name}" for name, _, _ in rows)
    together = sharing([file], seconds)
    assert together == {first: {first, after}, after: {first, after}}
    assert divide(seconds, budget=6.0, together=together).check.keys() == {first, after}
    assert divide(seconds, {after}, budget=0.2, together=together).check.keys() == {first, own, cheap}


@pytest.fixture(scope="module")
def costly() -> int:
    return 7


def test_the_junit_file_says_which_fixtures_of_its_file_a_test_shares(
    costly: int, request: pytest.FixtureRequest
) -> None:
    assert costly == 7
    assert [value for name, value in request.node.user_properties if name == "shares"] == ["costly"]


def test_without_a_run_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tools.lanes.JUNIT", tmp_path)
    monkeypatch.setattr("tools.lanes.FILE", tmp_path / "lanes.toml")
    assert main([]) == 2 and not list(tmp_path.iterdir())
    (tmp_path / "short.xml").write_text(JUNIT)
    assert main([]) == 0
    assert Lanes.read(tmp_path / "lanes.toml") == Lanes(23.0, {})


def test_every_test_has_one_lane(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    me = request.node
    assert lane(me) == "short" and me.get_closest_marker("short") is not None
    monkeypatch.setattr("tools.pytest_lanes._check", lambda: {"test_lanes.py::test_every_test_has_one_lane"})
    assert lane(me) == "check"
    me.add_marker("stress")
    assert lane(me) == "long"


@pytest.mark.req("R-OP-10")
def test_the_contract_of_sliding_windows_is_in_the_normal_lanes_and_in_the_nightly_one() -> None:
    """As tests that no mark sends away, and as a contract of the ladder, which the lane of correctness climbs whole."""
    file = ROOT / "packages" / "layerzero-core" / "tests" / "ops" / "test_attention_contract.py"
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kept = {node.name: ast.unparse(ast.List(node.decorator_list)) for node in body if isinstance(node, ast.FunctionDef)}
    named = [name for name in kept if "window" in kept[name] + name and "R-OP-10" in kept[name]]
    assert {"test_sliding_windows_of_256_and_1024", "test_a_rolling_cache_of_the_window_is_enough"} <= set(named)
    module = [ast.unparse(node) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    texts = [*module, *(kept[name] for name in named)]
    sent_away = [mark for mark in ("gpu", *_LONG) for text in texts if f"mark.{mark}" in text]
    assert sent_away == []
    nightly = [shlex.split(line) for line in lanes()["correctness"].run]
    assert ["lz", "verify", "--lane", "full"] in [words[:4] for words in nightly]
    assert not {"--level", "--op", "--backend"} & {word for words in nightly for word in words}

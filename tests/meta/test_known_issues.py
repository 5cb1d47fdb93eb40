"""The ledger of known issues: nothing that blocks a release is open, and the page says what the ledger says."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tools import gates, known_issues
from tools.gates import main as gate
from tools.known_issues import PAGE, Issue, Ledger, render
from tools.lanes import Lanes
from tools.requirements_doc import ROOT

ENTRY = Issue("a", "P2", "0.1", "something is slow", "those who wait", "wait")


def ledger(*issues: Issue) -> Ledger:
    return Ledger(Ledger.read().severity, issues)


@pytest.mark.req("R-GATE-07")
def test_no_p0_or_p1_is_open() -> None:
    found = Ledger.read()
    assert [(item.id, item.severity) for item in found.blocking] == []
    assert len(found.issues) >= 15, "a ledger that names nothing is not kept"


@pytest.mark.req("R-GATE-07")
@pytest.mark.parametrize("severity", ["P0", "P1"])
def test_an_open_p0_or_p1_fails_the_gate_until_it_is_fixed(
    severity: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, meanings = replace(ENTRY, severity=severity), Ledger.read().severity
    monkeypatch.setattr(gates, "performance", lambda: 0)
    for entry, code in ((ENTRY, 0), (bad, 1), (replace(bad, fixed="by a test of that name"), 0)):
        found = Ledger(meanings, (entry,))
        monkeypatch.setattr(gates.Ledger, "read", classmethod(lambda cls, found=found: found))
        assert gate(["--no-verify"]) == code
    assert f"{severity} a: something is slow" in capsys.readouterr().out


def test_the_gate_fails_when_a_figure_or_a_check_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "performance", lambda: 1)
    assert gate(["--no-verify"]) == 1
    monkeypatch.setattr(gates, "performance", lambda: 0)
    monkeypatch.setattr(gates.regressions, "main", lambda argv: 1)
    assert (gate([]), gate(["--no-verify"])) == (1, 0)


def test_the_page_says_what_the_ledger_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PAGE.read_text(encoding="utf-8") == render(Ledger.read()), "python -m tools.known_issues"
    assert known_issues.main(["--check"]) == 0
    page = render(ledger(ENTRY, replace(ENTRY, id="b", severity="P3", fixed="done | and dusted")))
    assert "| `a` | P2 |" in page and "## Closed" in page and "done \\| and dusted" in page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('id = "x"\nseverity = "P5"\nsince = "1"\nwhat = "w"\nhits = "h"\nworkaround = "n"', "P5"),
        ('id = "x"\nseverity = "P2"\nsince = "1"\nwhat = ""\nhits = "h"\nworkaround = "n"', "no what"),
        ('id = "x"\nseverity = "P2"', "missing 4 required"),
        ('id = "x"\nseverity = "P2"\nwho = "me"', "who"),
    ],
)
def test_an_entry_that_means_nothing_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "known-issues.toml"
    head = '[severity]\nP0 = "a"\nP1 = "b"\nP2 = "c"\nP3 = "d"\n'
    file.write_text(f"{head}[[issue]]\n{text}\n")
    with pytest.raises(ValueError, match=words):
        Ledger.read(file)
    file.write_text('[severity]\nP0 = "a"\n')
    with pytest.raises(ValueError, match="expected meanings of P0, P1, P2, P3"):
        Ledger.read(file)


def test_every_numbered_fault_has_a_test_in_the_short_lane() -> None:
    """`@pytest.mark.fault(7)` on a test that `make test` runs; a number that the ledger does not have is a slip."""
    named: set[int] = set()
    later = {(name.split("::")[0], name.split("::")[-1]) for name in Lanes.read().check}
    for path in [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.fault(" in text else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith(("test", "Test")):
                marks = {name: numbers for name, numbers in map(_mark, node.decorator_list)}
                if not marks.keys() & {"slow", "stress", "benchmark", "memray", "gpu"}:
                    if (path.name, node.name) not in later:
                        named.update(marks.get("fault", ()))
            elif isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0]):
                named.update(int(number) for found in re.findall(r"mark\.fault\(([\d, ]+)\)", ast.unparse(node.value))
                             for number in found.split(","))  # fmt: skip
    assert named == {item.fault for item in Ledger.read().issues if item.fault}


def _mark(node: ast.expr) -> tuple[str, list[int]]:
    """The name of a mark, and its numbers."""
    call = node.func if isinstance(node, ast.Call) else node
    numbers = [item.value for item in node.args if isinstance(item, ast.Constant)] if isinstance(node, ast.Call) else []
    return (call.attr if isinstance(call, ast.Attribute) else "", [item for item in numbers if type(item) is int])

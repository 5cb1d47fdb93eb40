"""The requirement checklist and the tool that counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import requirements
from tools.requirements_doc import ROOT, Checklist, ChecklistError, parse

PAGE = """\
# Title
## SEL — selection
- **R-SEL-01** one
- **R-SEL-02** two

## MLP / EMB
- **R-EMB-01** three
- **R-BK-SDPA-01** never here
"""


def junit(path: Path, *cases: str, commit: str = "abc") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    properties = f'<properties><property name="commit" value="{commit}"/></properties>'
    suite = f"<testsuite>{properties}{''.join(cases)}</testsuite>"
    path.write_text(f"<testsuites>{suite}</testsuites>", encoding="utf-8")
    return path


def case(*ids: str, outcome: str = "", name: str = "n") -> str:
    marks = "".join(f'<property name="req" value="{i}"/>' for i in ids)
    return f'<testcase classname="t" name="{name}"><properties>{marks}</properties>{outcome}</testcase>'


def test_the_checklist_parses_and_holds_every_section():
    checklist = Checklist.load()
    assert len(checklist.ids) == 466
    assert {"CORE", "EXC", "DEV", "CTX", "REG", "POL", "SEL", "CACHE", "CAP", "GEN", "OPS", "API"} <= set(
        checklist.sections
    )
    assert checklist.elsewhere


def test_a_line_under_the_wrong_section_is_refused_by_line():
    with pytest.raises(ChecklistError, match=r"requirements\.md:8: R-BK-SDPA-01 stands under MLP / EMB"):
        parse(PAGE)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("- **R-SEL-01** again", "appears twice"),
        ("- R-SEL-03 no stars", "expected"),
        ("R-SEL-03 bare", "expected"),
    ],
)
def test_malformed_lines_are_refused(line, complaint):
    text = f"## SEL — s\n- **R-SEL-01** one\n{line}\n"
    with pytest.raises(ChecklistError, match=complaint):
        parse(text)


def test_an_excuse_for_an_unknown_line_is_refused(tmp_path):
    doc, table = tmp_path / "r.md", tmp_path / "e.toml"
    doc.write_text("## SEL — s\n- **R-SEL-01** one\n", encoding="utf-8")
    table.write_text('[elsewhere]\nR-SEL-09 = "no such line"\n', encoding="utf-8")
    with pytest.raises(ChecklistError, match="R-SEL-09"):
        Checklist.load(doc, table)


def test_only_passing_tests_count_and_a_failure_takes_the_line_away(tmp_path):
    found = requirements.evidence(
        [
            junit(
                tmp_path / "a.xml",
                case("R-SEL-01", "R-SEL-02"),
                case("R-SEL-02", outcome="<failure/>"),
                case("R-SEL-03", outcome="<skipped/>"),
                case("R-SEL-04", outcome="<error/>"),
            )
        ]
    )
    assert [i for i in ("R-SEL-01", "R-SEL-02", "R-SEL-03", "R-SEL-04") if found.shows(i)] == ["R-SEL-01"]
    assert found.commits == ["abc"]


def test_here_goes_before_long_lanes_those_before_the_h200_and_an_excuse_before_all(tmp_path):
    checklist = Checklist.load()
    excused = next(iter(checklist.elsewhere))
    found = {
        "here": requirements.evidence([junit(tmp_path / "here.xml", case("R-SEL-01"))]),
        "long": requirements.evidence([junit(tmp_path / "long.xml", case("R-SEL-01", "R-FUZZ-02"))]),
        "h200": requirements.evidence([junit(tmp_path / "h200.xml", case("R-FUZZ-02", "R-GRAPH-04", excused))]),
    }
    states = requirements.status(checklist, found).states
    assert (states["R-SEL-01"], states["R-FUZZ-02"], states["R-GRAPH-04"]) == ("here", "long", "h200")
    assert states[excused] == "elsewhere" and states["R-SEL-02"] == "open"


def test_json_counts_by_section_and_names_tests_and_commits(tmp_path, capsys):
    junit(tmp_path / "junit" / "quick.xml", case("R-SEL-01"), commit="here1")
    junit(tmp_path / "kept" / "h200" / "junit.xml", case("R-GRAPH-04"), commit="gpu1")
    junit(tmp_path / "kept" / "arm" / "junit.xml", case("R-SEL-02"), commit="long1")
    assert requirements.main(["--json", "--here", str(tmp_path / "junit"), "--kept", str(tmp_path / "kept")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sections"]["SEL"] == {"here": 1, "long": 1, "h200": 0, "elsewhere": 0, "open": 18, "total": 20}
    assert said["requirements"]["R-SEL-01"]["tests"] == ["t::n"]
    assert said["commits"] == {"here": ["here1"], "long": ["long1"], "h200": ["gpu1"]}


def test_newer_outcomes_take_the_place_of_older_ones_and_the_rest_stays(tmp_path, capsys):
    kept = tmp_path / "kept" / "arm" / "junit.xml"
    old = junit(tmp_path / "old.xml", case("R-SEL-01"), case("R-SEL-02", outcome="<failure/>", name="b"), commit="one")
    new = junit(tmp_path / "new.xml", case("R-SEL-02", name="b"), case("R-SEL-03", name="c"), commit="two")
    said = ["--here", str(tmp_path / "none"), "--kept", str(tmp_path / "kept"), "--machine", "arm"]
    assert requirements.main([*said, "--keep", str(old)]) == 0
    assert not requirements.evidence([kept]).shows("R-SEL-02")
    assert requirements.main([*said, "--keep", str(new)]) == 0
    found = requirements.evidence([kept])
    assert found.commits == ["one", "two"] and all(found.shows(rid) for rid in ("R-SEL-01", "R-SEL-02", "R-SEL-03"))
    assert requirements.main([*said, "--keep", str(new), str(old)]) == 0  # of several, the last counts
    assert not requirements.evidence([kept]).shows("R-SEL-02")
    capsys.readouterr()


def test_a_kept_file_says_the_same_without_the_machine(tmp_path, capsys):
    wrong = case("R-SEL-02", outcome='<failure message="secret"/>', name="m")
    source = junit(tmp_path / "run.xml", case("R-SEL-01"), wrong)
    source.write_text(source.read_text(encoding="utf-8").replace("<testsuite>", '<testsuite hostname="secret">'))
    kept = tmp_path / "kept" / "h200" / "junit.xml"
    assert (
        requirements.main(["--keep", str(source), "--here", str(tmp_path / "none"), "--kept", str(tmp_path / "kept")])
        == 0
    )
    assert "failing: R-SEL-02 (1 tests, the first t::m)" in capsys.readouterr().out
    assert requirements.evidence([kept]) == requirements.evidence([source])
    assert "secret" not in kept.read_text(encoding="utf-8")


def test_an_unknown_id_in_a_junit_file_fails_and_is_named(tmp_path, capsys):
    junit(tmp_path / "quick.xml", case("R-SEL-77"))
    assert requirements.main(["--here", str(tmp_path), "--kept", str(tmp_path / "none")]) == 1
    assert "R-SEL-77" in capsys.readouterr().out


def test_a_torn_junit_file_is_an_error_not_a_count(tmp_path, capsys):
    (tmp_path / "quick.xml").write_text("<testsuites><testcase", encoding="utf-8")
    assert requirements.main(["--here", str(tmp_path)]) == 1
    assert "requirements:" in capsys.readouterr().err


def run_pytest(folder: Path, body: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One pytest in a folder of its own, with the workspace's hooks and nothing else of its configuration."""
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "test_it.py").write_text("import pytest\n" + body, encoding="utf-8")
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  req\n  needs_tool\n  multigpu\n  stress\n", encoding="utf-8"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "LAYERZERO_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--junitxml=out.xml", *options],
        cwd=folder,
        env=env | {"PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_marks_reach_the_junit_file_with_the_commit(tmp_path):
    body = '@pytest.mark.req("R-SEL-01", "R-SEL-02")\ndef test_a(): pass\n'
    done = run_pytest(tmp_path, body, LAYERZERO_COMMIT="c0ffee")
    assert done.returncode == 0, done.stdout
    found = requirements.evidence([tmp_path / "out.xml"])
    assert found.shows("R-SEL-01")
    assert found.shows("R-SEL-02")
    assert found.commits == ["c0ffee"]


@pytest.mark.parametrize("options", [(), ("-n", "1"), ("-m", "stress")], ids=["plain", "xdist", "deselected"])
def test_an_unknown_id_stops_the_collection(tmp_path, options):
    body = '@pytest.mark.req("R-SEL-99")\ndef test_a(): pass\n'
    done = run_pytest(tmp_path, body, *options)
    assert done.returncode not in (0, 5)
    assert "test_a: R-SEL-99" in done.stdout


@pytest.mark.req("R-INFRA-01")
def test_lanes_skip_by_name_and_stretch_the_timeout(tmp_path):
    body = """
@pytest.mark.multigpu
def test_two_gpus():
    import torch
    assert torch.cuda.device_count() >= 2

@pytest.mark.needs_tool("no-such-program")
def test_tool(): raise AssertionError

@pytest.mark.stress
def test_stress(request):
    assert request.node.get_closest_marker("timeout").args == (1800,)
"""
    done = run_pytest(tmp_path, body)
    assert done.returncode == 0, done.stdout
    assert "missing tool: no-such-program" in done.stdout
    required = run_pytest(tmp_path, body, "-k", "test_tool", LAYERZERO_REQUIRE="1")
    assert required.returncode == 1
    assert "no-such-program" in required.stdout

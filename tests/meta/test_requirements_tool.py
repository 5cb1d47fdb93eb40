"""The requirement checklist and the tool that counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import requirements, sources
from tools.prove import lanes
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
    assert requirements.main(["--json", "--here", str(tmp_path / "junit"), "--kept", str(tmp_path / "kept")]) == 1
    said = json.loads(capsys.readouterr().out)
    counts = {"here": 1, "long": 1, "h200": 0, "elsewhere": 0, "open": 18, "failing": 0, "total": 20}
    assert said["sections"]["SEL"] == counts
    assert said["stale"] == ["R-SEL-02", "R-GRAPH-04"], "made from commits that nobody knows"
    assert said["requirements"]["R-SEL-01"]["tests"] == ["t::n"]
    assert said["commits"] == {"here": ["here1"], "long": ["long1"], "h200": ["gpu1"]}


def test_newer_outcomes_take_the_place_of_older_ones_and_the_rest_stays(tmp_path, capsys):
    kept = tmp_path / "kept" / "arm" / "junit.xml"
    old = junit(tmp_path / "old.xml", case("R-SEL-01"), case("R-SEL-02", outcome="<failure/>", name="b"), commit="one")
    new = junit(tmp_path / "new.xml", case("R-SEL-02", name="b"), case("R-SEL-03", name="c"), commit="two")
    said = ["--here", str(tmp_path / "none"), "--kept", str(tmp_path / "kept"), "--machine", "arm"]
    requirements.main([*said, "--keep", str(old)])
    assert not requirements.evidence([kept]).shows("R-SEL-02")
    requirements.main([*said, "--keep", str(new)])
    found = requirements.evidence([kept])
    assert found.commits == ["one", "two"] and all(found.shows(rid) for rid in ("R-SEL-01", "R-SEL-02", "R-SEL-03"))
    requirements.main([*said, "--keep", str(new), str(old)])  # of several, the last counts
    assert not requirements.evidence([kept]).shows("R-SEL-02")
    capsys.readouterr()


def test_a_kept_file_says_the_same_without_the_machine(tmp_path, capsys):
    wrong = case("R-SEL-02", outcome='<failure message="secret"/>', name="m")
    source = junit(tmp_path / "run.xml", case("R-SEL-01"), wrong)
    source.write_text(source.read_text(encoding="utf-8").replace("<testsuite>", '<testsuite hostname="secret">'))
    kept = tmp_path / "kept" / "h200" / "junit.xml"
    said = ["--keep", str(source), "--here", str(tmp_path / "none"), "--kept", str(tmp_path / "kept")]
    assert requirements.main(said) == 1
    assert "failing: R-SEL-02 (1 tests, the first t::m)" in capsys.readouterr().out
    assert requirements.evidence([kept]) == requirements.evidence([source])
    assert "secret" not in kept.read_text(encoding="utf-8")


class Planted:
    """A checklist of two lines, junit files beside it, and a repository that has the tests and what they import."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.here, self.kept = folder / "repository", folder / "junit", folder / "kept"
        (folder / "r.md").write_text("## SEL — s\n- **R-SEL-01** one\n- **R-SEL-02** two\n", encoding="utf-8")
        checklist = Checklist.load(folder / "r.md", folder / "none.toml")
        monkeypatch.setattr(requirements.Checklist, "load", lambda: checklist)
        monkeypatch.setattr(requirements, "ROOT", self.root)
        monkeypatch.setattr(requirements, "current_commit", lambda: self.commit)
        for name, text in {
            "tests/test_it.py": "def test_a():\n    import layerzero_one.part\n",
            "packages/layerzero-one/src/layerzero_one/__init__.py": "",
            "packages/layerzero-core/src/layerzero/__init__.py": "",
            "docs/page.md": "",
        }.items():
            self.write(name, text)
        self.git("init", "-q")
        self.change("docs/page.md")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, encoding="utf-8")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=n@n", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *who, *words], cwd=self.root, check=True, capture_output=True, text=True).stdout

    def change(self, name: str) -> None:
        """A commit to one file."""
        sources.history.cache_clear()
        self.write(name, (self.root / name).read_text(encoding="utf-8") + "# more\n")
        self.git("add", ".")
        self.git("commit", "-q", "-m", name)
        self.commit = self.git("rev-parse", "--short=12", "HEAD").strip()

    def judge(self, *options: str) -> int:
        return requirements.main(["--here", str(self.here), "--kept", str(self.kept), *options])


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(tmp_path, monkeypatch)


def test_all_lines_shown_is_the_only_way_to_pass(planted, capsys):
    junit(planted.here / "a.xml", case("R-SEL-01"), case("R-SEL-02"), commit=planted.commit)
    assert planted.judge() == planted.judge("--release") == 0
    junit(planted.here / "a.xml", case("R-SEL-01"), commit=planted.commit)
    assert planted.judge() == 1
    assert "open: R-SEL-02 two" in capsys.readouterr().out


def test_a_line_that_fails_here_is_failing_whatever_was_kept(planted, capsys):
    wrong = case("R-SEL-02", outcome="<failure/>", name="b")
    junit(planted.here / "a.xml", case("R-SEL-01"), wrong, commit=planted.commit)
    junit(planted.kept / "h200" / "junit.xml", case("R-SEL-01"), case("R-SEL-02"), commit=planted.commit)
    assert planted.judge() == 1
    said = capsys.readouterr().out
    assert "failing: R-SEL-02 (1 tests, the first t::b)" in said
    assert said.splitlines()[1].split() == ["SEL", "1", "0", "0", "0", "0", "1", "2"]


def test_a_line_is_open_without_a_tool_where_that_is_allowed_and_not_in_a_release(planted, capsys):
    missing = case("R-SEL-02", outcome='<skipped message="missing tool: chromium"/>')
    junit(planted.here / "a.xml", case("R-SEL-01"), missing, commit=planted.commit)
    assert planted.judge() == 0
    assert "open: R-SEL-02 two (missing tool: chromium)" in capsys.readouterr().out
    assert planted.judge("--release") == 1


def test_tests_made_from_another_commit_do_not_release(planted):
    junit(planted.here / "a.xml", case("R-SEL-01"), case("R-SEL-02"), commit=planted.commit)
    planted.change("docs/page.md")
    assert planted.judge() == 0 and planted.judge("--release") == 1


@pytest.mark.parametrize(
    ("changed", "old"),
    [
        ("docs/page.md", False),
        ("tests/test_it.py", True),
        ("packages/layerzero-one/src/layerzero_one/__init__.py", True),
        ("packages/layerzero-core/src/layerzero/__init__.py", True),
    ],
)
def test_a_kept_result_is_stale_when_its_sources_changed(planted, capsys, changed, old):
    shown = case("R-SEL-02").replace('classname="t"', 'classname="tests.test_it"')
    junit(planted.kept / "h200" / "junit.xml", shown, commit=planted.commit)
    planted.change(changed)
    junit(planted.here / "a.xml", case("R-SEL-01"), commit=planted.commit)
    assert planted.judge() == 0
    told = (
        "stale: R-SEL-02 is shown by a kept result alone (h200): 1 commits and 0.0 days ago, 1 of them to its sources"
    )
    assert (told in capsys.readouterr().out) is old
    assert planted.judge("--release") == int(old)


def test_a_kept_result_of_a_test_that_is_gone_or_a_commit_that_nobody_knows_is_stale(planted, capsys):
    shown = case("R-SEL-02").replace('classname="t"', 'classname="tests.test_gone"')
    junit(planted.here / "a.xml", case("R-SEL-01"), commit=planted.commit)
    junit(planted.kept / "arm" / "junit.xml", shown, commit=planted.commit)
    assert planted.judge("--release") == 1
    assert "stale: R-SEL-02 is shown by a kept result alone (long): made from a commit or a test" in (
        capsys.readouterr().out
    )
    junit(planted.kept / "arm" / "junit.xml", shown.replace("test_gone", "test_it"), commit="c0ffee")
    assert planted.judge("--release") == 1


def test_the_tests_of_make_check_end_with_the_ledger_and_a_release_asks_it_for_more():
    check = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    assert check.splitlines()[-1].split() == ["$(PY)", "-m", "tools.requirements"]
    assert "python -m tools.requirements --release" in lanes()["gates"].run


def test_an_unknown_id_in_a_junit_file_fails_and_is_named(tmp_path, capsys):
    junit(tmp_path / "quick.xml", case("R-SEL-77"))
    assert requirements.main(["--here", str(tmp_path), "--kept", str(tmp_path / "none")]) == 1
    assert "R-SEL-77" in capsys.readouterr().out


def test_a_torn_junit_file_is_an_error_not_a_count(tmp_path, capsys):
    (tmp_path / "quick.xml").write_text("<testsuites><testcase", encoding="utf-8")
    assert requirements.main(["--here", str(tmp_path)]) == 1
    assert "requirements:" in capsys.readouterr().err


def run_pytest(folder: Path, body: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One pytest in a folder of its own, with the workspace's hooks and nothing else of its configuration.

    Shared fixtures are left out: they import torch and the library, which takes longer than all the rest.
    """
    text, fixtures = (ROOT / "conftest.py").read_text(encoding="utf-8"), 'pytest_plugins = ["tools.pytest_fixtures"]\n'
    assert fixtures in text
    (folder / "conftest.py").write_text(text.replace(fixtures, ""), encoding="utf-8")
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


MARKERS = ("gpu", "multigpu", "stress", "correctness", "distributed", "integration", "benchmark", "memray")


@pytest.mark.req("R-INFRA-01")
def test_every_marker_is_known_and_says_where_its_tests_run(tmp_path):
    """Without a GPU two are skipped; three are left to the long lanes; the rest runs at once."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert set(MARKERS) <= {line.split(":")[0].split("(")[0] for line in configured["markers"]}
    assert "--strict-markers" in configured["addopts"], "a misspelt marker would be a test in no lane"
    body = "".join(f"@pytest.mark.{name}\ndef test_{name}(): pass\n" for name in MARKERS)
    options = ("-v", "-W", "ignore", "-m")
    short = run_pytest(tmp_path, body, *options, "short", CUDA_VISIBLE_DEVICES="")
    assert short.returncode == 0 and "3 passed, 2 skipped, 3 deselected" in short.stdout, short.stdout
    assert "needs a GPU" in short.stdout and "needs two GPUs" in short.stdout
    for name in ("correctness", "distributed", "integration"):
        assert f"test_{name} PASSED" in short.stdout, name
    for name in ("gpu", "multigpu"):
        assert f"test_{name} SKIPPED" in short.stdout, name
    long = run_pytest(tmp_path, body, *options, "long", CUDA_VISIBLE_DEVICES="")
    assert "3 passed, 5 deselected" in long.stdout, long.stdout
    for name in ("stress", "benchmark", "memray"):
        assert f"test_{name} PASSED" in long.stdout, name


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
    more = """
def test_plain(): pytest.skip("somehow")

def test_import(): pytest.importorskip("no_such_package")

@pytest.mark.skipif(True, reason="a whim")
def test_marked(): pass

def test_hardware(): pytest.skip("needs a GPU")
"""
    required = run_pytest(tmp_path, body + more, "-k", "not two_gpus and not stress", LAYERZERO_REQUIRE="1")
    assert required.returncode == 1
    assert "2 failed, 1 skipped" in required.stdout and "2 errors" in required.stdout
    for why in ("no-such-program", "somehow", "no_such_package", "a whim"):
        assert why in required.stdout
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    assert run_pytest(tmp_path, body, "test_whole.py", LAYERZERO_REQUIRE="1").returncode == 2

"""Gates that a release must pass, as far as a test can look at them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import gates, regressions
from tools.gates import Figure, Waiver, ages, figures, judged, unread, unsteady, waivers
from tools.prove import lanes
from tools.regressions import baselines
from tools.sources import history

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.req("R-GATE-02")
def test_every_kept_figure_is_inside_its_limit_or_waived_with_a_reason() -> None:
    found = list(figures())
    assert len(found) >= 10
    unexplained = [(f.file, f.name, f.value, f.limit) for f, waiver in judged(found, waivers()) if waiver is None]
    assert not unexplained


def test_every_kept_file_with_limits_is_read(tmp_path: Path) -> None:
    assert not unread()
    kept = tmp_path / "machine"
    kept.mkdir()
    (kept / "new.json").write_text('{"benchmark": "new", "fast": 1.0}')
    assert unread(tmp_path) == ["machine/new.json"], "a file in which nothing is judged is named"
    planted = {
        "untuned.json": {"figures": {"worst": {"value": 1.3, "at_most": 1.25}}},
        "cli_start.json": {"command": "python benchmarks/cli_start.py", "limit_ms": 150.0,
                           "commands": {"lz --help": {"least_ms": 151.0}}},
        "ops_host.json": {"command": "python benchmarks/adapters.py --ops", "limit": {"us": 3.0},
                          "ops": {"rope": {"more_us": 3.1}}},
        "models.json": {"benchmark": "models", "machine": {"gpu": "H"}, "limits": {"decode": 1.3, "overhead": 3.0},
                        "overhead_us": {"norm": 3.2}, "figures": {"decode B1": {"times faster": {"patched": 1.2}}}},
    }  # fmt: skip
    for name, data in planted.items():
        (kept / name).write_text(json.dumps(data))
    outside = {(figure.file.partition("/")[2], figure.name) for figure, _ in judged(list(figures(tmp_path)), [])}
    assert outside == {
        ("untuned.json", "worst"), ("cli_start.json", "lz --help"), ("ops_host.json", "rope: µs more than torch"),
        ("models.json", "overhead of norm, µs"), ("models.json", "decode B1: × stock"),
    }  # fmt: skip


def test_a_run_that_was_not_steady_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert not unsteady()
    kept = tmp_path / "machine" / "overhead.json"
    kept.parent.mkdir()
    data = {"benchmark": "overhead", "figures": {"hot": 1.0}, "limits": {"hot": 1.5}}
    for steady, bad in ((True, 0), (False, 1)):
        kept.write_text(json.dumps({**data, "steady": steady}))
        for judge in (figures, unread, unsteady):
            monkeypatch.setattr(judge, "__defaults__", (tmp_path,))
        assert gates.performance() == bad
    assert "UNSTEADY machine/overhead.json" in capsys.readouterr().out


def test_a_figure_older_than_its_sources_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    kept, root = tmp_path / "results" / "machine" / "some.json", tmp_path / "root"
    kept.parent.mkdir(parents=True)
    for name in ("benchmarks/some.py", "packages/layerzero-core/src/layerzero/hot.py", "docs/page.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("import layerzero\n" if name.endswith("some.py") else "")

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=n@n", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    monkeypatch.setattr(ages, "__defaults__", (kept.parents[1], root))
    for changed, old in (("docs/page.md", False), ("packages/layerzero-core/src/layerzero/hot.py", True)):
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", "first")
        kept.write_text(
            json.dumps({"command": "python benchmarks/some.py", "commit": git("rev-parse", "HEAD").strip()})
        )
        assert gates.aged(fatal=True) == 0
        history.cache_clear()
        (root / changed).write_text("# more\n")
        git("commit", "-q", "-a", "-m", "second")
        assert gates.aged(fatal=True) == int(old) and gates.aged(fatal=False) == 0
        told = "STALE   machine/some.json                       1 commits and 0.0 days ago, 1 of them to its sources"
        assert (told in capsys.readouterr().out) is old
    kept.write_text(json.dumps({"command": "python benchmarks/some.py", "commit": "c0ffee"}))
    assert gates.aged(fatal=True) == 1
    # A tool that a lane starts is a source of what it writes, too.
    (root / "tools").mkdir()
    for text, old in (("", 0), ("# more\n", 1)):
        (root / "tools" / "long.py").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", "a tool")
        history.cache_clear()
        if not text:
            made = {"benchmark": "long", "command": "make prove NAME=long", "commit": git("rev-parse", "HEAD").strip()}
            kept.write_text(json.dumps(made))
        assert gates.aged(fatal=True) == old


@pytest.mark.req("R-GATE-02")
def test_a_waiver_covers_what_it_names_and_no_more(tmp_path: Path) -> None:
    slow, slower = Figure("m/x.json", "a", 1.4, 1.0), Figure("m/x.json", "a", 1.6, 1.0)
    low = Figure("m/x.json", "b", 0.5, 1.0, at_least=True)
    allowed = [Waiver("m/*.json", "a", 1.5, "because it is so and that is accepted")]
    assert [waiver is not None for _, waiver in judged([slow, slower, low], allowed)] == [True, False, False]
    none = [Waiver("m/*.json", "c", 1.0, "because it is so and that is accepted", worst=2)]
    counts = [Figure("m/x.json", "c", 2.0, 0.0), Figure("m/x.json", "c", 3.0, 0.0)]
    assert [waiver is not None for _, waiver in judged(counts, none)] == [True, False]
    assert judged([Figure("m/x.json", "a", 0.9, 1.0), Figure("m/x.json", "b", 2.0, 1.0, at_least=True)], []) == []
    file = tmp_path / "waivers.toml"
    for text in ('up_to = 2.0\nwhy = "so"', 'up_to = 1.0\nwhy = "a reason of five words"'):
        file.write_text(f'[[waiver]]\nfile = "x"\nfigures = "*"\n{text}\n')
        with pytest.raises(ValueError, match="gives no reason or no bound"):
            waivers(file)


@pytest.mark.req("R-GATE-01", "R-GATE-02")
def test_the_gate_fails_for_a_figure_outside_its_limit_and_for_a_result_gone_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by itself; a waiver lets the figure pass and its reason stands beside it, nothing lets the result pass."""
    folder, kept, report, waived = (tmp_path / name for name in ("results", "kept", "report.json", "waivers.toml"))
    figure = folder / "machine" / "overhead.json"
    figure.parent.mkdir(parents=True)
    for judge in (figures, unread, unsteady):
        monkeypatch.setattr(judge, "__defaults__", (folder,))
    monkeypatch.setattr(ages, "__defaults__", (tmp_path / "none", ROOT))
    monkeypatch.setattr(waivers, "__defaults__", (waived,))
    monkeypatch.setattr(regressions, "RESULTS", kept)
    monkeypatch.setattr(regressions, "ROOT", tmp_path)
    monkeypatch.setattr(regressions, "baselines", lambda: baselines(kept))

    def gate(hot: float, status: str) -> int:
        figure.write_text(json.dumps({"benchmark": "overhead", "figures": {"hot": hot}, "limits": {"hot": 1.5}}))
        check = {"name": "forward", "status": status, "kernel": "x.op.a", "dtype": "float32", "stage": "result: plain"}
        level = {"level": 1, "checks": [check], "reason": ""}
        found = {"device": "cpu", "lane": "quick", "seed": 0, "versions": {}, "absent": [], "levels": [level]}
        report.write_text(json.dumps(found))
        return gates.main(["--report", str(report)])

    waived.write_text("")
    gate(1.0, "ok")
    assert regressions.main(["--report", str(report), "--keep", "--machine", "m"]) == 0
    assert [gate(*given) for given in ((1.0, "ok"), (1.6, "ok"), (1.0, "fail"))] == [0, 1, 1]
    told = capsys.readouterr().out
    assert "OUTSIDE machine/overhead.json" in told and "passed before, fails now: x.op.a" in told
    why = "a slower machine that is accepted here"
    waived.write_text(f'[[waiver]]\nfile = "machine/*"\nfigures = "hot"\nup_to = 1.2\nwhy = "{why}"\n')
    assert [gate(*given) for given in ((1.6, "ok"), (2.0, "ok"), (1.6, "fail"))] == [0, 1, 1]
    assert f"({why})" in capsys.readouterr().out


@pytest.mark.req("R-GATE-08")
def test_the_coverage_lane_fails_under_eighty_percent_of_the_whole_core(tmp_path: Path) -> None:
    """The lane's own words and settings, over a module of which a test reaches more than four fifths, then fewer."""
    text = (ROOT / "pyproject.toml").read_text()
    settings = tomllib.loads(text)["tool"]["coverage"]
    assert settings["report"]["fail_under"] == 80 and "layerzero" in settings["run"]["source_pkgs"]
    assert "omit" not in settings["run"] and "omit" not in settings["report"], "nothing is left out of the count"
    words = shlex.split(lanes()["coverage"].run[0])
    assert words[:3] == ["pytest", "-m", "short or check"] and "--cov" in words
    whole = re.search(r"^\[tool\.coverage\.run\]\n.*?(?=^\[(?!tool\.coverage)|\Z)", text, re.M | re.S)
    assert whole is not None
    ours = re.sub(r"source_pkgs = .*", 'source_pkgs = ["small"]', whole[0])
    (tmp_path / "pyproject.toml").write_text(f'{ours}\n[tool.pytest.ini_options]\nmarkers = ["short"]\n')
    (tmp_path / "small.py").write_text("".join(f"def f{n}():\n    return {n}\n\n" for n in range(10)))
    # 20 lines, 10 of which an import runs: 16 of 20 is eight tenths
    for called, ended, said in ((7, 0, "80.0% reached"), (5, 1, "80.0% not reached")):
        calls = "".join(f"    small.f{n}()\n" for n in range(called))
        (tmp_path / "test_small.py").write_text(
            f"import pytest\nimport small\n\n@pytest.mark.short\ndef test():\n{calls}"
        )
        done = subprocess.run(
            [sys.executable, "-m", *words, "-p", "no:cacheprovider", "--rootdir=."],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert "1 passed" in done.stdout and said in done.stdout, done.stdout + done.stderr
        assert done.returncode == ended


@pytest.mark.req("R-GATE-10")
def test_the_suite_holds_more_than_four_hundred_cases() -> None:
    """In the folders that pytest collects from, whatever is written elsewhere."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    names = set()
    for file in (file for folder in folders for file in ROOT.glob(f"{folder}/**/test_*.py")):
        names |= {(file, name) for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)}
    assert len(names) > 400

"""The comparison of other people's tests, plain and with us (tools/foreign.py), on a small project of our own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import foreign
from tools.foreign import Outcome, compared
from tools.foreign_plugin import WAYS
from tools.prove import lanes

TESTS = """
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend


def test_one_key():
    q = torch.ones(1, 1, 2, 4)
    assert torch.equal(attend(q, q[:, :, :1], q[:, :, :1]), q)


def test_who_answers():
    assert attend is not torch._C._nn.scaled_dot_product_attention


def test_a_name_of_torch():
    assert attend.__name__ == "scaled_dot_product_attention" and "built-in" in repr(attend)


@pytest.mark.skip(reason="wants a network")
def test_left_out(): pass
"""


@pytest.fixture
def clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the clone of one project, and a table that speaks of it."""
    project = tmp_path / "clones" / "small"
    project.mkdir(parents=True)
    (project / "test_small.py").write_text(TESTS)
    who = ("-c", "user.name=n", "-c", "user.email=n@n", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "tests"), ("tag", "v1")):
        subprocess.run(["git", *who, *words], cwd=project, check=True)
    monkeypatch.setattr(foreign, "FOLDER", tmp_path / "unpacked")
    return project.parent


def table(folder: Path, reasons: str = "", commit: str = "v1") -> Path:
    file = folder / "foreign.toml"
    suite = f'[suite.small]\nclone = "small"\ncommit = "{commit}"\ntests = ["test_small.py"]\nways = ["sdpa"]\n'
    file.write_text(f"{suite}[reasons]\n{reasons}")
    return file


def test_a_test_that_passes_plain_and_not_with_us_fails_the_run(
    tmp_path: Path, clones: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "foreign.json"
    monkeypatch.setattr(foreign.read, "__defaults__", (table(tmp_path),))
    assert foreign.main([str(clones), "--json", str(out)]) == 1
    assert "test_small::test_a_name_of_torch: failed" in capsys.readouterr().out
    found = json.loads(out.read_text())["suites"]["small"]
    row = found["ways"]["sdpa"]
    assert (row["passed both"], row["left out"]) == (1, {"wants a network": 1})
    assert row["failed plain"] == ["test_small::test_who_answers"], "plain, it is torch that answers"
    assert row["with us"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert list(row["differences"]) == ["test_small::test_a_name_of_torch"] and len(found["commit"]) == 40
    monkeypatch.setattr(foreign.read, "__defaults__", (table(tmp_path, commit="v2"),))
    assert foreign.main([str(clones), "--json", str(out)]) == 1
    assert "there is no v2 in small" in capsys.readouterr().out


def test_a_test_that_is_gone_or_skipped_with_us_is_a_difference() -> None:
    plain = {name: Outcome("passed") for name in "abc"} | {"d": Outcome("failed"), "e": Outcome("skipped", "why")}
    ours = {"a": Outcome("passed"), "b": Outcome("skipped", "so"), "d": Outcome("failed")}
    result = compared("suite way", plain, ours, {"suite way c": "gone for a good reason indeed"})
    assert {test: row["reason"] is None for test, row in result["differences"].items()} == {"b": True, "c": False}
    assert result["passed both"] == 1 and result["failed plain"] == ["d"] and result["left out"] == {"why": 1}


def test_the_table_names_four_projects_by_commit_and_gives_reasons() -> None:
    suites, _ = foreign.read()
    assert {suite.clone for suite in suites} == {"pytorch", "transformers", "diffusers", "flashinfer-bench"}
    assert all(suite.commit and set(suite.ways) <= set(WAYS) and suite.ways for suite in suites)
    assert "tools.foreign $FOREIGN" in lanes()["foreign"].run[0]


def test_a_reason_of_a_few_words_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no reason"):
        foreign.read(table(tmp_path, '"small sdpa *" = "differs"\n'))

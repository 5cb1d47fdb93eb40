"""Every Python block of the documentation and of the READMEs runs, or says on the page what it needs."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import snippets
from tools.workspace import ROOT

# they import transformers, compile or measure: more than half of the time of all
LONG = {"docs/blocks.md", "docs/compile.md", "docs/learn/model.md", "docs/transformers.md"}
NAMES = [page.relative_to(ROOT).as_posix() for page in snippets.pages()]


@functools.cache
def said(names: tuple[str, ...]) -> str:
    """What pages said: run by one process, which has loaded torch once and forks for each."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LAYERZERO_PERFDB_SHIPPED": "0"}
    command = [sys.executable, "-m", "tools.snippets", *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.stdout + ("" if done.returncode in (0, 1) else done.stderr)


def run_well(name: str, out: str) -> None:
    told = r"((?:(?! +[\d.]+ s  |\d+ blocks).*\n)*)"  # up to the next block
    lines = dict(re.findall(rf"^ +[\d.]+ s  {re.escape(name)}:(\d+)\n{told}", out, re.M))
    wanted = {str(block.line) for block in snippets.blocks(ROOT / name) if not block.marks}
    assert {line: text for line, text in lines.items() if text} == {}
    assert set(lines) == wanted, out[-2000:]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LONG])
def test_the_python_blocks_of_a_page_run(name: str) -> None:
    run_well(name, said(tuple(name for name in NAMES if name not in LONG)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG))
def test_the_longer_python_blocks_of_a_page_run(name: str) -> None:
    run_well(name, said(tuple(sorted(LONG))))


def test_a_block_that_fails_is_told_with_its_line_and_the_rest_of_its_page_is_left(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# P\n\n<!-- python\na = 1\n-->\n\n```python\nassert a == 1\nb\n```\n\n```python\n1\n```\n"
    page.write_text(text, encoding="utf-8")
    results = snippets.run(page)
    assert [bool(result.error) for result in results] == [False, True]
    assert "page.md:8" in results[1].name and "line 9" in results[1].error and "'b' is not defined" in results[1].error


def test_a_marked_block_runs_only_where_it_is_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python gpu\n1 / 0\n```\n", encoding="utf-8")
    assert snippets.run(page) == []
    assert "ZeroDivisionError" in snippets.run(page, ("gpu",))[0].error


def test_a_mark_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python later\n1\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match="marked later"):
        list(snippets.blocks(page))


def test_no_page_hides_its_python_from_the_test() -> None:
    """Blocks in another spelling (```py3, ~~~python, an indented session) would not be run."""
    for page in snippets.markdown_files():
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^ *(~~~+ *py|````+ *py|```+ *(pycon|python3|ipython|py3)|>>> )", text, re.M), page

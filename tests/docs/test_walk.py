"""Every command of the pages is one that there is, stands in a block that says so, and is run by `tools.walk`."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import click
import pytest

from tools import walk
from tools.check_docs import markdown_files
from tools.snippets import Block, blocks
from tools.workspace import ROOT

PAGES = markdown_files()


def _said() -> list[tuple[str, str]]:
    """(place, command) of every `lz …` in a block of commands or between backquotes."""
    found = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue  # what was true of a release
        for block in blocks(page, "sh"):
            found += [(block.name, command) for command in walk.commands(block)]
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        found += [(page.name, command) for command in re.findall(r"`(lz [a-z][^`\n]*)`", text)]
    return [
        (place, command[command.index("lz ") :]) for place, command in found if re.search(r"(?:^|[ =])lz ", command)
    ]


def test_every_lz_command_on_the_pages_is_one_that_there_is() -> None:
    from layerzero_cli.root import cli

    seen, wrong = 0, []
    for place, command in _said():
        try:
            words = shlex.split(command)[1:]
        except ValueError:
            continue  # half a sentence
        at: click.Command = cli
        with click.Context(cli, info_name="lz") as context:
            while isinstance(at, click.Group) and words and not words[0].startswith("-"):
                word = words[0]
                if not re.fullmatch(r"[a-z-]+", word):
                    break
                inner = at.get_command(context, word)
                if inner is None:
                    wrong.append(f"{place}: {command}: no verb {word}")
                    break
                at, words = inner, words[1:]
                seen += 1
            options = {
                name for parameter in at.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)
            }
        for word in words:
            option = word.partition("=")[0].rstrip(".,;")
            if re.fullmatch(r"--?[a-z][a-z-]*", option) and option not in options:
                wrong.append(f"{place}: {command}: no option {option}")
    assert not wrong, "\n".join(wrong)
    assert seen > 100


def test_a_block_without_a_language_stands_on_no_page() -> None:
    for page in PAGES:
        opened = ""
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            fence = re.match(r" *(`{3,})(.*)$", line)
            if fence and not opened:
                assert fence[2], f"{page.name}:{number}: say sh, text, python or another language"
                opened = fence[1]
            elif fence and fence[1] == opened and not fence[2]:
                opened = ""


def test_every_page_with_commands_has_one_reader_and_the_install_comes_first() -> None:
    read = walk.readers(PAGES)
    assert read["engineer"][0] == ROOT / walk.INSTALL and read["engineer"][1] == ROOT / "README.md"
    pages = [page for who in read.values() for page in who]
    assert sorted(pages) == [page for page in PAGES if any(block.shown for block in blocks(page, "sh"))]
    assert {page.relative_to(ROOT).as_posix() for page in read["author"]} == set(walk.AUTHOR)


def _walked(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> list[walk.Step]:
    """The steps of a page, with a clone that holds one file."""
    monkeypatch.setattr(walk, "ROOT", folder)
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    for name in ("wheels", "clone", "home"):
        (folder / name).mkdir()
    (folder / "clone" / "only-here").touch()
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder / "home"), "SAID": str(folder / "said")}
    return list(walk.walk(page, folder / "at", walk.Ground(env, folder / "wheels", folder / "clone", env)))


def test_a_page_is_walked_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _walked(
        tmp_path,
        monkeypatch,
        "A policy, as `p.yaml`:\n\n```yaml\njit: off\n```\n\n"
        "A program, as `say.py`:\n\n```python\nprint(6 * 7)\n```\n\n<!-- sh\nmkdir inner\n-->\n\n"
        "```sh\ncd inner\npython ../say.py   # says it\nfalse\n```\n\n```sh index\npip install elsewhere\n```\n",
    )
    assert [(step.command, step.status) for step in steps] == [
        ("python page.py", steps[0].status),
        ("mkdir inner", 0), ("cd inner", 0), ("python ../say.py", steps[3].status), ("false", 1),
        ("pip install elsewhere", None),
    ]  # fmt: skip
    assert (tmp_path / "at" / "inner").is_dir() and (tmp_path / "at" / "say.py").read_text() == "print(6 * 7)\n"
    assert (tmp_path / "at" / "p.yaml").read_text() == "jit: off\n"
    assert "package index" in str(steps[-1]) and "exit 1 and not 0" in str(steps[-2]) and steps[-2].failed


def test_blocks_for_a_checkout_run_in_the_clone_and_long_commands_name_what_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _walked(
        tmp_path,
        monkeypatch,
        "```sh checkout\nls only-here\nmake check\n```\n\n```sh\nls only-here\n```\n",
    )
    assert [step.status for step in steps] == [0, None, 2]
    assert ".ci/run" in steps[1].said


def test_where_wheels_are_given_the_clone_is_set_up_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "```sh checkout\nprintf 'setup:\\n\\tmkdir .venv\\n' > Makefile\n"
    page += "make wheels\nls -d .venv\nmake wheels\n```\n"
    steps = _walked(tmp_path, monkeypatch, page)
    assert [(step.command, step.status) for step in steps[1:]] == [("make setup", 0), ("ls -d .venv", 0)]


def test_a_promised_exit_code_is_held_and_a_check_may_read_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _walked(
        tmp_path,
        monkeypatch,
        "```sh\necho drifted; exit 3    # ends with exit code 3 then\n```\n\n<!-- sh\ngrep drifted $SAID\n-->\n\n"
        "```sh\ntrue    # ends with exit code 1\n```\n",
    )
    assert [(step.status, step.failed) for step in steps] == [(3, False), (0, False), (0, True)]


def test_what_a_page_left_running_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _walked(tmp_path, monkeypatch, "```sh\nsleep 600 > /dev/null 2>&1 & echo $! > number\n```\n")
    number = int((tmp_path / "at" / "number").read_text())
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return  # ended, and nobody has asked for its exit code yet
    pytest.fail(f"{number} still runs")


def test_words_in_capitals_stand_for_something_and_every_page_with_them_uses_them() -> None:
    for name, words in walk.WORDS.items():
        said = " ".join(block.code for block in blocks(ROOT / name, "sh"))
        assert all(re.search(rf"\b{word}\b", said) for word in words), name
        told = " ".join(command for block in blocks(ROOT / name, "sh") for command in walk.commands(block))
        assert not any(re.search(rf"\b{word}\b", told) for word in words), name


def test_comments_are_no_part_of_a_command() -> None:
    block = Block(Path("x.md"), 1, (), "lz list   # all\n\n# nothing\nlz explain a \\\n  --shape 1,2\n")
    assert list(walk.commands(block)) == ["lz list", "lz explain a    --shape 1,2"]

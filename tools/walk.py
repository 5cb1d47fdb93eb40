"""Walks through the documentation as its readers do: every command of every page, in fresh environments.

    python -m tools.walk --dist dist [PAGE …]        `make prove NAME=walk`; all pages where none is named

Three readers: the engineer (the README, the tutorials, the other pages), the author of a backend, the operator. Each
has an environment of his own that holds nothing of LayerZero before the pages install it from the wheels in `--dist`
(torch and other libraries are shared with the running environment: `tools.fresh`; pip builds as it is set up to on this
machine). A page is walked in an empty folder: its Python blocks as one program, where the first of them stands, and
its ```` ```sh ```` blocks line by line. A block that cannot run says why behind the language (`tools.snippets.MARKS`)
and is listed with that; what a reader has anyway is made by a comment, `<!-- sh … -->`. A Python block under "as
`serve.py`:" is the file of that name.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.check_docs import markdown_files
from tools.fresh import Fresh, fresh
from tools.requirements_doc import ROOT
from tools.snippets import MARKS, Block, blocks

__all__ = ["Step", "commands", "main", "readers", "walk"]

AUTHOR = ("docs/learn/backend.md", "docs/learn/new-op.md", "docs/plugins.md")
OPERATOR = ("docs/policy.md", "docs/production.md", "docs/runbooks.md", "docs/health.md", "docs/warmup.md")
INSTALL = "docs/learn/sixty-seconds.md"  # the page that says how to install; every reader begins with its command
SECONDS = 600


class Step(NamedTuple):
    """One command of a page: where it stands, its seconds, its exit status (None: not run) and what was said."""

    place: str
    command: str
    seconds: float
    status: int | None
    said: str

    def __str__(self) -> str:
        """One line of the log; for a command that failed, the end of what it said below."""
        if self.status is None:
            return f"     –    {self.command}    [{self.place}: {self.said}]"
        told = f"{self.seconds:6.1f} s  {self.command}    [{self.place}]"
        return told if not self.status else f"{told} exit {self.status}\n{self.said[-2000:]}"


def commands(block: Block) -> Iterator[str]:
    """The lines of a block that are commands, without their comments."""
    for line in block.code.replace("\\\n", " ").splitlines():
        command = re.sub(r"(?:^|\s+)# .*$", "", line).strip()
        if command:
            yield command


def readers(pages: Sequence[Path]) -> dict[str, list[Path]]:
    """Who reads which of the pages, in order: how to install, the README, then as the home page lists them."""
    home = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    order = re.findall(r"^- \[[^\]]+\]\(([^)#]+)\)", home, re.MULTILINE)
    rank = {(ROOT / "docs" / name).resolve(): number for number, name in enumerate(order)}
    found: dict[str, list[Path]] = {"engineer": [], "author": [], "operator": []}
    for page in sorted(pages, key=lambda page: (page != ROOT / INSTALL, rank.get(page, -1))):
        name = page.relative_to(ROOT).as_posix()
        who = "author" if name in AUTHOR else "operator" if name in OPERATOR else "engineer"
        if any(block.shown for block in blocks(page, "sh")):
            found[who].append(page)
    return found


def _environment(folder: Path, dist: Path) -> tuple[Fresh, dict[str, str]]:
    """A fresh environment, and variables under which its programs and our wheels are found."""
    made = fresh(folder)
    for name in ("pip", "pytest"):
        shim = made.python.with_name(name)
        shim.write_text(f'#!/bin/sh\nexec "{made.python}" -m {name} "$@"\n', encoding="utf-8")
        shim.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LAYERZERO_", "PYTEST_", "XDG_"))}
    path = os.pathsep.join((str(made.python.parent), os.environ.get("PATH", "")))
    pip = {"PIP_FIND_LINKS": f"{os.environ.get('PIP_FIND_LINKS', '')} {dist}".strip(), "PIP_QUIET": "1"}
    home = {"HOME": str(folder / "home"), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "VIRTUAL_ENV": str(folder / "venv")}
    (folder / "home").mkdir()
    return made, {**kept, **pip, **home, "PATH": path, "HF_HUB_OFFLINE": "1"}


def _ran(place: str, command: str, cwd: Path, env: dict[str, str]) -> tuple[Step, Path]:
    """Run one line of shell in a folder; and the folder that it ends in."""
    note = cwd / ".walked"
    begun = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", f"{command}\nstatus=$?; pwd > '{note}'; exit $status"],
            cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS, check=False,
        )  # fmt: skip
        status, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, said = 124, f"not done after {SECONDS} seconds"
    after = Path(note.read_text(encoding="utf-8").strip()) if note.exists() else cwd
    return Step(place, command, time.monotonic() - begun, status, said), after


def walk(page: Path, folder: Path, env: dict[str, str], dist: Path) -> Iterator[Step]:
    """A page in an empty folder: its Python blocks as one program, and its commands; those that are marked say why."""
    folder.mkdir(parents=True)
    (folder / "dist").symlink_to(dist)
    text = page.read_text(encoding="utf-8")
    for name, code in re.findall(r"as `([\w.-]+\.py)`:\n\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(code, encoding="utf-8")
    at = folder
    python = [block for block in blocks(page) if not block.marks]
    (folder / "page.py").write_text("\n".join(block.code for block in python), encoding="utf-8")
    program = [Block(page, block.line, (), "python page.py") for block in python[:1]]
    for block in sorted([*program, *blocks(page, "sh")], key=lambda block: block.line):
        for command in commands(block):
            if block.marks:
                yield Step(block.name, command, 0.0, None, " ".join(MARKS[mark] for mark in block.marks))
                continue
            step, at = _ran(block.name, command, at, env)
            yield step


def main(argv: Sequence[str] = ()) -> int:
    """Walk the named pages, or all; 1 when a command failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.walk")
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    asked = parser.parse_args(argv)
    dist = asked.dist.resolve()
    steps: list[Step] = []
    for who, pages in readers([page.resolve() for page in asked.pages] or markdown_files()).items():
        if not pages:
            continue
        with tempfile.TemporaryDirectory(prefix=f"lz-{who}-", ignore_cleanup_errors=True) as folder:
            begun = time.monotonic()
            env = _environment(Path(folder), dist)[1]
            print(f"== {who}: {len(pages)} pages, a fresh environment in {time.monotonic() - begun:.1f} s", flush=True)
            begun = time.monotonic()
            install = ROOT / INSTALL
            if install not in pages:
                first = next(block for block in blocks(install, "sh") if not block.marks)
                at = Path(folder, "begin")
                at.mkdir()
                (at / "dist").symlink_to(dist)
                steps.append(_ran(first.name, next(commands(first)), at, env)[0])
                print(steps[-1], flush=True)
            for number, page in enumerate(pages):
                for step in walk(page, Path(folder, f"page{number}"), env, dist):
                    steps.append(step)
                    print(step, flush=True)
            print(f"== {who}: {time.monotonic() - begun:.0f} s in all", flush=True)
    ran = [step for step in steps if step.status is not None]
    failed = [step for step in ran if step.status]
    print(f"{len(steps)} commands: {len(ran)} ran, {len(failed)} failed, {len(steps) - len(ran)} marked")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

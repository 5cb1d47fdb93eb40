"""Runs the Python blocks of the documentation: `python -m tools.snippets [PAGE …]`; `--with gpu` runs marked ones too.

The blocks of a page share one namespace, as in a session that follows the page from top to bottom, in an empty folder
and a process of their own. A block that cannot run everywhere says why behind the language, ```` ```python gpu ````,
and the site shows the words of `MARKS` above it. What a reader has anyway (a model's folder, a file of traffic) is made
by a comment of the page, `<!-- python … -->`, that runs like a block and is not shown.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import linecache
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.check_docs import markdown_files
from tools.requirements_doc import ROOT

__all__ = ["MARKS", "Block", "Result", "blocks", "main", "pages", "run", "run_all"]

MARKS = {
    "gpu": "Needs a CUDA device and the packages of this page.",
    "download": "Fetches models or kernels from a hub.",
    "ranks": "Runs on every rank, under torchrun.",
    "index": "Installs from a package index.",
    "checkout": "In a checkout of the repository.",
    "yours": "Names of files and words in capitals stand for your own.",
    "cross": "Needs a compiler for another processor family.",
}
# nothing that the user of this machine has set, measured, compiled or quarantined
_HOME = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")


@dataclass(frozen=True, slots=True)
class Block:
    """One block: the page, the line its code begins at, its marks, its code, and whether readers see it."""

    page: Path
    line: int
    marks: tuple[str, ...]
    code: str
    shown: bool = True

    @property
    def name(self) -> str:
        """Where it stands, as `docs/ops.md:12`."""
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page.as_posix()}:{self.line}"


class Result(NamedTuple):
    """A block that ran: where it stands, its seconds of processor time, and the traceback of what it raised."""

    name: str
    seconds: float
    error: str


def blocks(page: Path, language: str = "python") -> Iterator[Block]:
    """The blocks of a page in a language (`python`, `sh`) in order, those in comments too."""
    text = page.read_text(encoding="utf-8")
    pattern = (
        rf"^(?P<indent> *)(?:```(?P<info>{language}\b[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$"
        rf"|<!-- {language}\n(?P<hidden>.*?)-->)"
    )
    for found in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        code = found["hidden"] if found["info"] is None else found["code"]
        marks = tuple((found["info"] or "").split()[1:])
        if unknown := set(marks) - set(MARKS):
            raise ValueError(
                f"{page.name}: a block is marked {', '.join(sorted(unknown))}; there is {', '.join(MARKS)}"
            )
        code = re.sub(rf"^{found['indent']}", "", code, flags=re.MULTILINE)
        yield Block(page, text.count("\n", 0, found.start()) + 2, marks, code, found["info"] is not None)


def pages() -> list[Path]:
    """Every page of the repository with a Python block."""
    return [page for page in markdown_files() if any(block.shown for block in blocks(page))]


def run(page: Path, allowed: Sequence[str] = ()) -> list[Result]:
    """Run the blocks of a page that have no mark, or only `allowed` ones, in an empty folder; stop at an error."""
    space: dict[str, Any] = {"__name__": f"docs_{page.stem.replace('-', '_')}"}
    done: list[Result] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.chdir(folder):
        os.environ.update({name: os.path.join(folder, ".home") for name in _HOME})
        for block in blocks(page):
            if set(block.marks) - set(allowed):
                continue
            begun, error = time.process_time(), ""
            code = "\n" * (block.line - 1) + block.code
            linecache.cache[block.name] = (len(code), None, code.splitlines(keepends=True), block.name)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(ast.parse(code, block.name), block.name, "exec"), space)
            except BaseException:
                error = traceback.format_exc()
            done.append(Result(block.name, time.process_time() - begun, error))
            if error:
                break
    return done


def run_all(files: Sequence[Path], allowed: Sequence[str] = ()) -> dict[Path, list[Result]]:
    """Run pages, each in a child of a process that has loaded torch: loading it takes longer than most pages."""
    import torch  # noqa: F401

    import layerzero  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads; they are idle
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            found = pool.starmap(run, [(file, allowed) for file in files], chunksize=1)
    return dict(zip(files, found, strict=True))


def main(argv: Sequence[str] = ()) -> int:
    """Run the named pages, or all; 1 when a block fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.snippets")
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--with", dest="allowed", action="append", default=[], choices=list(MARKS))
    asked = parser.parse_args(argv)
    files = [file.resolve() for file in asked.pages] or pages()
    results = [result for found in run_all(files, asked.allowed).values() for result in found]
    for name, seconds, error in results:
        print(f"{seconds:6.2f} s  {name}")
        print(error, end="")
    shown = [block for file in files for block in blocks(file) if block.shown]
    marked = [block for block in shown if set(block.marks) - set(asked.allowed)]
    failed, count = sum(1 for result in results if result.error), len(shown) - len(marked)
    print(f"{len(shown)} blocks on {len(files)} pages: {count} to run, {failed} failed, {len(marked)} marked")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checks the Markdown of the repository: links and anchors lead somewhere, no path of a machine slips in."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tools.requirements_doc import ROOT

__all__ = ["anchors", "check_file", "main", "markdown_files"]

_SKIP = {".venv", ".tox", ".git", "build", "dist", "node_modules"}
_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|Users)/\w+")


def markdown_files(root: Path = ROOT) -> list[Path]:
    """Every Markdown file that belongs to the repository."""
    return sorted(f for f in root.rglob("*.md") if not _SKIP.intersection(f.relative_to(root).parts))


def _walk(tokens: Iterable[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _walk(token.children or ())


def anchors(text: str) -> set[str]:
    """The anchors a page's headings make, by the usual rule: lower case, punctuation dropped, blanks to dashes."""
    tokens = MarkdownIt("commonmark").parse(text)
    titles = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def check_file(path: Path, root: Path = ROOT) -> list[str]:
    """What is wrong in one file, one line each."""
    text = path.read_text(encoding="utf-8")
    where = path.relative_to(root)
    problems = [f"{where}: names a path of some machine: {m[0]}" for m in _MACHINE_PATH.finditer(text)]
    for token in _walk(MarkdownIt("commonmark").parse(text)):
        target = str(token.attrGet("href") or token.attrGet("src") or "")
        if not target or re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = unquote(target).partition("#")
        page = (path.parent / file).resolve() if file else path
        if not page.exists():
            problems.append(f"{where}: {target} leads nowhere")
        elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text(encoding="utf-8")):
            problems.append(f"{where}: {target} has no such heading")
    return problems


def main(argv: Sequence[str] = ()) -> int:
    """Check the named files, or all; 1 when something is wrong."""
    files = [Path(name).resolve() for name in argv] or markdown_files()
    problems = [problem for file in files for problem in check_file(file)]
    print("\n".join(problems) or f"{len(files)} pages, every link leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

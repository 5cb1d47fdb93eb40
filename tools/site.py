"""Builds the documentation site: `python -m tools.site`, or `make docs`; it lies in build/site/html.

The sources are Markdown, readable where they are: docs/, the README of each package and of the benchmarks, the
changelog. docs/README.md is the home page, and its lists are the navigation. This puts them side by side with the pages
of `tools.reference`, turns their links into links of the site, and has Sphinx build it with warnings as errors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote

from tools import reference
from tools.requirements_doc import ROOT
from tools.snippets import MARKS

__all__ = ["HTML", "build", "main", "marked", "places", "relinked", "stage"]

SITE = ROOT / "build" / "site"
HTML = SITE / "html"
_LINK = re.compile(r"(?<!\\)(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#{2,3}) (.+)$")
# What the theme leaves out for those who listen, and for those who scroll with keys.
_SPOKEN = {
    'role="heading"': 'role="heading" aria-level="2"',
    '<aside class="sidebar-drawer': '<aside aria-label="Navigation" class="sidebar-drawer',
    '<aside class="toc-drawer': '<aside aria-label="Sections of this page" class="toc-drawer',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    "<p><img ": '<p tabindex="0"><img ',
}
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#]+\.md)\)")


def places() -> dict[Path, str]:
    """Every Markdown file that is a page of the site, and its name there, without `.md`."""
    docs = ROOT / "docs"
    found = {page: page.relative_to(docs).with_suffix("").as_posix() for page in sorted(docs.rglob("*.md"))}
    found |= {docs / "README.md": "index", ROOT / "README.md": "index"}
    found |= {page: page.stem.lower() for page in sorted(ROOT.glob("*.md")) if page.name != "README.md"}
    found[ROOT / "benchmarks" / "README.md"] = "measured"
    found |= {page: f"packages/{page.parent.name}" for page in sorted(ROOT.glob("packages/*/README.md"))}
    return found


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with every line that stands in no fenced block changed."""
    fence = ""
    lines = []
    for line in text.split("\n"):
        opened = re.match(r" *(`{3,}|:{3,}|~{3,})", line)
        if opened and not fence and opened[1][0] != ":":
            fence = opened[1]
        elif opened and fence and line.strip() == fence:
            fence = ""
        elif not fence:
            line = change(line)
        lines.append(line)
    return "\n".join(lines)


def relinked(page: Path, text: str, known: dict[Path, str], target: Path) -> str:
    """Links between files of the repository as links between pages; other files are copied beside the pages."""
    here = known[page]

    def one(found: re.Match[str]) -> str:
        label, address = found[1], found[2]
        file, _, anchor = unquote(address).partition("#")
        if not file or re.match(r"[a-z]+:", address):
            return found[0]
        goal = (page.parent / file).resolve()
        if goal in known:
            to = f"{known[goal]}.md"
        elif goal.is_file():
            to = f"files/{goal.relative_to(ROOT).as_posix()}"
            (target / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(goal, target / to)
        else:
            return found[0]
        relative = os.path.relpath(to, Path(here).parent.as_posix())
        return f"{label}({relative}{f'#{anchor}' if anchor else ''})"

    return outside_fences(text, lambda line: _LINK.sub(one, line))


def marked(text: str) -> str:
    """Blocks that cannot run everywhere say so above themselves; what only the test runs is left out."""
    text = re.sub(r"(?ms)^ *<!-- (?:python|sh)\n.*?-->\n\n?", "", text)

    def one(found: re.Match[str]) -> str:
        indent, language, marks = found[1], found[2], found[3].split()
        told = " ".join(MARKS[mark] for mark in marks)
        note = f"{indent}```{{container}} needs\n{indent}{told}\n{indent}```\n\n" if told else ""
        return f"{note}{indent}```{language}\n"

    return re.sub(r"^( *)```(python|sh) ([a-z ]+)\n", one, text, flags=re.MULTILINE)


def _glossary() -> str:
    """The page of words, from the table in CONTRIBUTING.md."""
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Glossary\n")[2].partition("\n## ")[0]
    return f"# Glossary\n\n{table.strip()}\n"


def generated() -> dict[str, str]:
    """The pages that no one writes."""
    return {**reference.pages(), "understand/glossary": _glossary()}


def _home(text: str) -> str:
    """The home page with the pages made from the code in its lists, and the navigation below."""
    for heading, path, words in reference.LISTED:
        entry = f"- [{reference.TITLES[path]}]({path}.md): {words}\n"
        text = re.sub(rf"(?m)^(## {heading}\n\n(?:(?!- ).*\n)*)", lambda found, entry=entry: found[1] + entry, text)
    groups: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if found := _HEADING.match(line):
            heading = found[2]
        elif found := _ENTRY.match(line):
            groups.setdefault(heading, []).append(f"{found[1].replace('`', '')} <{found[2].removesuffix('.md')}>")
    text = re.sub(r"(?m)^(- \[[^\]]+\]\([^)]+\)): ", r"\1 ", text)  # cards: a title, and what it is about below
    for caption, entries in groups.items():
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(entries) + "\n```\n"
    return text


def stage(target: Path) -> None:
    """Write every page to a folder, as Sphinx is to read it."""
    known = places()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "_site", target)
    for page, name in known.items():
        if page == ROOT / "README.md":
            continue  # the front page of the repository; its place in the site is the home page
        text = marked(relinked(page, page.read_text(encoding="utf-8"), known, target))
        file = target / f"{name}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_home(text) if name == "index" else text, encoding="utf-8")
    for image in (ROOT / "docs").rglob("*.svg"):
        goal = target / image.relative_to(ROOT / "docs")
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, goal)
    for name, text in generated().items():
        file = target / f"{name}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def build(html: Path = HTML, source: Path = SITE / "source") -> int:
    """Stage the pages and build them; the exit status of Sphinx, which is not 0 after a warning."""
    stage(source)
    shutil.rmtree(html, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    command += ["-d", str(SITE / "doctrees"), str(source), str(html)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    for page in html.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for plain, spoken in _SPOKEN.items():
            text = text.replace(plain, spoken)
        page.write_text(text, encoding="utf-8")
    return status


def main(argv: Sequence[str] = ()) -> int:
    """Build the site and say where it is."""
    status = build()
    if not status:
        print(f"{len(list(HTML.rglob('*.html')))} pages in {HTML.relative_to(ROOT)}/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

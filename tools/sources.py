"""What a kept result was made from, and how far that has moved on since.

The sources of a test file or a benchmark are the file, the modules of this repository that it imports, and `src` of
every package among them; a test of a package has that package for a source, and whatever uses a package uses the core.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.requirements_doc import ROOT

__all__ = ["Drift", "drift", "file_of", "sources"]

CORE = "packages/layerzero-core/src"


@dataclass(frozen=True, slots=True)
class Drift:
    """Commits to the sources of a result since it was made, all commits since, and the days between."""

    changed: int
    commits: int
    days: float

    def __str__(self) -> str:
        return f"{self.commits} commits and {self.days:.1f} days ago, {self.changed} of them to its sources"


def file_of(classname: str, root: Path = ROOT) -> Path | None:
    """The file of a test by the `classname` of its junit case, wherever it lies today; None when it is gone."""
    parts = classname.split(".")
    parts = parts[: next((n for n, part in enumerate(parts, 1) if part.startswith("test_")), len(parts))]
    there = root.joinpath(*parts).with_suffix(".py")
    if there.is_file():
        return there
    top = root.joinpath(*parts[: parts.index("tests") + 1]) if "tests" in parts else root
    return next(iter(sorted(top.rglob(f"{parts[-1]}.py"))), None)


def sources(file: Path, root: Path = ROOT) -> tuple[str, ...]:
    """Paths in the repository whose change makes what this file shows or measures old."""
    packages = _packages(root)
    found, todo = set[str](), [file]
    if file.is_relative_to(root / "packages"):
        found.add(str(Path(*file.relative_to(root).parts[:2], "src")))
    while todo:
        path = todo.pop()
        if (name := str(path.relative_to(root))) in found:
            continue
        found.add(name)
        for module in _imported(path):
            top = module.partition(".")[0]
            beside = path.parent / f"{top}.py"
            tool = root.joinpath(*module.split(".")).with_suffix(".py") if top == "tools" else beside
            if top in packages:
                found.add(packages[top])
            else:
                todo += [place for place in {beside, tool} if place.is_file()]
    if any(name.startswith("packages/") for name in found):
        found.add(CORE)
    return tuple(sorted(found))


@functools.cache
def _packages(root: Path) -> dict[str, str]:
    """The folder `src` of every importable name that a package of the workspace brings."""
    return {
        path.stem: str(path.parent.relative_to(root))
        for path in root.glob("packages/*/src/*")
        if path.is_dir() and path.suffix == ""
    }


def _imported(file: Path) -> Iterator[str]:
    """Names of modules that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def drift(commit: str, paths: tuple[str, ...], root: Path = ROOT) -> Drift | None:
    """How far the tree has moved on from a commit; None when git does not know the commit, or is not there."""
    since = f"{commit.removesuffix('-dirty')}..HEAD"
    changed = _git(root, "rev-list", "--count", since, "--", *paths)
    commits = _git(root, "rev-list", "--count", since)
    dates = _git(root, "log", "--no-walk=unsorted", "--format=%ct", since.partition(".")[0], "HEAD").split()
    if not (changed and commits and dates):
        return None
    return Drift(int(changed), int(commits), (int(dates[-1]) - int(dates[0])) / 86400)


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""What a kept result was made from, and how far that has moved on since.

The sources of a test file or a benchmark are the file, the modules of this repository that it imports, and `src` of
every package among them; a test of a package has that package for a source, and whatever uses a package uses the core.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.requirements_doc import ROOT

__all__ = ["Drift", "drift", "file_of", "history", "sources"]

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
        for module in _imported(path.read_text(encoding="utf-8")):
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


@functools.cache
def _imported(text: str) -> tuple[str, ...]:
    """Names of modules that a file of this text imports, inside functions too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(dict.fromkeys(found))


def drift(commit: str, paths: tuple[str, ...], root: Path = ROOT) -> Drift | None:
    """How far the tree has moved on from a commit; None when git does not know the commit, or is not there."""
    since = history(commit.removesuffix("-dirty"), root)
    if since is None:
        return None
    touched, days = since
    return Drift(sum(not places.isdisjoint(paths) for places in touched), len(touched), days)


@functools.cache
def history(commit: str, root: Path = ROOT) -> tuple[list[frozenset[str]], float] | None:
    """The files and folders that each commit since has touched, and the days between."""
    dates = _git(root, "log", "--no-walk=unsorted", "--format=%ct", commit, "HEAD").split()
    known = _touched(root, _git(root, "rev-parse", "HEAD"))
    if not (dates and known):
        return None
    touched = [known[name] for name in _git(root, "rev-list", f"{commit}..HEAD").split()]
    return touched, (int(dates[-1]) - int(dates[0])) / 86400


@functools.cache
def _touched(root: Path, head: str) -> dict[str, frozenset[str]]:
    """What every commit up to one has touched: a merge what is its own, a commit that moves a file both places."""
    words = ("-c", "core.quotePath=off", "log", "-c", "--name-only", "--no-renames", "--format=%x00%H", head)
    found = {}
    for entry in _git(root, *words).split("\0")[1:]:
        commit, *names = entry.split("\n")
        found[commit] = frozenset(place for name in names if name for place in _places(name))
    return found


@functools.cache
def _places(name: str) -> tuple[str, ...]:
    """A file or folder and the folders around it."""
    around = name.rpartition("/")[0]
    return (name, *_places(around)) if around else (name,)


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

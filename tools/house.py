"""How big the house is, against what it may be: lines, circles between rooms, names and targets a newcomer meets.

python -m tools.house             the table; 1 when a figure is worse than it may be
python -m tools.house --json      the same as JSON
python -m tools.house --circles   the imports that close circles, worst room pairs first

`goal` is where a figure has to come to; `at most` is what is allowed today, and comes down with every step to the goal.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, packages

__all__ = ["Figure", "Import", "circles", "figures", "imports", "lines", "main"]

CORE = ROOT / "packages" / "layerzero-core" / "src" / "layerzero"
# Packages that came after the goals for lines were set: each brings ops or doors that were not there to be counted.
LATER = {"layerzero-hostile", "layerzero-linear-attention", "layerzero-vllm"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, the goal, and the most it may be today."""

    name: str
    value: int
    goal: int
    at_most: int

    @property
    def ok(self) -> bool:
        """Whether it is inside what is allowed today."""
        return self.value <= self.at_most


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """One module importing another of the same package, anywhere in its text, functions included."""

    importer: str
    imported: str

    @property
    def rooms(self) -> tuple[str, str]:
        """The first-level folders or modules of both."""
        return _room(self.importer), _room(self.imported)


def _room(module: str) -> str:
    return [*module.split("."), ""][1]


def sources(folder: Path) -> list[Path]:
    """Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def lines(files: Iterable[Path]) -> int:
    """Lines of all the files together, blank ones too."""
    return sum(len(file.read_bytes().splitlines()) for file in files)


def imports(folder: Path = CORE) -> Iterator[Import]:
    """Every import of one module of a package by another; imports for type checkers alone are none."""
    files = {_module(file, folder): file for file in sources(folder)}
    for module, file in files.items():
        for node in _running(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [name if name in files else node.module for name in whole]
            else:
                continue
            yield from (Import(module, name) for name in dict.fromkeys(named) if name in files and name != module)


def _module(file: Path, folder: Path) -> str:
    parts = [folder.name, *file.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"):
            yield from _running(child)


def circles(found: Iterable[Import]) -> list[set[str]]:
    """Sets of rooms that can all be reached from each other; the package's own `__init__` is the door, not a room."""
    graph: dict[str, set[str]] = defaultdict(set)
    for item in found:
        start, end = item.rooms
        if start and end and start != end:
            graph[start].add(end)
    reach = {room: _reached(graph, room) for room in list(graph)}
    knots = {frozenset(other for other in reach[room] if room in reach.get(other, ())) for room in reach}
    return sorted((set(knot) for knot in knots if len(knot) > 1), key=len, reverse=True)


def _reached(graph: dict[str, set[str]], room: str) -> set[str]:
    seen, todo = set[str](), [room]
    while todo:
        for other in graph.get(todo.pop(), ()):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def figures() -> list[Figure]:
    """Every figure of the house."""
    import layerzero

    core = sources(CORE.parent)  # the command line too
    every = [file for item in packages() if item.name not in LATER for file in sources(item.path / "src")]
    later = [lines(sources(item.path / "src")) for item in packages() if item.name in LATER]
    naming = [file for file in core if "relu_and_mul" in file.read_text(encoding="utf-8")]
    targets = re.findall(r"^[a-z-]+:.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    tangled = sum(len(knot) for knot in circles(imports()))
    crowd = max(len(list(folder.glob("test_*.py"))) for folder in ROOT.glob("packages/*/tests/**/") if folder.is_dir())
    readme = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    return [
        Figure("Python lines of the core", lines(core), 36_000, 39_755),
        Figure("Python lines of all packages", lines(every), 78_000, 84_150),
        Figure("Python lines of the largest package that came later", max(later), 2_000, 2_000),
        Figure("source files of the core that name relu_and_mul", len(naming), 6, 6),
        Figure("rooms of the core in circles", tangled, 0, 0),
        Figure("names in lz.__all__", len(layerzero.__all__), 25, 25),
        Figure("documented make targets", len(targets), 10, 10),
        Figure("lines of README.md", readme, 110, 110),
        Figure("test files in one folder", crowd, 40, 40),
    ]


def main(argv: Sequence[str]) -> int:
    """Print the figures; 1 when one is worse than it may be."""
    if "--circles" in argv:
        found = sorted(set(imports()))
        for knot in circles(found):
            print("circle:", ", ".join(sorted(knot)))
            for item in found:
                if set(item.rooms) <= knot and item.rooms[0] != item.rooms[1]:
                    print(f"  {item.importer} -> {item.imported}")
        return 0
    table = figures()
    if "--json" in argv:
        print(json.dumps([{**_asdict(item), "ok": item.ok} for item in table], indent=2))
    else:
        wide = max(len(item.name) for item in table)
        print(f"{'':{wide}}  {'now':>7}  {'at most':>7}  {'goal':>7}")
        for item in table:
            end = "" if item.ok else "   TOO MANY"
            print(f"{item.name:{wide}}  {item.value:7}  {item.at_most:7}  {item.goal:7}{end}")
    return 0 if all(item.ok for item in table) else 1


def _asdict(item: Figure) -> dict[str, object]:
    return {name: getattr(item, name) for name in Figure.__slots__}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which tests `make test` runs, and which only `make check`: tests/lanes.toml, made from the times of a run.

    make check                  leaves junit files in build/junit
    python -m tools.lanes       reads them and writes tests/lanes.toml anew (or: python -m tools.lanes FILE …)

The slowest tests go to the lane `check` until the rest fits the budget of the lane `short`. A test is named by its file
and itself, without folder and parameters, so that it keeps its lane when it moves; its time is that of all its
parameters together. A new test is short until it is measured. Tests marked `fault` stay short: what was mended is
watched by every run. Of several junit files the least time of a test counts, so that a busy moment does not decide.
"""

from __future__ import annotations

import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.requirements_doc import ROOT

__all__ = ["BUDGET", "Lanes", "divide", "main", "measured", "render"]

FILE = ROOT / "tests" / "lanes.toml"
JUNIT = ROOT / "build" / "junit"

# Seconds that the tests of the short lane may take together on one core; with two workers half of it passes.
BUDGET = 400.0


@dataclass(frozen=True)
class Lanes:
    """What the file says: the seconds of the short lane when it was measured, and the tests that are not in it."""

    short: float
    check: Mapping[str, float]

    @classmethod
    def read(cls, path: Path = FILE) -> Lanes:
        """The file as it stands."""
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(data["short"], data["check"])


def measured(files: Iterable[Path]) -> tuple[dict[str, float], set[str]]:
    """Seconds of every test by name, and the names of those marked `fault`, from junit files."""
    least: dict[tuple[str, str], float] = {}
    faults: set[str] = set()
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            one = case.get("classname", ""), case.get("name", "")
            least[one] = min(float(case.get("time", "0")), least.get(one, float("inf")))
            if case.find("properties/property[@name='fault']") is not None:
                faults.add(_name(*one))
    seconds: dict[str, float] = {}
    for one, time in least.items():
        seconds[_name(*one)] = seconds.get(_name(*one), 0.0) + time
    return seconds, faults


def _name(classname: str, name: str) -> str:
    """`packages.layerzero-core.tests.test_perfdb.TestX` and `test_y[3]` are `test_perfdb.py::TestX::test_y`."""
    parts = classname.split(".")
    file = max((i for i, part in enumerate(parts) if part.startswith("test_")), default=len(parts) - 1)
    return "::".join((f"{parts[file]}.py", *parts[file + 1 :], name.partition("[")[0]))


def divide(seconds: Mapping[str, float], stay: Collection[str] = (), budget: float = BUDGET) -> Lanes:
    """The slowest of them into the check lane, until what remains is inside the budget."""
    short, check = sum(seconds.values()), {}
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        if short <= budget:
            break
        if name not in stay:
            check[name] = seconds[name]
            short -= seconds[name]
    return Lanes(short, check)


def render(lanes: Lanes) -> str:
    """The file."""
    rows = sorted(lanes.check.items(), key=lambda row: (-round(row[1], 1), row[0]))
    lines = [
        "# Made by `python -m tools.lanes`: tests that `make check` runs and `make test` does not, with their seconds.",
        "# Every other test is in the short lane, unless it is marked slow, stress, benchmark or memray.",
        f"short = {lanes.short:.1f} # seconds of the short lane, on one core",
        "",
        "[check]",
        *(f'"{name}" = {seconds:.1f}' for name, seconds in rows),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Write the file anew from the junit files that are named, or from those of the last `make check`."""
    files = [Path(name) for name in argv] or sorted(JUNIT.glob("*.xml"))
    seconds, faults = measured(files)
    if not seconds:
        print("no junit files: run `make check` first", file=sys.stderr)
        return 2
    lanes = divide(seconds, faults)
    FILE.write_text(render(lanes), encoding="utf-8")
    print(f"short: {len(seconds) - len(lanes.check)} tests, {lanes.short:.0f} s of {BUDGET:.0f} s")
    print(f"check: {len(lanes.check)} tests, {sum(lanes.check.values()):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which tests `make test` runs, and which only `make check`: tests/lanes.toml, made from the times of a run.

    make check                  leaves junit files in build/junit
    python -m tools.lanes       reads them and writes tests/lanes.toml anew (or: python -m tools.lanes FILE …)

The slowest tests go to the lane `check` until the rest fits the budget of the lane `short`. A test is named by its file
and itself, without folder and parameters, so that it keeps its lane when it moves; its time is that of all its
parameters together. Tests of a file that share an expensive fixture go together: whichever runs first pays for it. A
new test is short until it is measured. Of the tests marked `fault` the quickest of each fault stays short, and as many
others as fit into a budget of their own: what was mended is watched by every run. Of several junit files the least time
of a test counts, so that a busy moment does not decide.
"""

from __future__ import annotations

import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.requirements_doc import ROOT

__all__ = ["BUDGET", "FAULTS", "Lanes", "divide", "main", "measured", "render", "sharing", "watched"]

FILE = ROOT / "tests" / "lanes.toml"
JUNIT = ROOT / "build" / "junit"

# Seconds that the tests of the short lane may take together on one core; with two workers half of it passes.
BUDGET = 280.0
# Of these, what the tests of mended faults may take.
FAULTS = 60.0
# A fixture of a file is expensive where a test that uses it took so many seconds.
EXPENSIVE = 3.0


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


def measured(files: Iterable[Path]) -> tuple[dict[str, float], dict[str, set[str]]]:
    """Seconds of every test by name, and the faults that tests marked `fault` name, from junit files."""
    least: dict[tuple[str, str], float] = {}
    faults: dict[str, set[str]] = {}
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            one = case.get("classname", ""), case.get("name", "")
            least[one] = min(float(case.get("time", "0")), least.get(one, float("inf")))
            for item in case.iterfind("properties/property[@name='fault']"):
                faults.setdefault(_name(*one), set()).add(item.get("value", ""))
    seconds: dict[str, float] = {}
    for one, time in least.items():
        seconds[_name(*one)] = seconds.get(_name(*one), 0.0) + time
    return seconds, faults


def sharing(files: Iterable[Path], seconds: Mapping[str, float]) -> dict[str, frozenset[str]]:
    """For every test that uses an expensive fixture of its file: all tests that use it."""
    users: dict[tuple[str, str], set[str]] = {}
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            name = _name(case.get("classname", ""), case.get("name", ""))
            for item in case.iterfind("properties/property[@name='shares']"):
                users.setdefault((name.partition("::")[0], item.get("value", "")), set()).add(name)
    together: dict[str, frozenset[str]] = {}
    for group in users.values():
        if max(seconds[name] for name in group) >= EXPENSIVE:
            for name in group:
                together[name] = together.get(name, frozenset()) | group
    return together


def _name(classname: str, name: str) -> str:
    """`packages.layerzero-core.tests.test_perfdb.TestX` and `test_y[3]` are `test_perfdb.py::TestX::test_y`."""
    parts = classname.split(".")
    file = max((i for i, part in enumerate(parts) if part.startswith("test_")), default=len(parts) - 1)
    return "::".join((f"{parts[file]}.py", *parts[file + 1 :], name.partition("[")[0]))


def watched(seconds: Mapping[str, float], faults: Mapping[str, Collection[str]], budget: float = FAULTS) -> set[str]:
    """The tests of faults that stay short: the quickest of each fault, then the quickest of all inside the budget."""
    order = sorted(faults, key=lambda name: (seconds[name], name))
    numbers = {number for named in faults.values() for number in named}
    stay = {next(name for name in order if number in faults[name]) for number in numbers}
    used = sum(seconds[name] for name in stay)
    for name in order:
        if name not in stay and used + seconds[name] <= budget:
            stay.add(name)
            used += seconds[name]
    return stay


def divide(
    seconds: Mapping[str, float],
    stay: Collection[str] = (),
    leave: Collection[str] = (),
    budget: float = BUDGET,
    together: Mapping[str, Collection[str]] | None = None,
) -> Lanes:
    """Those that `leave`, then the slowest of the others, into the check lane, until the rest is inside the budget.

    `together` says of a test who leaves with it; a group of which one test stays is not held together.
    """
    groups = {name: {name, *(together or {}).get(name, ())} for name in seconds}
    groups = {name: group if group.isdisjoint(stay) else {name} for name, group in groups.items()}
    cost = {name: sum(seconds[one] for one in group) for name, group in groups.items()}
    check = {name: seconds[name] for name in leave if name not in stay}
    short = sum(seconds.values()) - sum(check.values())
    for name in sorted(seconds, key=lambda name: (-cost[name], name)):
        if short <= budget:
            break
        for one in groups[name] if name not in stay else ():
            if one not in check:
                check[one] = seconds[one]
                short -= seconds[one]
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
    stay = watched(seconds, faults)
    lanes = divide(seconds, stay, faults, together=sharing(files, seconds))
    FILE.write_text(render(lanes), encoding="utf-8")
    print(f"short: {len(seconds) - len(lanes.check)} tests, {lanes.short:.0f} s of {BUDGET:.0f} s")
    print(f"of these tests of faults: {len(stay)}, {sum(seconds[name] for name in stay):.0f} s of {FAULTS:.0f} s")
    print(f"check: {len(lanes.check)} tests, {sum(lanes.check.values()):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

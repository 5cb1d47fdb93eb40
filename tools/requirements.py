"""`make requirements`: how many lines of docs/requirements.md are shown, by section, and which are open.

A line counts as shown here when a test of the last `make check` bears its id and passed, and none that bears it failed.
What long lanes showed, and what the H200 did, is read from kept junit files (benchmarks/results/*/junit.xml) with the
commits they were made from: `python -m tools.requirements --machine NAME --keep build/prove/*.xml` puts newer outcomes
in the place of older ones. Exit code 1 on an unknown id.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.requirements_doc import ROOT, Checklist, ChecklistError

__all__ = ["Evidence", "Status", "evidence", "keep", "main", "status"]

HERE = ROOT / "build" / "junit"
RESULTS = ROOT / "benchmarks" / "results"
STATES = ("here", "long", "h200", "elsewhere", "open")


@dataclass
class Evidence:
    """What junit files say: test names by id, and the commits they were made from."""

    passed: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)

    @property
    def ids(self) -> set[str]:
        """Every id that some test bears, whatever became of the test."""
        return set(self.passed) | set(self.failed) | self.skipped

    def shows(self, rid: str) -> bool:
        """Whether a test of this id passed and none failed."""
        return rid in self.passed and rid not in self.failed


def evidence(files: Iterable[Path]) -> Evidence:
    """Read junit files; a skipped test shows nothing, a failed one takes its ids away."""
    result = Evidence()
    for file in files:
        root = ET.parse(file).getroot()
        for suite in root.iter("testsuite"):
            result.commits += [p.get("value", "") for p in suite.iterfind("properties/property[@name='commit']")]
        for case in root.iter("testcase"):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            ids = [p.get("value", "") for p in case.iterfind("properties/property[@name='req']")]
            if case.find("failure") is not None or case.find("error") is not None:
                into = result.failed
            elif case.find("skipped") is not None:
                result.skipped.update(ids)
                continue
            else:
                into = result.passed
            for rid in ids:
                into.setdefault(rid, []).append(name)
    result.commits = list(dict.fromkeys(filter(None, result.commits)))
    return result


def keep(sources: Sequence[Path], target: Path) -> None:
    """Store junit files for good: commit, names, ids and outcomes of the tests that bear ids; no output.

    What the kept file holds stays, but for the tests that ran again.
    """
    kept = ET.Element("testsuites")
    seen: set[tuple[str, str]] = set()
    for source in (*reversed(sources), *([target] if target.exists() else [])):
        for suite in ET.parse(source).getroot().iter("testsuite"):
            copy = ET.Element("testsuite", {"name": suite.get("name", ""), "timestamp": suite.get("timestamp", "")})
            copy.extend(suite.findall("properties"))
            ran = [case for case in suite.iterfind("testcase") if _named(case) not in seen]
            for case in ran:
                if case.find("properties/property[@name='req']") is None:
                    continue
                row = ET.SubElement(copy, "testcase", case.attrib)
                row.extend(case.findall("properties"))
                for outcome in ("failure", "error", "skipped"):
                    if case.find(outcome) is not None:
                        ET.SubElement(row, outcome)
            seen |= {_named(case) for case in ran}
            if copy.find("testcase") is not None:
                kept.insert(0, copy)
    ET.indent(kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(ET.tostring(kept, encoding="utf-8", xml_declaration=True) + b"\n")


def _named(case: ET.Element) -> tuple[str, str]:
    return case.get("classname", ""), case.get("name", "")


@dataclass(frozen=True)
class Status:
    """Where every requirement stands: one of STATES by id, and the ids that tests bear but the checklist lacks."""

    states: dict[str, str]
    failing: tuple[str, ...]
    unknown: tuple[str, ...]


def status(checklist: Checklist, found: Mapping[str, Evidence]) -> Status:
    """The first that holds: cannot be shown on our machines, shown here, in a long lane, on the H200, open.

    An excused line stays excused though a test with a made-up device bears its id: what it asks for is the real thing.
    """
    states: dict[str, str] = {}
    for rid in checklist.requirements:
        if rid in checklist.elsewhere:
            states[rid] = "elsewhere"
        else:
            states[rid] = next((where for where, item in found.items() if item.shows(rid)), "open")
    failing = tuple(rid for rid in checklist.requirements if any(rid in item.failed for item in found.values()))
    unknown = tuple(sorted(set().union(*(item.ids for item in found.values())) - checklist.ids))
    return Status(states, failing, unknown)


def as_json(checklist: Checklist, result: Status, found: Mapping[str, Evidence]) -> dict[str, object]:
    """The whole state as one JSON-compatible value."""
    sections = {section: {state: 0 for state in STATES} | {"total": 0} for section in checklist.sections}
    for rid, state in result.states.items():
        row = sections[checklist.requirements[rid].section]
        row[state] += 1
        row["total"] += 1
    return {
        "commits": {where: item.commits for where, item in found.items()},
        "sections": sections,
        "requirements": {
            rid: {
                "state": state,
                "text": checklist.requirements[rid].text,
                "tests": found[state].passed.get(rid, []) if state in found else [],
                "why": checklist.elsewhere.get(rid) if state == "elsewhere" else None,
            }
            for rid, state in result.states.items()
        },
        "failing": list(result.failing),
        "unknown": list(result.unknown),
    }


def render(checklist: Checklist, result: Status, found: Mapping[str, Evidence], show_open: Sequence[str]) -> str:
    """The table people read; `show_open` names sections whose open lines are printed in full."""
    lines = [f"{'section':<9}{'shown here':>12}{'long lane':>11}{'on H200':>9}{'elsewhere':>11}{'open':>6}{'total':>7}"]
    totals = dict.fromkeys(STATES, 0)
    for section in checklist.sections:
        states = [state for rid, state in result.states.items() if checklist.requirements[rid].section == section]
        count = {state: states.count(state) for state in STATES}
        lines.append(_row(section, count))
        totals = {state: totals[state] + count[state] for state in STATES}
    lines += ["-" * 65, _row("all", totals), ""]
    absent = {"here": "no junit file under build/junit, run `make check` first"}
    for where, item in found.items():
        lines.append(f"{where}: {', '.join(item.commits) or absent.get(where, 'no kept junit file')}")
    lines += [f"elsewhere: {rid}: {why}" for rid, why in checklist.elsewhere.items()]
    for rid, state in result.states.items():
        requirement = checklist.requirements[rid]
        if state == "open" and (requirement.section in show_open or "all" in show_open):
            lines.append(f"open: {rid} {requirement.text}")
    for rid in result.failing:
        names = [name for item in found.values() for name in item.failed.get(rid, [])]
        lines.append(f"failing: {rid} ({len(names)} tests, the first {names[0]})")
    lines += [f"unknown id: {rid} is not in docs/requirements.md" for rid in result.unknown]
    return "\n".join(lines)


def _row(name: str, count: dict[str, int]) -> str:
    total = sum(count.values())
    shown = f"{name:<9}{count['here']:>12}{count['long']:>11}{count['h200']:>9}"
    return f"{shown}{count['elsewhere']:>11}{count['open']:>6}{total:>7}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table (or JSON); 1 when a test bears an unknown id or a file cannot be read, else 0."""
    parser = argparse.ArgumentParser(prog="make requirements", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--open", nargs="*", default=[], metavar="SECTION", help="print the open lines; 'all' for all")
    parser.add_argument("--here", type=Path, default=HERE, help="folder of junit files of the last `make check`")
    parser.add_argument("--kept", type=Path, default=RESULTS, help="folder of a folder for each machine")
    parser.add_argument("--keep", type=Path, nargs="+", metavar="JUNIT", help="first store these junit files")
    parser.add_argument("--machine", default="h200", help="the machine they were made on (h200)")
    args = parser.parse_args(argv)
    try:
        if args.keep is not None:
            keep(args.keep, args.kept / args.machine / "junit.xml")
        checklist = Checklist.load()
        files = {file.parent.name: file for file in sorted(args.kept.glob("*/junit.xml"))}
        found = {
            "here": evidence(sorted(args.here.glob("*.xml")) if args.here.is_dir() else ()),
            "long": evidence(file for name, file in files.items() if name != "h200"),
            "h200": evidence(file for name, file in files.items() if name == "h200"),
        }
    except (OSError, ChecklistError, ET.ParseError) as error:
        print(f"requirements: {error}", file=sys.stderr)
        return 1
    result = status(checklist, found)
    if args.json:
        print(json.dumps(as_json(checklist, result, found), indent=2, ensure_ascii=False))
    else:
        print(render(checklist, result, found, args.open))
    return 1 if result.unknown else 0


if __name__ == "__main__":
    sys.exit(main())

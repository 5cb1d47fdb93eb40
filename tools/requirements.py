"""`make requirements`: how many lines of docs/requirements.md are shown, by section; fails when one is open or failing.

A line counts as shown here when a test of the last `make check` bears its id and passed. What long lanes showed, and
what the H200 did, is read from kept junit files (benchmarks/results/*/junit.xml) with the commits they were made from:
`python -m tools.requirements --machine NAME --keep build/prove/*.xml` puts newer outcomes in the place of older ones. A
line that any of them shows to fail is failing, whatever else passed.

A line that only a kept result shows is stale when the sources of all its tests (tools/sources.py) changed since. That
is a warning; with `--release` it is a failure, and so are tests of `make check` made from another commit than this one.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.req_plugin import current_commit
from tools.requirements_doc import ROOT, Checklist, ChecklistError
from tools.sources import Drift, drift, file_of, sources

__all__ = ["Evidence", "Status", "evidence", "keep", "main", "stale", "status"]

HERE = ROOT / "build" / "junit"
RESULTS = ROOT / "benchmarks" / "results"
STATES = ("here", "long", "h200", "elsewhere", "open", "failing")


@dataclass
class Evidence:
    """What junit files say: test names by id, why tests were skipped, and the commits each test was made from."""

    passed: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def ids(self) -> set[str]:
        """Every id that some test bears, whatever became of the test."""
        return set(self.passed) | set(self.failed) | set(self.skipped)

    def shows(self, rid: str) -> bool:
        """Whether a test of this id passed and none failed."""
        return rid in self.passed and rid not in self.failed


def evidence(files: Iterable[Path]) -> Evidence:
    """Read junit files; a skipped test shows nothing, a failed one takes its ids away."""
    result = Evidence()
    for file in files:
        for suite in ET.parse(file).getroot().iter("testsuite"):
            made = [p.get("value", "") for p in suite.iterfind("properties/property[@name='commit']")]
            result.commits += made
            for case in suite.iterfind("testcase"):
                name = f"{case.get('classname', '')}::{case.get('name', '')}"
                ids = [p.get("value", "") for p in case.iterfind("properties/property[@name='req']")]
                left_out = case.find("skipped")
                if case.find("failure") is not None or case.find("error") is not None:
                    into, entry = result.failed, name
                elif left_out is not None:
                    into, entry = result.skipped, left_out.get("message", "")
                else:
                    into, entry = result.passed, name
                    result.origins[name] = made[0] if made else ""
                for rid in ids:
                    into.setdefault(rid, []).append(entry)
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
    """The first that holds: a test fails, cannot be shown on our machines, shown here, by a long lane, on the H200.

    An excused line stays excused though a test with a made-up device bears its id: what it asks for is the real thing.
    """
    failing = tuple(rid for rid in checklist.requirements if any(rid in item.failed for item in found.values()))
    states: dict[str, str] = {}
    for rid in checklist.requirements:
        if rid in failing:
            states[rid] = "failing"
        elif rid in checklist.elsewhere:
            states[rid] = "elsewhere"
        else:
            states[rid] = next((where for where, item in found.items() if item.shows(rid)), "open")
    unknown = tuple(sorted(set().union(*(item.ids for item in found.values())) - checklist.ids))
    return Status(states, failing, unknown)


def stale(result: Status, found: Mapping[str, Evidence], root: Path = ROOT) -> dict[str, Drift | None]:
    """Lines shown by kept results alone whose sources have all changed since, and how far; None: nobody can tell."""
    old: dict[str, Drift | None] = {}
    for rid, state in result.states.items():
        if state not in ("long", "h200"):
            continue
        item = found[state]
        made = {(name.partition("::")[0], item.origins[name]) for name in item.passed[rid]}
        ages = [
            drift(commit, sources(file, root), root) if (file := file_of(module, root)) is not None else None
            for module, commit in sorted(made)
        ]
        if all(age is None or age.changed for age in ages):
            old[rid] = min(filter(None, ages), key=lambda age: age.changed, default=None)
    return old


def _tools_missing(rid: str, here: Evidence) -> str:
    """The tool or package that kept every test of an open line from running here, where a skip is allowed."""
    return next((why for why in here.skipped.get(rid, ()) if why.startswith("missing ")), "")


def as_json(
    checklist: Checklist, result: Status, found: Mapping[str, Evidence], old: Iterable[str]
) -> dict[str, object]:
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
        "stale": list(old),
        "unknown": list(result.unknown),
    }


def render(checklist: Checklist, result: Status, found: Mapping[str, Evidence], old: Mapping[str, Drift | None]) -> str:
    """The table people read, and every line that is not shown today."""
    head = f"{'section':<9}{'shown here':>12}{'long lane':>11}{'on H200':>9}{'elsewhere':>11}{'open':>6}"
    lines = [f"{head}{'failing':>9}{'total':>7}"]
    totals = dict.fromkeys(STATES, 0)
    for section in checklist.sections:
        states = [state for rid, state in result.states.items() if checklist.requirements[rid].section == section]
        count = {state: states.count(state) for state in STATES}
        lines.append(_row(section, count))
        totals = {state: totals[state] + count[state] for state in STATES}
    lines += ["-" * 74, _row("all", totals), ""]
    absent = {"here": "no junit file under build/junit, run `make check` first"}
    for where, item in found.items():
        lines.append(f"{where}: {', '.join(item.commits) or absent.get(where, 'no kept junit file')}")
    lines += [f"elsewhere: {rid}: {why}" for rid, why in checklist.elsewhere.items()]
    for rid, age in old.items():
        told = age or "made from a commit or a test that is not here"
        lines.append(f"stale: {rid} is shown by a kept result alone ({result.states[rid]}): {told}")
    for rid, state in result.states.items():
        if state == "open" and found["here"].ids:
            missing = _tools_missing(rid, found["here"])
            lines.append(f"open: {rid} {checklist.requirements[rid].text}{f' ({missing})' if missing else ''}")
    for rid in result.failing:
        names = [name for item in found.values() for name in item.failed.get(rid, [])]
        lines.append(f"failing: {rid} ({len(names)} tests, the first {names[0]})")
    lines += [f"unknown id: {rid} is not in docs/requirements.md" for rid in result.unknown]
    return "\n".join(lines)


def _row(name: str, count: dict[str, int]) -> str:
    total = sum(count.values())
    shown = f"{name:<9}{count['here']:>12}{count['long']:>11}{count['h200']:>9}"
    return f"{shown}{count['elsewhere']:>11}{count['open']:>6}{count['failing']:>9}{total:>7}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table (or JSON); 1 when a line is open or failing, an id unknown or a file torn, else 0."""
    parser = argparse.ArgumentParser(prog="make requirements", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--release", action="store_true", help="fail on what is stale, too, and on what no tool showed")
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
    old = stale(result, found, ROOT)
    if args.json:
        print(json.dumps(as_json(checklist, result, found, old), indent=2, ensure_ascii=False))
    else:
        print(render(checklist, result, found, old))
    unshown = [rid for rid, state in result.states.items() if state == "open"]
    if args.release:
        unshown += [*old, *({*found["here"].commits} - {current_commit()})]
    else:
        unshown = [rid for rid in unshown if not _tools_missing(rid, found["here"])]
    return 1 if unshown or result.failing or result.unknown else 0


if __name__ == "__main__":
    sys.exit(main())

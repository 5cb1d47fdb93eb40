"""Other people's tests with our code in the place of theirs: `make prove NAME=foreign FOREIGN=folder-with-clones`.

Each suite of tools/foreign.toml runs plain and once for each way of putting us in place (tools/foreign_plugin.py), from
the sources of the commit it names; nothing of them is kept. A test that passes plain and not with us is a difference:
it is named in `[reasons]` with a reason, or the run fails. What ran, what was left out and why, and every difference go
to build/prove/foreign.json. `ONLY=sdpa,definitions` runs some of the suites, `AT=sdpa=v2.13.0-rc14` another commit than
the table's, which the comparison names; what their tests import beyond our own environment may stand on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.req_plugin import current_commit
from tools.requirements_doc import ROOT

__all__ = ["Outcome", "Suite", "compared", "main", "outcomes", "read"]

TABLE = ROOT / "tools" / "foreign.toml"
FOLDER = ROOT / "build" / "foreign"


@dataclass(frozen=True)
class Suite:
    """Tests of one project at one commit, and the ways we are put in place."""

    name: str
    clone: str
    commit: str
    tests: Sequence[str]
    ways: Sequence[str]
    path: Sequence[str] = ()
    take: Sequence[str] = ()

    def narrowed(self, words: str) -> Suite:
        """Of its tests those that these words of `pytest -k` choose, too."""
        *before, old = self.tests if "-k" in self.tests[-2:-1] else (*self.tests, "-k", "")
        return replace(self, tests=(*before, f"({old}) and ({words})" if old else words))

    def unpack(self, clones: Path, into: Path) -> str:
        """Lay out the sources of the commit in a folder; its full name."""
        clone, wanted = clones / self.clone, self.commit.format(torch=version("torch").partition("+")[0])
        said = subprocess.run(
            ["git", "-C", str(clone), "rev-parse", f"{wanted}^{{commit}}"], capture_output=True, text=True, check=False
        )
        if said.returncode:
            raise LookupError(f"there is no {wanted} in {self.clone}: clone it into the folder that FOREIGN names")
        found, mark = said.stdout.strip(), into / ".unpacked"
        if not mark.is_file() or mark.read_text(encoding="utf-8") != found:
            into.mkdir(parents=True, exist_ok=True)
            wanted_files = ["git", "-C", str(clone), "archive", found, *self.take]
            archive = subprocess.run(wanted_files, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)
            mark.write_text(found, encoding="utf-8")
        return found

    def run(self, sources: Path, way: str, junit: Path, limit_s: float) -> dict[str, Outcome]:
        """How every test ended, plain (an empty way) or with us."""
        paths = [*(str(sources / part) for part in self.path), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        plugin = ["-p", "tools.foreign_plugin"] if way else []
        # Their configuration or none, never ours, though their sources lie inside our folder.
        files = [sources / name for name in ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")]
        own = any(re.search(r"^\[(tool[.:])?pytest\b", file.read_text(), re.M) for file in files if file.is_file())
        theirs = [f"--rootdir={sources}", f"--confcutdir={sources}", *([] if own else ["-c", os.devnull])]
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *theirs]
        junit.unlink(missing_ok=True)
        log = junit.with_suffix(".log")
        with log.open("w", encoding="utf-8") as said:
            subprocess.run(
                [*command, *self.tests, f"--junitxml={junit}"],
                cwd=sources, env={**environ, "LAYERZERO_FOREIGN": way}, timeout=limit_s, stdout=said, stderr=said,
                check=False,
            )  # fmt: skip
        if not junit.is_file():
            raise RuntimeError(f"pytest wrote no results, see {log}")
        return outcomes(junit)


@dataclass(frozen=True)
class Outcome:
    """How a test ended: passed, failed or skipped, and what it said."""

    state: str
    why: str = ""


def outcomes(junit: Path) -> dict[str, Outcome]:
    """Every test of a junit file."""
    found = {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        state = Outcome("passed")
        for tag, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            if (element := case.find(tag)) is not None:
                state = Outcome(word, (element.get("message") or "").partition("\n")[0][:300])
        found[f"{case.get('classname')}::{case.get('name')}"] = state
    return found


def compared(
    name: str, plain: Mapping[str, Outcome], ours: Mapping[str, Outcome], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """What ran both ways, what was left out, and which tests pass plain and not with us."""
    passed = [test for test, outcome in plain.items() if outcome.state == "passed"]
    differ = {}
    for test in passed:
        outcome = ours.get(test, Outcome("missing", "was not collected"))
        if outcome.state != "passed":
            reason = next((why for glob, why in reasons.items() if fnmatchcase(f"{name} {test}", glob)), None)
            differ[test] = {"state": outcome.state, "said": outcome.why, "reason": reason}
    skipped = Counter(outcome.why for outcome in plain.values() if outcome.state == "skipped")
    return {
        "plain": dict(Counter(outcome.state for outcome in plain.values())),
        "with us": dict(Counter(outcome.state for outcome in ours.values())),
        "passed both": len(passed) - len(differ),
        "left out": dict(skipped.most_common()),
        "failed plain": [test for test, outcome in plain.items() if outcome.state == "failed"],
        "differences": differ,
    }


def read(table: Path = TABLE) -> tuple[list[Suite], dict[str, str]]:
    """The suites and the reasons; a reason of fewer than five words is none."""
    data = tomllib.loads(table.read_text(encoding="utf-8"))
    reasons = data.get("reasons", {})
    for glob, why in reasons.items():
        if len(str(why).split()) < 5:
            raise ValueError(f"{table.name}: {glob} has no reason")
    return [Suite(name, **entry) for name, entry in data["suite"].items()], reasons


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suites and write the comparison; 1 on a difference without a reason, or when a suite did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="folder with a clone of each project")
    parser.add_argument("--only", default="", help="names of suites, parted by commas")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "prove" / "foreign.json")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each run of a suite")
    parser.add_argument("-k", help="a narrower choice of tests, as of pytest")
    parser.add_argument("--at", default="", help="other commits than the table's: suite=commit, parted by commas")
    args = parser.parse_args(argv)
    suites, reasons = read()
    other = dict(item.split("=", 1) for item in args.at.split(",") if item)
    suites = [replace(suite, commit=other.pop(suite.name, suite.commit)) for suite in suites]
    if other:
        parser.error(f"--at names no suite of {TABLE.name}: {', '.join(other)}")
    wanted = [suite for suite in suites if not args.only or suite.name in args.only.split(",")]
    found: dict[str, Any] = {"commit": current_commit(), "torch": version("torch"), "suites": {}}
    bad = 0
    for suite in wanted:
        folder = FOLDER / suite.name
        folder.mkdir(parents=True, exist_ok=True)
        more = suite if not args.k else suite.narrowed(args.k)
        try:
            made_from = suite.unpack(args.clones, folder / "sources")
            plain = more.run(folder / "sources", "", folder / "plain.xml", args.limit)
            rows = {way: more.run(folder / "sources", way, folder / f"{way}.xml", args.limit) for way in suite.ways}
        except (LookupError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{suite.name}: not run: {error}")
            found["suites"][suite.name] = {"not run": str(error)}
            bad += 1
            continue
        results = {way: compared(f"{suite.name} {way}", plain, ours, reasons) for way, ours in rows.items()}
        found["suites"][suite.name] = {"commit": made_from, "tests": more.tests, "ways": results}
        for way, result in results.items():
            unnamed = {test: row for test, row in result["differences"].items() if row["reason"] is None}
            bad += bool(unnamed) or not result["passed both"]
            counts = f"{result['passed both']} passed both ways, {len(result['differences'])} differ"
            print(f"{suite.name} at {made_from[:12]}, {way}: {counts}, {len(unnamed)} of them without a reason")
            for test, row in unnamed.items():
                print(f"  {test}: {row['state']}: {row['said']}")
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if bad or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())

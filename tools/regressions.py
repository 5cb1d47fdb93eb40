"""The correctness gate: what `lz verify` passed before, it passes now.

    python -m tools.regressions                          a fresh run against the kept outcome of this machine
    python -m tools.regressions --report FILE            the same with a report of `lz verify --json`
    python -m tools.regressions --keep --machine NAME    the fresh outcome becomes benchmarks/results/NAME/verify.json

A check that fails, a kernel that no longer runs here and a check that is no longer made are regressions, exit 1. What
is taken out on purpose stands in benchmarks/removals.toml with its reason; a check that fails is excused by nothing.
Kernels and checks that are new are welcome as long as they pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools.req_plugin import current_commit
from tools.requirements_doc import ROOT

__all__ = ["Key", "Outcome", "Regression", "Removal", "baselines", "fresh_report", "main", "regressions", "removals"]

RESULTS = ROOT / "benchmarks" / "results"
REMOVALS = ROOT / "benchmarks" / "removals.toml"
COMMAND = ("verify", "--lane", "quick", "--json")
_ABOVE = "layers and models"  # levels 2 to 5: which kernel serves there is selection's choice, not part of the check


@dataclass(frozen=True, order=True, slots=True)
class Key:
    """One check: the kernel it is about, and what is checked."""

    kernel: str
    check: str
    stage: str = ""

    def __str__(self) -> str:
        return " · ".join(part for part in (self.kernel, self.check, self.stage) if part)


@dataclass(frozen=True)
class Outcome:
    """How often each check passed or failed in a run; and the kernels that run on other machines, with the reason."""

    device: str
    passed: Mapping[Key, int]
    failed: Mapping[Key, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of_report(cls, report: Mapping[str, Any], device: str) -> Outcome:
        """From what `lz verify --json` printed."""
        passed: Counter[Key] = Counter()
        failed = {}
        for level in report["levels"]:
            for check in level["checks"]:
                key = _key(level["level"], check)
                if check["status"] == "ok":
                    passed[key] += 1
                elif check["status"] == "fail":
                    failed[key] = check.get("detail") or f"off by {check.get('max_abs')}"
        skipped = {level["level"]: level["reason"] for level in report["levels"] if level.get("reason")}
        return cls(device, passed, failed, {item["kernel"]: item["why"] for item in report["absent"]}, skipped)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Outcome:
        """From a kept file."""
        passed = {
            Key(kernel, check, stage): count
            for kernel, checks in data["passed"].items()
            for check, stages in checks.items()
            for stage, count in stages.items()
        }
        return cls(data["device"], passed, {}, dict(data["elsewhere"]))

    def to_json(self) -> dict[str, Any]:
        """What is kept: passes only, by kernel, check and stage."""
        passed: dict[str, dict[str, dict[str, int]]] = {}
        for key, count in sorted(self.passed.items()):
            passed.setdefault(key.kernel, {}).setdefault(key.check, {})[key.stage] = count
        return {"device": self.device, "elsewhere": dict(sorted(self.elsewhere.items())), "passed": passed}

    def only(self, kernels: Collection[str]) -> Outcome:
        """The part of it that is about these kernels, each alone."""
        kept = {key: count for key, count in self.passed.items() if key.kernel in kernels}
        return Outcome(self.device, kept, self.failed, self.elsewhere, self.skipped)

    @property
    def kernels(self) -> frozenset[str]:
        """Kernels with a check that passed or failed."""
        return frozenset(key.kernel for key in (*self.passed, *self.failed))


def _key(level: int, check: Mapping[str, Any]) -> Key:
    what = " ".join(str(part) for part in (level, check["name"], check.get("dtype", "")) if part != "")
    if level < 2 and check.get("kernel"):
        return Key(check["kernel"], what, check.get("stage", ""))
    return Key(_ABOVE, what, check.get("subject", ""))


@dataclass(frozen=True, slots=True)
class Removal:
    """Kernels (glob) or some of their checks (glob) that were taken out on purpose, and why."""

    kernel: str
    why: str
    check: str = "*"

    def covers(self, key: Key) -> bool:
        """Whether it speaks of this check."""
        return fnmatchcase(key.kernel, self.kernel) and fnmatchcase(f"{key.check} {key.stage}".strip(), self.check)


@dataclass(frozen=True, slots=True)
class Regression:
    """Something that was right and is so no longer; or is new and wrong."""

    kind: str
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f" ({self.detail})" if self.detail else "")


def removals(path: Path = REMOVALS) -> list[Removal]:
    """The intended removals; one without a reason is an error."""
    found = [Removal(**item) for item in tomllib.loads(path.read_text(encoding="utf-8")).get("removed", ())]
    for item in found:
        if len(item.why.split()) < 5 or item.kernel.strip("*.") == "":
            raise ValueError(f"{path.name}: the removal of {item.kernel!r} gives no reason, or names every kernel")
    return found


def regressions(before: Outcome | None, now: Outcome, allowed: Iterable[Removal] = ()) -> list[Regression]:
    """What got worse from one outcome to the next, worst first; without a `before`, only what fails."""
    known = frozenset() if before is None else frozenset(before.passed)
    found = [
        Regression("passed before, fails now" if key in known else "new and wrong", str(key), why)
        for key, why in sorted(now.failed.items())
    ]
    if before is None:
        return found
    allowed = list(allowed)
    gone = {
        key: count - now.passed.get(key, 0)
        for key, count in before.passed.items()
        if now.passed.get(key, 0) < count and key not in now.failed and not any(item.covers(key) for item in allowed)
    }
    lost = sorted({key.kernel for key in gone} - now.kernels - {_ABOVE})
    found += [Regression("kernel vanished", name, now.elsewhere.get(name, "no longer registered")) for name in lost]
    found += [
        Regression("check vanished", str(key), f"{number} of {before.passed[key]}" + _level_reason(key, now))
        for key, number in sorted(gone.items())
        if key.kernel not in lost
    ]
    return found


def _level_reason(key: Key, now: Outcome) -> str:
    reason = now.skipped.get(int(key.check.split(" ", 1)[0]), "")
    return f"; {reason}" if reason else ""


def spent(allowed: Sequence[Removal], kept: Iterable[Outcome]) -> list[Removal]:
    """Removals that cover nothing kept any more: they have done their work, and would hide the next loss."""
    keys = [key for outcome in kept for key in outcome.passed]
    return [item for item in allowed if not any(item.covers(key) for key in keys)]


def baselines(folder: Path = RESULTS) -> dict[str, Outcome]:
    """The kept outcome of each machine, by folder."""
    return {
        path.parent.name: Outcome.of_json(json.loads(path.read_bytes()))
        for path in sorted(folder.glob("*/verify.json"))
    }


def device_name(kind: str) -> str:
    """What the device of a run is called, so that an outcome meets only outcomes of its like."""
    from layerzero.model.device import DeviceSpec

    return str(DeviceSpec.detect(kind).name or platform.machine())


def fresh_report(*options: str) -> dict[str, Any]:
    """`lz verify`, quick lane, in a process of its own that knows no settings, measurements or quarantine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    env |= {"LAYERZERO_PERFDB": "off", "LAYERZERO_QUARANTINE": "off", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "layerzero_cli", *COMMAND, *options]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"lz verify gave no report (exit {done.returncode}):\n{done.stderr[-2000:]}") from None
    return report


def main(argv: Sequence[str] = ()) -> int:
    """Compare, or keep; 1 when something regressed."""
    parser = argparse.ArgumentParser(prog="python -m tools.regressions", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--report", type=Path, help="a report of `lz verify --json` instead of a fresh run")
    parser.add_argument("--device", help="as for lz verify")
    parser.add_argument("--keep", action="store_true", help="write the outcome as this machine's baseline")
    parser.add_argument("--machine", help="the folder to keep it in")
    given = parser.parse_args(argv)
    if given.keep and not given.machine:
        parser.error("--keep needs --machine NAME")
    options = ("--device", given.device) if given.device else ()
    report = json.loads(given.report.read_bytes()) if given.report else fresh_report(*options)
    now = Outcome.of_report(report, device_name(report["device"]))
    kept = baselines()
    mine = next((name for name, outcome in kept.items() if outcome.device == now.device), None)
    found = regressions(kept[mine] if mine else None, now, removals())
    for item in found:
        print(item)
    count = sum(now.passed.values())
    against = (
        f"against {mine}/verify.json" if mine else f"no outcome is kept for {now.device!r}: nothing to compare with"
    )
    print(f"correctness: {count} checks pass, {len(now.failed)} fail, {len(found)} regressions; {against}")
    if found or not given.keep:
        return 1 if found else 0
    where = RESULTS / given.machine / "verify.json"
    _keep(where, report, now)
    for item in spent(removals(), baselines().values()):
        print(f"take the removal of {item.kernel} {item.check} out of {REMOVALS.name}: nothing kept needs it now")
    print(f"kept {where.relative_to(ROOT)}")
    return 0


def _keep(where: Path, report: Mapping[str, Any], now: Outcome) -> None:
    from layerzero.files import write_whole

    head = {
        "benchmark": "verify",
        "command": "python -m tools.regressions --keep --machine " + where.parent.name,
        "commit": current_commit(),
        "lane": report["lane"],
        "seed": report["seed"],
        "versions": report["versions"],
    }
    data = {**head, **now.to_json()}
    passed = data.pop("passed")
    # one line for each kernel: a change of one is one line of a diff
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(checks)}" for name, checks in passed.items())
    where.parent.mkdir(parents=True, exist_ok=True)
    write_whole(where, json.dumps(data, indent=1)[:-2] + f',\n "passed": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

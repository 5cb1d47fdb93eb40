"""The ledger of known issues: docs/known-issues.toml, the page made of it, and the gate on what is open.

python -m tools.known_issues             write docs/known-issues.md
python -m tools.known_issues --check     1 when the page is out of date, or a P0 or P1 is open
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.requirements_doc import ROOT

__all__ = ["BLOCKING", "Issue", "Ledger", "main", "render"]

LEDGER = ROOT / "docs" / "known-issues.toml"
PAGE = ROOT / "docs" / "known-issues.md"
SEVERITIES = ("P0", "P1", "P2", "P3")
BLOCKING = ("P0", "P1")


@dataclass(frozen=True, slots=True)
class Issue:
    """One entry: how bad, what, since which version, whom it hits, what to do; and once it is closed, how.

    `fault` is the number that tests name: `pytest -m fault` runs them.
    """

    id: str
    severity: str
    since: str
    what: str
    hits: str
    workaround: str
    fixed: str = ""
    fault: int = 0

    @property
    def blocks(self) -> bool:
        """Whether a release must wait for it."""
        return not self.fixed and self.severity in BLOCKING


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries, and what the severities mean."""

    severity: Mapping[str, str]
    issues: tuple[Issue, ...]

    @property
    def open(self) -> tuple[Issue, ...]:
        """Entries that are not closed, worst first."""
        found = [item for item in self.issues if not item.fixed]
        return tuple(sorted(found, key=lambda item: (item.severity, item.id)))

    @property
    def blocking(self) -> tuple[Issue, ...]:
        """Open entries that a release must wait for."""
        return tuple(item for item in self.open if item.blocks)

    @classmethod
    def read(cls, path: Path = LEDGER) -> Ledger:
        """The ledger; an entry that lacks something or means nothing is an error that names it."""
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if tuple(data.get("severity", ())) != SEVERITIES:
            raise ValueError(f"{path.name}: expected meanings of {', '.join(SEVERITIES)}, in this order")
        issues, seen = [], set()
        for item in data.get("issue", ()):
            name = item.get("id", "an entry without id")
            try:
                issue = Issue(**item)
            except TypeError as error:
                raise ValueError(f"{path.name}: {name}: {error}") from None
            if issue.severity not in SEVERITIES:
                raise ValueError(f"{path.name}: {name}: severity {issue.severity!r}, expected {', '.join(SEVERITIES)}")
            empty = [key for key in ("id", "since", "what", "hits", "workaround") if not getattr(issue, key).strip()]
            if empty or issue.id in seen:
                raise ValueError(f"{path.name}: {name}: {'said twice' if issue.id in seen else f'no {empty[0]}'}")
            seen.add(issue.id)
            issues.append(issue)
        return cls(data["severity"], tuple(issues))


def render(ledger: Ledger) -> str:
    """The page."""
    lines = [
        "# Known issues",
        "",
        "Made by `python -m tools.known_issues` from [known-issues.toml](known-issues.toml); a test keeps the two",
        "together, and `python -m tools.gates` fails while a P0 or P1 is open.",
        "",
        "| severity | meaning | open |",
        "|---|---|---:|",
    ]
    for name, meaning in ledger.severity.items():
        lines.append(f"| {name} | {meaning} | {sum(item.severity == name for item in ledger.open)} |")
    lines += [
        "",
        "## Open",
        "",
        "| id | severity | since | what | whom it hits | what to do |",
        "|---|---|---|---|---|---|",
    ]
    for item in ledger.open:
        cells = (f"`{item.id}`", item.severity, item.since, item.what, item.hits, item.workaround)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    closed = [item for item in ledger.issues if item.fixed]
    if closed:
        lines += ["", "## Closed", "", "| id | fault | severity | what | how |", "|---|---:|---|---|---|"]
        for item in closed:
            cells = (f"`{item.id}`", str(item.fault or ""), item.severity, item.what, item.fixed)
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(argv: Sequence[str] = ()) -> int:
    """Write the page, or check it and the gate."""
    ledger = Ledger.read()
    page = render(ledger)
    if "--check" not in argv:
        PAGE.write_text(page, encoding="utf-8")
        print(f"wrote {PAGE.name}: {len(ledger.open)} open")
        return 0
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page
    if stale:
        print(f"{PAGE.name} is out of date: python -m tools.known_issues")
    for item in ledger.blocking:
        print(f"open {item.severity}: {item.id}: {item.what}")
    return 1 if stale or ledger.blocking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Reads the checklist `docs/requirements.md` and the table of lines that cannot be shown on our machines."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Checklist", "ChecklistError", "Requirement"]

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "requirements.md"
ELSEWHERE = ROOT / "docs" / "requirements_elsewhere.toml"

_HEADING = re.compile(r"^## ([A-Z][A-Z0-9]*(?: / [A-Z][A-Z0-9]*)*)(?: —|$)")
_LINE = re.compile(r"^- \*\*(R-[A-Z0-9]+(?:-[A-Z0-9]+)?-\d{2})\*\* (\S.*)$")
_STRAY = re.compile(r"^[-*\s]*(R-[A-Z0-9-]+)")


class ChecklistError(ValueError):
    """The checklist or its table of exceptions does not parse; the message names the file and the line."""


@dataclass(frozen=True)
class Requirement:
    """One checkable line: its id, the section it stands in, and its text."""

    id: str
    section: str
    text: str


@dataclass(frozen=True)
class Checklist:
    """Every requirement by id, in the order of the page, and why some cannot be shown on the machines we have."""

    requirements: Mapping[str, Requirement]
    elsewhere: Mapping[str, str]

    @property
    def ids(self) -> frozenset[str]:
        """All known ids."""
        return frozenset(self.requirements)

    @property
    def sections(self) -> tuple[str, ...]:
        """Section names in the order of the page."""
        return tuple(dict.fromkeys(r.section for r in self.requirements.values()))

    @classmethod
    def load(cls, doc: Path = DOC, elsewhere: Path = ELSEWHERE) -> Checklist:
        """Read both files; refuse a repeated id, a line in the wrong section, an exception for an unknown id."""
        found = parse(doc.read_text(encoding="utf-8"), name=doc.name)
        excused: dict[str, str] = {}
        if elsewhere.exists():
            excused = tomllib.loads(elsewhere.read_text(encoding="utf-8")).get("elsewhere", {})
        for rid, why in excused.items():
            if rid not in found:
                raise ChecklistError(f"{elsewhere.name}: {rid} is not in {doc.name}")
            if not isinstance(why, str) or not why.strip():
                raise ChecklistError(f"{elsewhere.name}: {rid} needs a reason, got {why!r}")
        return cls(found, excused)


def parse(text: str, name: str = "requirements.md") -> dict[str, Requirement]:
    """The requirements of a page: `## SECTION` (or `## ONE / TWO`) headings, then `- **R-SECTION-NN** text` lines."""
    found: dict[str, Requirement] = {}
    sections: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := _HEADING.match(line):
            sections = heading[1].split(" / ")
        elif match := _LINE.match(line):
            rid, body = match.groups()
            section = rid.split("-")[1]
            if section not in sections:
                raise ChecklistError(f"{name}:{number}: {rid} stands under {' / '.join(sections) or 'no section'}")
            if rid in found:
                raise ChecklistError(f"{name}:{number}: {rid} appears twice")
            found[rid] = Requirement(rid, section, body)
        elif stray := _STRAY.match(line):
            raise ChecklistError(f"{name}:{number}: expected '- **{stray[1]}** text', got {line!r}")
    return found

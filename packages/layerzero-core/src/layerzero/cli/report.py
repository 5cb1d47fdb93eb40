"""Checks to read: doctor and readiness look alike."""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.cli.output import STYLES, Block, Cell, Line, Table
from layerzero.public.checks import Check, DoctorReport, ReadinessReport, Status

__all__ = ["check_blocks", "pairs"]


def check_blocks(report: DoctorReport | ReadinessReport, *, problems: bool = False) -> list[Block]:
    """One section per group, then a line of summary; the last two blocks are an empty line and that summary.

    `problems` leaves out what is well or was skipped.
    """
    blocks: list[Block] = []
    shown = [check for check in report.checks if not problems or check.status in (Status.WARN, Status.FAIL)]
    width = max((len(check.name) for check in shown), default=0)
    for group in dict.fromkeys(check.group for check in shown):
        if blocks:
            blocks.append(Line())
        blocks.append(Line(group, "bold"))
        rows = [_row(check, width) for check in shown if check.group == group]
        blocks.append(Table(("", "", ""), rows, indent=2))
    style = STYLES[Status.OK if report.ok else Status.FAIL]
    return [*blocks, Line(), Line(report.summary(), style)]


def _row(check: Check, width: int) -> tuple[str | Cell, ...]:
    style = STYLES[check.status]
    message = check.message if check.code is None else f"{check.code.value}: {check.message}"
    if check.fix and check.status != Status.OK:
        message = f"{message}\n→ {check.fix}"
    shown = "" if check.status == Status.OK else style
    return Cell(check.status.ljust(4), style), Cell(check.name.ljust(width), shown), message


def pairs(title: str, values: Mapping[str, str], columns: int = 3) -> list[Block]:
    """A section of short name-value pairs, several to a line."""
    width = max(len(name) for name in values)
    cells = [f"{name.ljust(width)}  {value}" for name, value in values.items()]
    cells += [""] * (-len(cells) % columns)
    lines = len(cells) // columns
    rows = [[cells[row + column * lines] for column in range(columns)] for row in range(lines)]
    return [Line(), Line(title, "bold"), Table(("",) * columns, rows, indent=2)]

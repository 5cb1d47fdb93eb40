"""`lz doctor`: what is here, what works, and the fix for what does not; `lz readiness`: may it take traffic?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, working
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb

if TYPE_CHECKING:
    from layerzero.public.checks import Check, DoctorReport, ReadinessReport


@verb(cli, "doctor")
@click.argument("backend", required=False)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds each vendor probe may take.")
@click.option("--probe/--no-probe", default=True, help="Whether to start a process for each vendor.")
@click.option("--problems", is_flag=True, help="Show only what is not well.")
def doctor(backend: str | None, timeout: float | None, probe: bool, problems: bool) -> Answer:
    """Check machine, settings, plugins and vendors, and name what mends each problem.

    \b
    lz doctor
    lz doctor flashinfer --timeout 60
    lz doctor --problems --no-probe

    Each vendor is imported in a process of its own with a time limit, so one that crashes or hangs is reported
    like any other problem. BACKEND looks at one only. Exit code 1 when anything failed.
    """
    from layerzero.public.checks import doctor as examine

    with working("probing vendors, each in a process of its own …" if probe else "looking …"):
        report = examine(backend, timeout=timeout, probe=probe)
    blocks: list[Block] = check_blocks(report, problems=problems)
    if report.libraries and not problems:
        rows = [(name, version or "-") for name, version in report.libraries.items()]
        blocks[-2:-2] = [Line(), Line("libraries", "bold"), Table(("", ""), rows, indent=2)]
    return Answer(report.to_dict(), blocks, OK if report.ok else PROBLEM)


@verb(cli, "readiness")
@click.option("--config", type=click.Path(path_type=Path), help="Policy file to judge instead of the one in force.")
@click.option("--production", is_flag=True, help="As a server that takes traffic: what would warn fails.")
def readiness(config: Path | None, production: bool) -> Answer:
    """Check that everything the policy needs exists and works.

    \b
    lz readiness --production
    lz readiness --config layerzero.yaml

    Capability schemas, the policy itself, the kernels it locks or lists, compiled artifacts, caches. Exit code 1
    when anything failed.
    """
    from layerzero.public.checks import readiness_check

    report = readiness_check(config, production=production)
    return Answer(report.to_dict(), check_blocks(report), OK if report.ok else PROBLEM)


def check_blocks(report: DoctorReport | ReadinessReport, *, problems: bool = False) -> list[Block]:
    """One section per group, then a line of summary; the last two blocks are an empty line and that summary.

    `problems` leaves out what is well or was skipped.
    """
    from layerzero.public.checks import Status

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
    from layerzero.public.checks import Status

    style = STYLES[check.status]
    message = check.message if check.code is None else f"{check.code.value}: {check.message}"
    if check.fix and check.status != Status.OK:
        message = f"{message}\n→ {check.fix}"
    shown = "" if check.status == Status.OK else style
    return Cell(check.status.ljust(4), style), Cell(check.name.ljust(width), shown), message

"""`lz doctor`: what is here, what works, and the fix for what does not; `lz readiness`: may it take traffic?

`lz quarantine list | clear`: kernels that took a process down, and the way back.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, working
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb

if TYPE_CHECKING:
    from layerzero.health.quarantine import Quarantine, QuarantineEntry
    from layerzero.public.checks import Check, DoctorReport, ReadinessReport


@verb(cli, "doctor")
@click.argument("backend", required=False)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds each vendor probe may take.")
@click.option("--probe/--no-probe", default=True, help="Whether to start a process for each vendor.")
@click.option("--problems", is_flag=True, help="Show only what is not well.")
def doctor(backend: str | None, timeout: float | None, probe: bool, problems: bool) -> Answer:
    """Check machine, settings, plugins and vendors, and show the fix of each problem.

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
@click.option("--production", is_flag=True, help="Also fail for what a server must not start with.")
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


@cli.group("quarantine")
def quarantine() -> None:
    """Show the kernels in quarantine (crashed or wrong); release them."""


@verb(quarantine, "list")
def show() -> Answer:
    """List the kernels in quarantine, with what they did and when."""
    quarantine, entries = _opened()
    rows = []
    for item in entries:
        when = datetime.fromtimestamp(item.since, UTC).strftime("%Y-%m-%d %H:%M UTC")
        rows.append((item.kernel_id, item.version, when, item.code, item.detail or "-", item.device_signature))
    data = {
        "path": str(quarantine.path),
        "entries": [asdict(entry) for entry in entries],
        "problems": [item.to_json() for item in quarantine.problems],
    }  # fmt: skip
    blocks: list[Block] = [Line(str(problem), STYLES["warn"], hang=2) for problem in quarantine.problems]
    if not rows:
        return Answer(data, [*blocks, Line("nothing is in quarantine", STYLES["ok"])])
    head = ("kernel", "version", "since", "code", "what happened", "device")
    blocks += [Table(head, rows), Line("lz quarantine clear KERNEL lifts one, once its cause is gone", "dim")]
    return Answer(data, blocks)


@verb(quarantine, "clear")
@click.argument("kernels", nargs=-1, metavar="KERNEL...")
@click.option("--all", "everything", is_flag=True, help="Lift every quarantine.")
def clear(kernels: tuple[str, ...], everything: bool) -> Answer:
    """Lift the quarantine of kernels.

    \b
    lz quarantine clear sdpa.attention.flash
    lz quarantine clear --all

    Exit code 1 when one of them was not in it.
    """
    from layerzero.errors import did_you_mean

    if bool(kernels) == everything:
        raise click.UsageError("name the kernels, or say --all")
    quarantine, entries = _opened()
    names = tuple(dict.fromkeys(entry.kernel_id for entry in entries)) if everything else kernels
    lifted = {name: quarantine.remove(name) for name in names}
    absent = [name for name, count in lifted.items() if not count]
    blocks: list[Block] = [Line(f"{name}: lifted", STYLES["ok"]) for name, count in lifted.items() if count]
    for name in absent:
        fix = did_you_mean(name, [entry.kernel_id for entry in entries], "lz quarantine list shows what is")
        blocks.append(Line(f"{name}: was not in quarantine; {fix}", STYLES["warn"]))
    blocks = blocks or [Line("nothing was in quarantine", STYLES["ok"])]
    data = {"path": str(quarantine.path), "lifted": lifted, "absent": absent}
    return Answer(data, blocks, PROBLEM if absent else OK)


def _opened() -> tuple[Quarantine, tuple[QuarantineEntry, ...]]:
    """The quarantine and its entries, what crashed processes have left included."""
    from layerzero.errors import ConfigurationError
    from layerzero.health.quarantine import Quarantine
    from layerzero.runtime.crashes import collect, place

    file = place()
    if file is None:
        message = "LAYERZERO_QUARANTINE switches the quarantine off"
        raise ConfigurationError(message, value="off", limit="a file", hint="unset LAYERZERO_QUARANTINE")
    quarantine = Quarantine(file)
    try:
        collect(quarantine)
        return quarantine, quarantine.entries()
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}"
        raise ConfigurationError(message, value=str(file), limit="a readable file") from error

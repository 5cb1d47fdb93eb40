"""`lz doctor`: what is here, what works, and the exact fix for what does not."""

from __future__ import annotations

import click

from layerzero.cli.output import Answer, Block, working
from layerzero.cli.report import check_blocks, pairs
from layerzero.cli.verbs import OK, PROBLEM, verb

__all__ = ["add"]


def add(group: click.Group) -> None:
    """Declare the verb."""

    @verb(group, "doctor")
    @click.argument("backend", required=False)
    @click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds each vendor probe may take.")
    @click.option("--probe/--no-probe", default=True, help="Whether to start a process for each vendor.")
    @click.option("--problems", is_flag=True, help="Show only what is not well.")
    def doctor(backend: str | None, timeout: float | None, probe: bool, problems: bool) -> Answer:
        """Check machine, settings, plugins and vendors; name the fixes.

        Each vendor is imported in a process of its own with a time limit, so one that crashes or hangs is reported
        like any other problem. BACKEND looks at one only. Exit code 1 when anything failed.
        """
        from layerzero.public.checks import doctor as examine

        with working("probing vendors, each in a process of its own …" if probe else "looking …"):
            report = examine(backend, timeout=timeout, probe=probe)
        blocks: list[Block] = check_blocks(report, problems=problems)
        if report.libraries and not problems:
            blocks[-2:-2] = pairs("libraries", {name: version or "-" for name, version in report.libraries.items()})
        return Answer(report.to_dict(), blocks, OK if report.ok else PROBLEM)

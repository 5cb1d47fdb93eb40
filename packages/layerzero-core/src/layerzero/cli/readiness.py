"""`lz readiness`: may this machine, with its policy, take traffic?"""

from __future__ import annotations

from pathlib import Path

import click

from layerzero.cli.output import Answer
from layerzero.cli.report import check_blocks
from layerzero.cli.verbs import OK, PROBLEM, verb

__all__ = ["add"]


def add(group: click.Group) -> None:
    """Declare the verb."""

    @verb(group, "readiness")
    @click.option("--config", type=click.Path(path_type=Path), help="Policy file to judge instead of the one in force.")
    @click.option("--production", is_flag=True, help="As a server that takes traffic: what would warn fails.")
    def readiness(config: Path | None, production: bool) -> Answer:
        """Check that everything the policy needs exists and works.

        Capability schemas, the policy itself, the kernels it locks or lists, compiled artifacts, caches. Exit code 1
        when anything failed.
        """
        from layerzero.public.checks import readiness_check

        report = readiness_check(config, production=production)
        return Answer(report.to_dict(), check_blocks(report), OK if report.ok else PROBLEM)

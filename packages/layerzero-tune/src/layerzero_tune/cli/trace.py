"""`lz trace`: run a program and see what was not hot in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import Answer, Block, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb


@verb(cli, "trace", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--out", type=click.Path(path_type=Path), default=Path("layerzero-trace.json"), show_default=True)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def trace(out: Path, command: tuple[str, ...]) -> Answer:
    """Run a program and write a Chrome trace of its cold calls, selections and compiles.

    \b
    lz trace serve.py --port 8000
    lz trace --out cold.json python -m mymodel

    COMMAND is a Python file or any program. The trace holds its cold calls, selections, compiles, failovers and
    tuning. Perfetto (ui.perfetto.dev) opens the file; the answer sums it up.
    """
    out = out.resolve()
    out.unlink(missing_ok=True)
    line = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    try:
        code = subprocess.run(line, env={**os.environ, "LAYERZERO_TRACE": str(out)}, check=False).returncode
    except OSError as error:
        from layerzero.errors import ConfigurationError

        raise ConfigurationError(f"{line[0]} cannot be run: {error.strerror}", value=line[0]) from None
    if not out.exists():
        told = f"the program ended with {code} and left no trace: it made no call of LayerZero, or it was killed"
        return Answer({"code": code, "path": None, "events": {}}, [Line(told)], PROBLEM)
    found = totals(json.loads(out.read_bytes()))
    rows = [(kind, str(row["count"]), f"{row['ms']:.1f}") for kind, row in found.items()]
    blocks: list[Block] = [Table(("event", "count", "ms"), rows, right=frozenset({1, 2}))]
    blocks += [Line(), Line(f"written to {out}; the program ended with {code}")]
    return Answer({"code": code, "path": str(out), "events": found}, blocks, OK if code == 0 else PROBLEM)


def totals(data: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Count and time of each kind of event in a trace."""
    found: dict[str, dict[str, float]] = {}
    for row in data["traceEvents"]:
        if row["ph"] == "X":
            kind = str(row["cat"]).partition(",")[2]
            entry = found.setdefault(kind, {"count": 0, "ms": 0.0})
            entry["count"] += 1
            entry["ms"] += row["dur"] / 1e3
    return dict(sorted(found.items()))

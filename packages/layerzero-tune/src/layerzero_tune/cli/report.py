"""`lz report`: what was measured, as one page."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero.errors import ConfigurationError
from layerzero_cli.output import Answer, Block, Line, Table, working
from layerzero_cli.root import cli
from layerzero_cli.verbs import verb
from layerzero_tune.cli.bench import FILE, written

if TYPE_CHECKING:
    from layerzero_tune.report.data import Figures, Measured

_MAX_BYTES = 256 << 20
_UNSAID = "not written down"


@verb(cli, "report")
@click.argument("measured", nargs=-1, type=FILE)
@click.option("--perfdb", type=FILE, help="Read this database instead of the one in use.")
@click.option("--out", type=FILE, default=Path("layerzero-report.html"), show_default=True, help="Where the page goes.")
@click.option("--no-torch", is_flag=True, help="From PerfDB: do not time plain torch beside what was tuned.")
def report(measured: tuple[Path, ...], perfdb: Path | None, out: Path, no_torch: bool) -> Answer:
    """Write what was measured as one HTML page.

    \b
    lz report                                          what lz tune has put into PerfDB
    lz report bench.json --out bench.html              what lz bench --out bench.json has written

    Winner maps, the speed-up against torch and against each single library, and every case with times and errors.
    The page needs nothing else and can be sent around. Where stored times have none of plain torch, it is timed now, a
    fraction of a second a call.
    """
    from layerzero_tune.report.data import figures
    from layerzero_tune.report.page import render

    if measured and perfdb is not None:
        raise click.UsageError("either files or --perfdb")
    cases, facts = _from_files(measured) if measured else _from_perfdb(perfdb, not no_torch)
    if not cases:
        source, hint = ", ".join(map(str, measured)) or "PerfDB", "lz tune or lz bench makes some"
        raise ConfigurationError(f"{source} holds no measurements", value=source, hint=hint)
    found = figures(cases)
    told = [case.busy for case in cases if case.busy is not None]
    quiet = f"the machine was quiet in {told.count(False)} of {len(told)} cases"
    facts["steadiness"] = f"{quiet}{' that say it' * (len(told) < len(cases))}" if told else _UNSAID
    line = written(out, render(cases, facts))
    return Answer({"page": str(out), "facts": dict(facts), **found.to_json()}, [*_blocks(found), line])


# -- sources ----------------------------------------------------------------------------------------------
def _from_files(paths: Sequence[Path]) -> tuple[list[Measured], dict[str, str]]:
    from layerzero.recording.traffic import read_json
    from layerzero_tune.report.data import from_json

    cases: list[Measured] = []
    facts: dict[str, str] = {}
    for path in paths:
        data = read_json(path, _MAX_BYTES)
        cases += from_json(data, path.name)
        facts.update(_facts(data))
    return cases, facts


def _facts(data: Mapping[str, Any]) -> dict[str, str]:
    """What a file says about its own making, as far as it is text or a number."""
    machine = data.get("machine")
    unsaid = dict.fromkeys(("measured", "cores", "threads", "load"), _UNSAID)
    found = {**unsaid, **(machine if isinstance(machine, dict) else {}), **data}
    names = ("device", "gpu", "cpu", "arch", "measured", "cores", "threads", "load", "driver", "torch", "python",
             "layerzero", "commit", "command", "method")  # fmt: skip
    return {name: str(found[name]) for name in names if isinstance(found.get(name), (str, int, float))}


def _from_perfdb(path: Path | None, with_torch: bool) -> tuple[list[Measured], dict[str, str]]:
    import torch

    from layerzero import __version__
    from layerzero.recording.traffic import load
    from layerzero_tune.report.perfdb import cases_of, torch_beside
    from layerzero_tune.tuning import calls_path, database_of

    db = database_of(path)
    rows = db.all()
    days = sorted({datetime.date.fromtimestamp(item.measured_at).isoformat() for item in rows})
    threads = sorted({str(item.platform.threads) for item in rows if item.platform.threads})
    facts = {
        "source": f"PerfDB {db.path.name}",
        "measured": " to ".join(dict.fromkeys([*days[:1], *days[-1:]])) or "never",
        "cores": str(os.cpu_count()),
        "threads": ", ".join(threads) or _UNSAID,
        "load": f"{os.getloadavg()[0]:.2f} now",
        "torch": torch.__version__,
        "layerzero": __version__,
    }
    calls, beside = calls_path(db.path), {}
    if with_torch and calls.exists():
        with working("timing plain torch beside what was tuned"):
            beside = torch_beside(load(calls).contexts, db)
    return cases_of(db, beside), facts


# -- text -------------------------------------------------------------------------------------------------
def _blocks(found: Figures) -> list[Block]:
    blocks: list[Block] = [Line(f"{found.cases} cases", "bold")]
    against = (("the fastest of all, torch included", found.layerzero, "bold"), ("oracle", found.ratio, ""))
    for what, share, style in against:
        if share is not None:
            text = f"chosen ÷ {what}: {share.geomean:.3f}, worst {share.worst:.2f} ({share.worst_case})"
            blocks.append(Line(text, style, hang=2))
    if found.speedup is not None:
        blocks.append(Line(f"{found.speedup:.2f}× torch default, geometric mean"))
    if found.busy:
        words = f"{found.busy} of {found.cases} cases were measured while others used the machine; do it again later"
        blocks.append(Line(words, "yellow", hang=2))
    rows = [
        (name, f"{item.geomean:.3f}", f"{item.worst:.2f}", f"{item.used_in} of {item.cases}")
        for name, item in found.ways
    ]
    columns = ("time ÷ fastest", "geomean", "worst", "runs in")
    return [*blocks, Line(), Table(columns, rows, right=frozenset({1, 2, 3})), Line()]

"""`lz perfdb show | verify | export | import | merge | prune`: the database of measured times."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb

if TYPE_CHECKING:
    from layerzero.perfdb.store import PerfDB

_PATH = click.Path(path_type=Path)
_database = click.option("--database", type=_PATH, help="The file; default: the policy's, else the user's own.")


@cli.group("perfdb")
def perfdb() -> None:
    """Look at measured kernel times, move them between machines, and tidy up."""


@verb(perfdb, "show")
@_database
@click.option("--op", help="Only this op.")
@click.option("--kernel", help="Only this kernel id.")
@click.option("--all", "everything", is_flag=True, help="Also times of other machines and versions, with the reason.")
@click.option("--limit", type=click.IntRange(min=1), default=40, show_default=True, help="Rows to print.")
def show(database: Path | None, op: str | None, kernel: str | None, everything: bool, limit: int) -> Answer:
    """List measured times, the fastest kernel of each bucket first."""
    from layerzero.measurements.believed import doubt_of
    from layerzero.runtime.state import state
    from layerzero_tune.perfdb.exchange import summarise

    db = _opened(database)
    world = state.world
    rows = [item for item in db.all() if (op is None or item.op == op) and (kernel is None or item.kernel_id == kernel)]
    judged = [(item, doubt_of(item, world)) for item in rows]
    shown = [(item, why) for item, why in judged if everything or why is None]
    shown.sort(key=lambda pair: (pair[0].op, pair[0].bucket, pair[1] is not None, pair[0].median_us))
    believed = sum(why is None for _, why in judged)
    listed = [{**item.to_json(), "not_believed": why} for item, why in shown]
    blocks: list[Block] = [Line(f"{db.path}: {len(rows)} rows, {believed} believed here", "bold")]
    if shown:
        body = [
            (f"{item.median_us:.1f} µs", item.kernel_id, item.op, f"{item.spread:.0%}", _age(item.measured_at),
             summarise(item), item.surroundings.bucket.replace("unknown/", ""), Cell(why or "", STYLES["warn"]))
            for item, why in shown[:limit]
        ]  # fmt: skip
        columns = ("median", "kernel", "op", "spread", "age", "bucket", "taken while", "not believed")
        blocks.append(Table(columns, body, right=frozenset({0, 3})))
    if len(shown) > limit:
        blocks.append(Line(f"{len(shown) - limit} more; --limit shows them", "dim"))
    if not everything and believed != len(rows):
        blocks.append(Line("--all shows the others and why they do not count here", "dim"))
    return Answer({"path": str(db.path), "rows": len(rows), "believed": believed, "measurements": listed}, blocks)


def _age(measured_at: float) -> str:
    seconds = max(0.0, time.time() - measured_at)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@verb(perfdb, "verify")
@_database
def verify(database: Path | None) -> Answer:
    """Check every row's checksum and the file itself. Exit code 1 when something is damaged."""
    from layerzero_tune.perfdb import exchange

    db = _opened(database)
    good, bad, problems = exchange.verify(db)
    data = {"path": str(db.path), "intact": good, "damaged": bad, "problems": problems}
    head = f"{db.path}: {good} rows intact, {bad} damaged"
    if not bad and not problems:
        return Answer(data, [Line(head, STYLES["ok"])])
    blocks = [Line(head, STYLES["fail"]), *(Line(item, STYLES["fail"], indent=2) for item in problems)]
    blocks.append(Line("damaged rows are never used; lz perfdb prune removes them", "dim", indent=2))
    return Answer(data, blocks, PROBLEM)


@verb(perfdb, "export")
@click.argument("out", type=_PATH)
@_database
def export(out: Path, database: Path | None) -> Answer:
    """Write every measurement to a JSON file; equal databases give equal bytes."""
    from layerzero_tune.perfdb.exchange import export_json

    count = export_json(_opened(database), out)
    return Answer({"path": str(out), "rows": count}, [Line(f"{count} measurements written to {out}")])


@verb(perfdb, "import")
@click.argument("file", type=_PATH)
@_database
@click.option("--dataset", type=_PATH, help="Folder of the definitions, for flashinfer-bench traces (.jsonl).")
def bring(file: Path, database: Path | None, dataset: Path | None) -> Answer:
    """Add measurements from a file: our own export, flashinfer-bench traces, or a FlashInfer autotune cache.

    Of two measurements of the same thing the newer stays. What was measured elsewhere is kept, and used only where
    machine and versions are the same. A FlashInfer cache names tactics, not times; they are stored apart.
    """
    db = _opened(database, must_exist=False)
    if file.suffix == ".jsonl" or file.is_dir():
        from layerzero.companions import part
        from layerzero_tune.perfdb.exchange import add_newer

        rows, problems = part("flashinfer-bench.traces")(file, dataset)
        count = add_newer(db, rows)
        data: dict[str, Any] = {"kind": "flashinfer-bench", "rows": count, "problems": problems}
        blocks: list[Block] = [Line(f"{count} measurements from {file}", "bold")]
        blocks += [Line(item, STYLES["warn"], indent=2, hang=2) for item in problems[:20]]
        return Answer(data, blocks, OK if count or not problems else PROBLEM)
    from layerzero_tune.perfdb.exchange import import_json, is_autotune_cache, put_tactics, read_autotune_cache

    if is_autotune_cache(file):
        kept = put_tactics(db, read_autotune_cache(file))
        return Answer({"kind": "flashinfer-autotune", "tactics": kept}, [Line(f"{kept} tactics of FlashInfer kept")])
    count = import_json(db, file)
    return Answer({"kind": "layerzero", "rows": count}, [Line(f"{count} measurements added to {db.path}")])


@verb(perfdb, "merge")
@click.argument("sources", type=_PATH, nargs=-1, required=True)
@_database
def join(sources: tuple[Path, ...], database: Path | None) -> Answer:
    """Bring the measurements of other databases into this one; of two of the same thing the newer stays."""
    from layerzero_tune.perfdb.exchange import merge

    coming = [_opened(item) for item in sources]
    db = _opened(database, must_exist=False)
    count = merge(db, coming)
    return Answer({"path": str(db.path), "rows": count}, [Line(f"{count} measurements came into {db.path}")])


@verb(perfdb, "prune")
@_database
@click.option("--foreign", is_flag=True, help="Also times of other machines, drivers and torch versions.")
@click.option("--older-than", type=click.FloatRange(min=0), help="Also times older than so many days.")
def prune(database: Path | None, foreign: bool, older_than: float | None) -> Answer:
    """Remove damaged rows, and what the options name."""
    from layerzero.device.probe import probe_device
    from layerzero.measurements.believed import platform_of
    from layerzero_tune.perfdb import exchange

    db = _opened(database)
    here = platform_of(probe_device()) if foreign else None
    count = exchange.prune(db, platform=here, older_than_s=None if older_than is None else older_than * 86_400)
    return Answer({"path": str(db.path), "removed": count}, [Line(f"{count} rows removed from {db.path}")])


def _opened(database: Path | None, *, must_exist: bool = True) -> PerfDB:
    from layerzero.errors import ConfigurationError
    from layerzero_tune.tuning import database_of

    db = database_of(database)
    if must_exist and not db.path.exists():
        raise ConfigurationError(
            f"there is no database at {db.path}", code="CONFIG_FILE_MISSING", value=str(db.path),
            hint="correct the path, or run lz tune first",
        )  # fmt: skip
    for problem in db.problems:
        click.echo(problem, err=True)
    return db

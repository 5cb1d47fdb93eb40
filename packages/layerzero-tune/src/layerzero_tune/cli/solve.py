"""`lz solve`: decisions made beforehand, as a file that can be committed, reviewed and obeyed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.completion import complete_device
from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb
from layerzero_tune.cli.tune import PATH, measured_or, source_options

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable


@verb(cli, "solve")
@source_options
@click.argument("new", type=PATH, required=False)
@click.option("--out", "-o", type=PATH, default=Path("dispatch_table.json"), show_default=True, help="The table.")
@click.option("--database", type=PATH, help="Measured times; default: the policy's, else the user's own.")
@click.option(
    "--device", help="Device the table is for; default: the first accelerator.", shell_complete=complete_device
)
@click.option("--model-id", default="", help="Name written into the table.")
@click.option("--key", type=PATH, help="Key file to sign the table with: a shared secret, or an ed25519 key in PEM.")
@click.option("--warm", is_flag=True, help="First compile what these calls need.")
@click.option("--diff", is_flag=True, help="Compare two tables, OLD NEW, and say what changed and why.")
def solve(
    source: Path | None, new: Path | None, out: Path, database: Path | None, warm: bool, diff: bool, **options: Any
) -> Answer:
    """Choose the kernels of the given calls now, and write the choices to a dispatch table.

    \b
    lz solve                                 the calls that lz tune has measured
    lz solve traffic.json -o table.json      recorded calls
    lz solve --config path/to/model --key secret
    lz solve --diff old.json new.json        what changed, and the times behind it (exit code 1 if anything)

    The same calls, times, kernels and policy give the same bytes. LAYERZERO_DISPATCH_TABLE, the policy key
    dispatch_table or lz.use_table put a table in force; other calls are selected as before.
    """
    if diff:
        if source is None or new is None:
            raise click.UsageError("--diff takes two tables: lz solve --diff OLD NEW")
        return _compared(source, new, database)
    if new is not None:
        raise click.UsageError("one SOURCE; two files are for --diff")
    import layerzero as lz
    from layerzero.tables.file import table_json

    otherwise = "say which calls to decide: a traffic file, --config, --grid, or lz tune first"
    chosen = measured_or(source, database, otherwise)
    if warm:  # first: a kernel that is not compiled yet could not be decided for
        from layerzero.public.traffic import calls_of, warmup

        warmup([item.context for _, item in calls_of(chosen)], background=False)
    table = lz.solve(chosen, out, database=database, **options)
    data = {
        "path": str(out),
        "entries": len(table.entries),
        "busy": sum(entry.busy for entry in table.entries),
        "table": table_json(table),
    }
    return Answer(data, _blocks(out, table), OK if table.entries else PROBLEM)


def _blocks(out: Path, table: DispatchTable) -> list[Block]:
    measured = sum(entry.median_us is not None for entry in table.entries)
    blocks: list[Block] = [
        Line(f"{len(table.entries)} decisions written to {out}", "bold"),
        Line(f"{measured} of them measured; for {table.hardware}", "dim", indent=2),
        Line(f"policy {table.policy_hash[:12]}, content {table.content_hash[:12]}", "dim", indent=2),
    ]
    if busy := sum(entry.busy for entry in table.entries):
        words = f"{busy} rest on times that were taken while others used the machine; tune again when it is quiet"
        blocks.append(Line(words, STYLES["warn"], indent=2, hang=2))
    if table.signature is not None:
        blocks.append(Line(f"signed ({table.signature.partition(':')[0]})", "dim", indent=2))
    if not table.entries:
        blocks.append(Line("no call of the source runs on this device", STYLES["warn"], indent=2))
    counts = Counter((entry.op, entry.kernel_id) for entry in table.entries)
    rows = [(op, kernel, str(count)) for (op, kernel), count in sorted(counts.items())]
    return [*blocks, Table(("op", "kernel", "buckets"), rows, indent=2, right=frozenset({2}))] if rows else blocks


def _compared(old: Path, new: Path, database: Path | None) -> Answer:
    from layerzero.tables.file import load_table
    from layerzero_tune.tables.solver import diff_tables
    from layerzero_tune.tuning import times_in

    found = diff_tables(load_table(old), load_table(new), times_in(database))
    blocks: list[Block] = [Line(item, STYLES["warn"]) for item in found.header]
    if found.changes:
        rows = [
            (item.op, item.bucket, item.old or Cell("new", "green"), item.new or Cell("gone", "yellow"), item.why)
            for item in found.changes
        ]
        blocks.append(Table(("op", "bucket", "was", "is", "why"), rows))
    if found.retimed:
        again = [(item.op, item.bucket, item.new or "", item.why) for item in found.retimed]
        blocks.append(Line("same kernel, other times:", "dim"))
        blocks.append(Table(("op", "bucket", "kernel", "times"), again, indent=2))
    blocks.append(Line(f"{len(found.changes)} decisions differ, {found.same} are the same", "bold"))
    return Answer(found.to_json(), blocks, OK if found.equal else PROBLEM)

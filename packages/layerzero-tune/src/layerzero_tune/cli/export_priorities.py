"""`lz export-priorities`: a solved table in the settings of another stack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import PlanEntry
    from layerzero_tune.tables.priorities import Case, Export, Setting

# Not read from stacks.json by way of tables.priorities, which loads torch; a test keeps the two alike.
STACKS = ("vllm", "sglang", "transformers", "diffusers")


path = click.Path(path_type=Path)


@verb(cli, "export-priorities")
@click.argument("table", type=path, default=Path("dispatch_table.json"))
@click.option("--for", "stack", type=click.Choice(STACKS), required=True, help="The stack to write settings for.")
@click.option("--database", type=path, help="Measured times; default: the policy's, else the user's own.")
def export(table: Path, stack: str, database: Path | None) -> Answer:
    """Translate TABLE, a dispatch table of lz solve, into settings of another engine.

    \b
    lz export-priorities --for vllm
    lz export-priorities h200.json --for sglang --database h200.db

    Each line comes with the measured cases behind it. A stack takes one value where the table has many: what that
    costs is said, with times from the database where they are known. Exit code 1: nothing could be said.
    """
    from layerzero.tables.file import load_table
    from layerzero_tune.tables.priorities import export_priorities

    found = export_priorities(load_table(table), stack, _times(database))
    return Answer(found.to_json(), _blocks(table, found), OK if found.settings else PROBLEM)


def _times(database: Path | None) -> Callable[[PlanEntry], dict[str, float]] | None:
    from layerzero.runtime.state import state
    from layerzero_tune.tables.solver import times_of
    from layerzero_tune.tuning import known_database

    if database is not None and not database.exists():
        raise click.UsageError(f"no such database: {database}")
    db = known_database(database)
    return None if db is None else lambda entry: times_of(entry, state.world, db)


def _blocks(table: Path, found: Export) -> list[Block]:
    stack = found.stack
    blocks: list[Block] = [Line(f"{stack.title} {stack.version}, from {table.name} ({found.hardware})", "dim")]
    if found.settings:
        blocks += [Line(), Line(found.command, "bold", indent=2, hang=2), Line()]
    for item in found.settings:
        blocks.append(Line(f"{item.text}  {item.why}", hang=2))
        blocks.append(Table(("", "", "", ""), _rows(item), indent=2, right=frozenset({2})))
    blocks += [Line(text, STYLES["warn"], hang=2) for text in found.warnings]
    if found.ignored:
        words = ", ".join(f"{op} ({count})" for op, count in found.ignored)
        blocks.append(Line(f"{stack.title} has no setting for these ops of the table: {words}", "dim", hang=2))
    if stack.instead:
        blocks.append(Line(f"or: {stack.instead}", "dim", hang=2))
    if not found.settings:
        blocks.append(Line(f"nothing in the table can be said to {stack.title}", STYLES["warn"]))
    return blocks


def _rows(item: Setting) -> list[tuple[str | Cell, ...]]:
    marked = (("for", "green", item.backed), ("against", "yellow", item.lost), ("no name", "yellow", item.nameless))
    return [
        (Cell(mark, style), case.kernel_id, _us(case), f"{case.op} {case.bucket}")
        for mark, style, cases in marked
        for case in cases
    ]


def _us(case: Case) -> str:
    text = "not measured" if case.median_us is None else f"{case.median_us:.4g} µs"
    return text if case.instead_us is None else f"{text}, here {case.instead_us:.4g} µs"

"""`lz demo`: a tour of one Llama-shaped block on this machine, in the terminal, as JSON and as one HTML page."""

from __future__ import annotations

import json as json_module
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero.cli.output import is_plain
from layerzero.errors import InvalidInputError, LayerZeroError

if TYPE_CHECKING:
    from layerzero_tune.demo.stations import Tour

__all__ = ["run"]


def run(html: Path | None = None, json: bool = False, device: str | None = None, quick: bool = False) -> int:
    """Take the tour and tell of it. 0: every result matches the reference; 1: one does not; 2: no such device.

    `html` names a page to write (whole or not at all), `json` prints JSON alone, `quick` takes a smaller block
    and fewer rounds.
    """
    try:
        tour = _take(device, quick=quick, quiet=json)
    except InvalidInputError as error:
        print(f"lz demo: {error}", file=sys.stderr)
        return 2
    except LayerZeroError as error:
        print(f"lz demo: the block could not run: {error}", file=sys.stderr)
        return 1
    from layerzero_tune.demo.words import text_lines, text_round_trip

    text = text_round_trip()
    written, problem = _write_page(html, tour) if html is not None else (None, "")
    if json:
        page = None if written is None else str(written)
        print(json_module.dumps({**tour.to_json(), "text": text, "page": page}, indent=2))
    elif not is_plain(sys.stdout):
        _print_rich(tour, written)
    else:
        from layerzero_tune.demo.text import plain_lines

        print("\n".join(plain_lines(tour, written)))
    if not json and text is not None:
        print("\n".join(("", *text_lines(text))))
    if problem:
        print(f"lz demo: {problem}", file=sys.stderr)
    return 0 if tour.ok and not problem and (text is None or text.get("round_trip", True)) else 1


def _take(device: str | None, *, quick: bool, quiet: bool) -> Tour:
    """The tour itself, behind a progress bar where somebody is watching."""
    from layerzero_tune.demo.tour import TICKS, take

    if quiet or is_plain(sys.stderr):
        return take(device, quick=quick, tick=lambda _: None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("[cyan]{task.description:<20}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=TICKS + 1)

        def tick(text: str) -> None:
            bar.update(task, description=text, advance=1)

        return take(device, quick=quick, tick=tick)


def _write_page(path: Path, tour: Tour) -> tuple[Path | None, str]:
    """Write the page beside its place and move it there: readers see the old page or the new one, never half."""
    from layerzero_tune.demo.page import render

    text = render(tour)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        return None, f"the page could not be written: {error}"
    return path, ""


def _print_rich(tour: Tour, written: Path | None) -> None:
    """Colour, and two lines per row where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from layerzero_tune.demo import text as words

    console = Console(highlight=False)
    narrow = console.width < 104
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in words.HEAD:
        if not (narrow and name == "kernel that ran"):
            table.add_column(name, justify="right" if name in ("LayerZero", "torch") else "left", overflow="fold")
    group = ""
    for stop in tour.stops:
        if stop.station.group != group and group:
            table.add_row()
        group = stop.station.group
        title, kernel, ours, theirs, against, check = words.cells(stop)
        named = Text(kernel, style="cyan")
        first = (Text.assemble(title, "\n  ", named),) if narrow else (Text(title), named)
        table.add_row(
            *first,
            ours,
            Text(theirs, style="dim"),
            Text(against, style="green" if "faster" in against else "yellow" if "slower" in against else "dim"),
            Text(check, style="green" if stop.check.ok else "bold red"),
        )
    console.print(Text(f"\n{words.introduction(tour)}\n"))
    console.print(table)
    console.print(Text(f"\n{words.whole_line(tour)}"))
    if slower := words.slower_line(tour):
        console.print(Text(slower, style="dim"))
    console.print(Text("\nWhy not the others", style="bold"))
    for op, reasons in words.why_lines(tour):
        console.print(Text.assemble("  ", op, ("" if reasons else ": no other kernel is registered", "dim")))
        for kernel_id, text in reasons:
            console.print(Text.assemble("    ", (kernel_id, "cyan"), (f"  {text}", "dim")))
    console.print(Text("\nDecoding", style="bold"))
    for line in words.decode_lines(tour):
        console.print(Text(f"  {line}"))
    mark, style = ("✓", "bold green") if tour.ok else ("✗", "bold red")
    console.print(Text(f"\n{mark} {words.summary(tour, written)}", style=style))
    console.print(Text(words.NEXT, style="dim"))

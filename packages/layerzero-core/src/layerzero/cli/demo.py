"""`lz demo`: a tour of one Llama-shaped block on this machine, in the terminal, as JSON and as one HTML page."""

from __future__ import annotations

import json as json_module
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero.errors import InvalidInputError, LayerZeroError

if TYPE_CHECKING:
    from rich.console import Console

    from layerzero.cli.demo_stations import Stop, Tour

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
    written, problem = _write_page(html, tour) if html is not None else (None, "")
    if json:
        page = None if written is None else str(written)
        print(json_module.dumps({**tour.to_json(), "page": page}, indent=2))
    elif sys.stdout.isatty():
        _print_rich(tour, written)
    else:
        print("\n".join(plain_lines(tour, written)))
    if problem:
        print(f"lz demo: {problem}", file=sys.stderr)
    return 0 if tour.ok and not problem else 1


def _take(device: str | None, *, quick: bool, quiet: bool) -> Tour:
    """The tour itself, behind a progress bar where somebody is watching."""
    from layerzero.cli.demo_tour import TICKS, take

    if quiet or not sys.stderr.isatty():
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
    from layerzero.cli.demo_page import render

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


# -- text ----------------------------------------------------------------------------------------
def duration(us: float) -> str:
    """A time with three digits and a unit."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def checked(stop: Stop) -> str:
    """The outcome of a check in a word."""
    if not stop.check.ok:
        return f"WRONG {stop.check.max_error:.1e}"
    return "ok, exact" if stop.check.max_error == 0 else f"ok, {stop.check.max_error:.0e}"


def introduction(tour: Tour) -> str:
    """What was built, in one sentence."""
    sizes = tour.sizes
    return (
        f"One Llama-shaped block on {tour.device.name or tour.device.device_type} in {tour.dtype}: hidden {sizes.hidden}, "
        f"{sizes.heads} heads over {sizes.kv_heads} KV heads, {sizes.prompt} tokens of prompt, "
        f"{sizes.decode_steps} tokens decoded."
    )


def why_lines(tour: Tour) -> list[tuple[str, list[tuple[str, str]]]]:
    """(op, why-not lines), each op once: the first stop of an op speaks for those that were judged alike."""
    seen: dict[tuple[str, tuple[tuple[str, bool], ...]], tuple[str, list[tuple[str, str]]]] = {}
    for stop in tour.stops:
        judged = tuple((item.kernel_id, item.accepted) for item in stop.candidates)
        title = stop.station.op if len(stop.station.op) > 6 else f"{stop.station.op} ({stop.station.title})"
        seen.setdefault((stop.station.op, judged), (title, stop.why_not()))
    return list(seen.values())


def decode_lines(tour: Tour) -> list[str]:
    """What the decode loop showed."""
    steps, made = len(tour.decode), tour.decode_selections
    chose = [step for step in tour.decode if step.selections]
    lines = [f"{steps} steps, {made} selections: the choice is made once and then looked up, while the cache grows."]
    for step in chose:
        lines.append(f"  context {step.context}: {step.selections} selected{_reason_to_select(tour, step.context)}")
    state = "match" if tour.agreement.ok else "DO NOT match"
    lines.append(f"Paged and dense attention {state} at every step (max error {tour.agreement.max_error:.0e}).")
    return lines


def _reason_to_select(tour: Tour, context: int) -> str:
    if context == tour.decode[0].context:
        return ", the first step has new shapes"
    if (context - 1) & (context - 2) == 0:
        return f", the cache grew past {context - 1}, the end of a bucket"
    return ""


def summary(tour: Tour, written: Path | None) -> str:
    """The last line: how many, all right or not, where the page is."""
    if tour.ok:
        checks = "all results match the reference"
    else:
        checks = f"WRONG results: {', '.join(tour.failed)}"
    page = "" if written is None else f", page written to {written}"
    return f"{len(tour.stops)} ops, {tour.kernels_considered} kernels considered, {checks}{page} ({tour.seconds:.0f} s)"


def whole_line(tour: Tour) -> str:
    """The block as a whole, cold and hot and against torch."""
    from layerzero.cli.demo_stations import verdict

    return (
        f"First pass {duration(tour.first_pass_us)} (backends found, kernels chosen); from then on "
        f"{duration(tour.lz_us)}, plain torch {duration(tour.torch_us)}: {verdict(tour.lz_us, tour.torch_us)}."
    )


def plain_lines(tour: Tour, written: Path | None) -> list[str]:
    """The tour as text without colour or boxes."""
    lines = [introduction(tour), ""]
    head = ("step", "kernel that ran", "LayerZero", "torch", "against torch", "check")
    rows = [_cells(stop) for stop in tour.stops]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [cell.rjust(width) if i in (2, 3) else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines += ["", whole_line(tour), "", "Why not the others"]
    for title, reasons in why_lines(tour):
        if not reasons:
            lines.append(f"  {title}: no other kernel is registered")
            continue
        lines.append(f"  {title}")
        lines.extend(f"    {kernel_id}: {text}" for kernel_id, text in reasons)
    return [*lines, "", "Decoding", *(f"  {line}" for line in decode_lines(tour)), "", summary(tour, written)]


def _cells(stop: Stop) -> tuple[str, ...]:
    kernel = stop.kernel if stop.ran in (None, stop.chosen) else f"{stop.kernel} (after {stop.chosen} failed)"
    return (stop.station.title, kernel, duration(stop.lz_us), duration(stop.torch_us), stop.verdict, checked(stop))


def _print_rich(tour: Tour, written: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print()
    console.print(Text(introduction(tour)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "kernel that ran"):
        table.add_column(name, overflow="fold")
    for name in ("LayerZero", "torch"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("against torch", "check"):
        table.add_column(name, no_wrap=True)
    group = ""
    for stop in tour.stops:
        if stop.station.group != group and group:
            table.add_row()
        group = stop.station.group
        title, kernel, ours, theirs, against, check = _cells(stop)
        colour = "green" if "faster" in against else "yellow" if "slower" in against else "dim"
        table.add_row(
            title,
            Text(kernel, style="dim cyan" if kernel.startswith("reference.") else "cyan"),
            ours,
            Text(theirs, style="dim"),
            Text(against, style=colour),
            Text(check, style="green" if stop.check.ok else "bold red"),
        )
    console.print(table)
    console.print(Text(whole_line(tour)))
    _print_reasons(console, tour)
    console.print(Text("\nDecoding", style="bold"))
    for line in decode_lines(tour):
        console.print(Text(f"  {line}"))
    console.print()
    console.print(Text(("✓ " if tour.ok else "✗ ") + summary(tour, written), style="bold green" if tour.ok else "bold red"))


def _print_reasons(console: Console, tour: Tour) -> None:
    from rich.text import Text

    console.print(Text("\nWhy not the others", style="bold"))
    for title, reasons in why_lines(tour):
        if not reasons:
            console.print(Text.assemble("  ", title, (": no other kernel is registered", "dim")))
            continue
        console.print(Text(f"  {title}"))
        for kernel_id, text in reasons:
            console.print(Text.assemble("    ", (kernel_id, "cyan"), (f"  {text}", "dim")))

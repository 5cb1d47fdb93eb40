"""`lz bench`: every kernel that may run a call, head to head, with plain torch beside them."""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.completion import complete_kernel, complete_op
from layerzero_cli.explaining import call_options
from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, is_plain, working
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb
from layerzero_cli.words import known_names
from layerzero_tune.timing.host_load import BUSY

if TYPE_CHECKING:
    from layerzero_tune.bench.contest import Entry, Outcome

_BAR = 24
_COLUMNS = ("case", "op", "dtype", "kernel", "median_us", "p95_us", "samples", "max_error", "times_torch", "chosen",
            "note")  # fmt: skip
FILE = click.Path(path_type=Path, dir_okay=False)


@verb(cli, "bench")
@click.argument("op", required=False, shell_complete=complete_op)
@call_options
@click.option("--grid", type=FILE, help="The cases of a grid file instead of one call.")
@click.option("--tag", multiple=True, help="Of the grid only cases with this tag; may be repeated.")
@click.option(
    "--kernel", multiple=True, help="Only this kernel or backend; may be repeated.", shell_complete=complete_kernel
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    default=2.0,
    show_default=True,
    help="Time for the race of one case.",
)
@click.option(
    "--mode",
    type=click.Choice(["eager", "graph"]),
    default="eager",
    show_default=True,
    help="eager: each call by itself, on a GPU with a cold cache; graph: replayed CUDA graphs.",
)
@click.option("--no-check", is_flag=True, help="Do not compare results with the reference.")
@click.option("--out", type=FILE, help="Also write the measurements as JSON, for lz report.")
@click.option("--csv", "table", type=FILE, help="Also write them as CSV.")
@click.option("--plot", type=FILE, help="Also draw them as SVG.")
def bench(
    op: str | None, grid: Path | None, tag: tuple[str, ...], kernel: tuple[str, ...], seconds: float, mode: str,
    no_check: bool, out: Path | None, table: Path | None, plot: Path | None, **options: Any,
) -> Answer:  # fmt: skip
    """Time every kernel that may run a call, head to head.

    \b
    lz bench attention --shape 1,8,256,64 --causal --dtype fp32
    lz bench rms_norm --shape 512,4096 --kernel torch --plot norms.svg
    lz bench --grid benchmarks/grid.toml --tag decode --out decode.json

    All run in the same rounds; results are compared with the reference first, and a wrong kernel is not timed. Exit
    code 1 when nothing could be timed.
    """
    from layerzero_tune.bench.contest import compete, svg

    known_names(kernel, kernels=True)
    found: list[Outcome] = []
    refused: list[tuple[str, str]] = []
    with working("measuring"):
        for name, ctx in _asked(op, options, grid, tag):
            if mode == "graph" and ctx.device.device_type != "cuda":
                raise click.UsageError("--mode graph needs a CUDA device")
            try:
                found.append(compete(name, ctx, seconds=seconds, mode=mode, only=kernel, check=not no_check))
            except RuntimeError as error:  # torch: out of memory, not on this device
                refused.append((name, str(error).splitlines()[0]))
    data = document(found, seconds=seconds)
    blocks = _blocks(found, refused)
    if out is not None:
        blocks.append(written(out, json.dumps(data, indent=1, allow_nan=False) + "\n"))
    if table is not None:
        blocks.append(written(table, _csv(found)))
    if plot is not None:
        blocks.append(written(plot, svg(found)))
    return Answer(data, blocks, OK if any(item.times for item in found) else PROBLEM)


def document(found: Sequence[Outcome], **more: Any) -> dict[str, Any]:
    """The measurements as `lz report` reads them."""
    import torch

    from layerzero import __version__
    from layerzero_tune.report.data import FORMAT

    device = found[0].context.device if found else None
    machine = {
        "device": None if device is None else device.name or device.device_type,
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "layerzero": __version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }
    more["measured"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "machine": machine, **more, "cases": [item.to_json() for item in found]}


def _asked(
    op: str | None, options: dict[str, Any], grid: Path | None, tags: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    from layerzero.device.probe import probe_devices
    from layerzero_cli.calls import context
    from layerzero_cli.words import device as device_of
    from layerzero_tune.grid import load

    spec = device_of(options.get("device"))
    if spec not in probe_devices():
        raise click.UsageError(f"--device {options.get('device')}: only a device of this machine can be measured")
    if grid is None:
        if op is None:
            raise click.UsageError("lz bench needs an op, or --grid FILE")
        if tags:
            raise click.UsageError("--tag goes with --grid")
        shapes = " ".join(
            f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in options.items()
            if value not in (None, False) and name not in ("device", "backend")
        )
        yield f"{op} {shapes}", context(op, options)
        return
    cases = load(grid).pick(device=spec.device_type, tags=tags, ops=[op] if op else [])
    if not cases.cases:
        raise click.UsageError(f"{grid}: no case for {spec.device_type} with these tags and this op")
    for case in cases.cases:
        yield case.name, context(case.op, {**case.options, "device": options.get("device")})


# -- text -------------------------------------------------------------------------------------------------
def _blocks(found: Sequence[Outcome], refused: Sequence[tuple[str, str]]) -> list[Block]:
    blocks: list[Block] = []
    for outcome in found:
        if blocks:
            blocks.append(Line())
        ctx = outcome.context
        place = ctx.device.name or ctx.device.device_type
        blocks += [Line(outcome.name, "bold"), Line(f"{ctx.dtype} on {place}, {outcome.mode}", "dim", indent=2)]
        blocks.append(Line(f"a time, for all alike: {outcome.rule}", "dim", indent=2, hang=2))
        rows = sorted(outcome.kernels.items(), key=lambda row: (row[1].us is None, row[1].us, row[0]))
        shown = [_row(name, entry, outcome) for name, entry in rows]
        if outcome.torch.us is not None:
            shown.append(_row("torch default", outcome.torch, outcome))
        if outcome.call.us is not None:
            shown.append(_row("lz." + ctx.op, outcome.call, outcome))
        columns = ("kernel", "median", "×torch", "max error", "")
        blocks.append(Table(columns, shown, indent=2, right=frozenset({1, 2, 3})))
        if outcome.pace is not None and not outcome.pace.steady:
            words = f"the host's speed changed by {outcome.pace.change:+.0%} meanwhile: ratios hold, times alone do not"
            blocks.append(Line(words, "yellow", indent=2))
        if outcome.busy > BUSY:
            words = f"other programs used {outcome.busy:.0%} of the cores meanwhile: measure again when it is quiet"
            blocks.append(Line(words, "yellow", indent=2))
    for name, why in refused:
        blocks += [Line(), Line(f"{name}: {why}", STYLES["fail"], hang=2)]
    return blocks


def _row(name: str, entry: Entry, outcome: Outcome) -> tuple[str | Cell, ...]:
    if entry.us is None:
        return Cell(name, "dim"), "", "", _error(entry), Cell(entry.why, "yellow")
    longest = max([*outcome.times.values(), outcome.torch.us or 0.0])
    bar = ("#" if is_plain(sys.stdout) else "█") * max(1, round(_BAR * entry.us / longest))
    mark = " chosen" if name == outcome.chosen else ""
    style = "bold green" if name == outcome.chosen else ""
    time = f"{entry.us / 1e3:.2f} ms" if entry.us >= 1e4 else f"{entry.us:.1f} µs"
    return Cell(name, style), time, _times_torch(entry, outcome), _error(entry), Cell(bar + mark, style)


def _error(entry: Entry) -> str:
    return "" if entry.error is None else f"{entry.error:.1e}"


def _times_torch(entry: Entry, outcome: Outcome) -> str:
    plain = outcome.torch.us
    return "" if plain is None or entry.us is None else f"{plain / entry.us:.2f}"


# -- files ------------------------------------------------------------------------------------------------
def written(path: Path, text: str) -> Line:
    """Write a file whole or not at all; the line that says so."""
    from layerzero.files import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise click.UsageError(f"{path} could not be written: {error.strerror or error}") from None
    return Line(f"wrote {path}", "dim")


def _csv(found: Sequence[Outcome]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    for outcome in found:
        contestants = {**outcome.kernels, "torch default": outcome.torch, f"lz.{outcome.context.op}": outcome.call}
        for name, entry in contestants.items():
            if entry.us is None and not entry.why:
                continue
            ctx = outcome.context
            numbers = _plain(entry.us), _plain(entry.p95_us), entry.samples, _plain(entry.error)
            chosen = "yes" if name == outcome.chosen else ""
            told = _times_torch(entry, outcome), chosen, entry.why
            rows.writerow([outcome.name, ctx.op, ctx.dtype, name, *numbers, *told])
    return text.getvalue()


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"

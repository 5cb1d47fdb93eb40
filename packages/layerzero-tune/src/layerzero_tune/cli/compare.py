"""`lz compare`: a model or a function before and after, in one table, as JSON and as one page."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.html import breakable, escaped, page
from layerzero_cli.output import Answer, Block, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import verb
from layerzero_tune.cli.bench import written
from layerzero_tune.timing.host_load import BUSY

if TYPE_CHECKING:
    from layerzero_tune.bench.compare import Comparison

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;margin:1rem 0}th,td{text-align:left;padding:.3rem 1rem .3rem 0;"
    "border-top:1px solid #8888;overflow-wrap:anywhere}h1{font-size:2rem}"
)


@verb(cli, "compare")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="[AFTER]", required=False)
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, help="For the race.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write it as one page.")
def compare(before: str, after: str | None, seconds: float, html: Path | None) -> Answer:
    """Time a model or a function before and after, in one interleaved run.

    \b
    lz compare bench.py:model                       a model as it is, and patched
    lz compare bench.py:plain bench.py:with_lz      two functions

    BEFORE is FILE.py:NAME or MODULE:NAME, a function without arguments that returns what to call and its inputs:
    (model, inputs). AFTER is the same, or returns what to call alone; it gets the same inputs. Without it BEFORE
    has to be a model that lz.patch knows. Both run without gradients.
    """
    from layerzero_tune.bench.compare import compare as hold

    made = _made(before)
    if not isinstance(made, tuple) or len(made) != 2:
        raise click.UsageError(f"{before} returns {type(made).__name__}, not (what to call, its inputs)")
    other = None if after is None else _made(after)
    found = hold(*made, other[0] if isinstance(other, tuple) else other, seconds=seconds)
    head, notes = _told(found)
    blocks: list[Block] = [Line(head, "bold"), *(Line(note, "dim", indent=2, hang=2) for note in notes), Line()]
    blocks.append(Table(("", "median", "95 %", "samples"), _rows(found), right=frozenset({1, 2, 3})))
    if found.report.calls:
        blocks += [Line(), Table(("kernel", "calls", "where and why"), _calls(found), right=frozenset({1}))]
    if html is not None:
        blocks.append(written(html, _page(before, found)))
    return Answer(found.to_json(), blocks)


def _made(word: str) -> Any:
    place, _, name = word.rpartition(":")
    if not place or not name.isidentifier():
        raise click.UsageError(f"{word!r} is not FILE.py:NAME or MODULE:NAME")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(place)
        return getattr(module, name)()
    except (FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
        raise click.UsageError(f"{word}: {error}") from None


def _rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    return [
        (name, f"{item.median_us / 1e3:.3f} ms", f"{item.p95_us / 1e3:.3f} ms", str(item.samples))
        for name, item in (("before", found.before), ("after", found.after))
    ]


def _told(found: Comparison) -> tuple[str, list[str]]:
    notes = [] if found.difference is None else [f"results differ by at most {found.difference:.1e}"]
    if found.busy > BUSY:
        notes.append(f"other programs used {found.busy:.0%} of the cores meanwhile: compare again when it is quiet")
    if not found.report.calls:
        notes.append(str(found.report))
    return f"{found.speedup:.2f}× on {found.device}", notes


def _calls(found: Comparison) -> list[tuple[str, str, str]]:
    return [
        (call.ran, str(call.count), f"{call.part or 'the model'}: {call.report.op}\n{call.why}")
        for call in found.report.calls
    ]


def _page(name: str, found: Comparison) -> str:
    head, notes = _told(found)

    def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
        top = "".join(f'<th scope="col">{escaped(column)}</th>' for column in columns)
        body = "".join(
            f'<tr><th scope="row">{breakable(row[0])}</th>' + "".join(f"<td>{escaped(cell)}</td>" for cell in row[1:])
            for row in rows
        )
        return f"<table><caption>{title}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"

    parts = [f"<h1>{escaped(name)}: {escaped(head)}</h1>", *(f"<p>{escaped(note)}</p>" for note in notes)]
    parts.append(table("One interleaved run", ("run", "median", "95 %", "samples"), [*_rows(found)]))
    if found.report.calls:
        parts.append(table("What ran after", ("kernel", "calls", "where and why"), [*_calls(found)]))
    return page(f"{name}: {head}", _STYLE, parts)

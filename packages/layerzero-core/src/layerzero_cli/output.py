"""How answers reach the reader: colours and tables in a terminal, plain aligned text elsewhere, JSON when asked.

A verb returns an `Answer`: the data, and the same as blocks of text. While it works, standard output is turned to
standard error, so that a chatty plugin can spoil neither JSON nor a pipe.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import IO, Any

_ASCII = str.maketrans({"→": "->", "–": "-", "µ": "u", "…": "...", "×": "x"})
# Of what --json prints: it goes up when an entry is renamed, removed or means something else, never for a new one.
SCHEMA_VERSION = 1
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a style; line breaks inside are kept."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A paragraph; wrapped in a terminal, the following lines indented by `hang` more."""

    text: str = ""
    style: str = ""
    indent: int = 0
    hang: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Aligned columns; a header is printed when `columns` has any text. `right` columns are numbers.

    The last column describes: it is the one that yields in a narrow terminal.
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str | Cell]]
    indent: int = 0
    right: frozenset[int] = frozenset()


Block = Line | Table


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb found: JSON-compatible data, the same to read, and the exit code."""

    data: Any
    blocks: Sequence[Block] = ()
    code: int = 0


def is_plain(stream: IO[str]) -> bool:
    """Whether colours and boxes would be noise: a pipe, a file, NO_COLOR, a dumb terminal."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return True
    return not stream.isatty()


def emit(answer: Answer, *, as_json: bool) -> None:
    """Write an answer to standard output."""
    if as_json:
        import json

        sys.stdout.write(json.dumps(stamped(answer.data), indent=2, allow_nan=False) + "\n")
    else:
        show(answer.blocks, sys.stdout)
    sys.stdout.flush()


def stamped(data: Any) -> dict[str, Any]:
    """An answer as JSON with the version of its form; a list becomes the entry `items`. A JSON Schema has its own."""
    if isinstance(data, dict):
        return data if "$schema" in data else {"schema_version": SCHEMA_VERSION, **data}
    return {"schema_version": SCHEMA_VERSION, "items": data}


def show(blocks: Sequence[Block], stream: IO[str]) -> None:
    """Write blocks to a stream, in the way it can take them."""
    if not is_plain(stream):
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False, emoji=False, markup=False)
        for line in _lines(blocks, console.width):
            console.print(Text.assemble(*((cell.text, cell.style) for cell in line)), soft_wrap=True)
        return
    text = "".join(f"{''.join(cell.text for cell in line).rstrip()}\n" for line in _lines(blocks, None))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # an ASCII locale: our own signs have plain spellings, names from elsewhere do not
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(text)


def working(what: str) -> AbstractContextManager[Any]:
    """Say what takes so long, while it does, to somebody who watches a terminal."""
    if is_plain(sys.stderr):
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


@contextmanager
def progress_bar(unit: str = "count") -> Iterator[Callable[..., None] | None]:
    """A bar for somebody who watches a terminal, or None: call it with done, total, a name and the time left.

    Bar and count stand first; a name that is too long is shortened, it never pushes them out. `unit` may be "bytes".
    """
    if is_plain(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    def text(what: str, **column: Any) -> TextColumn:
        return TextColumn(what, markup=False, table_column=Column(no_wrap=True, **column))

    columns = (
        BarColumn(bar_width=24, table_column=Column(min_width=12)),
        *(
            (DownloadColumn(), TimeRemainingColumn())
            if unit == "bytes"
            else (MofNCompleteColumn(), TimeElapsedColumn())
        ),
        text("{task.fields[left]}"),
        text("{task.description}", ratio=1, overflow="ellipsis"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task("", total=None, left="")

        def update(done: int, total: int | None, name: str = "", left: str = "") -> None:
            bar.update(task, completed=done, total=total, description=name, left=left)

        yield update


# -- layout ------------------------------------------------------------------------------------------------------
# A line is a list of cells. Nothing is cut: at a width that is too small the last column, which describes, is wrapped;
# where that is not enough, the columns that do not fit come below the others, each cell whole.
_GAP = "  "
_LEAST = 24  # columns below which a description is better set under its row


def _lines(blocks: Sequence[Block], width: int | None) -> Iterator[list[Cell]]:
    for block in blocks:
        if isinstance(block, Line):
            first, then = " " * block.indent, " " * (block.indent + block.hang)
            yield from ([Cell(line, block.style)] for line in _wrapped(block.text, width, first, then))
        else:
            for line in _table(block, width):
                yield [Cell(" " * block.indent), *line]


def _wrapped(text: str, width: int | None, first: str = "", then: str = "") -> list[str]:
    """Lines of at most `width`, which break between words; only a word that is longer than a line breaks inside."""
    if width is None:
        return [first + line for line in text.split("\n")]
    fill = partial(textwrap.wrap, width=max(width, len(then) + 1), break_on_hyphens=False)
    return [
        piece
        for line in text.split("\n")
        for piece in fill(line, initial_indent=first, subsequent_indent=then) or [first]
    ]


def _table(table: Table, width: int | None) -> Iterator[list[Cell]]:
    rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in table.rows]
    if any(table.columns):
        rows.insert(0, [Cell(name.upper() if width is None else name, "bold") for name in table.columns])
    last = len(table.columns) - 1
    widths = [max((len(line) for row in rows for line in row[i].text.split("\n")), default=0) for i in range(last + 1)]
    room = sys.maxsize if width is None else max(width - table.indent, 1)
    beside = sum(widths[:last]) + len(_GAP) * last  # what stands before the last column
    words = (len(word) for row in rows for word in row[last].text.split())
    if beside + widths[last] <= room or room - beside >= max(_LEAST, *words):
        widths[last] = min(widths[last], room - beside)
        for row in rows:
            yield from _aligned(row, widths, table.right)
        return
    fitting = 1
    while sum(widths[: fitting + 1]) + len(_GAP) * fitting <= room and fitting < last:
        fitting += 1
    for number, row in enumerate(rows):
        yield from _aligned(row[:fitting], [min(widths[0], room), *widths[1:fitting]], table.right)
        if number or not any(table.columns):
            yield from _below(row[fitting:], table.columns[fitting:], room)


def _aligned(row: Sequence[Cell], widths: Sequence[int], right: Collection[int]) -> Iterator[list[Cell]]:
    """The lines of a row, every cell in its column."""
    columns = [_wrapped(cell.text, size or None) for cell, size in zip(row, widths, strict=True)]
    last = len(row) - 1
    for texts in zip_longest(*columns, fillvalue=""):
        line = []
        for i, (text, cell, size) in enumerate(zip(texts, row, widths, strict=True)):
            filled = text.rjust(size) if i in right else text if i == last else text.ljust(size)
            line.append(Cell(filled if i == last else filled + _GAP, cell.style))
        yield line


def _below(row: Sequence[Cell], names: Sequence[str], room: int) -> Iterator[list[Cell]]:
    """Cells that found no room in their row: several to a line with the names of their columns, the last by itself."""
    indent = " " * min(4, room // 4)
    units = [
        Cell(line, cell.style)
        for cell, name in zip(row[:-1], names, strict=False)
        for text in cell.text.split("\n")
        for line in _wrapped(f"{name} {text}" if name else text, room - len(indent))
        if text.strip()
    ]
    line: list[Cell] = []
    for unit in units:
        if line and len(indent) + sum(len(cell.text) + len(_GAP) for cell in line) + len(unit.text) > room:
            yield [Cell(indent), *line]
            line = []
        line.append(Cell(unit.text + _GAP, unit.style))
    if line:
        yield [Cell(indent), *line]
    if row[-1].text.strip():
        text = f"{names[-1]}: {row[-1].text}" if names[-1] else row[-1].text
        yield from ([Cell(piece, row[-1].style)] for piece in _wrapped(text, room, indent, indent))


# -- errors ------------------------------------------------------------------------------------------------------
def _ours(error: BaseException) -> Any:
    """The error, where it is one of the library's, which is loaded then; else None."""
    return error if isinstance(error, getattr(sys.modules.get("layerzero.errors"), "LayerZeroError", ())) else None


def error_json(error: BaseException) -> dict[str, Any]:
    """An error as JSON: code, message, hint and every reason."""
    ours = _ours(error)
    if ours is not None:
        reasons = [item.to_json() for item in ours.reasons]
        return {"error": {"code": ours.code.value, "message": ours.body, "hint": ours.hint, "reasons": reasons}}
    return {"error": {"code": None, "message": f"{type(error).__name__}: {error}", "hint": "", "reasons": []}}


def describe_error(error: BaseException) -> list[Block]:
    """An error to read: what, which value met which limit, what to do. Never a traceback."""
    ours = _ours(error)
    if ours is None:
        told = f"{type(error).__name__}: {error}"
        hint = "this should not happen; LAYERZERO_DEBUG=1 shows the traceback"
        if isinstance(error, OSError):
            hint = "make room or correct the permissions there, or name another path"
        return [Line(f"error: {told}", "bold red", hang=2), Line(hint, "dim", indent=2)]
    blocks: list[Block] = [Line(f"error {ours.code.value}: {ours.body}", "bold red", hang=2)]
    first, rows = ours.reasons[0], []
    for name, value in (("value", first.value), ("limit", first.limit), ("hint", ours.hint)):
        if value not in (None, ""):
            text = str(value)
            rows.append((Cell(name, "dim"), text if len(text) <= 400 else f"{text[:400]}…"))
    if rows:
        blocks.append(Table(("", ""), rows, indent=2))
    return blocks

"""How answers reach the reader: colours and tables in a terminal, plain aligned text elsewhere, JSON when asked.

A verb returns an `Answer`: the data, and the same as blocks of text. While it works, standard output is turned to
standard error, so that a chatty plugin can spoil neither JSON nor a pipe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.errors import LayerZeroError

__all__ = [
    "STYLES",
    "Answer",
    "Block",
    "Cell",
    "Line",
    "Table",
    "describe_error",
    "emit",
    "error_json",
    "is_plain",
    "show",
    "working",
]

_ASCII = str.maketrans({"→": "->", "–": "-", "µ": "u", "…": "...", "×": "x"})
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
    """Aligned columns; a header is printed when `columns` has any text. `right` columns are numbers."""

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

        sys.stdout.write(json.dumps(answer.data, indent=2, allow_nan=False) + "\n")
    else:
        show(answer.blocks, sys.stdout)
    sys.stdout.flush()


def show(blocks: Sequence[Block], stream: IO[str]) -> None:
    """Write blocks to a stream, in the way it can take them."""
    if not is_plain(stream):
        _rich(blocks, stream)
        return
    text = "".join(f"{line}\n" for block in blocks for line in _plain(block))
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


# -- plain -------------------------------------------------------------------------------------------------------
def _plain(block: Block) -> Iterator[str]:
    if isinstance(block, Line):
        yield " " * block.indent + block.text
        return
    rows = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in block.rows]
    if any(block.columns):
        rows.insert(0, [name.upper() for name in block.columns])
    widths = [
        max((len(line) for row in rows for line in row[i].split("\n")), default=0) for i in range(len(block.columns))
    ]
    for row in rows:
        parts = [cell.split("\n") for cell in row]
        for number in range(max(len(lines) for lines in parts)):
            cells = [lines[number] if number < len(lines) else "" for lines in parts]
            padded = [
                cell.rjust(width) if i in block.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            yield (" " * block.indent + "  ".join(padded)).rstrip()


# -- rich --------------------------------------------------------------------------------------------------------
def _rich(blocks: Sequence[Block], stream: IO[str]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    for block in blocks:
        if isinstance(block, Line):
            room = max(20, console.width - block.indent - block.hang)
            wrapped = Text(block.text, style=block.style).wrap(console, room)
            for number, line in enumerate(wrapped or [Text("")]):
                console.print(Padding(line, (0, 0, 0, block.indent + (block.hang if number else 0))))
            continue
        table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(block.columns))
        for number, name in enumerate(block.columns):
            last = number == len(block.columns) - 1
            table.add_column(
                name, header_style="bold", justify="right" if number in block.right else "left",
                overflow="fold", no_wrap=not last, ratio=1 if last else None,
            )  # fmt: skip
        for row in block.rows:
            table.add_row(
                *(Text(cell.text, style=cell.style) if isinstance(cell, Cell) else Text(cell) for cell in row)
            )
        console.print(Padding(table, (0, 0, 0, block.indent)))


# -- errors ------------------------------------------------------------------------------------------------------
def error_json(error: BaseException) -> dict[str, Any]:
    """An error as JSON: code, message, hint and every reason."""
    from layerzero.errors import LayerZeroError

    if isinstance(error, LayerZeroError):
        return {
            "error": {
                "code": error.code.value,
                "message": _body(error),
                "hint": error.hint,
                "reasons": [item.to_json() for item in error.reasons],
            }
        }
    return {"error": {"code": None, "message": f"{type(error).__name__}: {error}", "hint": "", "reasons": []}}


def describe_error(error: BaseException) -> list[Block]:
    """An error to read: what, which value met which limit, what to do. Never a traceback."""
    from layerzero.errors import LayerZeroError

    if not isinstance(error, LayerZeroError):
        return [
            Line(f"error: {type(error).__name__}: {error}", "bold red", hang=2),
            Line("this should not happen; LAYERZERO_DEBUG=1 shows the traceback", "dim", indent=2),
        ]
    blocks: list[Block] = [Line(f"error {error.code.value}: {_body(error)}", "bold red", hang=2)]
    first = error.reasons[0]
    rows = [
        (name, _short(value))
        for name, value in (("value", first.value), ("limit", first.limit), ("hint", error.hint))
        if value not in (None, "")
    ]
    if rows:
        blocks.append(Table(("", ""), [(Cell(name, "dim"), text) for name, text in rows], indent=2))
    return blocks


def _body(error: LayerZeroError) -> str:
    return str(error).removesuffix(f"; {error.hint}").removesuffix(f" [{error.code.value}]")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]}…"

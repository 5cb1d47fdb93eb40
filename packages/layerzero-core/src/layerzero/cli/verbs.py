"""How a verb is declared, run and answered; every verb goes through here, so all behave alike."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from layerzero.cli.output import Answer, describe_error, emit, error_json, show
from layerzero.errors import InvalidInputError, LayerZeroError, UnknownNameError

__all__ = ["OK", "PROBLEM", "USAGE", "failed", "verb"]

OK, PROBLEM, USAGE = 0, 1, 2


def verb(group: click.Group, name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Answer]], Any]:
    """Declare a verb: a function that returns an Answer. It gains `--json`; printing and errors are done for it."""

    def declare(function: Callable[..., Answer]) -> Any:
        @functools.wraps(function)
        def run(as_json: bool, **options: Any) -> None:
            _run(function, as_json, **options)

        option = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
        return group.command(name, **attributes)(option(run))

    return declare


def _run(function: Callable[..., Answer], as_json: bool, **options: Any) -> None:
    """Run a verb with standard output turned away, then print its answer and leave with its code."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = function(**options)
    except LayerZeroError as error:
        click.get_current_context().exit(failed(error, as_json=as_json))
    emit(answer, as_json=as_json)
    click.get_current_context().exit(answer.code)


def failed(error: Exception, *, as_json: bool) -> int:
    """Show an error, and give the exit code it means."""
    if os.environ.get("LAYERZERO_DEBUG", "").lower() not in ("", "0", "false", "no", "off"):
        traceback.print_exception(error)
    if as_json:
        emit(Answer(error_json(error)), as_json=True)
    else:
        show(describe_error(error), sys.stderr)
    # What was typed cannot mean anything: that is usage. Anything else is a problem that was found.
    return USAGE if isinstance(error, (InvalidInputError, UnknownNameError)) else PROBLEM

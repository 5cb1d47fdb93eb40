"""How a verb is declared, run and answered; every verb goes through here, so all behave alike."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from layerzero_cli.output import Answer, describe_error, emit, error_json, show

__all__ = ["OK", "PROBLEM", "USAGE", "GroupedOption", "failed", "verb"]

OK, PROBLEM, USAGE = 0, 1, 2


class GroupedOption(click.Option):
    """An option that `--help` shows under a heading of its own."""

    def __init__(self, *args: Any, heading: str = "Options", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading


class Verb(click.Command):
    """A command whose options are shown under their headings, the general ones last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for item in self.get_params(ctx):
            if (record := item.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(item, "heading", "Options"), []).append(record)
        for heading in sorted(sections, key="Options".__eq__):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])


def verb(group: click.Group, name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Answer]], Any]:
    """Declare a verb: a function that returns an Answer. It gains `--json`; printing and errors are done for it."""

    def declare(function: Callable[..., Answer]) -> Any:
        @functools.wraps(function)
        def run(as_json: bool, **options: Any) -> None:
            import logging

            # Python would print our warnings itself when nobody has set up logging; here the answer says it all.
            logging.getLogger("layerzero").addHandler(logging.NullHandler())
            if unsaid := [name for name, value in options.items() if value != value]:
                raise click.UsageError(f"--{unsaid[0].replace('_', '-')} nan is no number")
            try:
                with contextlib.redirect_stdout(sys.stderr):  # turned away while the verb works
                    answer = function(**options)
            except (click.ClickException, click.Abort, click.exceptions.Exit):
                raise
            except Exception as error:
                click.get_current_context().exit(failed(error, as_json=as_json))
            emit(answer, as_json=as_json)
            click.get_current_context().exit(answer.code)

        option = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
        return group.command(name, cls=Verb, **attributes)(option(run))

    return declare


def failed(error: Exception, *, as_json: bool) -> int:
    """Show an error, and give the exit code it means."""
    known, usage = sys.modules.get("layerzero.errors"), ("InvalidInputError", "UnknownNameError")

    if os.environ.get("LAYERZERO_DEBUG", "").lower() not in ("", "0", "false", "no", "off"):
        import traceback

        traceback.print_exception(error)
    try:
        if as_json:
            emit(Answer(error_json(error)), as_json=True)
        else:
            show(describe_error(error), sys.stderr)
    except OSError:  # a full disk, too, where the answer was to go
        show(describe_error(error), sys.stderr)
    # What was typed cannot mean anything: that is usage. Anything else is a problem that was found.
    return USAGE if isinstance(error, tuple(getattr(known, name, ()) for name in usage)) else PROBLEM

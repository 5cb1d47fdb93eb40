"""The root command `lz`: how verbs of the core, of packages beside it and of plugins are found, and the exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import torch

from layerzero import __version__, companions
from layerzero.cli.verbs import OK, USAGE, failed

__all__ = ["cli"]


class Root(click.Group):
    """`lz`: verbs of the core, and those that plugins bring through `layerzero_commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every verb: the core's, those of packages beside it, those of plugins."""
        own = super().list_commands(ctx)
        return list(dict.fromkeys([*own, *sorted(companions.commands()), *sorted(_foreign(ctx, self))]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb by name; plugins are asked only for names that neither the core nor a package beside it has."""
        own = super().get_command(ctx, cmd_name) or _beside(cmd_name)
        if own is None and companions.package_of(companions.COMMANDS, cmd_name):
            companions.refuse(companions.COMMANDS, cmd_name)
        return own or _foreign(ctx, self).get(cmd_name)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, show what goes wrong in one place, and leave with 0, 1 (problem found) or 2 (usage)."""
        given = list(sys.argv[1:] if args is None else args)
        # Python would print our warnings itself when nobody has set up logging; here the answer says it all.
        logging.getLogger("layerzero").addHandler(logging.NullHandler())
        try:
            code = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            _usage(error, as_json="--json" in given)
            code = USAGE
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            code = 130
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = OK
        except Exception as error:
            code = failed(error, as_json="--json" in given)
        sys.exit(code if isinstance(code, int) else OK)


def _beside(name: str) -> click.Command | None:
    """A verb of a package beside the core: its entry point names the function that declares it, as for the core's."""
    entry = companions.commands().get(name)
    if entry is None:
        return None
    group = click.Group()
    entry.load()(group)
    return group.commands.get(name)


def _foreign(ctx: click.Context, root: click.Group) -> dict[str, click.Command]:
    """The verbs of plugins, asked for once per run."""
    known: dict[str, click.Command] | None = ctx.meta.get("layerzero.foreign")
    if known is None:
        with contextlib.redirect_stdout(sys.stderr):
            known, problems = _offered(taken=frozenset({*root.commands, *companions.commands()}))
        for line in problems:
            click.echo(f"lz: {line}", err=True)
        ctx.meta["layerzero.foreign"] = known
    return known


def _offered(taken: frozenset[str]) -> tuple[dict[str, click.Command], list[str]]:
    """All usable verbs of plugins (`layerzero_commands`) by name, and one line about each that is not."""
    from layerzero.plugin.manager import call_hook
    from layerzero.public.situation import look

    found: dict[str, click.Command] = {}
    problems: list[str] = []
    manager = look().plugins
    for name, plugin in manager.list_name_plugin() if manager is not None else ():
        try:
            offered = call_hook(plugin, "layerzero_commands") or ()
            items = list(offered)
        except (Exception, SystemExit) as error:
            problems.append(f"the commands of plugin {name} are left out: {type(error).__name__}: {error}")
            continue
        for item in items:
            if not isinstance(item, click.Command) or not item.name:
                problems.append(f"plugin {name} offers a {type(item).__name__}, expected a click command with a name")
            elif item.name in taken or item.name in found:
                problems.append(f"plugin {name} offers {item.name!r}, which exists already")
            else:
                found[item.name] = item
    return found, problems


def _usage(error: click.UsageError, *, as_json: bool) -> None:
    error.show()
    if as_json:
        click.echo(json.dumps({"error": {"code": "USAGE", "message": error.format_message(), "hint": ""}}, indent=2))


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"layerzero {__version__} (torch {torch.__version__}, Python {sys.version.split()[0]})")
        ctx.exit()


@click.group("lz", cls=Root, context_settings=_SETTINGS)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show versions.")
def cli() -> None:
    """LayerZero: for every call the fastest kernel that is correct here, and the reason why.

    Exit codes: 0 all is well, 1 a problem was found, 2 the command was not understood. Output is plain when piped;
    every verb takes --json.
    """

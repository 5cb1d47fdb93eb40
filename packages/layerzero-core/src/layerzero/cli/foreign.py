"""Verbs that plugins bring through the hook `layerzero_commands`. A broken one costs only itself."""

from __future__ import annotations

import click

from layerzero.plugin.manager import call_hook
from layerzero.public.situation import look

__all__ = ["commands"]


def commands(taken: frozenset[str]) -> tuple[dict[str, click.Command], list[str]]:
    """All usable verbs by name, and one line about each that is not."""
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

"""The command `lz` with all verbs of the core, and `lz completion`: the script that teaches a shell to complete it."""

from __future__ import annotations

import click

# Importing a module declares its verbs.
from layerzero.cli import checks, explaining, listing, plugins, policies, quarantine, warming  # noqa: F401
from layerzero.cli.output import Answer, Line
from layerzero.cli.root import cli
from layerzero.cli.verbs import verb

__all__ = ["cli"]

_INSTALL = {
    "bash": 'eval "$(lz completion bash)"  in ~/.bashrc',
    "zsh": 'eval "$(lz completion zsh)"  in ~/.zshrc',
    "fish": "lz completion fish > ~/.config/fish/completions/lz.fish",
}


@verb(cli, "completion")
@click.argument("shell", type=click.Choice(sorted(_INSTALL)))
def completion(shell: str) -> Answer:
    """Print the completion script of a shell.

    \b
    eval "$(lz completion bash)"                                 in ~/.bashrc
    eval "$(lz completion zsh)"                                  in ~/.zshrc
    lz completion fish > ~/.config/fish/completions/lz.fish      once
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "lz", "_LZ_COMPLETE").source_template % {
        "complete_func": "_lz_completion", "complete_var": "_LZ_COMPLETE", "prog_name": "lz",
    }  # fmt: skip
    return Answer({"shell": shell, "script": script, "install": _INSTALL[shell]}, [Line(script.strip("\n"))])

"""The root command `lz`: its verbs by task, where each of them is found, and the exit codes."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import operator
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.output import stamped
from layerzero_cli.verbs import OK, USAGE, failed

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = "layerzero.commands"
"""Group of entry points: a verb's name, and its click command or the function that adds it to a group."""

_CLI, _TUNE, _VERIFY = "layerzero_cli", "layerzero-tune", "layerzero-verify"
# Verbs by task: the module that declares it or the package beside the core that brings it, and the first sentence of
# its help, which stands here so that `lz --help` imports no verb. A test holds the two sentences together.
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "Look": {
        "doctor": (f"{_CLI}.checks", "Check machine, settings, plugins and vendors, and show the fix of each problem."),
        "list": (f"{_CLI}.listing", "List the kernels with platforms and dtypes, and say which can be used here."),
        "explain": (f"{_CLI}.explaining", "Say which kernel a call would run, and why not the others."),
        "which": (f"{_CLI}.explaining", "Print the id of the kernel that a call would run."),
        "validate": (f"{_CLI}.explaining", "Say whether a kernel may run a call, or why not."),
        "top": (_TUNE, "Watch a running process: calls a second by kernel, misses, failovers, breakers, compiles."),
        "trace": (_TUNE, "Run a program and write a Chrome trace of its cold calls, selections and compiles."),
        "demo": (_TUNE, "Take a Llama-shaped block through LayerZero."),
    },
    "Measure": {
        "tune": (_TUNE, "Time every kernel for the given calls; selection uses the times from then on."),
        "compare": (_TUNE, "Time a model or a function before and after, in one interleaved run."),
        "bench": (_TUNE, "Time every kernel that may run a call, head to head."),
        "perfdb": (_TUNE, "Look at measured kernel times, move them between machines, and tidy up."),
        "report": (_TUNE, "Write what was measured as one HTML page."),
    },
    "Decide": {
        "policy": (f"{_CLI}.policies", "Write and check policy files; see which values hold and where they come from."),
        "solve": (_TUNE, "Choose the kernels of the given calls now, and write the choices to a dispatch table."),
        "plan": (_TUNE, "Plan a decoder layer of the model in CONFIG (config.json or a model folder)."),
        "export-priorities": (_TUNE, "Translate TABLE, a dispatch table of lz solve, into settings of another engine."),
    },
    "Operate": {
        "readiness": (f"{_CLI}.checks", "Check that everything the policy needs exists and works."),
        "warmup": (f"{_CLI}.warming", "Compile the kernels that SOURCE will call, before any request needs them."),
        "quarantine": (f"{_CLI}.checks", "Show the kernels in quarantine (crashed or wrong); release them."),
        "completion": (f"{_CLI}.completion", "Print the script that completes verbs, options and names in a shell."),
    },
    "Extend": {
        "plugin": (_VERIFY, "Write, check and list backend packages."),
        "verify": (_VERIFY, "Compare kernels, layers, models and training with references."),
        "definitions": (_VERIFY, "Read kernel definitions, and check kernels against them."),
    },
}
_OURS = {name: told for verbs in VERBS.values() for name, told in verbs.items()}


class Root(click.Group):
    """`lz`: verbs of the core, of our packages beside it and of any other package with an entry point."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every verb that is installed, by task."""
        return [name for names in _by_task(_entries(ctx)).values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb by name; only its own module is imported."""
        home, _ = _OURS.get(cmd_name, ("", ""))
        if home.startswith("layerzero_cli."):
            importlib.import_module(home)  # declares it
            return super().get_command(ctx, cmd_name)
        value, _ = _entries(ctx).get(cmd_name, ("", ""))
        if not value and home:
            from layerzero.errors import PackageMissingError

            raise PackageMissingError(f"lz {cmd_name} needs {home}", value=home, hint=f"pip install {home}")
        return _loaded(cmd_name, value) if value else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that was typed; of one that nobody has, the nearest is named."""
        if args[0][:1] not in ("", "-") and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], {*self.list_commands(ctx), *_OURS}, 1)
            told = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{told}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs by task, each with the first sentence of its help."""
        for task, names in _by_task(_entries(ctx)).items():
            with formatter.section(task):
                formatter.write_dl([(name, self._sentence(ctx, name)) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs that begin as what was typed; modules of other packages are not imported for it."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        verbs = [CompletionItem(name, help=self._sentence(ctx, name)) for name in names]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def _sentence(self, ctx: click.Context, name: str) -> str:
        """What a verb does; of a package that is not ours, what its metadata says, so that it need not be imported."""
        if name in _OURS:
            return _OURS[name][1]
        folder, said = _entries(ctx)[name][1], {}
        with contextlib.suppress(OSError), open(f"{folder}/METADATA", encoding="utf-8", errors="replace") as file:
            said = dict(line.strip().partition(": ")[::2] for line in itertools.takewhile(str.strip, file))
        package = said.get("Name") or os.path.basename(folder).partition("-")[0]
        return f"{said.get('Summary') or package} ({package})"

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Run, show what goes wrong in one place, and leave with 0, 1 (problem found) or 2 (usage)."""
        given = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in given
        # A shell or a service manager may have closed them.
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
        try:
            code = super().main(given, prog_name, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            error.show()
            if as_json:
                import json

                kind = "USAGE" if error.exit_code == USAGE else None
                told: dict[str, Any] = {"code": kind, "message": error.format_message(), "hint": "", "reasons": []}
                click.echo(json.dumps(stamped({"error": told}), indent=2))
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            code = 130
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = OK
        except Exception as error:
            code = failed(error, as_json=as_json)
        sys.exit(code if isinstance(code, int) else OK)


def entries(group: str) -> dict[str, tuple[str, str]]:
    """Entry points by name: what each stands for, and the folder of its package's metadata.

    `importlib.metadata` reads the same files, but its import takes longer than all the rest of `lz --help` but click.
    """
    found: dict[str, tuple[str, str]] = {}
    for place in sys.path:
        try:
            names = sorted(name for name in os.listdir(place or ".") if name.endswith(".dist-info"))
        except OSError:
            continue
        for folder in (os.path.join(place, name) for name in names):
            try:
                with open(f"{folder}/entry_points.txt", encoding="utf-8", errors="replace") as file:
                    section = file.read().partition(f"[{group}]\n")[2].partition("\n[")[0]
            except OSError:
                continue
            for name, equals, value in (line.partition("=") for line in section.splitlines()):
                if equals and name[:1] not in "#;":
                    found.setdefault(name.strip(), (value.strip(), folder))
    return found


def _entries(ctx: click.Context) -> dict[str, tuple[str, str]]:
    """The verbs of installed packages beside the core, as their metadata names them; read once in a run."""
    found: dict[str, tuple[str, str]] = ctx.meta.get(COMMANDS) or ctx.meta.setdefault(COMMANDS, entries(COMMANDS))
    return found


def _by_task(found: Collection[str]) -> dict[str, list[str]]:
    """Installed verbs by task; those of packages that are not ours come last."""
    ours = {
        task: [name for name, (home, _) in verbs.items() if name in found or home.startswith("layerzero_cli.")]
        for task, verbs in VERBS.items()
    }
    return {task: names for task, names in {**ours, "Of other packages": sorted({*found} - {*_OURS})}.items() if names}


def _loaded(name: str, value: str) -> click.Command:
    """The command behind an entry point: the command itself, or a function that adds it to a group."""
    module, _, attribute = value.partition(":")
    found = operator.attrgetter(attribute)(importlib.import_module(module))
    if isinstance(found, click.Command):
        return found
    group = click.Group()
    found(group)
    if name not in group.commands:
        raise click.ClickException(f"{value} declares no command {name!r}")
    return group.commands[name]


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import torch

        from layerzero.version import __version__

        click.echo(f"layerzero {__version__} (torch {torch.__version__}, Python {sys.version.split()[0]})")
        ctx.exit()


@click.group("lz", cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show versions.")
def cli() -> None:
    """LayerZero: for every call the fastest kernel that is correct here, and the reason why.

    \b
    lz doctor                                             what is installed, what works, how to fix the rest
    lz explain attention --shape 1,32,4096,128 --causal   which kernel would run, and why not the others
    lz tune --config path/to/model                        measure the kernels for a model's calls
    lz COMMAND --help                                     options and examples of a command

    Exit codes: 0 all is well, 1 a problem was found, 2 the command was not understood. Output is plain when piped;
    every command takes --json.
    """

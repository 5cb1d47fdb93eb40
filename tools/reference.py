"""The pages of the documentation that the code writes: commands, ops, reasons, capabilities, metrics, the Python API.

`pages()` gives them by the path they have under docs/. They are made when the site is built and never committed;
tests/docs/test_site.py holds that nothing is missing on them.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import click

__all__ = [
    "LISTED",
    "TITLES",
    "api",
    "capabilities",
    "commands",
    "metrics",
    "op_pages",
    "pages",
    "public_names",
    "reasons",
]

TITLES = {
    "reference/ops/index": "Every op",
    "reference/api": "Python API",
    "reference/commands": "Commands",
    "reference/reasons": "Reason codes",
    "reference/capabilities": "capabilities.json",
    "reference/metrics": "Metrics",
    "understand/glossary": "Glossary",
}
LISTED = [
    ("Look up", "reference/metrics", "every metric, its kind and meaning"),
    ("Look up", "reference/capabilities", "every field of a backend's description of its kernels"),
    ("Look up", "reference/reasons", "every reason a kernel is refused for: cause and fix"),
    ("Look up", "reference/commands", "every verb of `lz` with its options"),
    ("Look up", "reference/api", "every public function and class, from the docstrings"),
    ("Look up", "reference/ops/index", "each op from its declaration: arguments, sizes, tolerance, kernels"),
    ("Understand", "understand/glossary", "the words of these pages"),
]
"""The generated pages that the home page lists: under which heading, and what is said of them; the last comes first."""


def cell(text: object) -> str:
    """Text as it may stand in a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(part) for part in line)} |" for line in lines) + "\n"


# --- commands ---------------------------------------------------------------------------------------------------------


def walk(command: click.Command, ctx: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """A command and every command below it, each with its context."""
    yield command, ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            child = command.get_command(ctx, name)
            if child is not None and not child.hidden:
                yield from walk(child, click.Context(child, info_name=name, parent=ctx))


def _help(text: str) -> str:
    """The help of a command as Markdown: paragraphs that click leaves as they are written become blocks."""
    found = []
    for paragraph in re.split(r"\n{2,}", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):
            found.append("```text\n" + inspect.cleandoc(paragraph[1:].strip("\n")) + "\n```")
        else:
            found.append(" ".join(paragraph.split()).replace("<", "&lt;"))
    return "\n\n".join(found)


def _parameters(command: click.Command, ctx: click.Context) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            rows.append((f"`{record[0]}`", record[1].replace("<", "&lt;").replace("*", "\\*")))
    return rows


def commands() -> str:
    """Every verb of `lz` with its usage, help and options, as click declares them."""
    from layerzero_cli.root import VERBS, cli

    root = click.Context(cli, info_name="lz")
    text = "# Commands\n\nWhat `lz COMMAND --help` prints, of every command.\n\n"
    for task, verbs in VERBS.items():
        links = ", ".join(f"[`lz {verb}`](#lz-{verb})" for verb in verbs if verb in cli.list_commands(root))
        text += f"- **{task}**: {links}\n"
    for command, ctx in walk(cli, root):
        depth = len(ctx.command_path.split())
        text += f"\n{'#' * min(depth + 1, 5)} {ctx.command_path}\n\n{_help(command.help or '')}\n\n"
        text += f"```text\n{command.get_usage(ctx)}\n```\n\n"
        if rows := _parameters(command, ctx):
            text += table(("option", "meaning"), rows)
    return text


# --- ops --------------------------------------------------------------------------------------------------------------


def op_pages() -> dict[str, str]:
    """A page for each op, from its declaration, and the list of them."""
    import layerzero as lz
    from layerzero_cli.listing import op_page

    rows: list[tuple[object, ...]] = []
    found = {}
    for spec in sorted(lz.list_ops(), key=lambda spec: spec.op_id):
        text = op_page(spec.op_id)
        function = getattr(spec, "function", None)
        words = (inspect.getdoc(function) or "").partition("\n\n")[0]
        rows.append((f"[`{spec.op_id}`]({spec.op_id}.md)", words, spec.output_kind))
        found[f"reference/ops/{spec.op_id}"] = text
    intro = (
        "# Every op\n\nMade from each op's declaration; `lz list --op NAME --page` prints the same page,"
        " for ops of other packages too. What they compute, with examples: [Ops](../../ops.md).\n\n"
    )
    toc = "\n```{toctree}\n:hidden:\n\n" + "\n".join(path.rpartition("/")[2] for path in found) + "\n```\n"
    return {"reference/ops/index": intro + table(("op", "computes", "gives"), rows) + toc, **found}


# --- reasons, capabilities, metrics -----------------------------------------------------------------------------------


def reasons() -> str:
    """Every reason code with what caused it and what to do, by category."""
    from layerzero.reasons import ReasonCategory, ReasonCode

    text = (
        "# Reason codes\n\nWhy a kernel, a plugin, a file or an input was refused or adapted. Codes are stable:"
        " they stand in JSON, in logs and in `error.code`, and are never renamed or reused. `{value}` is what was met,"
        " `{limit}` what was allowed.\n"
    )
    for category in ReasonCategory:
        codes = [code for code in ReasonCode if code.category is category]
        if codes:
            rows = [
                (f"`{code.value}`", _braced(code.message), _braced(code.hint) or "nothing: told, not refused")
                for code in codes
            ]
            text += f"\n## {category.value}\n\n" + table(("code", "cause", "what to do"), rows)
    return text


def _braced(text: str) -> str:
    return re.sub(r"\{(value|limit)\}", r"`{\1}`", text).replace("<", "&lt;").replace("*", "\\*")


def _form(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "anyOf" in schema:
        return ", or ".join(_form(part) for part in schema["anyOf"])
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_form(schema.get('items', {})) or 'values'}"
    limits = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join((kind if isinstance(kind, str) else " or ".join(kind), *limits))


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every field of a JSON Schema by its path, with its own schema and whether it is required."""
    for name, inner in schema.get("properties", {}).items():
        here = f"{path}{name}"
        yield here, inner, name in schema.get("required", ())
        yield from fields(inner, f"{here}.")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from fields(schema["additionalProperties"], f"{path}NAME.")
    if isinstance(schema.get("items"), dict):
        yield from fields(schema["items"], f"{path.rstrip('.')}[].")


def capabilities_schema() -> dict[str, Any]:
    """The JSON Schema of capabilities.json, as `lz plugin schema` prints it."""
    import json

    from click.testing import CliRunner

    from layerzero_cli.root import cli

    answer = CliRunner().invoke(cli, ["plugin", "schema"])
    found: dict[str, Any] = json.loads(answer.output)
    return found


def capabilities() -> str:
    """Every field of capabilities.json."""
    text = (
        "# capabilities.json\n\nWhat a backend says of its kernels; what is not declared is not supported."
        " `lz plugin schema` prints the same as JSON Schema for an editor, `lz plugin check` names every mistake."
        " How to write one: [Writing a backend](../plugins.md). `NAME` stands for a name you choose,"
        " `[]` for the entries of a list.\n\n"
    )
    groups: dict[str, list[tuple[object, ...]]] = {}
    for path, schema, required in fields(capabilities_schema()):
        head, _, last = path.rpartition(".")
        told = schema.get("description", "") + (" (required)" if required else "")
        groups.setdefault(head, []).append((f"`{last}`", _form(schema), told))
    for head, rows in groups.items():
        text += f"\n## {'The file' if not head else f'`{head}`'}\n\n" + table(("field", "values", "meaning"), rows)
    return text


def metrics() -> str:
    """Every metric."""
    from layerzero.telemetry.metrics import CATALOGUE

    text = (
        "# Metrics\n\nEvery metric that `lz.metrics()`, the Prometheus port and the Grafana dashboard know;"
        " [Seeing what it does](../observability.md) says how to get at them and which are worth an alert.\n\n"
    )
    return text + table(("metric", "kind", "meaning"), [(f"`{n}`", *kind) for n, kind in CATALOGUE.items()])


# --- Python -----------------------------------------------------------------------------------------------------------

_MODULES = {
    "layerzero.plugin": "For authors of backends and ops.",
    "layerzero.errors": "Every exception that LayerZero raises on purpose derives from `LayerZeroError`.",
}


def public_names() -> list[str]:
    """Every public name of `layerzero` that is not an op: ops have pages of their own."""
    import layerzero as lz
    from layerzero.companions import Missing, known_names

    ops = {spec.op_id for spec in lz.list_ops()}
    names = {*lz.__all__, *lz._LAZY, *known_names()} - ops - {"__version__", "ops"}
    return sorted(name for name in names if not name.startswith("_") and not isinstance(getattr(lz, name), (Missing,)))


def api() -> str:
    """The public names of `layerzero`, of `layerzero.plugin` and the exceptions, from their docstrings."""
    import layerzero as lz

    text = (
        "# Python API\n\nMade from the docstrings. Ops (`lz.attention`, `lz.rms_norm`, …) have"
        " [pages of their own](ops/index.md). A name of a package that is not installed says what to install.\n"
    )
    by_home: dict[str, list[str]] = {}
    for name in public_names():
        found = getattr(lz, name)
        home = getattr(found, "__module__", None) or getattr(found, "__name__", "")
        if isinstance(found, ModuleType):
            home = found.__name__
        by_home.setdefault(home if isinstance(found, ModuleType) else home.partition(".")[0], []).append(name)
    for home in sorted(by_home, key=lambda home: (home != "layerzero", home)):
        modules = [name for name in by_home[home] if isinstance(getattr(lz, name), ModuleType)]
        title = f"lz.{modules[0]}" if modules else home.replace("_", "-").replace("layerzero", "layerzero", 1)
        text += f"\n## {'layerzero-core' if title == 'layerzero' else title}\n\n"
        if modules:
            text += _module(getattr(lz, modules[0]), f"lz.{modules[0]}")
        else:
            text += "\n".join(_entry(f"lz.{name}", getattr(lz, name)) for name in by_home[home])
    for module, words in _MODULES.items():
        text += f"\n## {module}\n\n{words}\n\n" + _module(importlib.import_module(module), module)
    return text


def _module(module: ModuleType, prefix: str) -> str:
    return "\n".join(_entry(f"{prefix}.{name}", getattr(module, name)) for name in module.__all__)


def _entry(name: str, found: Any) -> str:
    """One object: a directive of Sphinx's Python domain, so that the search and the index know it."""
    if inspect.isclass(found):
        kind = "exception" if issubclass(found, BaseException) else "class"
    else:
        kind = "function" if callable(found) else "data"
    body = _docstring(found) if kind != "data" else ""
    if inspect.isclass(found):
        body += "".join(
            _entry(part, member).replace(":::{py:function}", ":::{py:method}") for part, member in _members(found)
        )
    colons = "::::" if inspect.isclass(found) else ":::"
    return f"{colons}{{py:{kind}}} {name}{_signature(found)}\n\n{body}\n{colons}\n"


def _members(found: type) -> list[tuple[str, Callable[..., Any]]]:
    if issubclass(found, (enum.Enum, BaseException)):
        return []
    return [
        (name, member)
        for name, member in vars(found).items()
        if not name.startswith("_") and inspect.isfunction(member) and member.__doc__
    ]


def _signature(found: Any) -> str:
    if not callable(found) or (inspect.isclass(found) and issubclass(found, (enum.Enum, BaseException))):
        return ""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return "(…)"
    shown = [
        item.replace(
            annotation=item.empty, default=item.empty if item.default is item.empty else _Written(item.default)
        )
        for item in signature.parameters.values()
        if item.name != "self"
    ]
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))


class _Written:
    """A default as one writes it: without addresses of objects."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, enum.Enum):
            return repr(self.value.value)
        if self.value is dataclasses.MISSING or "<" in repr(self.value):
            return "..."
        return repr(self.value)


def _docstring(found: Any) -> str:
    """A docstring as Markdown: aligned columns (a name, then what it means) become a list."""
    lines = (inspect.getdoc(found) or "").splitlines()
    if inspect.isclass(found) and found.__doc__ and found.__doc__.startswith(f"{found.__name__}("):
        lines = []  # what dataclass writes when there is none
    text: list[str] = []
    for line in lines:
        row = re.match(r"^(?P<name>[\w.*=, ]*\w) {2,}(?P<words>\S.*)$", line)
        if row:
            text.append(f"- `{row['name']}`: {row['words']}")
        elif text and text[-1].startswith("- `") and line.startswith("  "):
            text[-1] += f" {line.strip()}"
        else:
            text.append(line)
    return re.sub(r"(?m)^([^-\n].*)\n(- `)", r"\1\n\n\2", "\n".join(text)).replace("<", "&lt;") + "\n"


def pages() -> dict[str, str]:
    """Every generated page by its path under docs/, without `.md`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "reference/commands": commands(),
            **op_pages(),
            "reference/reasons": reasons(),
            "reference/capabilities": capabilities(),
            "reference/metrics": metrics(),
            "reference/api": api(),
        }

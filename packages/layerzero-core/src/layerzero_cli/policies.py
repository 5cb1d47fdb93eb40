"""`lz policy check | show | init | schema`: is a policy file right, what holds here, and a file to begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, error_json
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb

# Context.get knows these besides what a jit_key may name and the fields of a Context.
_SIZES = ("batch_heads", "device", "k", "n", "num_blocks")


@cli.group("policy")
def policy() -> None:
    """Write and check policy files; see which values hold and where they come from."""


@verb(policy, "check")
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> Answer:
    """Check a policy file; every mistake is shown with its line and key, and what was probably meant.

    \b
    lz policy check layerzero.yaml

    What is valid but names no kernel or context field known here is a warning. Exit code 1 for a mistake.
    """
    from layerzero.policy.load import mistakes

    wrong = mistakes(file)
    warnings = [] if wrong else _warnings(file)
    found = [{**_place(error), **error_json(error)["error"]} for error in wrong]
    data = {"file": str(file), "valid": not wrong, "warnings": [item.to_json() for item in warnings], "mistakes": found}
    if wrong:
        data |= {**_place(wrong[0]), **error_json(wrong[0])}
    told = [("fail", f"{item['code']}: {item['message']}", item["hint"]) for item in found]
    told += [("warn", f"{item.name}: {item.message}", item.fix) for item in warnings]
    rows = [
        # that a check is advised is no advice to somebody who makes one
        (Cell(status, STYLES[status]), text if not hint or "lz policy check" in hint else f"{text}\n→ {hint}")
        for status, text, hint in told
    ]
    count = "valid" if not wrong else "1 mistake" if len(wrong) == 1 else f"{len(wrong)} mistakes"
    blocks: list[Block] = [Line(f"{file}: {count}", STYLES["fail" if wrong else "ok"])]
    return Answer(data, [*blocks, Table(("", ""), rows, indent=2)] if rows else blocks, PROBLEM if wrong else OK)


@verb(policy, "show")
def show() -> Answer:
    """Show every value of the policy in force, and where it comes from: a file, a variable, or the default.

    \b
    lz policy show
    LAYERZERO_CONFIG=candidate.yaml lz policy show
    """
    import layerzero as lz
    from layerzero.env import read
    from layerzero.json_form import plain
    from layerzero.policy.load import discover
    from layerzero.runtime.policies import policies
    from layerzero.settings import SETTINGS

    files = [{"path": str(found.path), "trusted": found.trusted} for found in discover(read())]
    config = lz.get_config()
    data = config.to_json()
    isolation = {**dict(config.backend_isolation), **{name: dict(entry) for name, entry in config.isolation.items()}}
    spelled = {"locks": config.locks_by_op(), "boosts": dict(config.boosts), "isolation": isolation}
    values = {}
    for item in (item for item in SETTINGS if item.key):
        group, _, name = item.key.partition(".")
        value = data[group].get(name, item.default) if name else spelled.get(group, data.get(group))
        said = [layer.source for layer in policies.base() if _says(layer, group, name)]
        variable = f"LAYERZERO_{item.variable}" if item.variable else "environment"
        sources = [variable if source == "environment" else source for source in said]
        values[item.key] = {"value": plain(value), "from": sources}
    values["rules"] = {"value": len(config.rules), "from": [rule.source for rule in config.rules]}
    rows = [
        (Cell(key, "bold" if row["from"] else "dim"), _words(row["value"]) or "–",
         Cell(", ".join(row["from"]) or "default", "" if row["from"] else "dim"))
        for key, row in values.items()
    ]  # fmt: skip
    blocks: list[Block] = [Line(f"policy {data['policy_hash'][:12]}", "bold")]
    blocks += [Line(f"from {found['path']}", "dim", indent=2) for found in files]
    blocks.append(Table(("key", "value", "from"), rows, indent=2))
    return Answer({"files": files, "policy": data, "values": values}, blocks)


def _says(layer: Any, group: str, name: str) -> bool:
    """Whether a layer speaks of a setting."""
    if not name and hasattr(layer, group):
        return getattr(layer, group) not in (None, ())
    return name in layer.settings.get(group, ()) if name else group in layer.settings


@verb(policy, "init")
@click.argument("file", type=click.Path(path_type=Path), default=Path("layerzero.yaml"))
def init(file: Path) -> Answer:
    """Write a policy file in which every setting stands as a comment, with what it means and its default.

    \b
    lz policy init                      layerzero.yaml in this folder
    lz policy init ~/.config/layerzero/layerzero.yaml

    The JSON Schema is written beside it and named in its first line: editors complete and check by it.
    """
    from layerzero.files import write_whole
    from layerzero.policy.load import commented, json_schema

    schema = file.with_suffix(".schema.json")
    if file.suffix not in (".yaml", ".yml"):
        raise click.UsageError(f"{file} is not a YAML file")
    for path in (file, schema):
        if path.exists():
            raise click.UsageError(f"{path} exists already")
    write_whole(schema, json.dumps(json_schema(), indent=2) + "\n")
    write_whole(file, commented(schema.name))
    steps = [f"lz policy check {file}", "lz policy show"]
    blocks: list[Block] = [Line(f"wrote {file} and {schema}", STYLES["ok"]), *(Line(step, indent=2) for step in steps)]
    return Answer({"path": str(file), "schema": str(schema), "next": steps}, blocks)


@verb(policy, "schema")
def schema() -> Answer:
    """Print the JSON Schema of the policy file, for editors."""
    from layerzero.policy.load import json_schema

    data = dict(json_schema())
    return Answer(data, [Line(json.dumps(data, indent=2))])


def _place(error: Any) -> dict[str, Any]:
    return {"line": getattr(error, "line", None), "key": getattr(error, "key", None)}


def _warnings(file: Path) -> list[Any]:
    """Entries that are legal and reach nothing: kernels and context fields nobody here knows."""
    from dataclasses import fields
    from fnmatch import filter as matching

    from layerzero.model.context import KEYABLE, Context
    from layerzero.policy.layers import merge
    from layerzero.policy.load import load_file, mistakes
    from layerzero.public.check_policy import named_nothing, required, similar
    from layerzero.public.checks import Check, Status, look
    from layerzero.reasons import ReasonCode

    world = look().world
    merged = merge((load_file(file),))
    found = named_nothing(merged, world)
    for kernel_id, ops in required(merged).items():
        kernel = world.registry.kernels.get(kernel_id)
        where = f"lock of {', '.join(ops)}" if ops else "allow"
        if kernel is None:
            fix, told = similar(kernel_id, world.registry.kernels), f"{kernel_id} is not registered here"
            found.append(Check("policy", where, Status.WARN, told, ReasonCode.KERNEL_UNKNOWN, fix))
        elif others := [op for op in ops if kernel.op not in (matching(world.ops, op) or kernel.op)]:
            told = f"{kernel_id} does not compute {', '.join(others)}"
            found.append(Check("policy", where, Status.WARN, told, None, f"lock {kernel.op} instead"))
    known = {*_SIZES, *KEYABLE, *(item.name for item in fields(Context))}
    for error in mistakes(file, known_fields=known):
        found.append(Check.error("policy", getattr(error, "key", "") or "when", error, Status.WARN))
    return found


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

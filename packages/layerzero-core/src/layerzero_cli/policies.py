"""`lz policy check | show | schema`: is a policy file right, and what holds here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, describe_error, error_json
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb

# Context.get knows these besides what a jit_key may name and the fields of a Context.
_SIZES = ("batch_heads", "device", "k", "n", "num_blocks")


@cli.group("policy")
def policy() -> None:
    """Check policy files, and see which policy holds."""


@verb(policy, "check")
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> Answer:
    """Check a policy file; a mistake is shown with its line and key.

    What is valid but names no kernel or context field known here is a warning. Exit code 1 for a mistake.
    """
    from layerzero.errors import LayerZeroError
    from layerzero.policy.load import load_file

    try:
        layer = load_file(file)
    except LayerZeroError as error:
        place = {"line": getattr(error, "line", None), "key": getattr(error, "key", None)}
        data = {"file": str(file), "valid": False, "warnings": [], **place, **error_json(error)}
        return Answer(data, _mistake(error, place), PROBLEM)
    warnings = _warnings(file, layer)
    data = {"file": str(file), "valid": True, "warnings": [item.to_json() for item in warnings]}
    rows = [(Cell("warn", STYLES["warn"]), f"{item.name}: {item.message}\n→ {item.fix}") for item in warnings]
    blocks: list[Block] = [Line(f"{file}: valid", STYLES["ok"])]
    return Answer(data, [*blocks, Table(("", ""), rows, indent=2)] if rows else blocks, OK)


@verb(policy, "show")
def show() -> Answer:
    """Show the policy in force and the files it comes from."""
    import layerzero as lz
    from layerzero.env import read
    from layerzero.model.config import Policy
    from layerzero.policy.load import discover

    files = [{"path": str(found.path), "trusted": found.trusted} for found in discover(read())]
    data = lz.get_config().to_json()
    plain = Policy().to_json()
    changed = {name: value for name, value in data.items() if value != plain[name] and name != "policy_hash"}
    rows = [(Cell(name, "bold"), _words(value)) for name, value in sorted(changed.items())]
    blocks: list[Block] = [Line(f"policy {data['policy_hash'][:12]}", "bold")]
    blocks += [Line(f"from {found['path']}", "dim", indent=2) for found in files]
    blocks.append(Table(("", ""), rows, indent=2) if rows else Line("only defaults", "dim", indent=2))
    return Answer({"files": files, "policy": data}, blocks)


@verb(policy, "schema")
def schema() -> Answer:
    """Print the JSON Schema of the policy file, for editors."""
    from layerzero.policy.schema import json_schema

    data = dict(json_schema())
    return Answer(data, [Line(json.dumps(data, indent=2))])


def _mistake(error: Any, place: dict[str, Any]) -> list[Block]:
    rows = [(Cell(name, "dim"), str(value)) for name, value in place.items() if value not in (None, "")]
    if "lz policy check" not in error.hint:  # that is what is being done
        rows.append((Cell("hint", "dim"), error.hint))
    return [*describe_error(error)[:1], Table(("", ""), rows, indent=2)]


def _warnings(file: Path, layer: Any) -> list[Any]:
    """Entries that are legal and reach nothing: kernels and context fields nobody here knows."""
    from dataclasses import fields

    from layerzero.errors import LayerZeroError
    from layerzero.model.context import KEYABLE, Context
    from layerzero.policy.layers import merge
    from layerzero.policy.load import load_file
    from layerzero.public.check_policy import named_nothing, required
    from layerzero.public.checks import Check, Status
    from layerzero.public.situation import look
    from layerzero.reasons import ReasonCode

    world = look().world
    merged = merge((layer,))
    found = named_nothing(merged, world)
    for kernel_id, ops in required(merged).items():
        if kernel_id not in world.registry:
            where = f"lock of {', '.join(ops)}" if ops else "allow"
            found.append(
                Check("policy", where, Status.WARN, f"{kernel_id} is not registered here",
                      ReasonCode.KERNEL_UNKNOWN, "install the backend that brings it, or correct the id")
            )  # fmt: skip
    try:
        load_file(file, known_fields={*_SIZES, *KEYABLE, *(item.name for item in fields(Context))})
    except LayerZeroError as error:
        found.append(Check.error("policy", getattr(error, "key", "") or "when", error, Status.WARN))
    return found


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "\n".join(_words(item) for item in value)
    return str(value)

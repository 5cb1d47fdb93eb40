"""`lz quarantine list | clear`: kernels that took a process down, and the way back."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from layerzero_cli.output import STYLES, Answer, Block, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb

if TYPE_CHECKING:
    from layerzero.health.quarantine import Quarantine, QuarantineEntry


@cli.group("quarantine")
def quarantine() -> None:
    """See which kernels took a process down and are skipped, and lift that."""


@verb(quarantine, "list")
def show() -> Answer:
    """List the kernels in quarantine, with what they did and when."""
    quarantine, entries = _opened()
    rows = [
        (item.kernel_id, item.version, _when(item.since), item.code, item.detail or "-", item.device_signature)
        for item in entries
    ]
    data = {
        "path": str(quarantine.path),
        "entries": [asdict(entry) for entry in entries],
        "problems": [item.to_json() for item in quarantine.problems],
    }  # fmt: skip
    blocks: list[Block] = [Line(str(problem), STYLES["warn"], hang=2) for problem in quarantine.problems]
    if not rows:
        return Answer(data, [*blocks, Line("nothing is in quarantine", STYLES["ok"])])
    head = ("kernel", "version", "since", "code", "what happened", "device")
    blocks += [Table(head, rows), Line("lz quarantine clear KERNEL lifts one, once its cause is gone", "dim")]
    return Answer(data, blocks)


@verb(quarantine, "clear")
@click.argument("kernels", nargs=-1, metavar="KERNEL...")
@click.option("--all", "everything", is_flag=True, help="Lift every quarantine.")
def clear(kernels: tuple[str, ...], everything: bool) -> Answer:
    """Lift the quarantine of kernels.

    \b
    lz quarantine clear sdpa.attention.flash
    lz quarantine clear --all

    Exit code 1 when one of them was not in it.
    """
    from layerzero.errors import did_you_mean

    if bool(kernels) == everything:
        raise click.UsageError("name the kernels, or say --all")
    quarantine, entries = _opened()
    names = tuple(dict.fromkeys(entry.kernel_id for entry in entries)) if everything else kernels
    lifted = {name: quarantine.remove(name) for name in names}
    absent = [name for name, count in lifted.items() if not count]
    blocks: list[Block] = [Line(f"{name}: lifted", STYLES["ok"]) for name, count in lifted.items() if count]
    held = [entry.kernel_id for entry in entries]
    fixes = {name: did_you_mean(name, held, "lz quarantine list shows what is") for name in absent}
    blocks += [Line(f"{name}: was not in quarantine; {fix}", STYLES["warn"]) for name, fix in fixes.items()]
    blocks = blocks or [Line("nothing was in quarantine", STYLES["ok"])]
    data = {"path": str(quarantine.path), "lifted": lifted, "absent": absent}
    return Answer(data, blocks, PROBLEM if absent else OK)


def _opened() -> tuple[Quarantine, tuple[QuarantineEntry, ...]]:
    """The quarantine and its entries, what crashed processes have left included."""
    from layerzero.errors import ConfigurationError
    from layerzero.health.quarantine import Quarantine
    from layerzero.runtime.crashes import collect, place

    file = place()
    if file is None:
        message = "LAYERZERO_QUARANTINE switches the quarantine off"
        raise ConfigurationError(message, value="off", limit="a file", hint="unset LAYERZERO_QUARANTINE")
    quarantine = Quarantine(file)
    try:
        collect(quarantine)
        return quarantine, quarantine.entries()
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}"
        raise ConfigurationError(message, value=str(file), limit="a readable file") from error


def _when(since: float) -> str:
    return datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M UTC")

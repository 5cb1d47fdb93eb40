"""`lz warmup`: compile what a model's traffic will need, ahead of the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import Answer, Block, Cell, Line, Table, progress_bar
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, verb


@verb(cli, "warmup")
@click.argument("source", type=click.Path(path_type=Path), required=False)
@click.option("--config", type=click.Path(path_type=Path), help="config.json the manifest must come from.")
@click.option("--kernels", multiple=True, metavar="GLOB", help="Compile these too, chosen or not.")
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait for critical kernels.")
@click.option("--workers", type=click.IntRange(min=1), help="Kernels compiled at a time.")
@click.option("--critical-only", is_flag=True, help="Do not wait for the rest.")
@click.option("--retry", is_flag=True, help="Try again what could not be compiled before.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the manifest there; compile nothing.")
@click.option("--pack", type=click.Path(path_type=Path), help="Write what is ready into this file, for other machines.")
@click.option("--unpack", type=click.Path(path_type=Path), help="Install what such a file holds; compiles nothing.")
@click.option("--key", type=click.Path(path_type=Path), help="Key file to sign a pack with, or to check it by.")
def warmup(
    source: Path | None,
    config: Path | None,
    critical_only: bool,
    write: Path | None,
    pack: Path | None,
    unpack: Path | None,
    key: Path | None,
    **options: Any,
) -> Answer:
    """Compile the kernels that SOURCE will call, before any request needs them.

    \b
    lz warmup path/to/model
    lz warmup traffic.json --pack kernels.lzpack --key secret
    lz warmup --unpack kernels.lzpack --key secret

    SOURCE is a manifest, traffic recorded with lz.record, a model folder or its config.json. Compiled kernels are
    kept in the cache folder (LAYERZERO_JIT_CACHE_DIR), where every process of this user finds them. Exit code 1
    when a critical call is not ready. --pack takes them to machines with the same device, driver and versions:
    lz warmup --unpack FILE there.
    """
    if (source is None) is (unpack is None):
        raise click.UsageError("give SOURCE, or --unpack FILE alone")
    from layerzero.companions import part
    from layerzero.public.traffic import manifest, warmup

    if unpack is not None:
        return _packed("installed from", unpack, part("warmup.unpack")(unpack, key=key))
    made = manifest(source, config=config)
    if write is not None:
        made.save(write)
        critical = sum(item.critical for item in made.items)
        told = f"{len(made.items)} calls, {critical} critical, written to {write}"
        data = {"calls": len(made.items), "critical": critical, "config_hash": made.config_hash, "path": str(write)}
        return Answer(data, [Line(told)])
    with progress_bar() as progress:
        result = warmup(made, background=critical_only, progress=progress, **options)
    if pack is not None:
        packed = _packed("packed into", pack, part("warmup.pack")(result, pack, key=key))
        data = {**result.to_json(), "pack": packed.data}
        return Answer(data, [*_blocks(result), *packed.blocks], OK if result.ok else PROBLEM)
    return Answer(result.to_json(), _blocks(result), OK if result.ok else PROBLEM)


def _packed(done: str, path: Path, what: Any) -> Answer:
    """What went into a pack, or came out of one."""
    told = f"{len(what.artifacts)} artifacts, {what.files} files, {what.bytes / 2**20:.1f} MiB {done} {path}"
    data = {"path": str(path), "artifacts": len(what.artifacts)}
    data |= {name: getattr(what, name) for name in ("files", "bytes", "content_hash", "signed")}
    return Answer(data, [Line(f"{told}; {'signed' if what.signed else 'no signature asked for'}")])


def _blocks(result: Any) -> list[Block]:
    head = (
        f"{result.calls} calls: {len(result.compiled)} artifacts ready ({result.already} of them were before), "
        f"{len(result.failed)} not, {result.waiting} still compiling; {result.seconds:.1f} s"
    )
    blocks: list[Block] = [Line(head)]
    rows = []
    for item in (*result.outcomes, *result.unready):
        state = Cell("ready", "green") if item.reason is None else Cell(item.reason.code, "bold red")
        why = "" if item.reason is None else f"{item.reason.message}; {item.reason.hint}"
        kind = "critical" if item.critical else ""
        rows.append((item.artifact[0], " ".join(item.artifact[1][2:]), kind, f"{item.seconds:.1f}", state, why))
    if rows:
        blocks.append(Table(("kernel", "compiled for", "", "s", "", ""), rows, right=frozenset({3})))
    return blocks

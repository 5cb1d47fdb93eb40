"""`lz plugin new | check | prove | schema | list`: for those who write backends, or wonder which are here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, working
from layerzero_cli.verbs import OK, PROBLEM, verb

_STATE_STYLES = {"ok": "green", "unavailable": "yellow", "failed": "bold red", "denied": "dim"}


@click.group("plugin")
def plugin() -> None:
    """Write, check and list backend packages."""


@verb(plugin, "new")
@click.argument("name")
@click.option("--dir", "folder", type=click.Path(path_type=Path, file_okay=False), default=".", show_default=True)
@click.option("--op", help="The op its kernel computes; a name that nobody has becomes a new op.")
@click.option(
    "--lang", type=click.Choice(["python", "triton", "c"]), default="python", show_default=True, help="Of its kernel."
)
def new(name: str, folder: Path, op: str | None, lang: str) -> Answer:
    """Write a complete backend package that passes the conformance kit as it is.

    \b
    lz plugin new mybackend --dir ~/work
    lz plugin new mybackend --op rms_norm --lang c
    lz plugin new mybackend --op squared_relu --lang triton

    In C it becomes one wheel for Python 3.11 and later (abi3). The kernel of a known op stands behind the built-in
    ones until `priority` in capabilities.json is raised.
    """
    from layerzero_verify.scaffold import write_plugin

    target = write_plugin(name, folder, op=op, lang=lang)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    steps = [f"pip install -e '{target}[test]'", f"lz plugin check {name.replace('-', '_')}", f"pytest '{target}'"]
    blocks: list[Block] = [Line(f"wrote {target}", STYLES["ok"]), *(Line(file, indent=2) for file in files)]
    blocks += [Line(), Line("next", "bold"), *(Line(step, indent=2) for step in steps)]
    return Answer({"path": str(target), "files": files, "next": steps}, blocks)


@verb(plugin, "schema")
def schema() -> Answer:
    """Print the JSON Schema of capabilities.json, for editors and for your own checks.

    \b
    lz plugin schema > capabilities.schema.json
    """
    from layerzero.registry.capabilities import json_schema

    data = json_schema()
    return Answer(data, [Line(json.dumps(data, indent=2))])


@verb(plugin, "list")
def list_() -> Answer:
    """List every plugin that was found, and how it fared."""
    from layerzero.public.checks import look

    records = look().records
    rows = []
    for record in records:
        why = f"{record.reasons[0].code.value}: {record.reasons[0].message}" if record.reasons else ""
        told = f"{why}\n→ {record.fix}" if why and record.fix else why
        kernels = str(len(record.kernels)) if record.state in ("ok", "unavailable") else "–"
        package = f"{record.dist} {record.dist_version}".strip()
        rows.append((record.name, Cell(record.state, _STATE_STYLES[record.state]), kernels, package, told))
    table = Table(("plugin", "state", "kernels", "package", "why"), rows, right=frozenset({2}))
    return Answer([record.to_json() for record in records], [table])


@verb(plugin, "prove")
@click.argument("name")
@click.option("--family", help="Family of devices, where this machine pretends to be another one.")
@click.option("--dry-run", is_flag=True, help="Run the kit, write nothing.")
def prove(name: str, family: str | None, dry_run: bool) -> Answer:
    """Run the conformance kit and write proofs.json beside the plugin's capabilities.json.

    Shipped in the wheel, it says that these very sources were right on this family of devices: its kernels then
    serve their first call unchecked. Exit code 1 when a test failed or nothing ran here.
    """
    _must_be_plugin(name)
    options = ([] if family is None else ["--family", family]) + (["--dry-run"] if dry_run else [])
    found, _, code = _run_kit(name, *options)
    blocks: list[Block] = [Line(line, STYLES["fail"]) for line in (*found["failed"], *found.get("said", ()))]
    for backend, told in found["backends"].items():
        families = ", ".join(told["families"])
        blocks.append(Line(f"{backend}: {len(told['proven'])} kernels proven on {families}", STYLES["ok"]))
        blocks += [Line(f"{told['path']}", indent=2)]
        blocks += [Line(f"no proof: {kernel}", STYLES["skip"], indent=2) for kernel in told["unproven"]]
    ok = code == 0
    return Answer({**found, "ok": ok}, blocks or [Line("no kernel of it runs on this machine")], OK if ok else PROBLEM)


@verb(plugin, "check")
@click.argument("name")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds the probe may take.")
@click.option("--kit", is_flag=True, help="Also run the conformance kit.")
def check(name: str, timeout: float | None, kit: bool) -> Answer:
    """Check one plugin: does it load, what does its probe say, and does it pass the conformance kit.

    Exit code 1 when anything failed.
    """
    from layerzero.public.checks import doctor
    from layerzero_cli.checks import check_blocks

    if kit:
        _must_be_plugin(name)
    with working(f"probing {name} in a process of its own …"):
        report = doctor(name, timeout=timeout)
    blocks = check_blocks(report)
    data = report.to_dict()
    if not kit:
        return Answer({**data, "kit": None}, blocks, OK if report.ok else PROBLEM)
    found, lines, _ = _run_kit(name, "--dry-run")
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    summary = lines[-1].strip("= ") if lines else "pytest said nothing"
    passed = "said" not in found and not found["failed"]
    blocks += [Line(), Line(f"conformance kit: {'passed' if passed else 'failed'}", STYLES["ok" if passed else "fail"])]
    blocks += [Line(line, indent=2) for line in (found.get("said") or [*failed, summary])]
    ok = report.ok and passed
    told = {"ok": passed, "summary": summary, "failed": failed}
    return Answer({**data, "ok": ok, "kit": told}, blocks, OK if ok else PROBLEM)


def _must_be_plugin(name: str) -> None:
    """The kit runs on whole plugins, by entry point or module; a usage error names the one that brings a backend."""
    from layerzero.errors import did_you_mean
    from layerzero.public.checks import look

    records = {record.name: record for record in look().records}
    if name in records or "." in name or ":" in name:
        return
    owner = next((record.name for record in records.values() if name in record.backends), None)
    near = did_you_mean(name, records, f"known here: {', '.join(sorted(records))}")
    hint = f"{name} is a backend of the plugin {owner}, give that" if owner else near
    raise click.UsageError(f"no plugin is named {name!r}; {hint}")


def _run_kit(name: str, *options: str) -> tuple[dict[str, Any], list[str], int]:
    """Run the kit on a plugin in its own process: what it found (else what was said), pytest's lines, the exit code."""
    command = [sys.executable, "-P", "-m", "layerzero_verify.testing.proofs", name, *options]
    with working("running the conformance kit …"):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    written, _, said = done.stdout.partition("\n{\n")
    try:
        return json.loads(f"{{{said}"), written.strip().splitlines(), done.returncode
    except ValueError:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return {"backends": {}, "failed": [], "said": lines[-8:]}, lines, done.returncode

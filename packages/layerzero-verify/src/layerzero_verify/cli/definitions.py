"""`lz definitions list | show | check`: kernels against the definitions of flashinfer-bench."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, is_plain
from layerzero_cli.verbs import OK, PROBLEM, verb

if TYPE_CHECKING:
    from layerzero_verify.definitions.schema import Definition
    from layerzero_verify.definitions.trace import Outcome, Report

_ROOT = click.option("--root", type=click.Path(path_type=Path), help="The dataset; else FIB_DATASET_PATH.")
_TRUST = click.option(
    "--trust", multiple=True, type=click.Path(), help="A folder or file whose definitions may run their code."
)


def add(group: click.Group) -> None:
    """Declare the verbs."""

    @group.group("definitions")
    def definitions() -> None:
        """Read kernel definitions, and check kernels against them."""

    @verb(definitions, "list")
    @_ROOT
    @click.option("--op-type", multiple=True, help="Only this kind.")
    def list_(root: Path | None, op_type: tuple[str, ...]) -> Answer:
        """List definitions, the op of ours that stands for each, and files that cannot be read."""
        from layerzero_verify.definitions import open_dataset

        dataset = open_dataset(root)
        found = dataset.select((), op_type, everything=not op_type)
        data: list[dict[str, Any]] = []
        rows: list[tuple[str | Cell, ...]] = []
        unknown, stray = dataset.strays()
        wrong = [*dataset.problems, *stray]
        for item in found:
            (workloads, bad), (traces, worse) = dataset.workloads(item), dataset.traces(item)
            wrong += [*bad, *worse]
            op, counts = _op(item)[0], {"workloads": len(workloads), "traces": len(traces)}
            data.append(
                {"name": item.name, "op_type": item.op_type, "op": op, **counts, "tested": dataset.tested(item)}
            )
            rows.append((Cell(item.name, "bold"), item.op_type, op or Cell("none", "dim"), *map(str, counts.values())))
        notes = [
            f"no {word} in {dataset.root / word / '**' / suffix}"
            for word, suffix in (("definitions", "*.json"), ("workloads", "*.jsonl"), ("traces", "*.jsonl"))
            if not (data if word == "definitions" else any(row[word] for row in data))
        ]
        if unknown:
            notes.append(f"lines of definitions that are not here: {', '.join(unknown)}")
        head = ("definition", "op_type", "op", "workloads", "traces")
        blocks: list[Block] = [Table(head, rows, right=frozenset({3, 4}))] if rows else []
        problems = list(dict.fromkeys(str(problem) for problem in wrong))
        blocks += [Line(f"cannot be used: {problem}", STYLES["fail"], hang=2) for problem in problems]
        blocks += [Line(), Line(f"{len(found)} definitions in {dataset.root}", "dim")]
        blocks += [Line(note, STYLES["warn"]) for note in notes]
        return Answer({"definitions": data, "problems": problems, "notes": notes}, blocks, PROBLEM if problems else OK)

    @verb(definitions, "show")
    @click.argument("name")
    @_ROOT
    @_TRUST
    def show(name: str, root: Path | None, trust: tuple[str, ...]) -> Answer:
        """Show one definition: axes, inputs, outputs, our op, whether its code may run, and the code."""
        from layerzero_verify.definitions import open_dataset
        from layerzero_verify.definitions.reference import Trust

        definition = open_dataset(root).select([name])[0]
        refused = Trust.of(trust).refusal(definition.source)
        op, why = _op(definition)
        data = {**definition.to_json(), "op": op, "no_op": why or None, "trusted": refused is None}
        return Answer(data, _shown(definition, op, why, "it may run" if refused is None else refused.message))

    @verb(definitions, "check")
    @click.option("--name", multiple=True, help="This definition.")
    @click.option("--op-type", multiple=True, help="Every definition of this kind.")
    @click.option("--all", "everything", is_flag=True, help="Every definition.")
    @_ROOT
    @_TRUST
    @click.option("--backend", multiple=True, help="A backend or kernel id; else every kernel of the op.")
    @click.option(
        "--sizes", default="small,medium", show_default=True, help="Of small, medium, large, runner, or none."
    )
    @click.option(
        "--workloads/--no-workloads", "stored", default=True, help="Whether the dataset's own workloads are used too."
    )
    @click.option("--rtol", type=click.FloatRange(min=0), help="Instead of the table's relative bound.")
    @click.option("--atol", type=click.FloatRange(min=0), help="Instead of the table's absolute bound.")
    @click.option("--device", help="Where to run; else the GPU if there is one.")
    @click.option("--seed", type=int, default=0, show_default=True, help="Another seed, other inputs.")
    @click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds for each solution.")
    @click.option("--force", is_flag=True, help="Also those that are tested already.")
    @click.option("--out", type=click.Path(path_type=Path), help="Append the traces to this JSONL file.")
    def check(everything: bool, sizes: str, out: Path | None, **given: Any) -> Answer:
        """Check kernels and ground truths against definitions; exit code 1 when one is wrong or nothing was compared.

        The code of a definition runs only from a place named with --trust or LAYERZERO_TRUSTED_DEFINITIONS. Without it
        kernels are compared with FlashInfer, SGLang or PyTorch, where one of them has the op.
        """
        from layerzero_verify.definitions import Options, open_dataset, write_traces
        from layerzero_verify.definitions import check as run

        dataset = open_dataset(given.pop("root"))
        chosen = dataset.select(given.pop("name"), given.pop("op_type"), everything=everything)
        options = Options(*(given.pop(word) for word in ("backend", "device", "trust", "rtol", "atol")))
        wanted = [word for word in sizes.replace(",", " ").split() if word != "none"]
        report = run(dataset, chosen, options, sizes=wanted, watch=_progress, **given)
        _progress("")
        written = write_traces(report, out) if out is not None else 0
        data = {**report.to_json(), "traces_written": written}
        blocks = _found(report)
        if out is not None:
            blocks.append(Line(f"{written} traces appended to {out}", "dim"))
        compared = any(outcome.passed or outcome.failed for outcome in report.outcomes)
        return Answer(data, blocks, OK if report.ok and (compared or report.left_out) else PROBLEM)


def _progress(line: str) -> None:
    """A line that says what is being done, for somebody who watches a terminal."""
    if not is_plain(sys.stderr):
        click.echo(f"\r\033[K{line[:110]}", nl=False, err=True)


def _op(definition: Definition) -> tuple[str, str]:
    """The op of ours for a definition, or why there is none."""
    from layerzero._ops.signature import public_op
    from layerzero.errors import LayerZeroError
    from layerzero_verify.definitions.adapters import adapter_for

    try:
        return public_op(adapter_for(definition).op).op_id, ""
    except LayerZeroError as error:
        return "", error.reasons[0].message


def _shown(definition: Definition, op: str, why: str, trusted: str) -> list[Block]:
    axes = [(name, "var" if axis.value is None else str(axis.value)) for name, axis in definition.axes.items()]
    tensors = [
        (side, name, spec.dtype, "a number" if spec.shape is None else f"[{', '.join(spec.shape)}]")
        for side, specs in (("input", definition.inputs), ("output", definition.outputs))
        for name, spec in specs.items()
    ]
    blocks: list[Block] = [Line(f"{definition.name}  {definition.op_type}", "bold")]
    if definition.description:
        blocks.append(Line(definition.description, indent=2))
    facts = [("op", op or f"none: {why}"), ("code", trusted)]
    facts += [("constraint", text) for text in definition.constraints]
    blocks += [Table(("", ""), [(Cell(name, "dim"), text) for name, text in facts], indent=2)]
    blocks += [Line(), Line("axes", "bold"), Table(("", ""), axes, indent=2)]
    blocks += [Line(), Line("tensors", "bold"), Table(("", "", "", ""), tensors, indent=2)]
    blocks += [Line(), Line("reference", "bold")]
    return [*blocks, *(Line(line, indent=2) for line in definition.reference.splitlines())]


def _found(report: Report) -> list[Block]:
    """By definition and solution how many passed; then each kind of failure and of skip once, in full."""
    blocks: list[Block] = [Line(f"on {report.device}", "dim")]
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in report.outcomes:
        groups.setdefault((outcome.definition, outcome.solution, outcome.against), []).append(outcome)
    rows = []
    for (definition, solution, against), items in groups.items():
        failed, passed = sum(item.failed for item in items), sum(item.passed for item in items)
        word, style = ("fail", "fail") if failed else ("ok", "ok") if passed else ("skip", "skip")
        first = next((item for item in items if item.failed), items[0])
        text = f"{passed}/{passed + failed} passed" if passed + failed else ""
        if failed:
            text += f", {first.status}"
        elif not passed and first.reason is not None:
            text = f"{first.reason.code.value}: {first.reason.message}"
        compared = f"{solution} against {against}" if against else solution
        rows.append((Cell(word, STYLES[style]), definition, compared, text))
    blocks.append(Table(("", "definition", "solution", ""), rows))
    for outcome in report.failures[:5]:
        where = " ".join(f"{axis}={size}" for axis, size in outcome.workload.axes.items())
        blocks += [Line(), Line(f"{outcome.definition} {where}: {outcome.solution} {outcome.status}", STYLES["fail"])]
        blocks += [Line(line, indent=2) for line in outcome.log.splitlines()[:14]]
    blocks += [Line(f"left out: {name}: {why}", "dim") for name, why in report.left_out.items()]
    blocks += [Line(note, STYLES["warn"], hang=2) for note in report.notes]
    blocks += [Line(f"cannot be read: {problem}", STYLES["fail"], hang=2) for problem in report.problems]
    passed, failed, skipped = (
        sum(getattr(outcome, word) for outcome in report.outcomes) for word in ("passed", "failed", "skipped")
    )
    if not passed and not failed and not report.left_out:
        blocks += [Line(), Line("nothing was compared: see the reasons above", STYLES["fail"])]
    style = STYLES["ok" if report.ok else "fail"]
    return [*blocks, Line(), Line(f"{passed} passed, {failed} failed, {skipped} skipped", style)]

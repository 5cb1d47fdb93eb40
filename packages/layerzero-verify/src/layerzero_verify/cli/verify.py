"""`lz verify`: the parity ladder in a terminal, as JSON and as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerzero.companions import part
from layerzero_cli.completion import complete_kernel, complete_op
from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, progress_bar
from layerzero_cli.verbs import OK, PROBLEM, verb

if TYPE_CHECKING:
    from layerzero_verify.report import Level, VerifyReport

_SHOWN = 12  # failures that are written out; --json has all of them
_LANES = ("quick", "full", "stress")
_CONFIGS = ("tiny", "gqa", "deep", "wide", "no_rope", "medium")


def add(group: click.Group) -> None:
    """Declare the verb."""

    @verb(group, "verify")
    @click.option("--lane", type=click.Choice(_LANES), default="quick", show_default=True, help="How thoroughly.")
    @click.option("--backend", help="Only kernels of this backend.")
    @click.option("--kernel", help="Only this kernel.", shell_complete=complete_kernel)
    @click.option("--op", help="Only kernels of this op.", shell_complete=complete_op)
    @click.option("--level", type=click.IntRange(1, 5), multiple=True, help="Only this level; may be repeated.")
    @click.option("--config", type=click.Choice(_CONFIGS), help="Only this small model, at levels 2 and 5.")
    @click.option("--dtype", help="Only this dtype: fp32, bf16, fp16.")
    @click.option("--device", help="cpu, cuda:0; default: the first accelerator, else the CPU.")
    @click.option("--model", help="A local folder with a causal language model, for levels 3 and 4.")
    @click.option("--seed", type=int, default=0, show_default=True, help="Seed of all weights and inputs.")
    @click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as a page.")
    @click.option("--hostile", is_flag=True, help="Look for kernels that pass checks by cheating.")
    @click.option("--checklist", is_flag=True, help="Show what a new model has to pass, and leave.")
    def verify(checklist: bool, hostile: bool, html: Path | None, level: tuple[int, ...], **options: Any) -> Answer:
        """Compare kernels, layers, models and training with references.

        \b
        lz verify --lane quick
        lz verify --backend flashinfer --level 1 --html report.html
        lz verify --hostile --backend mybackend

        Level 1: each kernel alone, forward and backward. 2: a whole layer, and prefill + decode. 3: its stages with
        real weights. 4: real architectures. 5: training. A level that fails while those below it pass is an
        integration fault. Exit code 1 when anything differs.
        """
        from layerzero_verify.ladder import STEPS
        from layerzero_verify.ladder import verify as climb

        if checklist:
            blocks: list[Block] = [Line("what a new model has to pass", "bold"), Line()]
            for number, step in enumerate(STEPS, start=1):
                blocks += [Line(f"{number}. {step['step']}", hang=3), Line(step["command"], "dim", indent=3)]
            return Answer([dict(step) for step in STEPS], blocks)
        if hostile:
            found: Answer = part("verify.hostile")(**options)
            return found
        with progress_bar() as tell:
            report = climb(level=level or None, progress=tell, **options)
        blocks = _blocks(report)
        data, problem = report.to_json(), ""
        if html is not None:
            from layerzero.files import write_whole
            from layerzero_verify.cli.page import render

            try:
                write_whole(html, render(report))
            except OSError as error:
                problem = f"the page could not be written: {error}"
            data["page"] = None if problem else str(html)
            blocks.append(Line(problem or f"page: {html}", STYLES["fail"] if problem else "dim"))
        return Answer(data, blocks, OK if report.ok and not problem else PROBLEM)


# -- text ------------------------------------------------------------------------------------------------
def _blocks(report: VerifyReport) -> list[Block]:
    blocks: list[Block] = [
        Line(f"{report.lane} lane: {report.target} on {report.device}, seed {report.seed}", "bold"),
        Line(),
        Table(
            ("level", "", "passed", "failed", "of limit", "seconds", ""),
            [_level_row(level) for level in report.levels],
            right=frozenset({2, 3, 4, 5}),
        ),
    ]
    stages = next(
        (check for level in report.levels if level.number == 3 for check in level.checks if check.stages), None
    )
    if stages is not None:
        rows = [(row.stage, f"{row.max_abs:.2e}", row.kernel) for row in stages.stages]
        blocks += [Line(), Line(f"stages, {stages.subject}", "bold"), Table(("stage", "max error", "kernel"), rows)]
    failures = report.failures
    if failures:
        blocks += [Line(), Line(f"{len(failures)} failed", STYLES["fail"])]
        blocks += [Line(str(check), indent=2, hang=2) for check in failures[:_SHOWN]]
        if len(failures) > _SHOWN:
            blocks.append(Line(f"and {len(failures) - _SHOWN} more; --json shows all", "dim", indent=2))
    if report.absent:
        names = ", ".join(name for name, _ in report.absent[:4]) + (", …" if len(report.absent) > 4 else "")
        blocks += [Line(), Line(f"{len(report.absent)} kernels cannot run here: {names}", "dim", hang=2)]
    style = STYLES["ok"] if report.ok else STYLES["fail"]
    blocks += [Line(), Line(f"{report.verdict.text} ({report.seconds:.1f} s)", style, hang=2)]
    return blocks


def _level_row(level: Level) -> tuple[str | Cell, ...]:
    status = level.status.value
    # The largest error as a share of what its own check allows: errors of different ops cannot stand side by side.
    shares = [check.used for check in level.checks if check.used is not None]
    return (
        f"{level.number} {level.name}",
        Cell(status, STYLES[status]),
        str(level.passed),
        str(len(level.failures)),
        f"{max(shares):.0%}" if shares else "",
        f"{level.seconds:.1f}",
        Cell(level.skipped, "dim"),
    )

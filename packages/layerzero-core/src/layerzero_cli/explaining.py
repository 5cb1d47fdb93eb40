"""`lz explain`, `lz which`, `lz validate`: the decision for a call that is given by shapes alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.completion import complete_device, complete_kernel, complete_op
from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import OK, PROBLEM, GroupedOption, verb
from layerzero_cli.words import ShapeType

if TYPE_CHECKING:
    from layerzero.model.decision import Candidate
    from layerzero.telemetry.report import SelectionReport

_SHAPE = ShapeType()
# Options that describe a call, under the headings of `--help`.
_shape, _where, _attention, _other = (
    functools.partial(click.option, cls=GroupedOption, heading=heading)
    for heading in ("Shapes", "Where and with what", "Attention", "Other ops")
)
_OPTIONS = (
    _shape("--shape", type=_SHAPE, help="B,H,S,D (attention), ROWS,HIDDEN (norms), B,VOCAB (sampling), …"),
    _shape("--q", type=_SHAPE, help="Query, where it differs from the key."),
    _shape("--k", type=_SHAPE, help="Key; for paged_attention the cache BLOCKS,PAGE,HKV,D."),
    _shape("--v", type=_SHAPE, help="Value, where it differs from the key."),
    _shape("--weight", type=_SHAPE, help="N,K (linear), VOCAB,HIDDEN (embedding), EXPERTS,2*INNER,HIDDEN (moe)."),
    _shape("--layout", type=click.Choice(["BHSD", "BSHD", "NHD", "HND"]), help="Order of the axes."),
    _shape("--context", type=click.IntRange(min=1), help="paged_attention: length of each context."),
    _shape("--rotary-dim", type=click.IntRange(min=2), help="rope: rotate only this many of head_dim."),
    _where("--dtype", help="bf16 (default), fp16, fp32, float8_e4m3fn, …"),
    _where("--device", help="cpu, cuda:0, or a name: h100, a100, b200, mi300x, zen4, …",
           shell_complete=complete_device),
    _where("--backend", help="Only this backend or kernel id."),
    _where("--grad", is_flag=True, help="A gradient will be needed."),
    _attention("--causal", type=click.Choice(["top_left", "bottom_right"]), is_flag=False, flag_value="top_left",
               help="Causal mask; alone it means top_left, as in SDPA."),
    _attention("--mask", type=click.Choice(["bool", "float"]), is_flag=False, flag_value="bool",
               help="An attention mask; alone it means bool."),
    _attention("--window", type=_SHAPE, help="Sliding window, LEFT or LEFT,RIGHT."),
    _attention("--softcap", type=float, help="Cap of the logits."),
    _attention("--dropout", type=float, help="Dropout probability."),
    _attention("--alibi", is_flag=True, help="ALiBi slopes."),
    _attention("--sinks", is_flag=True, help="A learned score per head in the denominator."),
    _attention("--lse", is_flag=True, help="Also return the log-sum-exp."),
    _other("--interleaved", is_flag=True, help="rope: pairs (2i, 2i+1)."),
    _other("--no-weight", is_flag=True, help="Norms: without a weight."),
    _other("--bias", is_flag=True, help="layer_norm, linear: with a bias."),
    _other("--activation", help="linear: gelu, gelu_tanh, silu or relu."),
    _other("--approximate", help="gelu_and_mul: none or tanh."),
    _other("--top-k", type=int, help="Sampling; experts of a token."),
    _other("--top-p", type=float, help="Sampling."),
    _other("--format", help="quantize; weight of linear: int8, int4, fp8_e4m3, mxfp4, …; cast: a dtype."),
    _other("--granularity", help="Scales per tensor, channel or block."),
)  # fmt: skip


def call_options(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Add the options that describe a call."""
    return functools.reduce(lambda made, option: option(made), reversed(_OPTIONS), function)


@verb(cli, "explain")
@click.argument("op", shell_complete=complete_op)
@call_options
@click.option("--all", "everything", is_flag=True, help="Also kernels for other devices.")
def explain(op: str, everything: bool, **options: Any) -> Answer:
    """Say which kernel a call would run, and why not the others.

    \b
    lz explain attention --shape 1,32,4096,128 --causal --dtype bf16 --device h100
    lz explain attention --q 1,32,1,128 --k 1,8,4096,128 --causal bottom_right
    lz explain rms_norm --shape 8192,4096

    The device need not be here. Exit code 1 when nothing may run.
    """
    import layerzero as lz
    from layerzero_cli.calls import context

    report = lz.explain(op, context(op, options))
    return Answer(json.loads(report.to_json()), _blocks(report, everything), OK if report.chosen else PROBLEM)


@verb(cli, "which")
@click.argument("op", shell_complete=complete_op)
@call_options
def which(op: str, **options: Any) -> Answer:
    """Print the id of the kernel that a call would run.

    \b
    lz which attention --shape 1,32,4096,128 --causal --device h100
    """
    import layerzero as lz
    from layerzero_cli.calls import context

    kernel_id = lz.which(op, context(op, options))
    return Answer({"op": op, "kernel_id": kernel_id}, [Line(kernel_id)])


@verb(cli, "validate")
@click.argument("kernel_id", shell_complete=complete_kernel)
@call_options
def validate(kernel_id: str, **options: Any) -> Answer:
    """Say whether a kernel may run a call, or why not.

    \b
    lz validate sdpa.attention.flash --shape 1,32,4096,128 --dtype fp32 --device h100

    Every reason against it is listed; exit code 1 when there is one.
    """
    import layerzero as lz
    from layerzero.dispatch.run import current_world
    from layerzero_cli.calls import context

    kernel = current_world().registry.get(kernel_id)
    reasons = lz.validate(kernel_id, context(kernel.op, options))
    data = {"kernel_id": kernel_id, "valid": not reasons, "reasons": [item.to_json() for item in reasons]}
    if not reasons:
        return Answer(data, [Line(f"{kernel_id} may run this call", STYLES["ok"])])
    rows = [
        (Cell(item.code.value, "yellow"), f"{item.message}\n→ {item.hint}" if item.hint else item.message)
        for item in reasons
    ]
    return Answer(
        data, [Line(f"{kernel_id} cannot run this call", STYLES["fail"]), Table(("", ""), rows, indent=2)], PROBLEM
    )


def _blocks(report: SelectionReport, everything: bool) -> list[Block]:
    ctx, decision = report.context, report.decision
    place = ctx.device.name or ctx.device.device_type
    sizes = "  ".join(f"{name}={value}" for name, value in ctx.dims)
    blocks: list[Block] = [Line(f"{report.op} on {place}, {ctx.dtype}", "bold"), Line(sizes, "dim", indent=2)]
    if ctx.needs:
        blocks.append(Line(f"asks for {', '.join(sorted(ctx.needs))}", "dim", indent=2))
    blocks.append(Line())
    if report.chosen:
        winner = decision.winner
        lock = ", locked" if decision.locked else ", preferred by the policy" if winner.preferred else ""
        speed = f", {winner.speed}" if winner.speed else ""
        blocks.append(Line(f"→ {report.chosen}  (score {winner.score:.1f}{speed}{lock})", "bold green"))
        blocks.append(Line(f"ranked by {winner.expected or winner.source}", "dim", indent=2, hang=2))
        for step in winner.transforms:
            what = "isolated: there and back to its own process" if step.name == "isolated" else f"after {step.name}"
            blocks.append(Line(f"{what}, about {step.cost_us:.1f} µs", indent=2))
    else:
        blocks.append(Line(f"nothing may run: {decision.refusal}", STYLES["fail"], hang=2))
    held = [f"{item.name} {item.low}–{item.high}" for item in decision.buckets if item.low != item.high]
    if held:
        blocks.append(Line(f"holds for {', '.join(held)}", "dim", indent=2))
    blocks += [Line(f"note: {note.message}", "yellow", indent=2) for note in decision.notes]
    others = [item for item in decision.candidates if item.kernel_id != report.chosen]
    shown = [item for item in others if everything or all(why.code != "PLATFORM_MISMATCH" for why in item.reasons)]
    if others:
        blocks.append(Line())
    if shown:
        blocks.append(Table(("kernel", "score", "why not"), [_row(item) for item in shown], right=frozenset({1})))
    if len(shown) < len(others):
        blocks.append(Line(f"{len(others) - len(shown)} more are for other devices; --all shows them", "dim"))
    return blocks


def _row(item: Candidate) -> tuple[str | Cell, ...]:
    if item.accepted:
        words = [item.message for item in item.reasons if item.code.value != "OUTSCORED"]
        fits = ", ".join(filter(None, ("fits", item.outdone, item.speed)))
        return item.kernel_id, f"{item.score:.1f}", "; ".join([fits, *words])
    lines = [f"{why.code.value}: {why.message}" for why in item.reasons]
    if item.flip:
        lines.append(f"→ {item.flip}")
    return Cell(item.kernel_id, "dim"), Cell("–", "dim"), "\n".join(lines)

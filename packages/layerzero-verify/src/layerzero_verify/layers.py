"""Level 2: a full layer against the truth, all stages, forward and backward; and prefill + decode = full forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch.run import current_world
from layerzero.numerics import ErrorReport, compare
from layerzero_verify import block
from layerzero_verify.caller import IDLE, Caller, StageError
from layerzero_verify.configs import Config
from layerzero_verify.lineup import LineUp
from layerzero_verify.report import Check, StageDiff, Status, failed, of_error, skipped
from layerzero_verify.stages import CONSUMERS, OPS, bare, localise, red_flags
from layerzero_verify.thresholds import LAYER, limit
from layerzero_verify.truth import Truth, rope_tables
from layerzero_verify.weights import LayerWeights, generator, made

__all__ = ["WEIGHTS", "check_layer", "diff_stages", "own_error", "references"]

_BATCH, _LENGTH, _PROMPT = 2, 13, 6


def references(line_up: LineUp) -> dict[str, Any]:
    """The references of plugins' ops that stand in for built-in ones."""
    ops = current_world().ops
    found = {}
    for op, name in line_up.stand_ins:
        reference = ops[name].fallback_impl
        if reference is not None:
            found[op] = reference
    return found


def check_layer(
    config: Config, line_up: LineUp, device: torch.device, dtype: str = "float32", seed: int = 0
) -> Iterator[Check]:
    """Every layer of a config, chained, forward and backward; then the first layer as a server would run it."""
    kind: torch.dtype = getattr(torch, dtype)
    where = {"subject": f"{config.name} [{line_up.name}]", "dtype": dtype}
    layers = [made(config, number, seed).to(kind, device) for number in range(config.layers)]
    draw = generator("input", config.name, seed)
    x = torch.randn(_BATCH, _LENGTH, config.hidden, generator=draw).to(device, kind)
    tables = _tables(config, device) if config.rope else None
    call = Caller(line_up)
    with line_up.entered():
        yield from _forward_backward(call, layers, x, tables, line_up, where)
        yield from _decode(line_up, layers[0], x, tables, where)


def _tables(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = rope_tables(_LENGTH, config.head_dim)
    return cos.float().to(device), sin.float().to(device)


def _as(tables: block.Tables, dtype: torch.dtype) -> block.Tables:
    return None if tables is None else (tables[0].to(dtype), tables[1].to(dtype))


Named = dict[str, Tensor]


def _chain(layers: list[LayerWeights], x: Tensor, run: Any) -> tuple[Named, Named]:
    """Stages of all layers by name, and the leaves whose gradients are compared."""
    start = x.detach().clone().requires_grad_()
    stages: Named = {}
    leaves: Named = {"input": start}
    stream = start
    for number, layer in enumerate(layers):
        prefix = f"layer {number} "
        weights = layer.leaves()
        found = run(weights, stream, prefix)
        stages |= {f"{prefix}{name}": value for name, value in found.items()}
        leaves |= {f"{prefix}{name}": value for name, value in weights.named().items()}
        stream = found["output"]
    return stages, leaves


def _gradients(stages: Named, leaves: Named) -> Named:
    """Gradients of all stages and leaves of a loss that weighs every element of the last output differently."""
    out = list(stages.values())[-1]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).reshape(out.shape)
    loss = (out * weights.to(out.dtype)).sum() / out.shape[-1] ** 0.5
    # Scores are worked out beside the layer, so no gradient passes through them.
    wanted = {**leaves, **{name: value for name, value in stages.items() if bare(name) != "scores"}}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(wanted.items(), found, strict=True)
    }


def _forward_backward(
    call: Caller, layers: list[LayerWeights], x: Tensor, tables: block.Tables, line_up: LineUp, where: dict[str, str]
) -> Iterator[Check]:
    truth = Truth(references(line_up))
    wide = [layer.to(torch.float64) for layer in layers]
    want, want_leaves = _chain(wide, x.double(), lambda w, s, _: truth.layer(w, s, _as(tables, torch.float64)))
    # What plain torch itself loses in a narrow dtype is no fault of a kernel.
    own: Named = {}
    narrow = x.dtype not in (torch.float32, torch.float64)
    if narrow:
        own, own_leaves = _chain(layers, x, lambda w, s, _: truth.layer(w, s, _as(tables, x.dtype)))
    try:
        got, got_leaves = _chain(layers, x, lambda w, s, prefix: block.forward(call, w, s, tables, prefix))
    except StageError as error:
        yield failed(2, "forward", error, **where)
        return
    if call.idle:
        yield skipped(2, "forward and backward", IDLE, **where)
        return
    yield diff_stages(2, "forward", got, want, call, own, **where)
    try:
        grads = _gradients(got, got_leaves)
    except RuntimeError as error:
        yield failed(2, "backward", error, **where)
        return
    want_grads = _gradients(want, want_leaves)
    own_grads = _gradients(own, own_leaves) if narrow else {}
    yield _diff_gradients(grads, want_grads, call, own_grads, where)


def diff_stages(
    level: int, name: str, got: Named, want: Named, call: Caller, own: Mapping[str, Tensor], **where: Any
) -> Check:
    """One check over all stages: the first one that differs names op, kernel and component."""
    return _judged(level, name, {stage: stage for stage in want}, got, want, call, own, where)


def _diff_gradients(got: Named, want: Named, call: Caller, own: Mapping[str, Tensor], where: dict[str, str]) -> Check:
    """Gradients from the output back to the input: the op that takes a stage in made its gradient."""
    makers = {}
    for stage in reversed(list(want)):
        prefix, _, last = stage.rpartition(" ")
        makers[stage] = f"{prefix or 'layer 0'} {WEIGHTS.get(last) or CONSUMERS.get(last, last)}"
    return _judged(2, "backward", makers, got, want, call, own, where, backward=True)


# weight -> the stage it takes part in
WEIGHTS = {
    "ln1": "ln1_out", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "proj_out", "ln2": "ln2_out",
    "w1": "fc1_out", "w2": "mlp_out", "bq": "q_proj", "bk": "k_proj", "bv": "v_proj",
}  # fmt: skip


def own_error(own: Tensor | None, truth: Tensor) -> float:
    """What plain torch itself is off by in a narrow dtype; 0 where that was not computed."""
    return 0.0 if own is None else (own.double() - truth.double()).abs().max().item()


def _shown(report: ErrorReport) -> float:
    if not report.shape_ok or not report.nan_agree or not report.inf_agree:
        return float("inf")
    return report.max_abs


def _judged(
    level: int,
    name: str,
    makers: Mapping[str, str],
    got: Named,
    want: Named,
    call: Caller,
    own: Mapping[str, Tensor],
    where: Mapping[str, Any],
    *,
    backward: bool = False,
) -> Check:
    """`makers` are the stages to compare, in order, each with the stage whose op is asked about."""
    reports: dict[str, ErrorReport] = {}
    rows = []
    for stage, maker in makers.items():
        loss = own_error(own.get(stage), want[stage])
        report = reports[stage] = compare(got[stage], want[stage], limit(LAYER, loss))
        op, kernel = call.stages.get(maker, (OPS.get(bare(maker), ""), ""))
        rows.append(StageDiff(stage, op, kernel, _shown(report), report.tolerance.atol, report.ok))
    worst = max(rows, key=lambda row: row.max_abs)
    wrong = next((row for row in rows if not row.ok), None)
    found = {"stages": tuple(rows), **where}
    if wrong is None:
        used = max(report.used for report in reports.values())
        return Check(level, name, Status.OK, max_abs=worst.max_abs, threshold=worst.threshold, used=used, **found)
    finding = localise(rows)
    assert finding is not None
    component = f"backward of {wrong.op}" if backward else finding.component
    rule = "the gradients after this stage are right, its own is not" if backward else finding.rule
    return of_error(
        level,
        name,
        reports[wrong.stage],
        op=wrong.op,
        kernel=wrong.kernel,
        stage=wrong.stage,
        component=component,
        detail=rule,
        flags=red_flags(rows),
        **found,
    )


def _decode(
    line_up: LineUp, layer: LayerWeights, x: Tensor, tables: block.Tables, where: dict[str, str]
) -> Iterator[Check]:
    truth = Truth(references(line_up))
    want = truth.layer(layer.to(torch.float64), x.double(), _as(tables, torch.float64))["output"]
    narrow = x.dtype not in (torch.float32, torch.float64)
    own = own_error(truth.layer(layer, x, _as(tables, x.dtype))["output"] if narrow else None, want)
    for name, paged in (("contiguous", None), ("paged NHD", "NHD"), ("paged HND", "HND")):
        if any(op == "attention" for op, _ in line_up.stand_ins):
            yield skipped(2, f"prefill + decode, {name}", "attention is a plugin's own op here", **where)
            continue
        call = Caller(line_up)
        try:
            with torch.no_grad():
                got = block.decode(call, layer, x, tables, _PROMPT, paged=paged)
        except StageError as error:
            yield failed(2, f"prefill + decode, {name}", error, **where)
            continue
        if call.idle:
            yield skipped(2, f"prefill + decode, {name}", IDLE, **where)
            continue
        report = compare(got, want, limit(LAYER, own))
        op = "attention" if paged is None else "paged_attention"
        place = _place(report)
        yield of_error(
            2,
            f"prefill + decode, {name}",
            report,
            op=op,
            kernel=call.kernels.get(op, ""),
            stage=place,
            served=call.served,
            component="" if report.ok else "KV cache or attention alignment",
            **where,
        )


def _place(report: ErrorReport) -> str:
    """Which step of the decode loop the first wrong element belongs to."""
    if report.first is None:
        return "output"
    token = report.first.index[1]
    return "prefill output" if token < _PROMPT else f"decode token {token} output"

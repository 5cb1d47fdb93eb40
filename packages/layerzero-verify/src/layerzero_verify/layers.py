"""Levels 2 and 3: a layer against the truth.

Level 2: all stages, forward and backward, with weights made here; and prefill + decode = full forward. Level 3: the
stages with real weights, one difference each, and the component they point to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch.run import current_world
from layerzero.numerics import ErrorReport, compare
from layerzero_verify import block
from layerzero_verify.block import CONFIGS, Config, LayerWeights, from_transformers, generator, made
from layerzero_verify.lineup import Caller, LineUp
from layerzero_verify.models import Model
from layerzero_verify.oracles import Truth, cast, rope_tables
from layerzero_verify.report import CONSUMERS, OPS, Check, StageDiff, StageError, Status, bare, localise
from layerzero_verify.thresholds import LAYER, limit

_BATCH, _LENGTH, _PROMPT = 2, 13, 6
Named = dict[str, Tensor]
Chain = tuple[Named, Named]  # stages of all layers by name, and the leaves whose gradients are compared


def _truth(line_up: LineUp, layers: Sequence[LayerWeights], x: Tensor, tables: block.Tables) -> tuple[Chain, Chain]:
    """The truth in float64, and in a narrow dtype also in that one: what plain torch loses is no fault of a kernel.

    It is made of the formulas, but of the references of plugins' ops that stand in for built-in ones.
    """
    ops = current_world().ops
    standing = {op: ops[name].fallback_impl for op, name in line_up.stand_ins}
    truth = Truth({op: reference for op, reference in standing.items() if reference is not None})
    wide = [layer.to(torch.float64) for layer in layers]
    narrow = x.dtype not in (torch.float32, torch.float64)
    own: Chain = _chain(truth, layers, x, cast(tables, x.dtype)) if narrow else ({}, {})
    return _chain(truth, wide, x.double(), cast(tables, torch.float64)), own


# -- level 2 ---------------------------------------------------------------------------------------------
def check_layer(
    config: Config, line_up: LineUp, device: torch.device, dtype: str = "float32", seed: int = 0
) -> Iterator[Check]:
    """Every layer of a config, chained, forward and backward; then the first layer as a server would run it."""
    kind: torch.dtype = getattr(torch, dtype)
    layers = [made(config, number, seed).to(kind, device) for number in range(config.layers)]
    draw = generator("input", config.name, seed)
    x = torch.randn(_BATCH, _LENGTH, config.hidden, generator=draw).to(device, kind)
    tables = cast(rope_tables(_LENGTH, config.head_dim) if config.rope else None, torch.float32, device)
    with line_up.entered():
        yield from _forward_backward(Caller(line_up, 2, config.name, dtype), layers, x, tables)
        for name, paged in (("contiguous", None), ("paged NHD", "NHD"), ("paged HND", "HND")):
            call = Caller(line_up, 2, config.name, dtype)
            yield _decode(call, f"prefill + decode, {name}", layers[0], x, tables, paged)


def _chain(call: block.Calls, layers: Sequence[LayerWeights], x: Tensor, tables: block.Tables) -> Chain:
    stream = x.detach().clone().requires_grad_()
    stages: Named = {}
    leaves: Named = {"input": stream}
    for number, layer in enumerate(layers):
        prefix = f"layer {number} "
        weights = layer.leaves()
        found = block.forward(call, weights, stream, tables, prefix)
        stages |= {f"{prefix}{name}": value for name, value in found.items()}
        leaves |= {f"{prefix}{name}": value for name, value in weights.named().items()}
        stream = found["output"]
    return stages, leaves


def _gradients(stages: Named, leaves: Named) -> Named:
    """Gradients of all stages and leaves of a loss that weighs every element of the last output differently."""
    if not stages:
        return {}
    out = list(stages.values())[-1]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).reshape(out.shape)
    loss = (out * weights.to(out.dtype)).sum() / out.shape[-1] ** 0.5
    # Scores are worked out beside the layer, so no gradient passes through them.
    wanted = {**leaves, **{name: value for name, value in stages.items() if bare(name) != "scores"}}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True), strict=True))


def _forward_backward(call: Caller, layers: Sequence[LayerWeights], x: Tensor, tables: block.Tables) -> Iterator[Check]:
    want, own = _truth(call.line_up, layers, x, tables)
    try:
        got = _chain(call, layers, x, tables)
    except StageError as error:
        yield call.failed("forward", error)
        return
    if call.idle:
        yield call.left_out("forward and backward")
        return
    yield _judged(call, "forward", got[0], want[0], own[0])
    try:
        grads = _gradients(*got)
    except RuntimeError as error:
        yield call.failed("backward", error)
        return
    # Gradients from the output back to the input: the op that takes a stage in made its gradient.
    wide, makers = _gradients(*want), {}
    for stage in reversed(list(wide)):
        prefix, _, last = stage.rpartition(" ")
        makers[stage] = f"{prefix or 'layer 0'} {WEIGHTS.get(last) or CONSUMERS.get(last, last)}"
    yield _judged(call, "backward", grads, wide, _gradients(*own), makers)


# weight -> the stage it takes part in
WEIGHTS = {
    "ln1": "ln1_out", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "proj_out", "ln2": "ln2_out",
    "w1": "fc1_out", "w2": "mlp_out", "bq": "q_proj", "bk": "k_proj", "bv": "v_proj",
}  # fmt: skip


def own_error(own: Tensor | None, truth: Tensor) -> float:
    """What plain torch itself is off by in a narrow dtype; 0 where that was not computed."""
    return 0.0 if own is None else (own.double() - truth.double()).abs().max().item()


def _judged(
    call: Caller, name: str, got: Named, want: Named, own: Named, makers: Mapping[str, str] | None = None
) -> Check:
    """One check over all stages: the first one that differs names op, kernel and component.

    `makers` are given for gradients: the stages in their order, each with the one whose op made its gradient.
    """
    reports: dict[str, ErrorReport] = {}
    rows = []
    for stage, maker in (makers or {stage: stage for stage in want}).items():
        report = reports[stage] = compare(got[stage], want[stage], limit(LAYER, own_error(own.get(stage), want[stage])))
        op, kernel = call.stages.get(maker, (OPS.get(bare(maker), ""), ""))
        sound = report.shape_ok and report.nan_agree and report.inf_agree
        largest = report.max_abs if sound else float("inf")
        rows.append(StageDiff(stage, op, kernel, largest, report.tolerance.atol, report.ok))
    fault = localise(rows)
    if not fault:
        worst = max(rows, key=lambda row: row.max_abs)
        found: dict[str, Any] = {"max_abs": worst.max_abs, "threshold": worst.threshold, "stages": tuple(rows)}
        used = max(report.used for report in reports.values())
        return Check(call.level, name, Status.OK, used=used, **found, **call.where)
    if makers:
        rule = "the gradients after this stage are right, its own is not"
        fault |= {"component": f"backward of {fault['op']}", "detail": rule}
    return call.compared(name, reports[fault["stage"]], **fault)


def _decode(call: Caller, name: str, layer: LayerWeights, x: Tensor, tables: block.Tables, paged: str | None) -> Check:
    if any(op == "attention" for op, _ in call.line_up.stand_ins):
        return call.left_out(name, "attention is a plugin's own op here")
    try:
        with torch.no_grad():
            (want, _), (own, _) = _truth(call.line_up, [layer], x, tables)
            got = block.decode(call, layer, x, tables, _PROMPT, paged=paged)
    except StageError as error:
        return call.failed(name, error)
    if call.idle:
        return call.left_out(name)
    output = "layer 0 output"
    report = compare(got, want[output], limit(LAYER, own_error(own.get(output), want[output])))
    op = "attention" if paged is None else "paged_attention"
    component = "" if report.ok else "KV cache or attention alignment"
    place = "output"
    if report.first is not None:  # which step of the decode loop the first wrong element belongs to
        token = report.first.index[1]
        place = "prefill output" if token < _PROMPT else f"decode token {token} output"
    found = {"op": op, "kernel": call.kernels.get(op, ""), "stage": place, "component": component}
    return call.compared(name, report, served=call.served, **found)


# -- level 3 ---------------------------------------------------------------------------------------------
def check_stages(name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str) -> Iterator[Check]:
    """First and last layer of a Llama-like model, on the hidden states that the model itself feeds them."""
    module, config = model.module, model.module.config
    layers = getattr(getattr(module, "model", None), "layers", None)
    if layers is None or not _llama_like(layers[0]):
        yield Caller(line_up, 3, name).left_out("stage diff", "not of the Llama family")
        return
    hidden = [(args[0] if args else kwargs["hidden_states"]).detach() for args, kwargs in fed(model, layers)]
    first = hidden[0]
    cos, sin = module.model.rotary_emb(first, torch.arange(first.shape[1], device=first.device)[None])
    half = cos.shape[-1] // 2
    tables = cos[0, :, :half], sin[0, :, :half]
    for number in sorted({0, len(layers) - 1}):
        weights, x = from_transformers(layers[number], config), hidden[number]
        yield _one(Caller(line_up, 3, name, dtype), f"layer {number}", weights, x, tables, device)


Fed = list[tuple[Any, dict[str, Any]]]


def fed(model: Model, layers: Iterable[Any]) -> Fed:
    """Positional and named arguments that the model gives each of its layers."""
    found: Fed = []
    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_pre_hook(lambda _, *given: found.append(given), with_kwargs=True)
            hooks.enter_context(hook)
        model.logits(model.inputs)
    return found


def _llama_like(layer: Any) -> bool:
    """RMSNorm, separate projections, SwiGLU: what the ladder's own layer computes."""
    return (
        all(hasattr(layer, name) for name in ("self_attn", "input_layernorm", "post_attention_layernorm"))
        and hasattr(layer.mlp, "gate_proj")
        and "SiLU" in type(layer.mlp.act_fn).__name__
        and not hasattr(layer.self_attn, "q_norm")
        and not hasattr(layer, "pre_feedforward_layernorm")
    )


def check_made(line_up: LineUp, device: torch.device, dtype: str, seed: int) -> Iterator[Check]:
    """The same with weights made here, for a machine without transformers."""
    config = CONFIGS["gqa"]
    x = torch.randn(2, 12, config.hidden, generator=generator("stages", seed))
    call = Caller(line_up, 3, "made weights", dtype)
    yield _one(call, "layer 0", made(config, 0, seed), x, rope_tables(12, config.head_dim), device)


def _one(
    call: Caller, label: str, weights: LayerWeights, x: Tensor, tables: block.Tables, device: torch.device
) -> Check:
    kind: torch.dtype = getattr(torch, call.dtype)
    weights, x, tables = weights.to(kind, device), x.to(device, kind), cast(tables, torch.float32, device)
    try:
        with torch.no_grad(), call.line_up.entered():
            chains = _truth(call.line_up, [weights], x, tables)
            got = block.forward(call, weights, x, tables)
    except StageError as error:
        return call.failed("stage diff", error)
    if call.idle:
        return call.left_out(f"stage diff, {label}")
    want, own = ({bare(name): value for name, value in stages.items()} for stages, _ in chains)
    return _judged(call, f"stage diff, {label}", got, want, own)

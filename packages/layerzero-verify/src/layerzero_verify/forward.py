"""Whole models: level 4, logits and top-1, in transformers' own computation and on LayerZero's ops.

Models that other packages bring also pass levels 2, 3 and 5, against the same model of transformers, unmodified.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerzero.numerics import ErrorReport, Tolerance, compare
from layerzero.tuning.truth import computed
from layerzero_verify import models
from layerzero_verify.layers import Fed, fed, own_error
from layerzero_verify.lineup import Caller, LineUp
from layerzero_verify.models import Events, Model, applied, hooked, ran, watched
from layerzero_verify.report import Check, StageDiff, StageError, Status, localise
from layerzero_verify.thresholds import LAYER, LOGITS, TRAINING, gradient, limit


def placed(model: Model, device: torch.device, dtype: str) -> Model:
    """The model on a device in a dtype; a copy, unless it is there already."""
    kind: torch.dtype = getattr(torch, dtype)
    here = next(model.module.parameters())
    if here.device == device and here.dtype == kind:
        return model
    key = f"on {device} in {dtype}"
    if key in model.memo:
        kept: Model = model.memo[key]
        return kept

    def moved(inputs: dict[str, Tensor] | None) -> Any:
        if inputs is None:
            return None
        return {
            name: item.to(device, kind) if item.is_floating_point() else item.to(device)
            for name, item in inputs.items()
        }

    module = copy.deepcopy(model.module).to(device, kind)
    found = replace(model, module=module, inputs=moved(model.inputs), padded=moved(model.padded), memo={})
    model.memo[key] = found
    return found


def check_model(
    name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str = "float32", *, cached: bool = False
) -> Iterator[Check]:
    """Plain inputs, padded ones, and (asked for) prefill with a cache followed by single tokens."""
    truth = placed(model, device, "float32")
    subject = placed(model, device, dtype)
    for label, kind in (("full forward", "inputs"), ("padded batch", "padded")):
        inputs = getattr(subject, kind)
        if inputs is None:
            continue
        call = Caller(line_up, 4, name, dtype)
        check = _compared(call, label, truth, subject, kind, partial(subject.logits, inputs))
        differs = check.status is Status.FAIL and check.figures  # and has not just raised
        yield _explained(check, subject, inputs, call) if differs else check
    if cached and subject.decoder and not getattr(subject.module.config, "is_encoder_decoder", False):
        run, call = partial(_token_by_token, subject), Caller(line_up, 4, name, dtype)
        check = _compared(call, "prefill + decode with cache", truth, subject, "inputs", run)
        if check.status is Status.FAIL and check.figures:
            kernel, component = call.kernels.get("attention", ""), "attention over a cache, or RoPE's positions"
            check = replace(check, op="attention", kernel=kernel, component=component)
        yield check


def _plain_logits(model: Model, inputs: dict[str, Tensor]) -> Tensor:
    """Those of the unmodified model with its plainest attention."""
    label = "padded" if inputs is model.padded else "plain"
    if label not in model.memo:
        before = model.module.config._attn_implementation
        model.module.set_attn_implementation("eager")
        try:
            model.memo[label] = model.logits(inputs)
        finally:
            model.module.set_attn_implementation(before)
    logits: Tensor = model.memo[label]
    return logits


def _compared(call: Caller, label: str, truth: Model, subject: Model, kind: str, run: Callable[[], Tensor]) -> Check:
    """The logits that `run` gives on our ops, against the unmodified model's on one kind of its inputs."""
    inputs = getattr(subject, kind)
    want = _plain_logits(truth, getattr(truth, kind))
    own = own_error(None if subject is truth else _plain_logits(subject, inputs), want)
    try:
        with torch.no_grad(), call.line_up.entered(), applied(subject.module, call):
            got = run()
    except StageError as error:
        return call.failed(label, error)
    if call.idle:
        return call.left_out(label)
    return _judge(call, label, got, want, _kept(inputs, got), limit(LOGITS, own))


def _token_by_token(model: Model) -> Tensor:
    """A prompt at once, then one token at a time over transformers' own cache."""
    ids = model.inputs["input_ids"]
    prompt = ids.shape[1] // 2
    found = model.module(input_ids=ids[:, :prompt], use_cache=True)
    word = "cache_params" if "cache_params" in found else "past_key_values"
    parts = [found.logits]
    for position in range(prompt, ids.shape[1]):
        token = ids[:, position : position + 1]
        found = model.module(input_ids=token, use_cache=True, **{word: found[word]})
        parts.append(found.logits)
    return torch.cat(parts, dim=1)


def _explained(check: Check, model: Model, inputs: dict[str, Tensor], call: Caller) -> Check:
    """A failed comparison of logits, told by the first stage inside the model that differs: both run once more."""
    rows, first = stages_of(model, inputs, call)
    if first is None:
        return check
    fault = localise(rows)
    logits = "" if check.first is None else f"the logits first differ at {list(check.first.index)}"
    fault["detail"] = "; ".join(word for word in (fault["detail"], logits, check.detail) if word)
    return replace(check, first=first.first, **fault)


def stages_of(model: Model, inputs: dict[str, Tensor], call: Caller) -> tuple[list[StageDiff], ErrorReport | None]:
    """Every module of the model watched, unmodified and on our ops: one row each, and the first that differs."""
    want: Events = {}
    got: Events = {}
    with hooked(model.module, want) as observe, watched(model.module, observe):
        model.logits(inputs)
    with call.line_up.entered(), hooked(model.module, got) as observe, applied(model.module, call, observe):
        got.clear()  # of what patching tried the parts with
        model.logits(inputs)
    mask = None if "decoder_input_ids" in inputs else inputs.get("attention_mask")
    rows: list[StageDiff] = []
    first: ErrorReport | None = None
    for name in (name for name in want if name in got):
        left, right = (
            value if mask is None else _without_padding(value, mask.bool()) for value in (got[name], want[name])
        )
        # the spacing of a narrow dtype, which a comparison inside a model has to allow
        coarse = 0.0 if left.dtype in (torch.float32, torch.float64) else 8 * torch.finfo(left.dtype).eps
        report = compare(left, right, limit(LAYER, coarse))
        first = report if first is None and not report.ok else first
        op, kernel = ran(name, call)
        rows.append(StageDiff(name.partition("#")[0], op, kernel, report.max_abs, report.tolerance.atol, report.ok))
    return rows, first


def _kept(inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Positions that count: not the padding, whose rows attend nothing."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != logits.shape[:-1] or "decoder_input_ids" in inputs:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    return mask.bool()


def _judge(call: Caller, label: str, got: Tensor, want: Tensor, kept: Tensor, bound: Tolerance) -> Check:
    counted = kept.unsqueeze(-1)
    report = compare(torch.where(counted, got.float(), 0.0), torch.where(counted, want, 0.0), bound)
    found = {"op": "linear", "kernel": call.kernels.get("linear", ""), "stage": "logits"}
    check = call.compared(label, report, served=call.served, **found)
    top = got.argmax(-1) == want.argmax(-1)
    # Rounding may turn a tie; only a lead above the bound has to be kept.
    best = want.topk(min(2, want.shape[-1])).values
    clear = (best[..., 0] - best[..., -1]) > 2 * bound.atol * (1 + best[..., 0].abs())
    wrong = (~top & kept & clear).nonzero().tolist()
    figures = (("top1_agreement", (top & kept).sum().item() / kept.sum().item()),)
    if wrong and check.status is Status.OK:
        ours, theirs = (int(logits[tuple(wrong[0])].argmax()) for logits in (got, want))
        text = f"top-1 at position {wrong[0]}: got {ours}, want {theirs}"
        return replace(check, status=Status.FAIL, detail=text, figures=figures)
    if wrong:
        detail = f"top-1 differs at {len(wrong)} of {int(kept.sum())} positions, first at {wrong[0]}"
        return replace(check, detail=f"{check.detail}; {detail}".strip("; "), figures=figures)
    return replace(check, figures=figures)


def _without_padding(value: Tensor, kept: Tensor) -> Tensor:
    """Zeros in place of padding, so that an index still means what it says."""
    if value.shape[:2] == kept.shape:
        return value.masked_fill(~kept.reshape(*kept.shape, *(1,) * (value.ndim - 2)), 0.0)
    if value.ndim == 4 and (value.shape[0], value.shape[2]) == kept.shape:
        return value.masked_fill(~kept[:, None, :, None], 0.0)
    return value


def matrix(line_up: LineUp, device: torch.device, seed: int) -> Iterator[Check]:
    """The preflight's three models: do they run at all on these kernels, and give finite logits of the right shape?"""
    for name in models.MATRIX:
        model = placed(models.made(name, seed), device, "float32")
        call = Caller(line_up, 0, name)
        try:
            with line_up.entered(), applied(model.module, call):
                logits = model.logits(model.inputs)
        except Exception as error:
            yield call.failed("model runs", error)
            continue
        finite = bool(logits.isfinite().all())
        detail = "" if finite else "the logits are not finite"
        status = Status.OK if finite else Status.FAIL
        yield Check(0, "model runs", status, detail=detail, stage="logits", **call.where)


# -- levels 2, 3 and 5 of models that other packages bring -------------------------------------------------
_RATE = 0.003  # at 0.01, weights of Qwen3-Next moved in the sixth digit alone are up to 8e-2 apart after 20 steps


def check_layers(name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str) -> Iterator[Check]:
    """Each layer on what the unmodified model feeds it: its output, and the gradient of its input."""
    truth, subject = placed(model, device, "float32"), placed(model, device, dtype)
    inputs, call = fed(truth, _layers(truth.module)), Caller(line_up, 2, name, dtype)
    want, own = list(_each_layer(truth, inputs)), list(_each_layer(subject, inputs))
    try:
        with line_up.entered(), applied(subject.module, call):
            got = list(_each_layer(subject, inputs))
    except (StageError, RuntimeError) as error:
        yield call.failed("layers", error)
        return
    if call.idle:
        yield call.left_out("layers")
        return
    for number, results in enumerate(zip(got, want, own, strict=True)):
        for label, found, wanted, plain in zip(("forward", "gradient of its input"), *results, strict=True):
            off = own_error(None if subject is truth else plain, wanted)
            report = compare(found.float(), wanted, limit(LAYER * max(1.0, wanted.abs().max().item()), off))
            yield call.compared(f"layer {number} {label}", report, served=call.served)


def _each_layer(model: Model, given_to: Fed) -> Iterator[tuple[Tensor, Tensor]]:
    """Output, and gradient of the input, of every layer of a model."""
    kind = next(model.module.parameters()).dtype
    for layer, (args, kwargs) in zip(_layers(model.module), given_to, strict=True):
        given = {key: item.to(kind) if computed(item) else item for key, item in kwargs.items()}
        x = (args[0] if args else given.pop("hidden_states")).detach().to(kind).requires_grad_()
        with torch.no_grad():  # apart: a kernel without a backward serves here alone
            out = _first(layer(x, *args[1:], **given))
        with torch.enable_grad():
            made = _first(layer(x, *args[1:], **given))
            yield out, torch.autograd.grad(made.float().square().mean(), x)[0].float()


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _layers(module: Any) -> list[Any]:
    return list(next(item for name, item in module.named_modules() if name.endswith("layers")))


def check_stages(name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str) -> Iterator[Check]:
    """Every module inside the model, and the component that the first difference points to."""
    subject, call = placed(model, device, dtype), Caller(line_up, 3, name, dtype)
    try:
        rows, first = stages_of(subject, subject.inputs, call)
    except StageError as error:
        yield call.failed("stage diff", error)
        return
    if call.idle:
        yield call.left_out("stage diff")
        return
    worst = max(rows, key=lambda row: row.max_abs)
    found: dict[str, Any] = {"max_abs": worst.max_abs, "threshold": worst.threshold, "stages": tuple(rows)}
    check = Check(3, "stage diff", Status.OK, **found, served=call.served, **call.where)
    if first is not None:
        check = replace(check, status=Status.FAIL, first=first.first, **{**localise(rows), "component": ""})
    yield check


def check_training(
    name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str, *, steps: int
) -> Iterator[Check]:
    """Two copies stepped side by side: gradients of the first step, weights and loss after 1, 5 and 20."""
    start = placed(model, device, "float32")
    ours, theirs = (copy.deepcopy(start.module).train(False) for _ in range(2))
    ids, call = start.inputs["input_ids"], Caller(line_up, 5, name, "float32")
    for step in range(1, steps + 1):
        tokens = ids.roll(step, 1)
        try:
            with line_up.entered(), applied(ours, call):
                loss = _stepped(ours, tokens)
        except (StageError, RuntimeError) as error:
            yield call.failed(f"step {step}", error)
            return
        want = _stepped(theirs, tokens)
        if call.idle:
            yield call.left_out("training")
            return
        if step == 1:
            yield _gradients(ours, theirs, call)
        for count, weights, losses in TRAINING:
            if step == count:
                pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
                reports = {name: compare(a.detach(), b.detach(), limit(weights)) for (name, a), b in pairs}
                worst = max(reports, key=lambda name: (not reports[name].ok, reports[name].max_abs))
                check = call.compared(f"weights after {step} steps", reports[worst], stage=worst, served=call.served)
                off = abs(loss - want)
                if not off < losses:
                    check = replace(check, status=Status.FAIL, detail=f"loss differs by {off:.3g}, limit {losses:g}")
                yield replace(check, figures=(("loss_diff", off),))


def _stepped(module: Any, ids: Tensor) -> float:
    """One step of plain SGD; the loss before it. Gradients stay where they are."""
    module.zero_grad(set_to_none=True)
    loss = module(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(_RATE * parameter.grad)
    return float(loss.detach())


def _gradients(ours: Any, theirs: Any, call: Caller) -> Check:
    """The worst of the gradients of the first step."""
    checks = []
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None and mine.grad is None:
            continue
        got, want = (torch.zeros_like(one) if one.grad is None else one.grad for one in (mine, other))
        bound = gradient("linear", "float32", want.abs().max().item())
        checks.append(call.compared("gradients of the first step", compare(got, want, bound), stage=name))
    worst = max(checks, key=lambda check: (check.status is Status.FAIL, check.max_abs or 0))
    return replace(worst, served=call.served)

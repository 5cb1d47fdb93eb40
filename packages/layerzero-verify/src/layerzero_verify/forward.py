"""Whole models: level 4, logits and top-1, in transformers' own computation and on LayerZero's ops.

Models that other packages bring also pass levels 2, 3 and 5, against the same model of transformers, unmodified.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerzero.numerics import ErrorReport, compare
from layerzero.tuning.truth import computed
from layerzero_verify import models
from layerzero_verify.layers import Fed, fed, own_error
from layerzero_verify.lineup import IDLE, Caller, LineUp
from layerzero_verify.models import Events, Model, applied, hooked, ran, watched
from layerzero_verify.report import Check, StageDiff, StageError, Status, failed, of_error, skipped
from layerzero_verify.stages import localise, red_flags
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
    where = {"subject": f"{name} [{line_up.name}]", "dtype": dtype}
    for label, kind in (("full forward", "inputs"), ("padded batch", "padded")):
        inputs = getattr(subject, kind)
        if inputs is None:
            continue
        check, call = _compared(label, truth, subject, kind, line_up, where, partial(subject.logits, inputs))
        differs = check.status is Status.FAIL and check.figures  # and has not just raised
        yield _explained(check, subject, inputs, line_up, call) if differs else check
    if cached and subject.decoder and not getattr(subject.module.config, "is_encoder_decoder", False):
        run = partial(_token_by_token, subject)
        check, call = _compared("prefill + decode with cache", truth, subject, "inputs", line_up, where, run)
        if check.status is Status.FAIL and check.figures:
            kernel, component = call.kernels.get("attention", ""), "attention over a cache, or RoPE's positions"
            check = replace(check, op="attention", kernel=kernel, component=component)
        yield check


@contextmanager
def _eager(module: Any) -> Iterator[None]:
    """The unmodified model with its plainest attention."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(before)


def _plain_logits(model: Model, inputs: dict[str, Tensor]) -> Tensor:
    label = "padded" if inputs is model.padded else "plain"
    if label not in model.memo:
        with _eager(model.module):
            model.memo[label] = model.logits(inputs)
    logits: Tensor = model.memo[label]
    return logits


def _compared(
    label: str,
    truth: Model,
    subject: Model,
    kind: str,
    line_up: LineUp,
    where: dict[str, str],
    run: Callable[[], Tensor],
) -> tuple[Check, Caller]:
    """The logits that `run` gives on our ops, against the unmodified model's on one kind of its inputs."""
    inputs = getattr(subject, kind)
    want = _plain_logits(truth, getattr(truth, kind))
    own = own_error(None if subject is truth else _plain_logits(subject, inputs), want)
    call = Caller(line_up)
    try:
        with torch.no_grad(), line_up.entered(), applied(subject.module, call):
            got = run()
    except StageError as error:
        return failed(4, label, error, **where), call
    if call.idle:
        return skipped(4, label, IDLE, **where), call
    return _judge(label, got, want, _kept(inputs, got), own, call, where), call


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


def _explained(check: Check, model: Model, inputs: dict[str, Tensor], line_up: LineUp, call: Caller) -> Check:
    """A failed comparison of logits, told by the first stage inside the model that differs: both run once more."""
    rows, first = stages_of(model, inputs, line_up, call)
    finding = localise(rows)
    if finding is None or first is None:
        return check
    guilty = next(row for row in rows if not row.ok)
    logits = "" if check.first is None else f"the logits first differ at {list(check.first.index)}"
    return replace(
        check,
        component=finding.component,
        op=guilty.op,
        kernel=guilty.kernel,
        stage=guilty.stage,
        first=first.first,
        detail="; ".join(word for word in (finding.rule, logits, check.detail) if word),
        stages=tuple(rows),
        flags=red_flags(rows),
    )


def stages_of(
    model: Model, inputs: dict[str, Tensor], line_up: LineUp, call: Caller
) -> tuple[list[StageDiff], ErrorReport | None]:
    """Every module of the model watched, unmodified and on our ops: one row each, and the first that differs."""
    want: Events = {}
    got: Events = {}
    with hooked(model.module, want) as observe, watched(model.module, observe):
        model.logits(inputs)
    with line_up.entered(), hooked(model.module, got) as observe, applied(model.module, call, observe):
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


def _judge(
    label: str, got: Tensor, want: Tensor, kept: Tensor, own: float, call: Caller, where: dict[str, str]
) -> Check:
    bound = limit(LOGITS, own)
    report = compare(
        torch.where(kept.unsqueeze(-1), got.float(), 0.0), torch.where(kept.unsqueeze(-1), want, 0.0), bound
    )
    kernel = call.kernels.get("linear", "")
    check = of_error(4, label, report, op="linear", kernel=kernel, stage="logits", served=call.served, **where)
    top = got.argmax(-1) == want.argmax(-1)
    # Rounding may turn a tie; only a lead above the bound has to be kept.
    best = want.topk(min(2, want.shape[-1])).values
    clear = (best[..., 0] - best[..., -1]) > 2 * bound.atol * (1 + best[..., 0].abs())
    wrong = (~top & kept & clear).nonzero().tolist()
    figures = (("top1_agreement", (top & kept).sum().item() / kept.sum().item()),)
    if wrong and check.status is Status.OK:
        place = wrong[0]
        text = (
            f"top-1 at position {place}: got {int(got[tuple(place)].argmax())}, want {int(want[tuple(place)].argmax())}"
        )
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
        where: dict[str, Any] = {"subject": f"{name} [{line_up.name}]"}
        call = Caller(line_up)
        try:
            with line_up.entered(), applied(model.module, call):
                logits = model.logits(model.inputs)
        except Exception as error:
            yield failed(0, "model runs", error, **where)
            continue
        finite = bool(logits.isfinite().all())
        detail = "" if finite else "the logits are not finite"
        yield Check(0, "model runs", Status.OK if finite else Status.FAIL, detail=detail, stage="logits", **where)


_RATE = 0.003  # at 0.01, weights of Qwen3-Next moved in the sixth digit alone are up to 8e-2 apart after 20 steps


def check_layers(name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str) -> Iterator[Check]:
    """Each layer on what the unmodified model feeds it: its output, and the gradient of its input."""
    truth, subject = placed(model, device, "float32"), placed(model, device, dtype)
    where: dict[str, Any] = {"subject": f"{name} [{line_up.name}]", "dtype": dtype}
    inputs, call = fed(truth, _layers(truth.module)), Caller(line_up)
    want, own = list(_each_layer(truth, inputs)), list(_each_layer(subject, inputs))
    try:
        with line_up.entered(), applied(subject.module, call):
            got = list(_each_layer(subject, inputs))
    except (StageError, RuntimeError) as error:
        yield failed(2, "layers", error, **where)
        return
    if call.idle:
        yield skipped(2, "layers", IDLE, **where)
        return
    for number, results in enumerate(zip(got, want, own, strict=True)):
        for label, found, wanted, plain in zip(("forward", "gradient of its input"), *results, strict=True):
            off = own_error(None if subject is truth else plain, wanted)
            report = compare(found.float(), wanted, limit(LAYER * max(1.0, wanted.abs().max().item()), off))
            yield of_error(2, f"layer {number} {label}", report, served=call.served, **where)


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
    subject, call = placed(model, device, dtype), Caller(line_up)
    where: dict[str, Any] = {"subject": f"{name} [{line_up.name}]", "dtype": dtype}
    try:
        rows, first = stages_of(subject, subject.inputs, line_up, call)
    except StageError as error:
        yield failed(3, "stage diff", error, **where)
        return
    if call.idle:
        yield skipped(3, "stage diff", IDLE, **where)
        return
    worst = max(rows, key=lambda row: row.max_abs)
    check = Check(3, "stage diff", Status.OK, max_abs=worst.max_abs, threshold=worst.threshold, **where)
    check = replace(check, stages=tuple(rows), served=call.served)
    finding = localise(rows)
    if first is not None:
        guilty = next(row for row in rows if not row.ok)
        check = replace(check, status=Status.FAIL, op=guilty.op, kernel=guilty.kernel, stage=guilty.stage)
        check = replace(check, first=first.first, flags=red_flags(rows), detail="" if finding is None else finding.rule)
    yield check


def check_training(
    name: str, model: Model, line_up: LineUp, device: torch.device, dtype: str, *, steps: int
) -> Iterator[Check]:
    """Two copies stepped side by side: gradients of the first step, weights and loss after 1, 5 and 20."""
    start = placed(model, device, "float32")
    ours, theirs = (copy.deepcopy(start.module).train(False) for _ in range(2))
    where: dict[str, Any] = {"subject": f"{name} [{line_up.name}]", "dtype": "float32"}
    ids, call = start.inputs["input_ids"], Caller(line_up)
    for step in range(1, steps + 1):
        tokens = ids.roll(step, 1)
        try:
            with line_up.entered(), applied(ours, call):
                loss = _stepped(ours, tokens)
        except (StageError, RuntimeError) as error:
            yield failed(5, f"step {step}", error, **where)
            return
        want = _stepped(theirs, tokens)
        if call.idle:
            yield skipped(5, "training", IDLE, **where)
            return
        if step == 1:
            yield _gradients(ours, theirs, call, where)
        for count, weights, losses in TRAINING:
            if step == count:
                yield _after(step, ours, theirs, weights, losses, abs(loss - want), call, where)


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


def _gradients(ours: Any, theirs: Any, call: Caller, where: dict[str, Any]) -> Check:
    """The worst of the gradients of the first step."""
    checks = []
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None and mine.grad is None:
            continue
        got, want = (torch.zeros_like(one) if one.grad is None else one.grad for one in (mine, other))
        bound = gradient("linear", "float32", want.abs().max().item())
        checks.append(of_error(5, "gradients of the first step", compare(got, want, bound), stage=name, **where))
    worst = max(checks, key=lambda check: (check.status is Status.FAIL, check.max_abs or 0))
    return replace(worst, served=call.served)


def _after(
    step: int, ours: Any, theirs: Any, weights: float, losses: float, off: float, call: Caller, where: dict[str, Any]
) -> Check:
    """Weights and loss after a number of steps."""
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    reports = {name: compare(mine.detach(), other.detach(), limit(weights)) for (name, mine), other in pairs}
    worst = max(reports, key=lambda name: reports[name].max_abs)
    check = of_error(5, f"weights after {step} steps", reports[worst], stage=worst, served=call.served, **where)
    if not off < losses:
        check = replace(check, status=Status.FAIL, detail=f"loss differs by {off:.3g}, limit {losses:g}")
    return replace(check, figures=(("loss_diff", off),))

"""Level 4: whole models. Logits and top-1, in transformers' own computation and on LayerZero's ops."""

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
from layerzero_verify import models
from layerzero_verify.layers import own_error
from layerzero_verify.lineup import IDLE, Caller, LineUp
from layerzero_verify.models import Model
from layerzero_verify.patching import Events, applied, hooked, ran, watched
from layerzero_verify.report import Check, StageDiff, StageError, Status, failed, of_error, skipped
from layerzero_verify.stages import localise, red_flags
from layerzero_verify.thresholds import LAYER, LOGITS, limit


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

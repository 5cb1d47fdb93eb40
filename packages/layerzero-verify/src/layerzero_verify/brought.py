"""Levels 2, 3 and 5 of models that other packages bring: against the same model of transformers, unmodified."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.numerics import compare
from layerzero.tuning.truth import computed
from layerzero_verify.forward import placed, stages_of
from layerzero_verify.layers import Fed, fed, own_error
from layerzero_verify.lineup import IDLE, Caller, LineUp
from layerzero_verify.models import Model
from layerzero_verify.patching import applied
from layerzero_verify.report import Check, StageError, Status, failed, of_error, skipped
from layerzero_verify.stages import localise, red_flags
from layerzero_verify.thresholds import LAYER, TRAINING, gradient, limit

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

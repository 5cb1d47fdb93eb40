"""Level 5: training parity. The same small model twice, on LayerZero's ops and in plain torch, stepped side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.numerics import ErrorReport, compare
from layerzero_verify import block
from layerzero_verify.caller import IDLE, Caller, StageError
from layerzero_verify.configs import Config
from layerzero_verify.layers import WEIGHTS
from layerzero_verify.lineup import LineUp
from layerzero_verify.report import Check, Status, failed, of_error, skipped
from layerzero_verify.thresholds import BUG, EMBEDDING_GRAD, GRADS, TRAINING, limit
from layerzero_verify.truth import Truth, rope_tables
from layerzero_verify.weights import generator, made

__all__ = ["check_training", "grows_exponentially"]

_BATCH, _LENGTH, _BATCHES = 2, 10, 4
_RATE = 0.1
Parameters = dict[str, Tensor]


class _Model:
    """A small decoder whose parameters are leaves; `loss` computes with kernels or with formulas."""

    def __init__(self, config: Config, device: torch.device, seed: int) -> None:
        self.config = config
        draw = generator("model", config.name, seed)
        hidden, vocab = config.hidden, config.vocab
        self.layers = [made(config, number, seed).to(torch.float32, device).leaves() for number in range(config.layers)]
        self.others: Parameters = {
            "embedding": torch.randn(vocab, hidden, generator=draw),
            "positions": torch.randn(_LENGTH, hidden, generator=draw) if not config.rope else torch.zeros(0),
            "norm": 1 + 0.1 * torch.randn(hidden, generator=draw),
            "head": torch.randn(vocab, hidden, generator=draw) / hidden**0.5,
        }
        self.others = {name: value.to(device).requires_grad_() for name, value in self.others.items() if value.numel()}
        cos, sin = rope_tables(_LENGTH, config.head_dim)
        self.tables = (cos.float().to(device), sin.float().to(device)) if config.rope else None

    def parameters(self) -> Parameters:
        """All leaves by name, in the order of the forward pass."""
        found = {name: value for name, value in self.others.items() if name in ("embedding", "positions")}
        for number, layer in enumerate(self.layers):
            found |= {f"layer {number} {name}": value for name, value in layer.named().items()}
        return {**found, "norm": self.others["norm"], "head": self.others["head"]}

    def loss(self, call: block.Calls, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss, every step an op."""
        x = call("embedding", "embedding", ids, self.others["embedding"])
        if self.tables is None:
            x = x + self.others["positions"]
        for number, layer in enumerate(self.layers):
            x = block.forward(call, layer, x, self.tables, f"layer {number} ")["output"]
        normed = call("norm", "rms_norm", x, self.others["norm"], 1e-6)
        logits = call("head", "linear", normed, self.others["head"])
        loss: Tensor = call("loss", "cross_entropy", logits.flatten(0, 1), targets.flatten())
        return loss

    def step(self, gradients: Parameters) -> None:
        """One step of plain SGD."""
        with torch.no_grad():
            for name, value in self.parameters().items():
                value.sub_(_RATE * gradients[name])


def check_training(
    config: Config, line_up: LineUp, device: torch.device, *, steps: int, seed: int = 0
) -> Iterator[Check]:
    """`steps` of SGD; bounds at 1, 5 and 20 steps, the two loss curves beyond."""
    where: dict[str, Any] = {"subject": f"{config.name} [{line_up.name}]", "dtype": "float32"}
    if line_up.stand_ins:
        yield skipped(5, "training", "a plugin's own op stands in: its convention is the question of level 4", **where)
        return
    ours, theirs = _Model(config, device, seed), _Model(config, device, seed)
    call, truth = Caller(line_up), Truth()
    gaps: list[float] = []
    curves: list[tuple[float, float]] = []
    with line_up.entered():
        for step in range(1, steps + 1):
            # A few batches again and again, so that there is something to learn and the loss has a trend.
            draw = generator("batch", config.name, seed, step % _BATCHES)
            tokens = torch.randint(config.vocab, (_BATCH, _LENGTH + 1), generator=draw).to(device)
            ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            try:
                loss, gradients = _gradients(ours, ours.loss(call, ids, targets))
            except (StageError, RuntimeError) as error:
                yield failed(5, f"step {step}", error, **where)
                return
            want_loss, want = _gradients(theirs, theirs.loss(truth, ids, targets))
            if step == 1:
                if call.idle:
                    yield skipped(5, "training", IDLE, **where)
                    return
                yield from _first_gradients(gradients, want, call, where)
            ours.step(gradients)
            theirs.step(want)
            curves.append((loss.item(), want_loss.item()))
            gaps.append(_gap(ours, theirs))
            for count, weights, losses in TRAINING:
                if step == count:
                    yield _at(step, ours, theirs, curves, weights, losses, gaps, call, where)
    if steps > TRAINING[-1][0]:
        yield _curves(curves, gaps, where)


def _gradients(model: _Model, loss: Tensor) -> tuple[Tensor, Parameters]:
    parameters = model.parameters()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(parameters.items(), found, strict=True)
    }


def _gap(ours: _Model, theirs: _Model) -> float:
    pairs = zip(ours.parameters().values(), theirs.parameters().values(), strict=True)
    return max((left - right).abs().max().item() for left, right in pairs)


def _maker(name: str, call: Caller) -> tuple[str, str]:
    """Op and kernel that a parameter belongs to."""
    prefix, _, last = name.rpartition(" ")
    stage = f"{prefix} {WEIGHTS.get(last, last)}".strip()
    return call.stages.get(stage, ("", ""))


def _first_gradients(got: Parameters, want: Parameters, call: Caller, where: dict[str, Any]) -> Iterator[Check]:
    """Gradients of the first step, from the head back: the first that differs is the guilty one's."""
    for name in reversed(list(want)):
        bound = limit(EMBEDDING_GRAD if name == "embedding" else GRADS)
        report = compare(got[name], want[name], bound)
        op, kernel = _maker(name, call)
        check = of_error(5, "gradient of the first step", report, op=op, kernel=kernel, stage=name, **where)
        yield check
        if check.status is Status.FAIL:
            return


def _at(
    step: int,
    ours: _Model,
    theirs: _Model,
    curves: list[tuple[float, float]],
    weights: float,
    losses: float,
    gaps: list[float],
    call: Caller,
    where: dict[str, Any],
) -> Check:
    """Weights and loss after a number of steps."""
    reports: dict[str, ErrorReport] = {
        name: compare(value, theirs.parameters()[name], limit(weights)) for name, value in ours.parameters().items()
    }
    worst = max(reports, key=lambda name: reports[name].max_abs)
    guilty = next((name for name in reversed(list(reports)) if not reports[name].ok), worst)
    op, kernel = _maker(guilty, call)
    off = abs(curves[-1][0] - curves[-1][1])
    check = of_error(5, f"weights after {step} steps", reports[guilty], op=op, kernel=kernel, stage=guilty, **where)
    figures = (("loss", curves[-1][0]), ("torch_loss", curves[-1][1]), ("loss_diff", off))
    flags = _flags(gaps, reports)
    if not off < losses:
        text = f"loss differs by {off:.3g}, limit {losses:g}"
        check = replace(check, status=Status.FAIL, detail=f"{check.detail}; {text}".strip("; "))
    return replace(check, figures=figures, served=call.served, flags=flags if check.status is Status.FAIL else ())


def _flags(gaps: list[float], reports: dict[str, ErrorReport]) -> tuple[str, ...]:
    found = []
    if max(gaps) > BUG:
        found.append(f"weights differ by {max(gaps):.3g}: above {BUG:g} is a bug, not rounding")
    if grows_exponentially(gaps):
        found.append("the difference grows exponentially over the steps: numerical instability")
    sizes = sorted(report.max_abs for report in reports.values())
    worst = max(reports, key=lambda name: reports[name].max_abs)
    if len(sizes) >= 4 and sizes[len(sizes) // 2] > 0 and sizes[-1] > 100 * sizes[len(sizes) // 2]:
        found.append(f"{worst} is far worse than the other weights: look there")
    return tuple(found)


def grows_exponentially(gaps: list[float]) -> bool:
    """Whether differences multiply: by more than 1.5 a step over the later half, and to something that matters."""
    later = [gap for gap in gaps[len(gaps) // 2 :] if gap > 0]
    if len(later) < 4 or later[-1] < 1e-4:
        return False
    return math.log(later[-1] / later[0]) / (len(later) - 1) > math.log(1.5)


def _curves(curves: list[tuple[float, float]], gaps: list[float], where: dict[str, Any]) -> Check:
    """Over many steps rounding makes the weights part; what must hold is the trend of the loss."""
    ours, theirs = (torch.tensor(list(side), dtype=torch.float64) for side in zip(*curves, strict=True))
    off = (ours - theirs).abs().max().item()
    together = torch.corrcoef(torch.stack((ours, theirs)))[0, 1].item()
    ok = off < TRAINING[-1][2] and together > 0.99 and not grows_exponentially(gaps)
    ok = ok and all(math.isfinite(value) for value in ours.tolist())
    figures = (("steps", float(len(curves))), ("loss_diff", off), ("correlation", together), ("weight_diff", gaps[-1]))
    flags = ("the difference grows exponentially over the steps: numerical instability",)
    return Check(
        5,
        f"loss curve over {len(curves)} steps",
        Status.OK if ok else Status.FAIL,
        max_abs=off,
        threshold=TRAINING[-1][2],
        detail="" if ok else f"the curves part: largest difference {off:.3g}, correlation {together:.4f}",
        flags=flags if grows_exponentially(gaps) else (),
        figures=figures,
        **where,
    )

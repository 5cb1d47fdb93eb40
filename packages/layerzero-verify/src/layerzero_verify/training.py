"""Level 5: training parity. The same small model twice, on LayerZero's ops and in plain torch, stepped side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from layerzero.numerics import compare
from layerzero_verify import block
from layerzero_verify.block import Config, generator, made
from layerzero_verify.layers import WEIGHTS
from layerzero_verify.lineup import Caller, LineUp
from layerzero_verify.oracles import Truth, cast, rope_tables
from layerzero_verify.report import Check, StageDiff, StageError, Status, red_flags
from layerzero_verify.thresholds import EMBEDDING_GRAD, GRADS, TRAINING, limit

_BATCH, _LENGTH, _BATCHES = 2, 10, 4
_RATE = 0.1
Parameters = dict[str, Tensor]


class _Model:
    """A small decoder whose parameters are leaves; `loss` computes with kernels or with formulas."""

    def __init__(self, config: Config, device: torch.device, seed: int) -> None:
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
        self.tables = cast(rope_tables(_LENGTH, config.head_dim) if config.rope else None, torch.float32, device)

    def parameters(self) -> Parameters:
        found = {name: value for name, value in self.others.items() if name in ("embedding", "positions")}
        for number, layer in enumerate(self.layers):
            found |= {f"layer {number} {name}": value for name, value in layer.named().items()}
        return {**found, "norm": self.others["norm"], "head": self.others["head"]}

    def loss(self, call: block.Calls, ids: Tensor, targets: Tensor) -> Tensor:
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
        with torch.no_grad():
            for name, value in self.parameters().items():
                value.sub_(_RATE * gradients[name])


def check_training(
    config: Config, line_up: LineUp, device: torch.device, *, steps: int, seed: int = 0
) -> Iterator[Check]:
    """`steps` of SGD; bounds at 1, 5 and 20 steps, the two loss curves beyond."""
    call, truth = Caller(line_up, 5, config.name, "float32"), Truth()
    if line_up.stand_ins:
        yield call.left_out("training", "a plugin's own op stands in: its convention is the question of level 4")
        return
    both = _Both(_Model(config, device, seed), _Model(config, device, seed), call)
    with line_up.entered():
        for step in range(1, steps + 1):
            # A few batches again and again, so that there is something to learn and the loss has a trend.
            draw = generator("batch", config.name, seed, step % _BATCHES)
            tokens = torch.randint(config.vocab, (_BATCH, _LENGTH + 1), generator=draw).to(device)
            ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            try:
                loss, gradients = _gradients(both.ours, both.ours.loss(call, ids, targets))
            except (StageError, RuntimeError) as error:
                yield call.failed(f"step {step}", error)
                return
            want_loss, want = _gradients(both.theirs, both.theirs.loss(truth, ids, targets))
            if step == 1:
                if call.idle:
                    yield call.left_out("training")
                    return
                yield from both.first_gradients(gradients, want)
            both.ours.step(gradients)
            both.theirs.step(want)
            both.note(loss.item(), want_loss.item())
            for count, weights, losses in TRAINING:
                if step == count:
                    yield both.after(step, weights, losses)
    if steps > TRAINING[-1][0]:
        yield both.curve()


def _gradients(model: _Model, loss: Tensor) -> tuple[Tensor, Parameters]:
    parameters = model.parameters()
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return loss.detach(), dict(zip(parameters, found, strict=True))


@dataclass
class _Both:
    """The two models side by side: losses and the largest difference of a weight, step by step."""

    ours: _Model
    theirs: _Model
    call: Caller
    losses: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def note(self, loss: float, want: float) -> None:
        self.losses.append((loss, want))
        pairs = zip(self.ours.parameters().values(), self.theirs.parameters().values(), strict=True)
        self.gaps.append(max((left - right).abs().max().item() for left, right in pairs))

    def _maker(self, name: str) -> dict[str, str]:
        """The parameter as a stage, and the op and kernel that it belongs to."""
        prefix, _, last = name.rpartition(" ")
        op, kernel = self.call.stages.get(f"{prefix} {WEIGHTS.get(last, last)}".strip(), ("", ""))
        return {"stage": name, "op": op, "kernel": kernel}

    def first_gradients(self, got: Parameters, want: Parameters) -> Iterator[Check]:
        """Gradients of the first step, from the head back: the first that differs is the guilty one's."""
        for name in reversed(list(want)):
            report = compare(got[name], want[name], limit(EMBEDDING_GRAD if name == "embedding" else GRADS))
            check = self.call.compared("gradient of the first step", report, **self._maker(name))
            yield check
            if check.status is Status.FAIL:
                return

    def after(self, step: int, weights: float, losses: float) -> Check:
        theirs = self.theirs.parameters()
        reports = {name: compare(value, theirs[name], limit(weights)) for name, value in self.ours.parameters().items()}
        worst = max(reports, key=lambda name: reports[name].max_abs)
        guilty = next((name for name in reversed(list(reports)) if not reports[name].ok), worst)
        check = self.call.compared(f"weights after {step} steps", reports[guilty], **self._maker(guilty))
        loss, want = self.losses[-1]
        off = abs(loss - want)
        if not off < losses:
            text = f"loss differs by {off:.3g}, limit {losses:g}"
            check = replace(check, status=Status.FAIL, detail=f"{check.detail}; {text}".strip("; "))
        rows = [StageDiff(name, "", "", report.max_abs, weights, report.ok) for name, report in reports.items()]
        flags = (*red_flags(rows), *self._growth()) if check.status is Status.FAIL else ()
        figures = (("loss", loss), ("torch_loss", want), ("loss_diff", off))
        return replace(check, figures=figures, served=self.call.served, flags=flags)

    def _growth(self) -> tuple[str, ...]:
        text = "the difference grows exponentially over the steps: numerical instability"
        return (text,) if grows_exponentially(self.gaps) else ()

    def curve(self) -> Check:
        """Over many steps rounding makes the weights part; what must hold is the trend of the loss."""
        ours, theirs = (torch.tensor(list(side), dtype=torch.float64) for side in zip(*self.losses, strict=True))
        off = (ours - theirs).abs().max().item()
        together = torch.corrcoef(torch.stack((ours, theirs)))[0, 1].item()
        steps, flags, bound = len(self.losses), self._growth(), TRAINING[-1][2]
        ok = off < bound and together > 0.99 and not flags and bool(ours.isfinite().all())
        figures = {"steps": float(steps), "loss_diff": off, "correlation": together, "weight_diff": self.gaps[-1]}
        return Check(
            5,
            f"loss curve over {steps} steps",
            Status.OK if ok else Status.FAIL,
            max_abs=off,
            threshold=bound,
            detail="" if ok else f"the curves part: largest difference {off:.3g}, correlation {together:.4f}",
            flags=flags,
            figures=tuple(figures.items()),
            **self.call.where,
        )


def grows_exponentially(gaps: list[float]) -> bool:
    """Whether differences multiply: by more than 1.5 a step over the later half, and to something that matters."""
    later = [gap for gap in gaps[len(gaps) // 2 :] if gap > 0]
    if len(later) < 4 or later[-1] < 1e-4:
        return False
    return math.log(later[-1] / later[0]) / (len(later) - 1) > math.log(1.5)

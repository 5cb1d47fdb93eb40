"""Random kernels at the gate: equal draws where the op promises them, else the right distribution.

A kernel whose tokens for a seed are those of the reference is right. One that draws in its own way must draw from the
same distribution: its tokens are counted and held against the reference's probabilities by Pearson's chi-square.
Dropout is judged by what it promises: the mean stays, and something is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.context import Context
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.numerics.tolerances import full_float32
from layerzero.runtime.current import builtin_ops
from layerzero.tuning.inputs import Call
from layerzero.tuning.truth import UNLIKELY, Gate, Verdict, chi_square, flat

_DRAWS = 4096
_LIKELY = 100
_SECONDS_OF_CALLS = 400


def gate(spec: OperationSpec, ctx: Context, call: Callable[[], Call]) -> Gate:
    """What a kernel passes before it is timed for a call; `call()` makes the same inputs anew."""
    given = call()
    return Draws(spec, ctx, given) if spec.random is not None and spec.random(given.args) else Gate(spec, ctx, call)


class Draws(Gate):
    """The distribution that a call draws from."""

    def __init__(self, spec: OperationSpec, ctx: Context, call: Call) -> None:
        self._spec, self._ctx = spec, ctx
        self._args = self._peaked(call.args)
        with full_float32(), torch.autocast(ctx.device.device_type, enabled=False), torch.no_grad():
            self._seeded = self._draw(spec.fallback_impl, 11)
            self._probs = self._distribution()

    def _peaked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same call with every row the same and a hundred tokens that can be drawn, so that few draws tell much.

        A tenth of their mass lies beyond what top-k 50, top-p 0.9 and min-p 0.05 keep: a kernel that ignores its filter
        soon draws what it may not.
        """
        if self._spec.op_id == "attention":
            return (*args[:2], torch.ones_like(args[2]), *args[3:])
        if self._spec.op_id not in ("sample", "sample_topk", "sample_topp"):
            return args
        logits = args[0]
        with torch.no_grad():
            row = logits[:1].float() - 12.0
            likely = torch.randperm(row.shape[-1], generator=torch.Generator().manual_seed(5))[:_LIKELY]
            row[:, likely.to(row.device)] = torch.linspace(3.0, -1.0, len(likely), device=row.device)
            peaked = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
            peaked.copy_(row.expand(logits.shape))
        return (peaked, *args[1:])

    def _draw(self, run: Any, seed: int) -> list[Tensor]:
        device = self._args[0].device if isinstance(self._args[0], Tensor) else torch.device("cpu")
        torch.manual_seed(seed)
        args = tuple(
            torch.Generator(device).manual_seed(seed) if isinstance(item, torch.Generator) else item
            for item in self._args
        )
        return [item.detach() for item in flat(run(*args))]

    def _distribution(self) -> Tensor | None:
        if self._spec.op_id not in ("sample", "sample_topk", "sample_topp"):
            return None
        logits, given = self._args[0], self._args
        top_k = given[1] if self._spec.op_id in ("sample", "sample_topk") else None
        top_p = given[1] if self._spec.op_id == "sample_topp" else given[2] if self._spec.op_id == "sample" else None
        min_p = given[3] if self._spec.op_id == "sample" else None
        reference = builtin_ops["sampling_probs"].fallback_impl
        assert reference is not None
        one = tuple(item[:1] if isinstance(item, Tensor) else item for item in (top_k, top_p, min_p, given[-2]))
        found: Tensor = reference(logits[:1], *one)
        return found[0].double()

    def _compared(self, kernel: KernelSpec | None, run: Callable[..., Any]) -> Verdict:
        with torch.no_grad():
            once, again = self._draw(run, 11), self._draw(run, 11)
            if not all(torch.equal(left, right) for left, right in zip(once, again, strict=True)):
                return Verdict(False, why="equal seeds gave different results")
            same = len(once) == len(self._seeded) and all(
                left.shape == right.shape and torch.equal(left, right)
                for left, right in zip(once, self._seeded, strict=True)
            )
            if same:
                return Verdict(True)
            if self._spec.op_id == "attention":
                return self._dropped(once)
            if self._probs is None:
                return Verdict(False, why="other tokens than the reference for the same seed")
            return self._counted(run)

    def _dropped(self, once: list[Tensor]) -> Verdict:
        out = once[0].float()
        share = self._args[4]
        off = float((out.mean() - 1.0).abs())
        # Each output is a sum over its keys, so its spread shrinks with their number; the mean of all hardly moves.
        if not off < 0.05 or float((out - 1.0).abs().max()) < 0.01 * share:
            return Verdict(False, off, f"dropout of {share} gave a mean of {1 + off:.3g} for values of one")
        return Verdict(True, off)

    def _counted(self, run: Callable[..., Any]) -> Verdict:
        assert self._probs is not None
        counts = torch.zeros_like(self._probs)
        seen = 0
        for seed in range(_SECONDS_OF_CALLS):
            tokens = self._draw(run, 1000 + seed)[0].flatten()
            if bool(((tokens < 0) | (tokens >= len(counts))).any()):
                return Verdict(False, why="drew a token that is none")
            counts += torch.bincount(tokens, minlength=len(counts)).to(counts)
            seen += tokens.numel()
            if seen >= _DRAWS:
                break
        chance = chi_square(counts, self._probs)
        off = float((counts / seen - self._probs).abs().max())
        if chance < UNLIKELY:
            return Verdict(False, off, f"draws from another distribution (chance {chance:.1g})")
        return Verdict(True, off)

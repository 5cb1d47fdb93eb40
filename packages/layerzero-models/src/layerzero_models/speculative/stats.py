"""What speculation costs and what it brings, as numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from layerzero_models.speculative.decoder import SpeculativeDecoder


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """Counts and seconds of one generation. Rows that have ended count no more, though they are still computed.

    rounds       verifications
    drafted      candidates proposed; accepted: of these, kept; emitted: tokens of the text
    prefill_s, draft_s, target_s, verify_s    seconds for prompts, drafting, the target on the drafts, judging
    """

    rounds: int
    drafted: int
    accepted: int
    emitted: int
    prefill_s: float
    draft_s: float
    target_s: float
    verify_s: float

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def draft_latency_s(self) -> float:
        """Mean seconds to draft for one verification."""
        return self.draft_s / self.rounds if self.rounds else 0.0

    @property
    def verification_s(self) -> float:
        """Mean seconds of one verification: the target on the draft, and the judgement."""
        return (self.target_s + self.verify_s) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class SpeculativeReport:
    """A generation beside the target alone, on the same prompt.

    plain_s    seconds the target took alone; plain_steps: of how many calls
    """

    stats: SpeculativeStats
    plain_s: float
    plain_steps: int
    speculative_s: float

    @property
    def speedup(self) -> float:
        """End to end: how many times faster than the target alone."""
        return self.plain_s / self.speculative_s if self.speculative_s else 0.0

    @property
    def verification_overhead(self) -> float:
        """One verification over one step of the target alone; 1.0 means that the further tokens came for free."""
        step = self.plain_s / self.plain_steps if self.plain_steps else 0.0
        return self.stats.verification_s / step if step else 0.0

    def to_json(self) -> dict[str, float]:
        means = (*SpeculativeStats.__slots__, "acceptance_rate", "draft_latency_s", "verification_s")
        beside = ("verification_overhead", "plain_s", "speculative_s", "speedup")
        return {name: getattr(self.stats if name in means else self, name) for name in (*means, *beside)}


class Clock:
    """Seconds by phase. Waits for the device at the edges of a phase, so that each pays for its own kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def stats(self, rounds: int, drafted: int, accepted: int, emitted: int) -> SpeculativeStats:
        seconds = {f"{name}_s": self.seconds(name) for name in ("prefill", "draft", "target", "verify")}
        return SpeculativeStats(rounds, drafted, accepted, emitted, **seconds)


def compare(
    decoder: SpeculativeDecoder,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    generator: Callable[[], torch.Generator] | None = None,
) -> SpeculativeReport:
    """Run the target alone and with the draft, once to warm up and once timed, each with a fresh `generator()`."""
    from layerzero_models.speculative.decoder import decode

    fresh = generator if generator is not None else lambda: None
    clock = Clock(prompt.device)

    def alone() -> Tensor:
        with decoder.scope("target"):
            return decode(decoder.target, prompt, max_new_tokens, decoder.config, generator=fresh())

    alone()
    with clock.phase("plain"):
        plain = alone()
    decoder.generate(prompt, max_new_tokens, generator=fresh())
    with clock.phase("speculative"):
        made = decoder.generate(prompt, max_new_tokens, generator=fresh())
    steps = int((plain >= 0).sum(dim=1).max())
    return SpeculativeReport(made.stats, clock.seconds("plain"), steps, clock.seconds("speculative"))

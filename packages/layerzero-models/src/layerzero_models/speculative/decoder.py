"""Speculative decoding: a small model drafts, the target verifies several tokens at once; the text is the target's.

    decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(draft_len=4, temperature=0.8, top_p=0.95))
    made = decoder.generate(prompt, max_new_tokens=128)
    made.tokens, made.stats.acceptance_rate

Drawn tokens are distributed as if the target alone had drawn them; at temperature 0 they are the target's own greedy
text (as far as its logits do not depend on how many tokens it is fed at once). Verification is one call of the target
on draft_len + 1 tokens a row: kernels are selected for that query length, and another draft_len may get others.

The draft's calls, the target's and the verification's are three roles, each with settings of its own (those of
`lz.configure`): `SpeculativeConfig(draft={"locks": {"attention": "sdpa.attention.math"}})` ties the draft to a kernel
and leaves the target free. `decoder.explain("draft", "attention", q, k, v)` says what a role would run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

import layerzero as lz
from layerzero import explain, sample, sampling_probs
from layerzero._ops.sampling import check_filters, check_param
from layerzero.errors import invalid
from layerzero.policy.layers import Level, PolicyLayer
from layerzero.runtime.current import scope
from layerzero.runtime.policies import Scope

if TYPE_CHECKING:
    from layerzero.telemetry.report import SelectionReport


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
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


ROLES = ("draft", "target", "verify")


class CachedModel(Protocol):
    """A causal language model that holds a KV cache of its own, with as many rows as the prompt has."""

    def __call__(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits [B, S, V] of ids [B, S], which follow the first lengths[b] tokens of row b.

        Their keys and values go to the places from lengths[b] on; what the cache held there and after is stale. So a
        smaller length rolls a row back. There must be room for prompt + max_new_tokens + draft_len tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to draft, how to draw, and under which settings each role selects its kernels.

    draft_len     tokens drafted before each verification
    temperature, top_k, top_p, min_p    as in `lz.sample`; both models draw with them
    eos_id        a row ends with this token
    draft, target, verify               settings of `lz.configure` for each role's calls
    """

    draft_len: int = 4
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    eos_id: int | None = None
    draft: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)
    verify: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.draft_len, int) or isinstance(self.draft_len, bool) or self.draft_len < 1:
            raise invalid("VALUE_INVALID", str(self.draft_len), "1 or more", f"draft_len is {self.draft_len}")
        check_filters(self.top_k, self.top_p, self.min_p)
        check_param(self.temperature, "temperature")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        return sampling_probs(logits, **self._filters)

    def drawn(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """One token a row of logits [B, V]."""
        return sample(logits, **self._filters, generator=generator)

    @property
    def _filters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("top_k", "top_p", "min_p", "temperature")}


@dataclass(frozen=True, slots=True)
class Generation:
    """New tokens [B, max_new_tokens], -1 after a row's end, and what it took to make them."""

    tokens: Tensor
    stats: SpeculativeStats


class _Role:
    """What `lz.scoped(**settings)` is to a block, made to be entered thousands of times.

    `lz.scoped` derives a new World at each entry, with an empty hot table. A role keeps its World from entry to entry,
    so that its calls stay hot; it has a table of its own, so that no choice made in one role is ever found in another.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._layer = PolicyLayer.of(Level.CONTEXT, source=f"role {name}", **settings)
        # (scope around it, own scope) in one slot: threads may share a role, and must never see half of a pair.
        self._known: tuple[Scope | None, Scope] | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make calls under this role's settings, on top of those of the scope around."""
        outer = scope.get()
        known = self._known
        if known is None or known[0] is not outer:
            known = (outer, Scope((*(outer.layers if outer is not None else ()), self._layer)))
            self._known = known
        token = scope.set(known[1])
        try:
            yield
        finally:
            scope.reset(token)


class SpeculativeDecoder:
    """A draft and a target in one loop. Not for use by several threads at once: the models' caches are not."""

    def __init__(self, draft: CachedModel, target: CachedModel, config: SpeculativeConfig | None = None) -> None:
        self.draft = draft
        self.target = target
        self.config = config if config is not None else SpeculativeConfig()
        self._roles = {name: _Role(name, getattr(self.config, name)) for name in ROLES}

    def scope(self, role: str) -> AbstractContextManager[None]:
        """The settings of a role ("draft", "target", "verify"), for calls made inside the block."""
        if role not in self._roles:
            raise invalid("VALUE_INVALID", str(role), ROLES, f"unknown role {role!r}")
        return self._roles[role].entered()

    def explain(self, role: str, op: str, *args: Any, **kwargs: Any) -> SelectionReport:
        """`lz.explain` under the settings of a role."""
        with self.scope(role):
            return explain(op, *args, **kwargs)

    @torch.no_grad()
    def generate(self, prompt: Tensor, max_new_tokens: int, *, generator: torch.Generator | None = None) -> Generation:
        """Continue prompt [B, S] by max_new_tokens tokens a row."""
        ids, known, limit = _start(prompt, max_new_tokens, self.config.draft_len)
        start = prompt.shape[1]
        clock = Clock(prompt.device)
        fed = torch.zeros_like(known)
        if start > 1:
            with clock.phase("prefill"):
                for role, model in (("draft", self.draft), ("target", self.target)):
                    with self.scope(role):
                        model(prompt[:, :-1], fed)
        rounds = drafted = accepted = emitted = 0
        active = known < limit
        while bool(active.any()):
            # The draft has not seen a candidate that was kept last; fed again, all rows fit one shape.
            recent = 2 if start > 1 or rounds else 1
            tokens, kept = self._round(ids, known, recent, clock, generator)
            _check_drawn(tokens, kept, active)
            advance = torch.minimum(kept + 1, limit - known).where(active, 0)
            _write(ids, known, tokens, advance)
            rounds += 1
            drafted += int(active.sum()) * self.config.draft_len
            accepted += int(kept.where(active, 0).sum())
            emitted += int(advance.sum())
            known = known + advance
            active = (known < limit) & ~_ended(ids, start, known, self.config.eos_id)
        tokens = _finished(ids[:, start:limit], self.config.eos_id)
        seconds = (clock.seconds[phase] for phase in ("prefill", *ROLES))
        return Generation(tokens, SpeculativeStats(rounds, drafted, accepted, emitted, *seconds))

    def _round(
        self, ids: Tensor, known: Tensor, recent: int, clock: Clock, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Draft, run the target on the draft, and judge it: tokens [B, draft_len + 1] and how many were kept."""
        config = self.config
        with clock.phase("draft"), self.scope("draft"):
            logits = self.draft(last_tokens(ids, known, recent), known - recent)[:, -1]
            found: list[Tensor] = []
            probs: list[Tensor] = []
            for step in range(config.draft_len):
                found.append(config.drawn(logits, generator).unsqueeze(1))
                if not config.greedy:
                    probs.append(config.probs(logits).unsqueeze(1))
                if step < config.draft_len - 1:
                    logits = self.draft(found[-1].clamp(min=0), known + step)[:, -1]
            candidates = torch.cat(found, dim=1)
        with clock.phase("target"), self.scope("target"):
            # A draft without a distribution gave -1: no candidate, and any token will do in its place.
            logits = self.target(torch.cat((last_tokens(ids, known, 1), candidates.clamp(min=0)), dim=1), known - 1)
        with clock.phase("verify"), self.scope("verify"):
            if config.greedy:
                return lz.sample_speculative(candidates, None, logits, greedy=True)
            return lz.sample_speculative(candidates, torch.cat(probs, dim=1), config.probs(logits), generator=generator)


@torch.no_grad()
def decode(
    model: CachedModel,
    prompt: Tensor,
    max_new_tokens: int,
    config: SpeculativeConfig | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One model alone, token by token, with the same settings: what speculation is measured by. [B, max_new_tokens]."""
    config = config if config is not None else SpeculativeConfig()
    ids, known, limit = _start(prompt, max_new_tokens, 0)
    start = prompt.shape[1]
    active = known < limit
    fresh, fed = prompt, torch.zeros_like(known)
    while bool(active.any()):
        drawn = config.drawn(model(fresh, fed)[:, -1], generator).unsqueeze(1)
        _check_drawn(drawn, torch.zeros_like(known), active)
        _write(ids, known, drawn, active.long())
        fed, fresh = known, drawn.clamp(min=0)
        known = known + 1
        active = active & (known < limit) & ~_ended(ids, start, known, config.eos_id)
    return _finished(ids[:, start:limit], config.eos_id)


def _start(prompt: Tensor, max_new_tokens: int, width: int) -> tuple[Tensor, Tensor, int]:
    """Room for the text, how much of it each row has, and where it ends."""
    if prompt.ndim != 2 or prompt.shape[1] == 0 or prompt.dtype != torch.int64:
        raise invalid("SHAPE_INVALID", f"{prompt.dtype} {tuple(prompt.shape)}", "int64 [B, S >= 1]", "the prompt")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise invalid("VALUE_INVALID", f"max_new_tokens={max_new_tokens}", "1 or more")
    batch, start = prompt.shape
    limit = start + max_new_tokens
    ids = torch.cat((prompt, prompt.new_zeros(batch, max_new_tokens + width + 1)), dim=1)
    return ids, torch.full((batch,), start, dtype=torch.int64, device=prompt.device), limit


def last_tokens(ids: Tensor, known: Tensor, count: int) -> Tensor:
    """The last `count` tokens of each row."""
    return ids.gather(1, known.unsqueeze(1) + torch.arange(-count, 0, device=ids.device))


def _write(ids: Tensor, known: Tensor, tokens: Tensor, advance: Tensor) -> None:
    """Put the first advance[b] tokens of each row behind what it has."""
    step = torch.arange(tokens.shape[1], device=ids.device)
    place = known.unsqueeze(1) + step
    ids.scatter_(1, place, torch.where(step < advance.unsqueeze(1), tokens, ids.gather(1, place)))


def _ended(ids: Tensor, start: int, known: Tensor, eos_id: int | None) -> Tensor:
    if eos_id is None:
        return torch.zeros_like(known, dtype=torch.bool)
    place = torch.arange(ids.shape[1], device=ids.device)
    return ((ids == eos_id) & (place >= start) & (place < known.unsqueeze(1))).any(dim=1)


def _finished(tokens: Tensor, eos_id: int | None) -> Tensor:
    """-1 after the first end-of-text token."""
    if eos_id is None:
        return tokens.clone()
    over = (tokens == eos_id).long().cumsum(dim=1)
    return torch.where((over > 1) | ((over == 1) & (tokens != eos_id)), -1, tokens)


def _check_drawn(tokens: Tensor, kept: Tensor, active: Tensor) -> None:
    missing = active & (tokens.gather(1, kept.unsqueeze(1)).squeeze(1) < 0)
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        message = f"row {row}: the target's logits have no distribution"
        expected = "logits with at least one finite value and no NaN"
        raise invalid("VALUE_INVALID", "a NaN, or nothing but -inf", expected, message)


def compare(
    decoder: SpeculativeDecoder,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    generator: Callable[[], torch.Generator] | None = None,
) -> SpeculativeReport:
    """Run the target alone and with the draft, once to warm up and once timed, each with a fresh `generator()`."""
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
    return SpeculativeReport(made.stats, clock.seconds["plain"], steps, clock.seconds["speculative"])

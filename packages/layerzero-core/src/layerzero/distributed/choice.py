"""Choosing alike: the first rank of a group chooses a kernel for a call, the others take its word.

Selection is a pure function, so ranks whose Worlds are alike choose alike without a word. What may still differ (a
kernel that failed on one rank only, another database of measured times, less memory, a compile that is not done yet) is
settled here, once per call that was never met before: the first rank writes its choice into the store, the others read
it there. A hot call reads nothing. A rank that would wait longer than `wait_s` writes a choice of its own, and the
first one written counts for all.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from layerzero.distributed.channel import RankStore, await_keys
from layerzero.distributed.facts import digest
from layerzero.errors import DistributedError
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.kernel import KernelSpec
from layerzero.reasons import Reason, reason
from layerzero.telemetry.events import counter_value

_log = logging.getLogger("layerzero.distributed")

# What tensor parallelism splits: ranks of one TP group hold different numbers of these in the same call.
_SPLIT = frozenset(("num_heads", "num_kv_heads", "inner", "n", "k", "vocab", "experts"))
_LEFT_OUT = frozenset(("device", "notes", "scale", "dropout_p", "tp_rank", "needs", "dims"))


def call_key(ctx: Context, *, split: bool = False) -> str:
    """A call's name that is the same on every rank; `split` leaves out the sizes that tensor parallelism cuts."""
    data = ctx.to_json()
    sizes = {name: size for name, size in ctx.dims if not (split and name in _SPLIT)}
    kept = {name: value for name, value in data.items() if name not in _LEFT_OUT}
    needs = sorted(need for need in ctx.needs if not (split and need == "gqa"))
    return digest([kept, sizes, needs, ctx.device.hardware_signature])


@dataclass(frozen=True, eq=False)
class RankChoices:
    """The agreement as the World holds it: who chooses, which kernels are out, and what was settled."""

    store: RankStore | None
    rank: int
    group: tuple[int, ...]
    size: int
    name: str
    fingerprint: str
    excluded: Mapping[str, Reason] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)
    broadcast: bool = True
    tp_invariant: bool = False
    training: bool = False
    wait_s: float = 1.0
    # Counters that outlive one World.
    asking: Any = field(default_factory=itertools.count)
    disagreeing: Any = field(default_factory=itertools.count)

    @property
    def disagreements(self) -> int:
        """Choices in which this rank could not follow."""
        return counter_value(self.disagreeing)

    @property
    def asked(self) -> int:
        """How often the store was asked: once per new call, never by a hot one."""
        return counter_value(self.asking)

    def requires(self, ctx: Context) -> Context:
        """The context as a member of a tensor-parallel group that wants results independent of its size."""
        if not self.tp_invariant or len(self.group) < 2:
            return ctx
        ranks, needs = self.group, ctx.needs | {"tp_invariant"}
        return replace(ctx, tp_size=len(ranks), tp_rank=ranks.index(self.rank), needs=needs)

    def settle(self, decision: Decision) -> Decision:
        """The decision that holds for the group; the given one where nobody else has a say."""
        ctx = decision.context
        if not decision.chosen or decision.locked or ctx.backend is not None or len(self.group) < 2:
            return decision
        key = call_key(ctx, split=self.tp_invariant)
        agreed = self.pins.get(key)
        if agreed is None and self.broadcast and self.store is not None:
            agreed = self._ask(key, decision.chosen)
        if agreed is None or agreed == decision.chosen:
            return decision
        return self._follow(decision, agreed)

    def verdicts(self, kernel: KernelSpec, kind: str, mine: str | None = None) -> list[str | None]:
        """What each rank of the group says of a kernel's first use; None for one that has not spoken.

        With `mine` this rank speaks first and waits `wait_s` for the others.
        """
        if self.store is None:
            return [mine] * len(self.group)
        about = digest([kernel.kernel_id, kernel.version, kind])
        names = [f"{self.name}/first_use/{self.group[0]}/{about}/{rank}" for rank in self.group]
        next(self.asking)
        try:
            if mine is not None:
                self.store.set(names[self.group.index(self.rank)], mine)
                await_keys(self.store, names, self.wait_s)  # who is late is read at the next call
            return [self.store.get(name).decode() if self.store.check([name]) else None for name in names]
        except RuntimeError as error:
            _log.warning("%s", reason("RANK_LOST", "?", f"{self.wait_s:g}", detail=str(error).splitlines()[0][:200]))
            return [None] * len(self.group)

    def _ask(self, key: str, mine: str) -> str | None:
        assert self.store is not None
        name = f"{self.name}/choice/{self.group[0]}/{key}"
        next(self.asking)
        try:
            if self.rank != self.group[0]:
                await_keys(self.store, [name], self.wait_s)
            return self.store.compare_set(name, "", mine).decode()
        except RuntimeError as error:
            why = reason("RANK_LOST", "?", f"{self.wait_s:g}", detail=str(error).splitlines()[0][:200])
            if self.training:
                raise DistributedError(reasons=(why,)) from error
            next(self.disagreeing)
            _log.warning("%s; this rank chooses for itself", why)
            return None

    def _follow(self, decision: Decision, agreed: str) -> Decision:
        if agreed in decision.ranking:
            steps = tuple(sorted(decision.steps, key=lambda step: step[0] != agreed))
            note = reason("RANK_CHOICE", agreed, self.group[0])
            return replace(decision, chosen=agreed, steps=steps, is_fallback=False, notes=(*decision.notes, note))
        next(self.disagreeing)
        why = reason("RANK_DISAGREEMENT", f"rank {self.group[0]} {agreed}, rank {self.rank} {decision.chosen}")
        if self.training:
            raise DistributedError(reasons=(why,), ranks=(self.rank,))
        _log.warning("%s: %s; this rank cannot run it and goes on with its own", decision.op, why)
        return replace(decision, notes=(*decision.notes, why))

"""How ranks talk: through the store that torch.distributed keeps anyway, in rounds, each with a deadline.

A round: every member says something; the leader (the lowest rank) collects it and writes the verdict, which all read.
There is one verdict a round, the first that is written: a leader that cannot find a member in time writes that it is
missing; members that wait for the leader in vain write that the leader is. So all who survive read the same, whoever
died and whenever, and nobody waits longer than twice the deadline. No collective of a process group is used: one that
is entered by some ranks only hangs, and leaves the group useless behind it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from layerzero.distributed.facts import digest
from layerzero.errors import DistributedError
from layerzero.reasons import reason

_FIRST_S, _LONGEST_S = 0.0005, 0.05


class RankStore(Protocol):
    """What is used of `torch.distributed.Store`.

    `get` waits where there is nothing; `check` says whether all keys are there; `compare_set` writes if nothing
    (expected "") is there, and returns what is there then.
    """

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass
class Channel:
    """The members of a group, and the rounds they have held. Every member makes the same calls in the same order."""

    store: RankStore
    rank: int
    members: tuple[int, ...]
    timeout_s: float = 30.0
    name: str = "layerzero"
    round: int = 0

    def __post_init__(self) -> None:
        self.members = tuple(sorted(set(self.members)))
        if self.rank not in self.members:
            raise DistributedError(
                f"rank {self.rank} is not a member", code="VALUE_INVALID", value=self.rank, limit=list(self.members)
            )

    @property
    def leader(self) -> int:
        return self.members[0]

    def gather(self, what: str, mine: Any) -> dict[int, Any]:
        """What every member says (JSON-compatible), by rank. Raises DistributedError, the same on all who live:

        RANK_LOST when a member does not answer, RANK_DISAGREEMENT when members ask for different things.
        """
        if len(self.members) == 1:
            return {self.rank: mine}
        self.round += 1
        here = f"{self.name}/{self.round}"
        try:
            self.store.set(f"{here}/said/{self.rank}", json.dumps([what, mine]))
            verdict = self._lead(here) if self.rank == self.leader else self._follow(here)
        except DistributedError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError: the store itself, or the way to it, is gone
            raise lost(
                [], self.timeout_s, f"the store cannot be reached: {str(error).splitlines()[0][:200]}"
            ) from error
        if verdict["missing"]:
            raise lost(verdict["missing"], self.timeout_s, f"in {what}")
        if verdict["asked"]:
            raise DistributedError(
                f"ranks ask for different things: {_words(verdict['asked'])}",
                code="RANK_DISAGREEMENT", value=_words(verdict["asked"]), hint="make the same calls on every rank",
            )  # fmt: skip
        return {int(rank): value for rank, value in verdict["said"].items()}

    def barrier(self, what: str) -> None:
        """Return when every member has come here."""
        self.gather(f"barrier: {what}", None)

    def without(self, ranks: Sequence[int]) -> Channel:
        """The channel of those who are left, after some were lost."""
        left = tuple(rank for rank in self.members if rank not in set(ranks))
        # Those who are left name the channel: if another is lost on the way, the next attempt is a channel of its own.
        name = f"{self.name}/{self.round}-{digest(left)[:8]}"
        return Channel(self.store, self.rank, left, self.timeout_s, name)

    # -- the two sides of a round ----------------------------------------------------------------
    def _lead(self, here: str) -> dict[str, Any]:
        keys = {rank: f"{here}/said/{rank}" for rank in self.members}
        missing: list[int] = []
        if not await_keys(self.store, list(keys.values()), self.timeout_s):
            missing = [rank for rank, key in keys.items() if not self.store.check([key])]
        said = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if rank not in missing}
        asked = {rank: what for rank, (what, _) in said.items()}
        mixed = len(set(asked.values())) > 1
        clean = not missing and not mixed
        verdict = self._decide(
            here, missing, asked if mixed else {}, {rank: value for rank, (_, value) in said.items()} if clean else {}
        )
        if clean and not verdict["missing"] and self.round > 1:
            # Everybody has begun this round, so everybody has read the last one's verdict.
            last = f"{self.name}/{self.round - 1}"
            for key in (f"{last}/verdict", *(f"{last}/said/{rank}" for rank in self.members)):
                self.store.delete_key(key)
        return verdict

    def _follow(self, here: str) -> dict[str, Any]:
        # The leader may have come just now, and waits as long as we have.
        if not await_keys(self.store, [f"{here}/verdict"], 2 * self.timeout_s):
            return self._decide(here, [self.leader], {}, {})
        found: dict[str, Any] = json.loads(self.store.get(f"{here}/verdict"))
        return found

    def _decide(self, here: str, missing: list[int], asked: dict[int, str], said: dict[int, Any]) -> dict[str, Any]:
        text = json.dumps({"missing": missing, "asked": asked, "said": said})
        found: dict[str, Any] = json.loads(self.store.compare_set(f"{here}/verdict", "", text))
        return found


def await_keys(store: RankStore, keys: list[str], seconds: float) -> bool:
    """Whether all keys are there within this time.

    Looked for again and again, ever less often: a wait inside the store could not be interrupted, would hold its
    connection, and would write a warning to standard error each time it ends in vain.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_S
    while not store.check(keys):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.3, _LONGEST_S)
    return True


def lost(ranks: Sequence[int], seconds: float, detail: str) -> DistributedError:
    """The error for ranks that did not answer; none: it is not known which."""
    named = ", ".join(str(rank) for rank in ranks) or "?"
    why = reason("RANK_LOST", named, f"{seconds:g}", detail=detail)
    return DistributedError(reasons=(why,), ranks=tuple(ranks))


def _words(asked: dict[str, str]) -> str:
    return "; ".join(f"rank {rank}: {what}" for rank, what in sorted(asked.items(), key=lambda item: int(item[0])))

"""What a rank says of itself, and what follows when the ranks do not say the same. Values and pure functions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from layerzero import json_form
from layerzero.errors import DistributedError
from layerzero.json_form import Plain
from layerzero.reasons import Reason, reason


def digest(value: Any) -> str:
    """A short hash that is the same in every process."""
    return json_form.digest(value, default=str)[:24]


@dataclass(frozen=True, slots=True)
class Facts(Plain):
    """One rank. `kernels` maps the ids it can use to their versions; empty stands for "as the hash says"."""

    rank: int
    layerzero: str
    torch: str
    hardware: str
    device: str
    kernels_hash: str
    policy: str
    table: str
    measurements: str
    free_memory: int | None
    kernels: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_json(data: Any) -> Facts:
        """The inverse. Raises DistributedError for anything that is not the facts of a rank."""
        names = {item.name for item in fields(Facts)}
        whole = isinstance(data, dict) and set(data) == names
        if not whole or not isinstance(data["rank"], int) or not isinstance(data["kernels"], dict):
            raise DistributedError(
                "a rank says something else than its facts", code="VERSION_DISAGREEMENT", value=str(data)[:80],
                hint="install the same layerzero-core on every rank",
            )  # fmt: skip
        return Facts(**data)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the facts of all ranks mean.

    groups       ranks that are alike in hardware and kernels; the first of each chooses for it
    versions     differences of versions, in words; in training they are an error
    excluded     kernel id → why no rank may use it: its version differs somewhere
    policies     whether the ranks have different policies
    tables       groups in which the dispatch tables differ; the first rank's counts
    free_memory  the least of what the ranks of each group have, by its first rank; None: some rank does not know
    """

    groups: tuple[tuple[int, ...], ...]
    versions: tuple[str, ...] = ()
    excluded: Mapping[str, Reason] = field(default_factory=dict)
    policies: bool = False
    tables: tuple[int, ...] = ()
    free_memory: Mapping[int, int | None] = field(default_factory=dict)

    def group_of(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.groups if rank in group)

    @property
    def alike(self) -> bool:
        """Whether nothing differs but, perhaps, the hardware."""
        return not (self.versions or self.excluded or self.policies or self.tables)


def judge(found: Mapping[int, Facts]) -> Findings:
    """Compare every rank with the lowest one."""
    ranks = sorted(found)
    first = found[ranks[0]]
    excluded = _excluded(found)
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        one = found[rank]  # its kernels, those in question left out
        usable = digest(sorted(one.kernels.keys() - excluded.keys())) if one.kernels else one.kernels_hash
        groups.setdefault((one.hardware, usable), []).append(rank)
    versions: list[str] = []
    for name in ("layerzero", "torch"):
        there = {rank: getattr(found[rank], name) for rank in ranks}
        if len(set(there.values())) > 1:
            versions.append(f"{name} {_by_value(there)}")
    versions += [f"{kernel_id} {why.value}" for kernel_id, why in sorted(excluded.items())]
    made = tuple(tuple(group) for group in groups.values())
    return Findings(
        groups=made,
        versions=tuple(versions),
        excluded=excluded,
        policies=any(found[rank].policy != first.policy for rank in ranks),
        tables=tuple(group[0] for group in made if len({found[rank].table for rank in group}) > 1),
        free_memory={group[0]: least_of([found[rank].free_memory for rank in group]) for group in made},
    )


def _excluded(found: Mapping[int, Facts]) -> dict[str, Reason]:
    """Kernels that several ranks have, in different versions. A rank that lacks one is of another kind."""
    there: dict[str, dict[int, str]] = {}
    for rank, facts in found.items():
        for kernel_id, version in facts.kernels.items():
            there.setdefault(kernel_id, {})[rank] = version
    return {
        kernel_id: reason("VERSION_DISAGREEMENT", _by_value(versions))
        for kernel_id, versions in there.items()
        if len(set(versions.values())) > 1
    }


def _by_value(there: Mapping[int, str]) -> str:
    """ "0.2.0 on ranks 0, 1; 0.1.0 on rank 2"."""
    parts = []
    for value in dict.fromkeys(there[rank] for rank in sorted(there)):
        ranks = [str(rank) for rank in sorted(there) if there[rank] == value]
        parts.append(f"{value or 'none'} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}")
    return "; ".join(parts)


def least_of(values: list[int | None]) -> int | None:
    """The least of these numbers; None where one is not known."""
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None

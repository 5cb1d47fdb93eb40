"""What changed between two dispatch tables, and the measured reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layerzero.json_form import Plain
from layerzero.model.dispatch_table import DispatchTable, PlanEntry
from layerzero_tune.perfdb.summary import bucket_words

Lookup = Callable[[PlanEntry, str], float | None]


@dataclass(frozen=True, slots=True)
class Change(Plain):
    """One bucket whose kernel differs; `old` is None for a new bucket, `new` for one that is gone.

    why   the times behind it, in words
    """

    op: str
    bucket: str
    old: str | None
    new: str | None
    why: str


@dataclass(frozen=True, slots=True)
class TableDiff(Plain):
    """Everything that differs: what the tables are bound to, and their decisions."""

    header: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    same: int = 0
    retimed: tuple[Change, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the two decide alike, wherever they hold."""
        return not self.header and not self.changes

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.equal, **Plain.to_json(self)}


def diff_tables(old: DispatchTable, new: DispatchTable, measured: Lookup | None = None) -> TableDiff:
    """Compare two tables. `measured(entry, kernel_id)` gives a kernel's present time in an entry's bucket, in µs."""
    before = {(entry.op, entry.when, entry.sizes): entry for entry in old.entries}
    after = {(entry.op, entry.when, entry.sizes): entry for entry in new.entries}
    changes, retimed, same = [], [], 0
    for key in sorted({*before, *after}, key=str):
        left, right = before.get(key), after.get(key)
        entry = right or left
        assert entry is not None
        words = bucket_words(entry.sizes, entry.when)
        if left is None or right is None:
            why = _time(right.median_us) if right is not None else "no such calls any more"
            names = (None if left is None else left.kernel_id, None if right is None else right.kernel_id)
            changes.append(Change(entry.op, words, *names, why))
        elif left.kernel_id != right.kernel_id:
            changes.append(Change(entry.op, words, left.kernel_id, right.kernel_id, _why(left, right, measured)))
        else:
            same += 1
            if _moved(left.median_us, right.median_us):
                why = f"{_time(left.median_us)}, now {_time(right.median_us)}"
                retimed.append(Change(entry.op, words, left.kernel_id, right.kernel_id, why))
    return TableDiff(tuple(_header(old, new)), tuple(changes), same, tuple(retimed))


def _header(old: DispatchTable, new: DispatchTable) -> list[str]:
    found = []
    if old.hardware.signature != new.hardware.signature:
        found.append(f"machine: {old.hardware} → {new.hardware}")
    if old.policy_hash != new.policy_hash:
        found.append(f"policy: {old.policy_hash[:12]} → {new.policy_hash[:12]}")
    if old.model_id != new.model_id:
        found.append(f"model: {old.model_id or 'none'} → {new.model_id or 'none'}")
    for name in sorted({*old.kernels, *new.kernels}):
        left, right = old.kernels.get(name), new.kernels.get(name)
        if left != right and left is not None and right is not None:
            found.append(f"{name}: version {left} → {right}")
    return found


def _time(us: float | None) -> str:
    return "not measured" if us is None else f"{us:.4g} µs"


def _moved(old: float | None, new: float | None) -> bool:
    return old is not None and new is not None and not 0.9 <= new / old <= 1.1


def _why(old: PlanEntry, new: PlanEntry, measured: Lookup | None) -> str:
    """Both kernels in the new measurements where they are there; else what each table says of its own."""
    now = None if measured is None else measured(new, old.kernel_id)
    if now is not None and new.median_us is not None:
        return f"{_time(new.median_us)} against {_time(now)} for {old.kernel_id} ({now / new.median_us:.2f}×)"
    if new.median_us is None and old.median_us is None:
        return "neither was measured: another policy, version or set of kernels"
    return f"was {_time(old.median_us)}, is {_time(new.median_us)}"

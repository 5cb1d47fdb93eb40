"""From contexts and measurements to a dispatch table, one entry for each bucket of calls; and what differs in two.

The same contexts, measurements, kernels and policy give the same table, byte for byte: a table can be committed and a
change to it reviewed. Where a bucket was measured its entry carries the time and the error; where it was not, the entry
is what selection would have chosen, without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from layerzero.json_form import Plain
from layerzero.measurements.believed import mode_of, platform_of
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.dispatch_table import DispatchTable, PlanEntry, bucket_sizes, situation
from layerzero.perfdb.measurement import GROWING, Measurement, upper
from layerzero.perfdb.store import PerfDB
from layerzero.selection.engine import select
from layerzero.selection.filter import artifact_for, is_empty
from layerzero.selection.world import World, boundaries, bucketed
from layerzero.tables.file import hardware_of, make_table
from layerzero_tune.perfdb.exchange import bucket_words
from layerzero_tune.rows import row_of, stored_row

Edges = dict[str, dict[str, tuple[int, ...]]]


def solve_table(
    contexts: Iterable[Context], world: World, device: DeviceSpec, *, db: PerfDB | None = None, model_id: str = ""
) -> DispatchTable:
    """The table for these calls on a device under a World's policy and measurements."""
    free = world.changed(table=None, tally=None)
    known = [ctx for ctx in contexts if ctx.backend is None and not is_empty(ctx) and ctx.op in free.ops]
    here = [replace(ctx, device=device) for ctx in known if ctx.device.device_type == device.device_type]
    buckets = _edges(here, free)
    entries: dict[tuple[object, ...], PlanEntry] = {}
    kernels: dict[str, str] = {}
    for ctx in here:
        entry = _entry(ctx, free, buckets, db)
        if entry is not None:
            entries[entry.op, entry.when, entry.sizes] = entry
            kernels[entry.kernel_id] = free.registry.kernels[entry.kernel_id].version
    measured = any(entry.median_us is not None for entry in entries.values())
    threads = (platform_of(device).threads or None) if measured else None
    return make_table(
        hardware_of(device, threads), free.policy.policy_hash, dict(sorted(kernels.items())), buckets,
        tuple(entries.values()), model_id,
    )  # fmt: skip


def _edges(contexts: list[Context], world: World) -> Edges:
    """Upper ends of the buckets of every size that varies with traffic, up to the largest that occurs.

    They are those of selection itself, so that inside a bucket every constraint gives the same answer.
    """
    largest: dict[tuple[str, str], int] = {}
    for ctx in contexts:
        growing = GROWING | set(world.ops[ctx.op].growing)
        for axis, size in ctx.dims:
            if axis in growing:
                largest[ctx.op, axis] = max(size, largest.get((ctx.op, axis), 0))
    found: Edges = {}
    for (op, axis), most in sorted(largest.items()):
        ends = boundaries(world, op, axis)
        if ends is None:
            continue  # some kernel or rule looks at the exact size
        last = next((end for end in ends if end >= most), None)
        if last is not None:
            found.setdefault(op, {})[axis] = tuple(end for end in ends if end <= last)
    return found


def _entry(ctx: Context, world: World, buckets: Edges, db: PerfDB | None) -> PlanEntry | None:
    canonical, _ = bucketed(world, ctx, world.ops[ctx.op].growing)
    sizes = bucket_sizes(canonical, buckets.get(ctx.op, {}))
    decision = select(ctx, world)
    if sizes is None or not decision.chosen:
        return None
    kernel = world.registry.kernels[decision.chosen]
    row = None if db is None else stored_row(world, canonical, decision.chosen, db)
    time, error, busy = (None, None, False) if row is None else (row.median_us, row.max_error, row.surroundings.shared)
    artifact = (str(artifact_for(kernel, canonical, world)),) if kernel.jit else ()
    return PlanEntry(ctx.op, situation(canonical), sizes, decision.chosen, time, error, artifact, bool(busy))


def time_of(entry: PlanEntry, kernel_id: str, world: World, db: PerfDB) -> float | None:
    """The time of a kernel in the bucket of a table's entry, as measured here; None where it was not."""
    row = row_of(kernel_id, _rows_of(entry, world, db), world)
    return None if row is None else row.median_us


def times_of(entry: PlanEntry, world: World, db: PerfDB) -> dict[str, float]:
    """Kernel -> its time in the bucket of a table's entry, on the platform where the entry's own kernel was measured.

    The table may come from another machine with its database; no kernel has to be there to be looked up.
    """
    rows = _rows_of(entry, world, db)
    same = [row for row in rows if row.kernel_id == entry.kernel_id and row.median_us == entry.median_us]
    if not same:
        return {}
    here = sorted((row for row in rows if row.platform == same[0].platform), key=lambda row: row.measured_at)
    return {row.kernel_id: row.median_us for row in here}  # of several, the latest


def _rows_of(entry: PlanEntry, world: World, db: PerfDB) -> list[Measurement]:
    """An entry ends where its buckets end, as the database's do, so its sizes spell the database's bucket."""
    spec = world.ops.get(entry.op)
    if spec is None:
        return []
    growing = GROWING | set(spec.growing)
    sizes = {name: upper(size) if name in growing else size for name, size in entry.sizes}
    bucket = json.dumps({"sizes": sizes, "when": dict(entry.when)}, sort_keys=True, separators=(",", ":"))
    return [row for kind in ("cpu", "cuda") for row in db.find(entry.op, bucket, mode_of(kind))]


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
            before_us, now_us = left.median_us, right.median_us
            if before_us is not None and now_us is not None and not 0.9 <= now_us / before_us <= 1.1:
                why = f"{_time(before_us)}, now {_time(now_us)}"
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


def _why(old: PlanEntry, new: PlanEntry, measured: Lookup | None) -> str:
    """Both kernels in the new measurements where they are there; else what each table says of its own."""
    now = None if measured is None else measured(new, old.kernel_id)
    if now is not None and new.median_us is not None:
        return f"{_time(new.median_us)} against {_time(now)} for {old.kernel_id} ({now / new.median_us:.2f}×)"
    if new.median_us is None and old.median_us is None:
        return "neither was measured: another policy, version or set of kernels"
    return f"was {_time(old.median_us)}, is {_time(new.median_us)}"

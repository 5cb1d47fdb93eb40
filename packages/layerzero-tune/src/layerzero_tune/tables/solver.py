"""From contexts and measurements to a dispatch table: one entry for each bucket of calls, decided now.

The same contexts, measurements, kernels and policy give the same table, byte for byte: a table can be committed and a
change to it reviewed. Where a bucket was measured its entry carries the time and the error; where it was not, the entry
is what selection would have chosen, without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from layerzero.measurements.believed import mode_of, platform_of, versions_of
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.dispatch_table import DispatchTable, PlanEntry, bucket_sizes, situation
from layerzero.model.op import OperationSpec
from layerzero.perfdb.bucket import GROWING, upper
from layerzero.perfdb.store import PerfDB
from layerzero.selection.buckets import boundaries, bucketed
from layerzero.selection.engine import select
from layerzero.selection.filter import artifact_for, is_empty
from layerzero.selection.world import World
from layerzero.tables.file import hardware_of, make_table
from layerzero_tune.rows import stored_row

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
        entry = _entry(ctx, free, free.ops[ctx.op], buckets, db)
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


def _entry(ctx: Context, world: World, spec: OperationSpec, buckets: Edges, db: PerfDB | None) -> PlanEntry | None:
    canonical, _ = bucketed(world, ctx, spec.growing)
    sizes = bucket_sizes(canonical, buckets.get(ctx.op, {}))
    decision = select(ctx, world)
    if sizes is None or not decision.chosen:
        return None
    kernel = world.registry.kernels[decision.chosen]
    row = None if db is None else stored_row(world, spec, canonical, decision.chosen, db)
    time, error, busy = (None, None, False) if row is None else (row.median_us, row.max_error, row.surroundings.shared)
    artifact = (str(artifact_for(kernel, canonical, world)),) if kernel.jit else ()
    return PlanEntry(ctx.op, situation(canonical), sizes, decision.chosen, time, error, artifact, bool(busy))


def time_of(entry: PlanEntry, kernel_id: str, world: World, db: PerfDB) -> float | None:
    """The time of a kernel in the bucket of a table's entry, as measured here; None where it was not."""
    bucket = _bucket_of_entry(entry, world)
    if bucket is None:
        return None
    versions = versions_of(world.registry, kernel_id)
    for kind in ("cpu", "cuda"):
        for row in db.find(entry.op, bucket, mode_of(kind)):
            if row.kernel_id == kernel_id and versions == (row.kernel_version, row.backend_version):
                return row.median_us
    return None


def times_of(entry: PlanEntry, world: World, db: PerfDB) -> dict[str, float]:
    """Kernel -> its time in the bucket of a table's entry, on the platform where the entry's own kernel was measured.

    The table may come from another machine with its database; no kernel has to be there to be looked up.
    """
    bucket = _bucket_of_entry(entry, world)
    rows = [row for kind in ("cpu", "cuda") for row in db.find(entry.op, bucket, mode_of(kind))] if bucket else []
    same = [row for row in rows if row.kernel_id == entry.kernel_id and row.median_us == entry.median_us]
    if not same:
        return {}
    here = sorted((row for row in rows if row.platform == same[0].platform), key=lambda row: row.measured_at)
    return {row.kernel_id: row.median_us for row in here}  # of several, the latest


def _bucket_of_entry(entry: PlanEntry, world: World) -> str | None:
    """An entry ends where its buckets end, as the database's do, so its sizes spell the database's bucket."""
    import json

    spec = world.ops.get(entry.op)
    if spec is None:
        return None
    growing = GROWING | set(spec.growing)
    sizes = {name: upper(size) if name in growing else size for name, size in entry.sizes}
    return json.dumps({"sizes": sizes, "when": dict(entry.when)}, sort_keys=True, separators=(",", ":"))

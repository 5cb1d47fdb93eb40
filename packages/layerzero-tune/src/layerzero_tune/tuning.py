"""`lz.tune` and `lz.solve`: from the calls that occur to choices that are measured and fixed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero.device.probe import probe_device
from layerzero.errors import CacheCorruptionError, invalid
from layerzero.measurements.believed import measurements_from
from layerzero.measurements.database import database as policy_database
from layerzero.measurements.database import place
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.perfdb.store import PerfDB
from layerzero.public.traffic import calls_of
from layerzero.recording.traffic import Recorded, Traffic, add_to_file
from layerzero.recording.traffic import load as load_traffic
from layerzero.runtime.state import state

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable, PlanEntry
    from layerzero_tune.tuning_run import Progress, Tuned


# -- tuning ------------------------------------------------------------------------------------------
def tune(
    source: Any,
    *,
    database: str | os.PathLike[str] | None = None,
    budget: float | None = None,
    seconds: float | None = None,
    seed: int = 0,
    device: str | DeviceSpec | None = None,
    check: bool = False,
    fresh: bool = False,
    compile: bool = True,
    compile_seconds: float | None = None,
    thorough: bool = False,
    graphs: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Measure every kernel for the calls of `source`; selection in this process sees the times at once.

    source    `lz.record()`'s traffic or its file, a model's config.json or mapping, a grid file, or contexts
    database  where the times go; default: the policy's, else the user's own
    budget    seconds for all calls together, the most frequent first
    seconds   for the timing of one; default 2, on a GPU 0.1, or 0.3 where it is thorough
    check     only look at calls that were measured before, and measure those anew whose kernel has drifted
    fresh     begin anew instead of going on with a tuning run that was interrupted
    compile   kernels that are not compiled yet are compiled and measured, too, as many at a time as there are cores;
              False leaves them out
    compile_seconds  that they may take together, default 90: calls are measured without what is not ready by then,
              which is named and left for a later run
    thorough  measure also those that shipped measurements or the roofline rule out (`layerzero_tune.ruled_out`), those
              that are close on a GPU several times, and wait for all compilers where `compile_seconds` is not given
    graphs    measure calls on a GPU also as replayed CUDA graphs, where no launch counts: what captured steps and
              compiled graphs choose by

    No kernel is timed before its result is the reference's; one that is wrong is never chosen for such calls. Under
    torchrun the calls are split over the ranks, and every rank ends with the merged result. Ctrl-C raises
    `layerzero_tune.tuning_run.Interrupted`; what is done is kept.
    """
    for name, given in (("budget", budget), ("seconds", seconds), ("compile_seconds", compile_seconds)):
        if given is not None and (isinstance(given, bool) or not given > 0):
            raise invalid("VALUE_INVALID", f"{name}={given!r}", "a positive number of seconds")
    from layerzero_tune.ruled_out import chosen_now
    from layerzero_tune.tuning_run import COMPILE_S, Interrupted, Ranks, tune_calls

    db = database_of(database)
    where = probe_device(device) if isinstance(device, str) else device
    ranks = Ranks.of_process()
    jit, stopped = "block" if compile else "off", False
    if compile_seconds is None and not thorough:
        compile_seconds = COMPILE_S
    try:
        if where is None and ranks.size > 1:
            where = _device_of_rank(ranks.local_rank)
        calls = calls_of(source, device=where)
        if graphs:
            calls += _replayed(calls)
        if check:
            return _checked(calls, db, budget, progress, jit)
        try:
            found = tune_calls(
                calls, db, budget=budget, seconds=seconds, seed=seed, fresh=fresh, jit=jit,
                compile_seconds=compile_seconds, thorough=thorough, ranks=ranks, progress=progress,
            )  # fmt: skip
        except Interrupted as error:
            found, stopped = error.tuned, True
        if ranks.local_rank == 0:
            _remember(found, db)
    finally:
        ranks.close()
        _believe(db)
    contexts = {item.name: item.trial.context for item in found.outcomes if item.trial is not None}
    found = replace(found, chosen={name: chosen_now(ctx, state.world) for name, ctx in contexts.items()})
    if stopped:
        raise Interrupted(found)
    return found


def _replayed(calls: Sequence[tuple[str, Recorded]]) -> list[tuple[str, Recorded]]:
    """The calls that can be captured, as calls inside a graph; those that were recorded so are among them already."""
    known = {item.context for _, item in calls}
    found = []
    for name, item in calls:
        inside = replace(item.context, capturing=True)
        if item.context.device.device_type == "cuda" and not item.context.needs_grad and inside not in known:
            found.append((f"{name} in a graph", replace(item, context=inside)))
    return found


def _remember(found: Tuned, db: PerfDB) -> None:
    """Keep the tuned calls beside the database, so that `lz solve` knows what was meant."""
    calls = tuple(
        replace(item.recorded, context=item.trial.context) for item in found.outcomes if item.trial is not None
    )
    if calls:
        path = calls_path(db.path)
        before = load_traffic(path).contexts if path.exists() else ()
        add_to_file(Traffic(tuple(item for item in calls if item.context not in set(before))), path)


def calls_path(database: str | os.PathLike[str] | None = None) -> Path:
    """The file that holds the calls `lz.tune` has measured into a database."""
    path = database_of(database).path
    return path.with_name(f"{path.name}.calls.json")


def known_database(database: str | os.PathLike[str] | None = None) -> PerfDB | None:
    """A database, or the policy's, to look into; None where there is no such file."""
    file = Path(database).expanduser() if database is not None else place(state.world.policy)
    return database_of(file) if file is not None and file.exists() else None


def times_in(database: str | os.PathLike[str] | None = None) -> Callable[[PlanEntry, str], float | None] | None:
    """A look into a database for `diff_tables`: the time of a kernel in the bucket of a table's entry."""
    db = known_database(database)
    if db is None:
        return None
    from layerzero_tune.tables.solver import time_of

    return lambda entry, kernel_id: time_of(entry, kernel_id, state.world, db)


def _device_of_rank(local_rank: int) -> DeviceSpec:
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return probe_device(f"cuda:{local_rank % torch.cuda.device_count()}")
    return probe_device("cpu")


def _checked(
    calls: list[tuple[str, Recorded]], db: PerfDB, budget: float | None,
    progress: Callable[[Progress], None] | None, jit: str,
) -> Tuned:  # fmt: skip
    """The drift check as a tuning run: only calls whose kernel takes another time than it did are measured."""
    from layerzero_tune.drift import drifted
    from layerzero_tune.tuning_run import Outcome, Progress, Tuned

    _believe(db)
    begin, outcomes, rows, left = time.monotonic(), [], 0, []
    for number, (name, recorded) in enumerate(calls):
        if budget is not None and time.monotonic() - begin >= budget:
            left.append(name)
            continue
        if progress is not None:
            progress(Progress(number, len(calls), name, None))
        for drift in drifted([recorded.context], db, jit=jit):
            outcomes.append(Outcome(name, recorded, drift.retuned, str(drift.reason)))
            rows += len(drift.retuned.rows)
    return Tuned(str(db.path), tuple(outcomes), (), tuple(left), time.monotonic() - begin, 1, rows)


def database_of(path: str | os.PathLike[str] | None = None) -> PerfDB:
    """The database in a file, or the policy's; an error where measurements are off or something else wrote the file."""
    found = policy_database(state.world.policy) if path is None else PerfDB(Path(path).expanduser())
    if found is None:
        told = "measurements are switched off (perfdb.enabled, LAYERZERO_PERFDB=off)"
        raise invalid("VALUE_INVALID", "database=None", "a database", told, "name one with database=, or turn them on")
    if len(found) == 0 and any(why.code == "PERF_FILE_FOREIGN" for why in found.problems):
        raise CacheCorruptionError(code="PERF_FILE_FOREIGN", value=str(found.path))
    return found


def _believe(db: PerfDB) -> None:
    """Let selection see what was written: the policy's own database, or this one for the rest of the process."""
    if place(state.world.policy) == db.path:
        state.remeasured()
        return
    known = measurements_from(db, state.world)
    state.publish(measurements=replace(known, expected=state.world.measurements.expected))


# -- solving -----------------------------------------------------------------------------------------
def solve(
    source: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    database: str | os.PathLike[str] | None = None,
    device: str | DeviceSpec | None = None,
    model_id: str = "",
    key: str | os.PathLike[str] | None = None,
) -> DispatchTable:
    """Decide the calls of `source` now and write the decisions to a dispatch table, which `lz.use_table` obeys.

    Decisions are those of selection under the present policy, with the times of `database` (default: the policy's).
    Equal inputs give equal bytes. A table is for one kind of device: `device`, else the CPU where all calls are for it,
    else this machine's accelerator; calls for others are left out. `key` names a key file to sign the table with.
    """
    from layerzero.tables.file import save_table
    from layerzero_tune.tables.solver import solve_table

    given = probe_device(device) if isinstance(device, str) else device
    contexts = [item.context for _, item in calls_of(source, device=given)]
    where = _device_for(contexts) if given is None else given
    contexts = [ctx for ctx in contexts if ctx.device.device_type == where.device_type]
    world = state.world
    db = known_database(database)
    if database is not None and db is not None:
        world = world.changed(measurements=measurements_from(db, world))
    table = solve_table(_described(contexts), world, where, db=db, model_id=model_id)
    if key is not None:
        from layerzero.tables.signing import sign

        table = replace(table, signature=sign(table.content_hash, Path(key)))
    if path is not None:
        save_table(table, path)
    return table


def _device_for(contexts: Sequence[Context]) -> DeviceSpec:
    kinds = {ctx.device.device_type for ctx in contexts}
    where = probe_device("cpu" if kinds == {"cpu"} else None)
    if kinds and where.device_type not in kinds:
        message = f"the calls are for {', '.join(sorted(kinds))}, this machine's device is {where.device_type}"
        raise invalid("VALUE_INVALID", ", ".join(sorted(kinds)), where.device_type, message)
    return where


def _described(contexts: Iterable[Context]) -> Iterator[Context]:
    """Contexts as dispatch will see them; on an accelerator torch's own checks look at real tensors."""
    from layerzero.dispatch.run import describe
    from layerzero.tuning.inputs import build, buildable, conditions

    world = state.world
    for ctx in contexts:
        if ctx.device.device_type == "cpu" or ctx.op != "attention" or not buildable(ctx.op):
            yield ctx
            continue
        with conditions(ctx):
            call = build(ctx)
            yield describe(world.ops[ctx.op], call.args, call.layout, ctx.backend, world)

"""Which database of measured times this process believes, found when the first World is built.

Named by LAYERZERO_PERFDB or the policy (`perfdb.path`), else the user's own, which `lz tune` writes to. No file, or
`perfdb.enabled: false`: nothing is opened, nothing is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero import companions
from layerzero.errors import PackageMissingError
from layerzero.files import user_cache
from layerzero.model.config import Policy
from layerzero.model.context import Context
from layerzero.selection.world import Measurements, World

if TYPE_CHECKING:
    from layerzero.perfdb.store import PerfDB

_log = logging.getLogger("layerzero.perfdb")

_AUTO_S = 5.0  # seconds between two calls that are tuned beside the program (`perfdb.auto_tune`)


def place(policy: Policy) -> Path | None:
    """The file that holds the measurements under this policy, whether or not it exists; None when they are off."""
    if not policy.setting("perfdb.enabled"):
        return None
    named = policy.setting("perfdb.path")
    return user_cache("perf.db") if named is None else Path(named).expanduser()


def database(policy: Policy) -> PerfDB | None:
    """The database of this policy; None when measurements are off."""
    path = place(policy)
    if path is None:
        return None
    from layerzero.perfdb.store import PerfDB

    return PerfDB(path, ttl_s=policy.setting("perfdb.ttl_s"))


def known_times(policy: Policy, world: World) -> Measurements:
    """What selection is told: the believed rows of the database, read bucket by bucket when first asked for; where
    there are none, what the packages brought along."""
    path = place(policy)
    _watch(policy, path)
    known = Measurements()
    if path is not None and path.exists():
        from layerzero.measurements.believed import measurements_from

        found = database(policy)
        assert found is not None
        known = measurements_from(found, world)
    return replace(known, expected=_shipped(world)) if policy.setting("perfdb.shipped") else known


def _shipped(world: World) -> Callable[[Context, Sequence[str]], Any]:
    """What the packages brought along, read when a call is selected for which nothing was measured here."""
    registry, ops = world.registry, world.ops  # not the World: its hot table would live on
    made: list[Callable[[Context, Sequence[str]], Any]] = []

    def expected(ctx: Context, names: Sequence[str]) -> Any:
        if not made:
            from layerzero.measurements.shipped import shipped_by

            made.append(shipped_by(registry, ops))
        return made[0](ctx, names)

    return expected


_watcher: list[Callable[..., object]] = []


def _watch(policy: Policy, path: Path | None) -> None:
    """Start, change or end the thread that looks at measured times beside the program; off unless it is asked for."""
    auto = path is not None and policy.setting("perfdb.auto_tune")
    every = policy.setting("perfdb.drift_s") or (_AUTO_S if auto else None)
    if path is None or not every:
        every = None
    elif not _watcher:
        try:
            _watcher.append(companions.part("perfdb.drift_s"))
        except PackageMissingError as error:
            _log.warning("measured times are not looked at again: %s", error)
    for watcher in _watcher:
        watcher(every, lambda: database(policy), auto=auto)

"""The process as metrics, and counting switched on and off.

Nothing here runs unless somebody looks: counters and histograms exist anyway, gauges are read from the World.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from layerzero.forking import fresh_lock
from layerzero.health.breaker import BreakerPhase
from layerzero.runtime.state import state
from layerzero.selection.world import World
from layerzero.telemetry.counting import KernelCounters
from layerzero.telemetry.events import KINDS, events
from layerzero.telemetry.metrics import Family, family, histogram
from layerzero.version import __version__

_PHASES = {BreakerPhase.CLOSED: 0, BreakerPhase.HALF_OPEN: 1, BreakerPhase.OPEN: 2}
_lock = fresh_lock()
_users = 0
counters = KernelCounters()  # one for the life of the process: a metric that counts never falls


def count_calls(on: bool) -> None:
    """Count calls by kernel from now on, or no longer; each switching on wants its switching off.

    The World is swapped, so that every kernel is bound anew with or without its counter.
    """
    global _users
    with _lock:
        before = _users > 0
        _users = max(0, _users + (1 if on else -1))
        after = _users > 0
        if before is after:
            return
        with state.changing():
            state.counting = counters if after else None
            if state.loaded:
                state.publish()


def families() -> list[Family]:
    """Every metric of the catalogue that has something to say here."""
    loaded = [*_world(state.world), *_compiled(state.world), *_ranks(state.world)] if state.loaded else []
    return [*_identity(), *_calls(), *_cold(), *loaded]


def _identity() -> Iterator[Family]:
    torch = sys.modules.get("torch")
    labels = {
        "version": __version__,
        "torch": str(getattr(torch, "__version__", "")),
        "python": sys.version.split()[0],
    }
    yield family("layerzero_info", (labels, 1))


def _calls() -> Iterator[Family]:
    yield family("layerzero_counting", state.counting is not None)
    calls = counters.calls()
    rows = [({"op": op, "kernel": kernel}, count) for (op, kernel), count in sorted(calls.items())]
    yield family("layerzero_kernel_calls_total", *rows)
    total = sum(calls.values())
    if total:
        yield family("layerzero_hot_hit_ratio", sum(counters.hits().values()) / total)


def _cold() -> Iterator[Family]:
    numbers = state.counters.to_json()
    yield family("layerzero_bucketed_hits_total", numbers["bucketed_hits"])
    yield family("layerzero_world_swaps_total", numbers["swaps"])
    for name in ("misses", "selections", "followed", "binds", "failovers"):
        yield family(f"layerzero_{name}_total", numbers[name])
    stats = state.cache.stats()
    yield family("layerzero_selection_cache_entries", stats.entries)
    yield family("layerzero_selection_cache_hits_total", stats.hits)
    yield family("layerzero_selection_cache_misses_total", stats.misses)
    yield family("layerzero_long_loads_total", numbers["long_loads"])
    for kind in KINDS:
        yield histogram(f"layerzero_{kind}_seconds", events.histograms[kind])


def _world(world: World) -> Iterator[Family]:
    yield family("layerzero_hot_entries", len(world.hot))
    yield family("layerzero_kernels", len(world.registry))
    found = {**world.registry.backends, **world.enclosed}
    rows = [({"backend": name}, float(spec.available)) for name, spec in sorted(found.items())]
    yield family("layerzero_backend_available", *rows)
    health = state.health.snapshot()
    breakers = [
        ({"kind": kind, "name": name}, _PHASES[breaker.phase])
        for kind, named in (("backend", health.backends), ("kernel", health.kernels))
        for name, breaker in sorted(named.items())
    ]
    yield family("layerzero_breaker_state", *breakers)
    yield family("layerzero_quarantined", *(({"kernel": name}, 1) for name in sorted(health.quarantined)))
    yield family("layerzero_unbindable", *(({"kernel": name}, 1) for name in sorted(world.unbindable)))


def _compiled(world: World) -> Iterator[Family]:
    states = {"ready": len(world.ready), "failed": len(world.uncompilable)}
    states["pending"] = 0 if state.compiler is None else state.compiler.busy
    yield family("layerzero_jit_artifacts", *(({"state": word}, count) for word, count in states.items()))
    last = state.warmup
    if last is not None:
        told = {"asked": last.calls, "bound": last.bound, "failed": len(last.failed), "waiting": last.waiting}
        yield family("layerzero_warmup_calls", *(({"state": word}, count) for word, count in told.items()))


def _ranks(world: World) -> Iterator[Family]:
    ranks = world.ranks
    if ranks is not None:
        yield family("layerzero_ranks", ranks.size)
        yield family("layerzero_rank_disagreements_total", ranks.disagreements)

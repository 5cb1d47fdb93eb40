"""The current World, and the only functions that replace it.

A hot call reads `state.world` (or the World of the active scope) once and uses nothing else. Everything
that can change a choice (policy, locks, health, measurements, plugins, the clock) publishes a new World.
"""

from __future__ import annotations

import logging
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layerzero.errors import DispatchTableError
from layerzero.forking import fresh_lock, in_child
from layerzero.health.breaker import HealthRegistry
from layerzero.model.config import Policy
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.reasons import Reason
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.current import Unloaded, builtin_ops, now, scope
from layerzero.selection.cache import SelectionCache
from layerzero.selection.world import World

if TYPE_CHECKING:
    from layerzero.model.dispatch_table import DispatchTable
    from layerzero.plugin.manager import PluginRecord

__all__ = ["Counters", "Runtime", "scope", "state"]


class Counters:
    """Plain counters, exact under the GIL for the cold path only; hot calls count nothing."""

    __slots__ = ("binds", "failovers", "followed", "long_loads", "misses", "packs", "selections", "swaps")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.binds = self.failovers = self.followed = self.long_loads = 0
        self.misses = self.packs = self.selections = self.swaps = now.bucketed_hits = 0

    def to_json(self) -> dict[str, int]:
        return {**{name: getattr(self, name) for name in self.__slots__}, "bucketed_hits": now.bucketed_hits}


def _merged_policy() -> Policy:
    """Files, environment and code, merged; read late, so that importing LayerZero reads no file."""
    from layerzero.runtime.policies import policies

    return policies.merged()


def settled(world: World) -> World:
    """The World with its isolated backends and free memory worked out, where its policy asks for them."""
    if world.policy.backend_isolation or world.enclosed:
        from layerzero.runtime.isolated_backends import with_enclosures

        world = with_enclosures(world)
    if world.policy.memory_headroom_mb is not None or world.free_memory is not None:
        from layerzero.runtime.pressure import pressure

        world = pressure.with_memory(world)
    return world


class Runtime:
    """Holder of the current World. `now.world` is read by hot calls without a lock and replaced under one."""

    def __init__(self) -> None:
        self._lock: threading.RLock = fresh_lock(threading.RLock)
        self._world: World | None = None
        self.generation = 0  # how many resets there were; work that began before one finds its World gone
        self.cache: SelectionCache[Any, Decision] = SelectionCache()
        self.counters = Counters()
        self.health = HealthRegistry()
        self.records: tuple[PluginRecord, ...] = ()
        self.plugin_manager: Any = None
        self.ran: dict[Any, str] = {}
        # Devices that answer nothing more to this process ("cuda:0"), and why.
        self.lost: dict[str, Reason] = {}
        self.table_path: str | None = None
        self.table_problem: DispatchTableError | None = None
        self.tally: Any = None
        self.counting: Any = None  # telemetry's counters, while calls are counted by kernel
        self.compiler: Any = None  # the queue that compiles beside requests, once there is one
        self.warmup: Any = None  # the latest warm-up
        self._listeners: list[Callable[[World], None]] = []
        self._forgetting: list[Callable[[], None]] = []
        self.health.subscribe(self._health_changed)

    # -- reading ---------------------------------------------------------------------------------
    @property
    def world(self) -> World:
        """The current World, built on first use."""
        current = self._world
        return current if current is not None else self.load()

    @property
    def loaded(self) -> bool:
        return self._world is not None

    # -- building --------------------------------------------------------------------------------
    def load(self) -> World:
        """Discover plugins and build the first World. Safe to call from many threads; runs once."""
        with self._lock:
            if self._world is not None:
                return self._world
            from layerzero import env
            from layerzero.measurements.database import known_times
            from layerzero.plugin.manager import load_plugins
            from layerzero.recording.tally import tally_from

            policy = _merged_policy()
            # Who may come in is policy too: environment, and files that may speak of it, merged.
            allowed, denied = policy.setting("plugins.allow"), policy.setting("plugins.deny")
            settings = env.read()
            if settings.verbose:  # every selection is logged, to stderr where the program has set up no logging
                logger = logging.getLogger("layerzero")
                logger.setLevel(logging.INFO)
                if not logger.hasHandlers():
                    logger.addHandler(logging.StreamHandler())
            if settings.metrics or settings.trace or settings.log:
                from layerzero.runtime.observation import from_environment

                from_environment(settings)
            loaded = load_plugins(None, env.changed(settings, plugins=allowed, plugins_deny=denied), builtin_ops)
            self.records = loaded.records
            self.plugin_manager = loaded.pm
            world = self._made(loaded.registry, loaded.ops, policy, proven=False)
            named = settings.dispatch_table or policy.dispatch_table
            table = None if named is None else self._read_table(named)
            self.tally = self.tally or tally_from(settings)
            return self._install(world.changed(table=table, measurements=known_times(policy, world), tally=self.tally))

    def _made(
        self, registry: KernelRegistry, ops: Mapping[str, OperationSpec], policy: Policy, *, proven: bool
    ) -> World:
        """A World of these kernels; quarantined ones are blocked, compiled ones known, and proofs asked for."""
        from layerzero.runtime.crashes import take_up

        self._apply(policy)
        take_up(registry)
        both: ChainMap[str, Any] = ChainMap(builtin_ops, dict(ops))
        world = World(registry=registry, ops=both, policy=policy)
        if any(kernel.jit for kernel in registry.kernels.values()):  # else no index of compiled kernels is read
            from layerzero.jit.index import known

            world = world.changed(**known())
        if proven:
            return world
        from layerzero.runtime.proof_registry import proof_registry

        return world.changed(proofs=proof_registry.of_world(world))

    def _read_table(self, path: str) -> DispatchTable | None:
        """The table a variable names. A bad one is said and left aside: the process selects, readiness fails."""
        from layerzero.tables.file import load_table

        self.table_path, self.table_problem = path, None
        try:
            return load_table(path)
        except DispatchTableError as error:
            self.table_problem = error
            logging.getLogger("layerzero").warning("%s; every kernel is selected at run time", error)
            return None

    def obey(self, table: DispatchTable | None, path: str | None = None) -> World:
        """Obey this table from now on; None: select again."""
        with self._lock:
            self.table_path, self.table_problem = path, None
            return self.publish(table=table)

    def use(
        self,
        registry: KernelRegistry,
        ops: Mapping[str, OperationSpec] | None = None,
        policy: Policy | None = None,
        *,
        proven: bool = True,
    ) -> World:
        """Replace registry and ops wholesale: for tests and tools that bring their own kernels and vouch for them.

        With `proven=False` nobody does: they are held against the baseline at their first use, as in `load`.
        """
        with self._lock:
            return self._install(self._made(registry, ops or {}, policy or _merged_policy(), proven=proven))

    # -- swapping --------------------------------------------------------------------------------
    def publish(self, **changes: Any) -> World:
        with self._lock:
            return self._install(self.world.changed(**changes))

    def publish_since(self, generation: int, change: Callable[[World], Mapping[str, Any]]) -> None:
        """Swap in what background work has found, unless a reset came since the generation it began in."""
        with self._lock:
            if self._world is not None and self.generation == generation:
                self.publish(**change(self._world))

    def refresh_policy(self) -> World | None:
        """Merge the policy again and swap if it differs; does nothing before the first load."""
        with self._lock:
            if self._world is None:
                return None
            policy = _merged_policy()
            self._apply(policy)
            before = self._world.policy
            changes: dict[str, Any] = {}
            if policy.perfdb != before.perfdb:
                from layerzero.measurements.database import known_times

                changes["measurements"] = known_times(policy, self._world)
            if policy.dispatch_table != before.dispatch_table:
                path, self.table_path = policy.dispatch_table, None
                changes["table"] = None if path is None else self._read_table(path)
            same = policy.policy_hash == before.policy_hash
            if same and not changes and policy.expires_at == before.expires_at:
                return self._world
            return self.publish(policy=policy, **changes)

    def _apply(self, policy: Policy) -> None:
        """Settings that live outside the World: the breakers' and the selection cache's."""
        if policy.breaker != self.health.snapshot().settings:
            self.health.configure(policy.breaker)
        self.cache.max_entries, self.cache.ttl_s = policy.cache.max_entries, policy.cache.ttl_s

    def unbindable(self, kernel_id: str, why: Reason, since: int | None = None) -> None:
        """Leave a kernel alone whose adapter cannot be imported; `since`: the generation in which that was tried."""
        since = self.generation if since is None else since
        self.publish_since(since, lambda world: {"unbindable": MappingProxyType({**world.unbindable, kernel_id: why})})

    def changing(self) -> threading.RLock:
        """The lock under which Worlds are swapped, for a change that reads the present one first."""
        return self._lock

    def remeasured(self) -> World:
        """Look at the database of the policy again: `lz.tune` has written to it."""
        from layerzero.measurements.database import known_times

        with self._lock:
            return self.publish(measurements=known_times(self.world.policy, self.world))

    def record(self, tally: Any) -> World | None:
        """Count calls with this tally from now on; None: no longer. Before the first World it waits for it."""
        with self._lock:
            self.tally = tally
            return None if self._world is None else self.publish(tally=tally)

    def _install(self, world: World) -> World:
        world = settled(world)
        health = self.health.snapshot()
        if world.health.version != health.version:
            world = world.changed(health=health)
        self._world = now.world = world
        self.counters.swaps += 1
        for listener in tuple(self._listeners):
            listener(world)
        return world

    def _health_changed(self, health: Any) -> None:
        with self._lock:
            if self._world is not None:
                self._install(self._world.changed(health=health))
        from layerzero.runtime.timers import timers

        timers.at_health_deadline()

    def on_swap(self, listener: Callable[[World], None]) -> None:
        self._listeners.append(listener)

    def on_reset(self, forget: Callable[[], None]) -> None:
        """Call `forget()` with each reset: for modules that keep something of this process beside the World."""
        self._forgetting.append(forget)

    def reset(self) -> None:
        """Forget everything; the next use loads again. For tests."""
        with self._lock:
            self._world = None
            self.generation += 1
            now.world = Unloaded
            self.records = ()
            self.table_path = self.table_problem = None
            self.tally = None
            self.ran.clear()
            self.lost.clear()
            self.cache.invalidate_all()
            self.counters.reset()
            self.health.reset()
            self.health.set_quarantined({})
            for forget in tuple(self._forgetting):
                forget()

    def after_fork(self) -> None:
        """Fresh locks in a forked child; the World itself is a value and stays valid."""
        self.cache.reinit_after_fork()
        self.health.reinit_after_fork()


state = Runtime()
in_child(state.after_fork)

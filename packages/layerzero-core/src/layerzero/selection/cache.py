"""The selection cache: sharded, versioned, bounded, and safe against a thundering herd.

Laws:
1. Reads take no lock: one dict read, then the entry's version is compared with the shard's.
2. Invalidation is a version bump. Entries of an older version are misses at once and are dropped at the next
   write of their shard.
3. A value computed before an invalidation is never stored after it, and nobody who asked after the
   invalidation receives it.
4. One thread computes a missing key, the others wait for its result or its exception.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from layerzero.errors import ConfigurationError, SelectionTimeoutError, from_outside
from layerzero.json_form import Plain
from layerzero.telemetry.events import counter_value

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SHARDS = 256
_EVICT_FRACTION = 16  # above this many entries evict in batches of 1/16: finding the oldest costs a scan


def shard_index(key: Hashable, shards: int = SHARDS) -> int:
    """The shard of a key. Built on `hash`, so that equal keys (1, 1.0, True) always meet in one shard."""
    return hash(key) % shards


@dataclass(frozen=True, slots=True)
class CacheStats(Plain):
    """Counters since the cache was made. `entries` counts stored slots, invalidated ones included until dropped."""

    entries: int
    max_entries: int
    hits: int
    misses: int
    computes: int
    waits: int
    discarded: int
    evictions: int
    expirations: int
    invalidations: int


@dataclass(slots=True, eq=False)
class _Entry(Generic[V]):
    value: V
    version: int
    expires_at: float | None
    used: int


@dataclass(slots=True, eq=False)
class _Flight(Generic[V]):
    """A computation under way, for one key and one version."""

    version: int
    owner: int = field(default_factory=threading.get_ident)
    done: threading.Event = field(default_factory=threading.Event)
    result: tuple[V] | None = None  # a 1-tuple, so that a computed None is a result
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Shard(Generic[K, V]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: int = 0
    stored_under: int = 0  # the version that all entries share
    entries: dict[K, _Entry[V]] = field(default_factory=dict)
    flights: dict[K, _Flight[V]] = field(default_factory=dict)


class SelectionCache(Generic[K, V]):
    """A bounded map from hashable keys to values, shared by all threads of a process."""

    def __init__(
        self,
        max_entries: int = 10_000,
        *,
        ttl_s: float | None = None,
        shards: int = SHARDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_entries < 0 or shards < 1 or (ttl_s is not None and not ttl_s > 0):
            value = f"max_entries={max_entries}, shards={shards}, ttl_s={ttl_s}"
            raise ConfigurationError(
                f"cache sizes out of range: {value}", value=value, limit="max_entries >= 0, shards >= 1, ttl_s > 0"
            )
        self.max_entries = max_entries
        self.ttl_s = ttl_s
        self._clock = clock
        self._shards: tuple[_Shard[K, V], ...] = tuple(_Shard() for _ in range(shards))
        self._epoch = 0
        # Atomic without a lock. One of `_uses` per hit and per store: it orders the entries by recency.
        self._uses, self._misses = itertools.count(), itertools.count()
        self._counts = dict.fromkeys(
            ("entries", "stores", "computes", "waits", "discarded", "evictions", "expirations", "invalidations"), 0
        )
        self._book = threading.Lock()  # guards _counts and _epoch; held for a few instructions
        self._evicting = threading.Lock()

    # -- reading

    def get(self, key: K, default: V | None = None) -> V | None:
        """The value of a live entry, else `default`. Never blocks."""
        entry = self._live(key)
        if entry is None:
            next(self._misses)
            return default
        return entry.value

    def _live(self, key: K) -> _Entry[V] | None:
        shards = self._shards
        shard = shards[hash(key) % len(shards)]  # `shard_index`, without a call: every hit pays for it
        entry = shard.entries.get(key)
        if entry is None or entry.version != self._epoch + shard.version:
            return None
        if entry.expires_at is not None and self._clock() >= entry.expires_at:
            return None
        entry.used = next(self._uses)
        return entry

    def __len__(self) -> int:
        """Stored slots, those invalidated or expired but not yet dropped included."""
        return self._counts["entries"]

    # -- writing

    def put(self, key: K, value: V) -> None:
        shard = self._shard(key)
        with shard.lock:
            self._store(shard, key, value, self._epoch + shard.version)
        self._evict()

    def get_or_compute(self, key: K, compute: Callable[[], V], timeout: float | None = None) -> V:
        """The cached value, else that of `compute()`, run by one thread while the others wait for it.

        An exception of `compute` is raised in every waiting thread and nothing is cached; an interrupt
        (KeyboardInterrupt, SystemExit) belongs to its own thread, and a waiter takes over. A waiter gives up with
        SelectionTimeoutError after `timeout` seconds; the computing thread is never cut off. If the key is
        invalidated meanwhile, those who asked before still get the result, but it is not stored.
        """
        entry = self._live(key)
        if entry is not None:
            return entry.value
        next(self._misses)
        give_up = None if timeout is None else time.monotonic() + timeout
        shard = self._shard(key)
        while True:
            with shard.lock:
                entry = self._live(key)  # another thread may have stored it between the read and the lock
                if entry is not None:
                    return entry.value
                version, flight = self._epoch + shard.version, shard.flights.get(key)
                if flight is None or flight.version != version:
                    mine: _Flight[V] = _Flight(version)
                    shard.flights[key] = mine
                    break
            if flight.owner == threading.get_ident():
                return compute()  # `compute` asked for its own key: waiting for itself would never end
            self._count("waits")
            if not flight.done.wait(None if give_up is None else max(0.0, give_up - time.monotonic())):
                raise SelectionTimeoutError(f"another thread is still selecting after {timeout} s", limit=timeout)
            if flight.error is not None:
                raise flight.error
            if flight.result is not None:
                return flight.result[0]
        return self._fly(shard, key, mine, compute)

    def _fly(self, shard: _Shard[K, V], key: K, flight: _Flight[V], compute: Callable[[], V]) -> V:
        self._count("computes")
        try:
            value = compute()
            flight.result = (value,)
            with shard.lock:
                # Removed by `invalidate(key)` or replaced after a version bump: then the value may be stale.
                kept = shard.flights.get(key) is flight
                if not (kept and self._store(shard, key, value, flight.version)):
                    self._count("discarded")
        except Exception as error:
            if not from_outside(error):  # a handler's is for this thread alone; those that wait compute it themselves
                flight.error = error
            raise
        finally:
            with shard.lock:
                if shard.flights.get(key) is flight:
                    del shard.flights[key]
            flight.done.set()
        self._evict()
        return value

    def invalidate_all(self) -> None:
        """Forget everything, in O(1)."""
        with self._book:
            self._epoch += 1
            self._counts["invalidations"] += 1

    def invalidate_shard(self, index: int) -> None:
        """Forget one shard, in O(1)."""
        shard = self._shards[index]
        with shard.lock:
            shard.version += 1
        self._count("invalidations")

    def invalidate(self, key: K) -> bool:
        """Forget one key; a computation of it under way will not be stored. True if it was there."""
        shard = self._shard(key)
        with shard.lock:
            shard.flights.pop(key, None)
            entry = shard.entries.pop(key, None)
            if entry is not None:
                self._count("entries", -1)
        self._count("invalidations")
        return entry is not None

    def version(self, index: int) -> int:
        """The version of a shard: how often it was invalidated, alone or with all; entries of a lower one are gone."""
        return self._epoch + self._shards[index].version

    def stats(self) -> CacheStats:
        with self._book:
            counts = dict(self._counts)
            hits, misses = counter_value(self._uses) - counts.pop("stores"), counter_value(self._misses)
        return CacheStats(max_entries=self.max_entries, hits=hits, misses=misses, **counts)

    def reinit_after_fork(self) -> None:
        """Make the cache usable in a forked child: new locks, and no computations of threads that are not there."""
        self._book, self._evicting = threading.Lock(), threading.Lock()
        for shard in self._shards:
            shard.lock, shard.flights = threading.Lock(), {}
        self._counts["entries"] = sum(len(shard.entries) for shard in self._shards)

    # -- inside

    def _shard(self, key: K) -> _Shard[K, V]:
        return self._shards[shard_index(key, len(self._shards))]

    def _store(self, shard: _Shard[K, V], key: K, value: V, version: int) -> bool:
        """With the shard's lock held: store a value made under a version. False if that is over."""
        self._drop_dead(shard)
        if version != shard.stored_under:
            return False
        if self.max_entries == 0:
            return True
        expires_at = None if self.ttl_s is None else self._clock() + self.ttl_s
        with self._book:
            self._counts["stores"] += 1
            used = next(self._uses)
        old = shard.entries.pop(key, None)  # popped, so that dict order stays the order of expiry
        shard.entries[key] = _Entry(value, version, expires_at, used)
        if old is None:
            self._count("entries")
        return True

    def _drop_dead(self, shard: _Shard[K, V]) -> None:
        """With the shard's lock held: remove what no read would return."""
        now = self._epoch + shard.version
        if shard.stored_under != now:
            gone, shard.entries, shard.stored_under = len(shard.entries), {}, now
            self._count("entries", -gone)
        elif self.ttl_s is not None:
            moment = self._clock()
            late = []
            for key, entry in shard.entries.items():
                if entry.expires_at is None or moment < entry.expires_at:
                    break
                late.append(key)
            for key in late:
                del shard.entries[key]
            if late:
                self._count("entries", -len(late))
                self._count("expirations", len(late))

    def _evict(self) -> None:
        """Bring the size back to `max_entries`: first what is dead, then what was used longest ago."""
        while len(self) > self.max_entries:
            with self._evicting:
                if len(self) <= self.max_entries:
                    return
                found: list[tuple[int, _Shard[K, V], K]] = []
                for shard in self._shards:
                    with shard.lock:
                        self._drop_dead(shard)
                        found.extend((entry.used, shard, key) for key, entry in shard.entries.items())
                excess = len(found) - self.max_entries
                if excess <= 0:
                    continue
                found.sort(key=lambda item: item[0])
                for used, shard, key in found[: max(excess, self.max_entries // _EVICT_FRACTION)]:
                    with shard.lock:
                        entry = shard.entries.get(key)
                        if entry is not None and entry.used == used:  # used since: no longer the oldest
                            del shard.entries[key]
                            self._count("entries", -1)
                            self._count("evictions")

    def _count(self, name: str, by: int = 1) -> None:
        with self._book:
            self._counts[name] += by

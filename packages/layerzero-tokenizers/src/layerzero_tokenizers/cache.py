"""The prefix cache: long texts that begin alike are tokenized once up to where they differ.

One budget for the process, entries kept apart by tokenizer identity, namespace and mode. An entry is a text up to a
place where `boundaries` shows that it may be cut, with its ids. Readers take a snapshot without a lock; writers hold
one. Hits are checked again by sampling: 1 in 10 of the first 100, 1 in 100 of the next 1 000, then 1 in 1 000.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from layerzero.errors import InvalidInputError
from layerzero.reasons import Reason, reason
from layerzero_tokenizers.boundaries import last_cut

_log = logging.getLogger("layerzero.tokenizers")
MIN_CHARS = 512
_BYTES_PER_ID = 36  # a pointer and an int
_RECENT = 4
_PER_SPACE = 16
_SPACES = 512


def due(hits: int) -> bool:
    """Whether the hit with this number (from 1) is checked again."""
    every = 10 if hits <= 100 else 100 if hits <= 1_100 else 1_000
    return hits % every == 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made or cleared. `reasons` are the last invalidations."""

    entries: int
    bytes: int
    max_bytes: int
    hits: int
    misses: int
    learned: int
    evicted: int
    revalidated: int
    invalidated: int
    reasons: tuple[Reason, ...]


class _Entry:
    def __init__(self, text: str, ids: list[int]) -> None:
        self.text, self.ids = text, ids
        self.size = 200 + _size(text) + _BYTES_PER_ID * len(ids)
        self.used = 0


class _Space:
    """Entries of one (identity, namespace, mode); `ordered` is replaced whole, longest first."""

    def __init__(self) -> None:
        self.ordered: tuple[_Entry, ...] = ()
        self.recent: OrderedDict[str, int] = OrderedDict()  # text -> bytes
        self.hits = 0


class PrefixCache:
    """Bounded by bytes; the least recently used entry of the process goes first."""

    def __init__(self, max_bytes: int = 32 << 20, min_chars: int = MIN_CHARS) -> None:
        self._lock = threading.RLock()
        self._spaces: dict[tuple[str, bool], _Space] = {}
        self._bytes = self._recent_bytes = 0
        self._clock = 0
        self._counts = dict.fromkeys(("hits", "misses", "learned", "evicted", "revalidated", "invalidated"), 0)
        self._reasons: list[Reason] = []
        self.configure(max_bytes=max_bytes, min_chars=min_chars)

    def configure(self, *, max_bytes: int | None = None, min_chars: int | None = None) -> None:
        """Change the budget (0 turns the cache off) or the shortest text that is looked up."""
        for name, value in (("max_bytes", max_bytes), ("min_chars", min_chars)):
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidInputError(code="VALUE_INVALID", value=f"{name}={value!r}", limit="an int of at least 0")
        with self._lock:
            if max_bytes is not None:
                self.max_bytes = max_bytes
            if min_chars is not None:
                self.min_chars = max(1, min_chars)
            self._evict()

    def stats(self) -> CacheStats:
        with self._lock:
            entries = sum(len(space.ordered) for space in self._spaces.values())
            return CacheStats(
                entries, self._bytes + self._recent_bytes, self.max_bytes, **self._counts, reasons=tuple(self._reasons)
            )

    def clear(self) -> None:
        """Forget everything, the counts too."""
        with self._lock:
            self._spaces, self._bytes, self._recent_bytes, self._reasons = {}, 0, 0, []
            self._counts = dict.fromkeys(self._counts, 0)

    def invalidate(self, tokenizer_id: str, *why: Reason) -> int:
        """Drop every entry of an identity, and remember why. Returns how many there were."""
        count = 0
        with self._lock:
            for key in [key for key in self._spaces if key[0] == tokenizer_id]:
                space = self._spaces.pop(key)
                count += len(space.ordered)
                self._bytes -= sum(entry.size for entry in space.ordered)
                self._recent_bytes -= sum(space.recent.values())
                space.ordered, space.recent = (), OrderedDict()
            self._counts["invalidated"] += count
            self._reasons = [*self._reasons, *why][-16:]
        return count

    def remember(self, engine: Any, tokenizer_id: str, text: str, parse: bool) -> int:
        """Tokenize the beginning of a text ahead of time; returns how many characters are held, 0 for none."""
        at = last_cut(text, len(text))
        if at:
            self._store((tokenizer_id, parse), _Entry(text[: at + 1], engine.encode(text[:at], False, parse)))
        return at

    def encode(self, engine: Any, tokenizer_id: str, text: str, parse: bool) -> list[int]:
        """The ids of a long text without what is put around it, by way of the longest entry it begins with."""
        key = (tokenizer_id, parse)
        space = self._spaces.get(key)
        if space is None:
            with self._lock:
                if len(self._spaces) >= _SPACES:
                    self.invalidate(next(iter(self._spaces))[0])
                space = self._spaces.setdefault(key, _Space())
        found = next((entry for entry in space.ordered if text.startswith(entry.text)), None)
        held = 0 if found is None else len(found.text)
        # Learn where two texts have begun alike for much longer than anything held.
        wanted = self.min_chars if found is None else held + self.min_chars // 2
        if wanted <= len(text):
            at = last_cut(text, self._shared(key, space, text, wanted))
            if at > held and at >= self.min_chars // 2:
                ids = engine.encode(text[:at], False, parse)
                self._store(key, _Entry(text[: at + 1], ids))
                self._count("misses")
                return ids + engine.encode(text[at:], False, parse)
        if found is None:
            self._count("misses")
            return engine.encode(text, False, parse)  # type: ignore[no-any-return]
        out = found.ids + engine.encode(text[len(found.text) - 1 :], False, parse)
        with self._lock:
            space.hits += 1
            self._counts["hits"] += 1
            self._clock += 1
            found.used = self._clock
            check = due(space.hits)
        return self._checked(engine, key, text, out) if check else out

    def _checked(self, engine: Any, key: tuple[str, bool], text: str, out: list[int]) -> list[int]:
        """Tokenize the whole text as well; where that differs nothing of this identity can be trusted."""
        whole: list[int] = engine.encode(text, False, key[1])
        with self._lock:
            self._counts["revalidated"] += 1
            if whole != out:
                why = reason("TOKENIZER_HASH_MISMATCH", "cached ids", "ids of the whole text")
                dropped = self.invalidate(key[0], why)
                _log.error("prefix cache of %s: %s; %d entries dropped", key[0], why, dropped)
        return whole

    def _shared(self, key: tuple[str, bool], space: _Space, text: str, wanted: int) -> int:
        """How far this text and one of the last few begin alike, where that is `wanted` or more; else 0.

        The text becomes one of the last few. They may take a quarter of the budget; beyond it they are let go.
        """
        size = _size(text)
        if size > self.max_bytes // 8:
            return 0
        with self._lock:
            if self._spaces.get(key) is not space:
                return 0  # dropped meanwhile
            recent = list(space.recent)
            if text not in space.recent:
                self._recent_bytes += size
            space.recent[text] = size
            space.recent.move_to_end(text)
            while len(space.recent) > _RECENT:
                self._recent_bytes -= space.recent.popitem(last=False)[1]
            self._evict()
        head = text[:wanted]
        return max((_alike(text, other) for other in recent if other.startswith(head)), default=0)

    def _store(self, key: tuple[str, bool], entry: _Entry) -> None:
        with self._lock:
            if entry.size > self.max_bytes // 2:
                return
            space = self._spaces.setdefault(key, _Space())
            if any(other.text == entry.text for other in space.ordered):
                return
            self._clock += 1
            entry.used = self._clock
            space.ordered = tuple(sorted((*space.ordered, entry), key=lambda item: -len(item.text)))
            self._bytes += entry.size
            self._counts["learned"] += 1
            while len(space.ordered) > _PER_SPACE:
                self._drop(space, min(space.ordered, key=lambda item: item.used))
            self._evict()

    def _evict(self) -> None:
        if self._recent_bytes > self.max_bytes // 4:
            self._recent_bytes = 0
            for space in self._spaces.values():
                space.recent = OrderedDict()
        while self._bytes > self.max_bytes - self.max_bytes // 4:
            space, entry = min(
                ((space, entry) for space in self._spaces.values() for entry in space.ordered),
                key=lambda pair: pair[1].used,
            )
            self._drop(space, entry)

    def _drop(self, space: _Space, entry: _Entry) -> None:
        space.ordered = tuple(item for item in space.ordered if item is not entry)
        self._bytes -= entry.size
        self._counts["evicted"] += 1

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def after_fork(self) -> None:
        """A forked child may have copied a lock that somebody holds."""
        self._lock = threading.RLock()


def _size(text: str) -> int:
    """Bytes of a text, the UTF-8 that the libraries leave attached to it included."""
    return sys.getsizeof(text) if text.isascii() else 100 + 8 * len(text)


def _alike(one: str, other: str) -> int:
    """Length of the common beginning, by bisection: comparing slices runs at memory speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


CACHE = PrefixCache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CACHE.after_fork)

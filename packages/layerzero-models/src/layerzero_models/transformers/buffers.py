"""Keys and values of `lz.patch(model, graphs=True)`: buffers that stay where they are between calls of `generate`.

A CUDA graph reads and writes where it did when it was captured. So the buffers of a batch size and a number of places
are kept and lent to one call of `generate` after the other, and with them the graphs captured over them. Two caches of
transformers look at them: `BufferCache`, which `generate` holds, knows its length on the host and is a dynamic cache
with room to spare; `StepCache`, which stands in the graphs, knows only the place of the new token, on the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

_Cache: Any = cache_utils.Cache  # their types differ from version to version
_Dynamic: Any = cache_utils.DynamicLayer
_Static: Any = cache_utils.StaticLayer
_SMALLEST = 256  # places; every bucket is a multiple of the largest page that attention sees in a buffer


def bucket(places: int) -> int:
    """The room for so many places: 256, 384, 512, 768, 1024, …, two sizes to each doubling."""
    room = _SMALLEST
    while room < places:
        room *= 2
    return room * 3 // 4 if room > _SMALLEST and room * 3 // 4 >= places else room


class Buffers:
    """Keys and values of every layer [B, Hkv, places, D], and what was captured over them: `steps`, see captured.py.

    Whoever holds them runs one capture after the other, so that all share a pool.
    """

    def __init__(self, batch: int, places: int) -> None:
        self.batch, self.places = batch, places
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.steps: dict[Any, Any] = {}
        self.pool: Any = None
        self.lent = False

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer, made for heads like these at first."""
        found = self.layers.get(index)
        if found is None or not (_alike(found[0], key) and _alike(found[1], value)):
            with torch.inference_mode(False):  # they outlive a caller's inference mode
                found = self._made(key), self._made(value)
            self.layers[index] = found
            self.forget()  # what was captured before has other addresses
        return found

    def _made(self, like: Tensor) -> Tensor:
        shape = (self.batch, like.shape[1], self.places, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def forget(self) -> None:
        self.steps.clear()
        self.pool = None

    @property
    def memory(self) -> int:
        """Bytes of keys and values, and of what was captured over them."""
        held = sum(item.nbytes for pair in self.layers.values() for item in pair)
        return held + sum(int(step.memory) for step in self.steps.values())


def _alike(buffer: Tensor, heads: Tensor) -> bool:
    same = buffer.shape[1] == heads.shape[1] and buffer.shape[3] == heads.shape[3]
    return same and buffer.dtype is heads.dtype and buffer.device == heads.device


class Lender:
    """All buffers of a model, bounded in bytes: those nobody holds go first, the longest unused before the others."""

    def __init__(self) -> None:
        self.kept: list[Buffers] = []  # the latest used last

    def borrow(self, batch: int, places: int, token: int, limit: int) -> Buffers | None:
        """Buffers for so many places of `token` bytes that nobody holds; None where the bound leaves no room."""
        room = bucket(places)
        found = next((b for b in self.kept if b.batch == batch and b.places == room and not b.lent), None)
        if found is None:
            while self.memory + token * batch * room > limit:
                idle = next((b for b in self.kept if not b.lent), None)
                if idle is None:
                    return None
                self.kept.remove(idle)
            found = Buffers(batch, room)
        else:
            self.kept.remove(found)
        self.kept.append(found)
        found.lent = True
        return found

    @property
    def memory(self) -> int:
        return sum(b.memory for b in self.kept)


def _give_back(held: list[Buffers]) -> None:
    while held:
        held.pop().lent = False


class BufferLayer(_Dynamic):  # type: ignore[misc] # a class of transformers
    """A dynamic layer whose keys and values lie in buffers with room for more, so that nothing is copied to append.

    It holds all tokens of a sliding window too. Whoever assigns `keys` or `values` from outside ends the loan: the
    layer goes on by itself, and `BufferCache.whole` says so.
    """

    def __init__(self, cache: BufferCache, index: int) -> None:
        self.length = 0
        self.index = index
        self._cache = weakref.ref(cache)
        self._own: list[Tensor | None] = [None, None]
        super().__init__()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache, first = self._cache(), self.length == 0
        end = self.length + key_states.shape[-2]
        buffers = None if cache is None else cache.buffers
        if buffers is None or end > buffers.places or key_states.shape[0] != buffers.batch:
            if cache is not None:
                cache.leave()
            super().update(key_states, value_states)  # through the properties below
            return self.keys, self.values
        keys, values = buffers.layer(self.index, key_states, value_states)
        keys[:, :, self.length : end].copy_(key_states)
        values[:, :, self.length : end].copy_(value_states)
        self.is_initialized, self.dtype, self.device = True, keys.dtype, keys.device
        self.length = end
        return (key_states, value_states) if first else (keys[:, :, :end], values[:, :, :end])

    def _view(self, which: int) -> Tensor | None:
        cache = self._cache()
        buffers = None if cache is None else cache.buffers
        if buffers is None or not self.length:
            return self._own[which]
        return buffers.layers[self.index][which][:, :, : self.length]

    def _get(self, which: int) -> Tensor | None:
        """Keys or values for whoever asks: a copy, since the buffers are written again by the next call."""
        found = self._view(which)
        return found if found is None or found is self._own[which] else found.clone()

    def _set(self, which: int, value: Tensor | None) -> None:
        cache = self._cache()
        if cache is not None and cache.buffers is not None:
            cache.leave()
        self._own[which] = value
        self.length = 0 if value is None or value.ndim < 4 else value.shape[-2]

    keys = property(lambda self: self._get(0), lambda self, value: self._set(0, value))
    values = property(lambda self: self._get(1), lambda self, value: self._set(1, value))

    def get_seq_length(self) -> int:
        return self.length

    def keep(self) -> None:
        self._own = [self._get(0), self._get(1)]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the latest tokens; the number of them is negative."""
        if self._view(0) is self._own[0] or tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        else:
            self.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """In place, where what was captured reads them."""
        for item in (self._view(0), self._view(1)):
            if item is not None and self.length:
                item.copy_(item.index_select(0, beam_idx.to(item.device)))


class BufferCache(_Cache):  # type: ignore[misc] # a class of transformers
    """The cache that `generate` holds. Buffers are lent to it until it is gone; without, it is a dynamic cache."""

    def __init__(self, layers: int, lender: Lender, plain: Counter[str], longest: int, token: int, limit: int) -> None:
        self.buffers: Buffers | None = None
        self.stops_late = False  # whether the end of the text may be noticed one step late
        self.padded = False  # whether a token of the prompt is hidden
        self.why = ""  # why the plain path serves it
        self._lender, self._plain = lender, plain
        self._longest, self._token, self._limit = longest, token, limit
        self._held: list[Buffers] = []
        super().__init__(layers=[BufferLayer(self, index) for index in range(layers)])
        weakref.finalize(self, _give_back, self._held)

    @property
    def length(self) -> int:
        return int(self.layers[0].length)

    def reserve(self, batch: int, places: int, ahead: int) -> None:
        """Have room for so many places, and for some ahead of them unless the text ends before."""
        if self.why or (self.buffers is not None and places <= self.buffers.places):
            return
        wanted = max(places, min(places + ahead, self._longest))
        found = self._lender.borrow(batch, wanted, self._token, self._limit)
        if found is None:
            self.leave(f"buffers for {batch} × {bucket(wanted)} tokens are beyond graph_memory={self._limit}")
            return
        before, length = self.buffers, self.length
        if before is not None:
            for index, pair in before.layers.items():
                for new, old in zip(found.layer(index, *pair), pair, strict=True):
                    new[:, :, :length].copy_(old[:, :, :length])
            _give_back(self._held)
        self.buffers = found
        self._held.append(found)

    def leave(self, why: str = "its keys and values were replaced from outside") -> None:
        """Copy everything out of the buffers and give them back: from here on it is a dynamic cache like any other."""
        if not self.why:
            self.why = why
            self._plain[why] += 1
        if self.buffers is not None:
            for layer in self.layers:
                layer.keep()
            self.buffers = None
            _give_back(self._held)


class _StepLayer(_Static):  # type: ignore[misc] # a class of transformers
    """One layer in a captured step: the new token goes to a place that only the device knows."""

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.cumulative_length = keys, values, place
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.cumulative_length, key_states)
        self.values.index_copy_(2, self.cumulative_length, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return self.cumulative_length[0]


class StepCache(_Cache):  # type: ignore[misc] # a class of transformers
    """The cache in a captured step."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], place: Tensor) -> None:
        super().__init__(layers=[_StepLayer(keys, values, place) for keys, values in layers])

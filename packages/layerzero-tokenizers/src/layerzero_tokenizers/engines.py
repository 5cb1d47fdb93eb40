"""What every library is to the rest of the package: an engine that encodes and decodes, and nothing else."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from layerzero_tokenizers.results import Tokens

__all__ = ["Engine"]

# Below this many characters a batch is done by the calling thread: handing it out would cost more.
_WORTH_THREADS = 200_000


class Engine(ABC):
    """One tokenizer in one library. Safe to use from many threads at once.

    `add` asks for `prefix` and `suffix` around a text, where the library itself puts nothing there; `parse` tells
    whether special tokens written in the text count as such.
    """

    backend: str
    __slots__ = ("prefix", "suffix")

    def __init__(self, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> None:
        self.prefix, self.suffix = list(prefix), list(suffix)

    @abstractmethod
    def encode(self, text: str, add: bool, parse: bool) -> list[int]:
        """The ids of a text."""

    @abstractmethod
    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens:
        """The ids with their places, in characters."""

    @abstractmethod
    def decode(self, ids: list[int], skip: bool) -> str:
        """The text of ids; `skip` leaves special tokens out."""

    @abstractmethod
    def unknown_id(self, ids: Sequence[Any]) -> Any:
        """The first id that the library cannot take, None when it takes all."""

    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        """Every text; the work is shared out only where it is worth a thread."""
        return _in_threads(lambda text: self.encode(text, add, parse), texts)

    def offsets_batch(self, texts: list[str], add: bool, parse: bool) -> list[Tokens]:
        """The same with offsets."""
        return _in_threads(lambda text: self.encode_offsets(text, add, parse), texts)

    def decode_batch(self, rows: list[list[int]], skip: bool) -> list[str]:
        """Every row."""
        return [self.decode(row, skip) for row in rows]

    def _tokens(self, ids: list[int], places: list[tuple[int, int]], add: bool) -> Tokens:
        """Ids and places with what stands around them."""
        if not add or not (self.prefix or self.suffix):
            return Tokens(ids, places)
        before, after = [(0, 0)] * len(self.prefix), [(0, 0)] * len(self.suffix)
        return Tokens([*self.prefix, *ids, *self.suffix], [*before, *places, *after])

    def _rows(self, rows: list[list[int]], add: bool) -> list[list[int]]:
        """Ids of several texts with what stands around them."""
        if add and (self.prefix or self.suffix):
            return [[*self.prefix, *row, *self.suffix] for row in rows]
        return rows


def _in_threads(run: Callable[[str], Any], texts: list[str]) -> list[Any]:
    """`run` on each text, in order; a large batch is shared out among the cores, as the libraries release the GIL."""
    workers = min(os.cpu_count() or 1, 8, len(texts) // 16)
    if workers < 2 or sum(map(len, texts)) < _WORTH_THREADS:
        return [run(text) for text in texts]
    size = -(-len(texts) // (workers * 4))
    chunks = [texts[at : at + size] for at in range(0, len(texts), size)]
    with ThreadPoolExecutor(workers) as pool:
        return [item for done in pool.map(lambda part: [run(text) for text in part], chunks) for item in done]

"""What every library is to the rest of the package: an engine that encodes and decodes, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from layerzero_tokenizers.results import Tokens

__all__ = ["Engine", "in_threads"]

# Below this many characters a batch is done by the calling thread: handing it out would cost more.
_WORTH_THREADS = 200_000


class Engine(Protocol):
    """One tokenizer in one library. Safe to use from many threads at once.

    `encode` and `encode_batch` give plain ids, `encode_offsets` ids with their places. `parse` tells whether special
    tokens written in the text count as such.
    """

    backend: str

    def encode(self, text: str, add: bool, parse: bool) -> list[int]: ...
    def encode_offsets(self, text: str, add: bool, parse: bool) -> Tokens: ...
    def encode_batch(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]: ...
    def offsets_batch(self, texts: list[str], add: bool, parse: bool) -> list[Tokens]: ...
    def decode(self, ids: list[int], skip: bool) -> str: ...
    def decode_batch(self, rows: list[list[int]], skip: bool) -> list[str]: ...
    def unknown_id(self, ids: Sequence[Any]) -> Any: ...


def in_threads(run: Callable[[str], Any], texts: list[str]) -> list[Any]:
    """`run` on each text, in order; a large batch is shared out among the cores, as the libraries release the GIL."""
    workers = min(os.cpu_count() or 1, 8, len(texts) // 16)
    if workers < 2 or sum(map(len, texts)) < _WORTH_THREADS:
        return [run(text) for text in texts]
    size = -(-len(texts) // (workers * 4))
    chunks = [texts[at : at + size] for at in range(0, len(texts), size)]
    with ThreadPoolExecutor(workers) as pool:
        return [item for done in pool.map(lambda part: [run(text) for text in part], chunks) for item in done]

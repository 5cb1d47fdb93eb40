"""Short and long queries, compiled together.

Under a mask, and over packed sequences, FlashAttention 4 compiles a kernel of its own for queries that fit into one
tile, which selection cannot tell from the descriptor: to it, both are one artifact. So whoever compiles the one has the
other compiled in the same go, in the background or by a caller who said that he would wait; never a later request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

__all__ = ["LONG", "SHORT", "Families"]

SHORT, LONG = 1, 256  # tokens: within one tile of queries for every GQA ratio, and beyond it


class Families:
    """Which sets of options have been compiled for both lengths."""

    def __init__(self) -> None:
        self._complete: set[Hashable] = set()

    def complete(self, family: Hashable, query: Tensor, run: Callable[[int], object]) -> None:
        """Have `run` make a call with a query of each length, once for a family of options."""
        if family in self._complete or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._complete.add(family)
        for length in (SHORT, LONG):
            run(length)

"""Scratch memory, one piece for each device and stream: kernels of one stream run one after another, others may not.

Keyed by the raw stream, since `torch.cuda.current_stream()` makes a Python object and costs 6 µs. FlashInfer's own
scratch memory is one per device, which two streams would overwrite for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

SINGLE = 32 * 2**20  # what FlashInfer itself takes for one sequence
BATCH = 128 * 2**20  # what it recommends for a batch
STATES = 2**20  # what it takes for the row states of a selection
GRAPH = 16 * 2**20  # a graph's own to begin with: there may be many graphs
MOST = 2**30  # the most a batch may ask for

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Workspace:
    """Scratch of one (device, stream). Its lock is held from the first launch of a call to the last.

    A call that splits the keys launches two kernels; another thread's call between them would overwrite the partial
    results, although both use the same stream.
    """

    def __init__(self, device: torch.device, first: int | None = None) -> None:
        self.device = device
        self._first = first
        self.lock = threading.RLock()

    @cached_property
    def states(self) -> Tensor:
        """For the rows of a selection: zeros, which every launch leaves as it found them."""
        return torch.zeros(STATES, dtype=torch.uint8, device=self.device)

    @cached_property
    def single(self) -> Tensor:
        return torch.empty(SINGLE, dtype=torch.uint8, device=self.device)

    @cached_property
    def batch(self) -> Tensor:
        size = BATCH if self._first is None else self._first
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def grow(self) -> bool:
        """Twice the memory for batches planned from now on; False at the limit. Earlier plans keep what they have."""
        size = 2 * self.batch.numel()
        if size > MOST:
            return False
        self.batch = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return True


_known: dict[tuple[int, int], Workspace] = {}
_making = threading.Lock()


def place(tensor: Tensor) -> tuple[int, int]:
    """(device index, raw stream) of a call."""
    index = tensor.get_device()
    return index, _raw_stream(index) if _raw_stream is not None else 0


def workspace(where: tuple[int, int], device: torch.device) -> Workspace:
    """The scratch memory of a place; made at the first call."""
    found = _known.get(where)
    if found is None:
        with _making:
            found = _known.setdefault(where, Workspace(device))
    return found

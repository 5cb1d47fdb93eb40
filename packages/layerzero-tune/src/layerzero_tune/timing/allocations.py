"""One call in several places of memory: everybody is timed on all of them, in turn.

Where a GPU's memory controller finds the pages of a tensor moves the time of a kernel by up to two percent, each
kernel's otherwise. It is the same all through a process and another in the next one, so that more rounds in one place
do not bring two tunings closer. Arguments of a call are therefore made several times over, all kernels move from one
copy to the next together, and the last few results are kept so that a new one does not come to lie where the one before
was.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MOST = 6
_SHARE = 0.1  # of the device's memory, for all copies and results
_BESIDE = 2  # results take no more than the arguments, nearly always


class Places:
    """Copies of the arguments of one call; `args` are those of the place where everybody is now.

    `make` gives a new copy; there are as many as `room` bytes hold with their results, up to six, and one in any case.
    """

    def __init__(self, make: Callable[[], tuple[Any, ...]], room: float = 0.0) -> None:
        self._copies = [make()]
        each = max(1, _bytes(self._copies[0], set())) * _BESIDE
        while len(self._copies) < _MOST and (len(self._copies) + 1) * each <= room:
            self._copies.append(make())
        self._now = 0
        self.args = self._copies[0]
        self._results: deque[Any] = deque(maxlen=len(self._copies) - 1)

    def __len__(self) -> int:
        return len(self._copies)

    def move(self) -> None:
        self._now = (self._now + 1) % len(self._copies)
        self.args = self._copies[self._now]

    def prepared(self, make: Callable[[tuple[Any, ...]], Callable[[], Any]]) -> Callable[[], Any]:
        """A call that was made ready for each place beforehand, of wherever everybody is at that time."""
        calls = [make(args) for args in self._copies]
        if len(calls) == 1:
            return calls[0]
        keep = self._results.append
        return lambda: keep(calls[self._now]())

    def step(self, run: Callable[..., Any]) -> Callable[[], Any]:
        """A call of `run` with the arguments of wherever everybody is at that time."""
        return self.prepared(lambda args: functools.partial(run, *args))


def room() -> float:
    """Bytes of the current GPU that copies may take: a tenth, and no more than half of what is free."""
    free, total = torch.cuda.mem_get_info()
    return min(_SHARE * total, 0.5 * free)


def _bytes(items: Iterable[Any], seen: set[int]) -> int:
    """What the tensors among arguments hold, each storage once."""
    total = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            held = item.untyped_storage()
            if held.data_ptr() not in seen:
                seen.add(held.data_ptr())
                total += held.nbytes()
        elif isinstance(item, (tuple, list)):
            total += _bytes(item, seen)
    return total

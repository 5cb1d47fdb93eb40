"""How much memory a block really takes: every allocation torch's allocator makes, those inside its own ops included.

On the CPU the profiler reports each allocation and release; on a GPU the caching allocator keeps the peak itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["measured_peak", "result_bytes"]


def measured_peak(run: Callable[[], Any], device: torch.device | str = "cpu") -> tuple[Any, int]:
    """(the result, the most bytes alive at once beyond those before). The result itself is among them."""
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        result = run()
        torch.cuda.synchronize(where)
        return result, torch.cuda.max_memory_allocated(where) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    alive = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda item: item.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return result, most


def result_bytes(result: Any) -> int:
    """Bytes of all tensors of a result; storage that two of them share counts once."""
    storages: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif hasattr(value, "tensors"):
            for item in value.tensors():
                walk(item)

    walk(result)
    return sum(storages.values())

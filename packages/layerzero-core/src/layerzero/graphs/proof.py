"""The dummy capture of a single kernel: does it keep memory, and can it be captured at all?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch.run import current_world
from layerzero.errors import from_outside, one_line
from layerzero.graphs.rehearsal import Seen
from layerzero.graphs.streams import capture_on
from layerzero.reasons import Reason, reason

__all__ = ["objection"]

_RUNS = 3


def objection(item: Seen, stream: Any, limit: int) -> Reason | None:
    """What speaks against this kernel inside a graph, by trying it on the arguments of its call; None: nothing.

    It has run before, so what it allocates once is there already. `limit` is how many bytes it may keep a call.
    """
    run, args = item.bound.run, _own(item)
    kept = []
    with torch.cuda.stream(stream):
        for _ in range(_RUNS):
            before = torch.cuda.memory_allocated(stream.device)
            try:
                run(*args)  # the result is dropped, and its memory with it
            except Exception as error:
                if from_outside(error):
                    raise
                return reason("GRAPH_CAPTURE_FAILED", one_line(error, 300))
            kept.append(torch.cuda.memory_allocated(stream.device) - before)
    # The least of them: another thread may allocate during one run, hardly during each.
    if min(kept) > limit:
        return reason("GRAPH_MEMORY_GROWS", min(kept), limit)
    try:
        capture_on(stream, lambda: run(*args), torch.cuda.graph_pool_handle())
    except Exception as error:
        if from_outside(error):
            raise
        return reason("GRAPH_CAPTURE_FAILED", one_line(error, 300))
    return None


def _own(item: Seen) -> tuple[Any, ...]:
    """The arguments, copied where the op writes into them: the caller's must not be written twice."""
    spec = current_world().ops[item.context.op]
    if spec.mutates is None or not spec.mutates(item.args):
        return item.args
    return tuple(part.clone() if isinstance(part, Tensor) else part for part in item.args)

"""FlashInfer's radix selection: the largest of each row, in any order, and which of several equals is nobody's promise.

A launch may be several blocks a row that wait for each other, so two launches must not run at a time: each could hold
the processors that the other waits for, and both count into one buffer. Calls of one stream follow each other anyway;
a call of another stream waits for the stream before it, and only then is there an event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from layerzero_flashinfer.vendor import lib, part, starts_with
from layerzero_flashinfer.workspace import place, workspace

_RADIX = ("input", "top_k", "row_states_buffer", "output_values")


@cache
def _inner() -> Callable[..., Any] | None:
    """What the public call ends in, without its conversions; None: only the public door is known."""
    found = getattr(part("topk").get_topk_module(), "radix_topk", None)
    return found if found is not None and starts_with(found, _RADIX) else None


def chosen_publicly() -> bool:
    """Whether places come as int64, from the public door."""
    return _inner() is None


@dataclass(slots=True, eq=False)
class _Order:
    """Calls of one device, one stream after another."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    raw: int = 0  # the stream of the last call, as the driver knows it
    stream: Any = None  # and as torch does


_orders: dict[int, _Order] = {}


def select(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of [B, V] without gaps, and their places (int32, or int64)."""
    where = index, raw = place(values)
    order = _orders.get(index) or _orders.setdefault(index, _Order())
    with order.lock:
        if index >= 0 and (order.stream is None or order.raw != raw):
            _wait(order, torch.cuda.current_stream(values.device), raw)
        inner = _inner()
        if inner is None:
            return lib().top_k(values, count)  # type: ignore[no-any-return]
        found = torch.empty((values.shape[0], count), dtype=values.dtype, device=values.device)
        return found, inner(values, count, workspace(where, values.device).states, found)


def _wait(order: _Order, stream: Any, raw: int) -> None:
    """From now on calls are this stream's, after all that the one before has been given."""
    if order.stream is not None:
        stream.wait_event(order.stream.record_event())
    order.stream, order.raw = stream, raw

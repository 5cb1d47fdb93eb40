"""Clocks for races: µs a call, on the CPU, on a GPU with a cold cache, on a GPU in a replayed graph.

On a GPU each call stands between two events of its own, and before it a buffer larger than any L2 cache is
overwritten: a kernel in a model does not find its inputs in the cache either. That takes some sixty µs, during which
the host runs ahead, so that what is timed is the kernel and not Python; only a launch that takes longer shows. A
replayed graph has no launch cost at all, and a warm cache: what a captured decode loop sees.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[Callable[[], Any], int], float]
"""(call, how often) -> µs a call."""

RULES = {
    "cpu/eager": "mean of calls that follow each other, all a caller waits for",
    "cuda/eager": "the device's time with a cold cache, or the launch where the host takes longer for it",
    "cuda/graph": "a replayed graph: warm cache, no launch and no dispatch, so that the public call takes what its "
    "kernel takes",
    "cpu/compiled": "mean of calls of the compiled function that follow each other",
    "cuda/compiled": "the device's time of the compiled function with a cold cache; and as a replayed graph",
}
"""By device and mode, what counts as the time of a call: one rule for kernels, torch default and the public call."""
BEFORE = {
    "cuda/eager": "kernels: the device's time with a cold cache, or the launch where that is longer; torch default and "
    "the public call: the device's time alone (before one rule held for all)"
}
"""What held for results that name no rule."""
_FLUSHED_BYTES = 256 << 20  # as much as Triton's do_bench overwrites


def clock_for(device: torch.device | str) -> Clock:
    """The clock for calls on a device."""
    return cuda_clock if torch.device(device).type == "cuda" else cpu_clock


def cpu_clock(call: Callable[[], Any], count: int) -> float:
    """Mean over `count` calls in a row."""
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begin) / 1e3 / count


def cuda_clock(call: Callable[[], Any], count: int) -> float:
    """Median over `count` calls, each with a cold cache, queued without waiting between them."""
    make: Any = torch.cuda.Event
    buffer = _buffer(torch.cuda.current_device())
    pairs = [(make(enable_timing=True), make(enable_timing=True)) for _ in range(count)]
    for first, last in pairs:
        buffer.zero_()
        first.record()
        call()
        last.record()
    pairs[-1][1].synchronize()
    return statistics.median(float(first.elapsed_time(last)) for first, last in pairs) * 1e3


def launch_clock(call: Callable[[], Any], count: int) -> float:
    """µs of the host for a call whose work the device does later: what a chain of short kernels waits for.

    `count` calls are queued without waiting, after the device has finished what came before; a few dozen fit the queue.
    """
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    spent = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return spent / 1e3 / count


def graphed(call: Callable[[], Any], calls: int = 20) -> Callable[[], float]:
    """Capture so many calls in a CUDA graph, or raise what that raises; the function returned replays it: µs a call."""
    make: Any = torch.cuda.Event
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    def replay() -> float:
        first, last = make(enable_timing=True), make(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / calls

    return replay


@functools.lru_cache(maxsize=8)
def _buffer(index: int) -> torch.Tensor:
    return torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=f"cuda:{index}")

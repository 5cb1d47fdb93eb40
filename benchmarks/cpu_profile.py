"""Where the time of a case goes whose goal is missed: the call, the work on one thread, waking threads, the memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from cpu_case import Asked, Call, asked

import layerzero as lz
from layerzero.model.quant import QuantizedTensor
from layerzero_cpu.library import native

__all__ = ["smallest", "where"]

ROUNDS, SECONDS = 25, 0.15  # for each figure


def where(call: Asked, us: Mapping[str, float], goals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures in µs and, under "words", what they say. `us` and `goals` are those of the case's row."""
    threads, through = torch.get_num_threads(), call.call()
    found: dict[str, Any] = {"lz_us": us["lz"]}
    tiny = smallest(call)
    if tiny is not None:
        found["empty_call_us"] = _timed(tiny.call())
    found["threads_us"] = _timed(through)
    try:
        torch.set_num_threads(1)
        found["one_thread_us"] = _timed(through)
    finally:
        torch.set_num_threads(threads)
    if threads > 1:
        found["wake_us"] = _wake(threads)
    if "floor" in us:
        found["floor_us"] = us["floor"]
    found["words"] = list(_words(found, us, goals, threads))
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def _words(found: Mapping[str, Any], us: Mapping[str, float], goals: Sequence[Mapping[str, Any]], threads: int) -> Any:
    whole = found["lz_us"]
    parts = []
    if "empty_call_us" in found:
        empty = found["empty_call_us"]
        parts.append(f"{empty:.1f} µs ({100 * empty / whole:.0f} %) are a call with next to nothing to do")
    parts.append(f"one thread takes {found['one_thread_us']:.1f} µs, {threads} take {found['threads_us']:.1f}")
    if "wake_us" in found:
        parts.append(f"a second thread costs {found['wake_us']:.1f} µs to be woken and waited for")
    if "floor_us" in found:
        floor = found["floor_us"]
        parts.append(f"moving the bytes alone takes {floor:.1f} ({100 * floor / whole:.0f} %)")
    yield f"where {whole:.1f} µs go: " + "; ".join(parts)
    for goal in goals:
        if goal["met"] or goal["against"] not in us:
            continue
        wanted = us[goal["against"]] / goal["factor"]
        if goal["reached"] >= goal["factor"]:
            allowed = us[goal["against"]] / goal["through_factor"]
            yield f"the kernel reaches the goal; the call through lz may take {allowed:.1f} µs, {whole - allowed:+.1f}"
            continue
        if goal.get("above_floor"):
            yield (
                f"{goal['factor']:g}× eager would be {wanted:.1f} µs, less than moving the bytes takes: the memory "
                f"allows at most {us['eager'] / us['floor']:.2f}×"
            )
        else:
            kernel = min(whole, us.get("direct", whole))
            yield f"the goal asks the kernel for {wanted:.1f} µs; it takes {kernel:.1f}, {kernel - wanted:+.1f}"


def _timed(call: Call) -> float:
    """Median µs of a call, in batches of about a millisecond."""
    call()
    begin = time.perf_counter()
    call()
    batch = max(1, min(500, int(0.001 / max(1e-7, time.perf_counter() - begin))))
    samples: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(samples) < 3 or (len(samples) < ROUNDS and time.perf_counter() < end):
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter() - begin) / batch * 1e6)
    return statistics.median(samples)


def _wake(threads: int) -> float:
    """What is lost where two threads copy two rows of 64 KB, against half of what one takes for both."""
    source = torch.zeros(2, 1 << 14)
    to = torch.empty_like(source)

    def copy() -> None:
        native.copied(source, to)

    both = _timed(copy)
    try:
        torch.set_num_threads(1)
        alone = _timed(copy)
    finally:
        torch.set_num_threads(threads)
    return max(0.0, both - alone / 2)


def smallest(call: Asked) -> Asked | None:
    """The same op through the same entry with hardly any work; None for an op that has no such call here."""
    make = _SMALLEST.get(call.op)
    return None if make is None else make(call)


def _row(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (1, 8))).to(dtype)


def _rms(call: Asked) -> Asked:
    x, weight, eps = call.args
    return asked("rms_norm", _row(x.dtype), _row(weight.dtype, 8), eps)


def _add(call: Asked) -> Asked:
    x, residual, weight, eps = call.args
    return asked("add_rms_norm", _row(x.dtype), _row(residual.dtype), _row(weight.dtype, 8), eps)


def _layer(call: Asked) -> Asked:
    x, weight, bias, eps = call.args
    return asked("layer_norm", _row(x.dtype), _row(weight.dtype, 8), _row(bias.dtype, 8), eps)


def _rope(call: Asked) -> Asked:
    q, k, cos = call.args[:3]
    heads = [_row(t.dtype, 1, 1, 1, 8) for t in (q, k)]
    return Asked("rope", [(*heads, _row(cos.dtype, 1, 4), _row(cos.dtype, 1, 4))], call.options)


def _gated(call: Asked) -> Asked:
    return asked(call.op, _row(call.args[0].dtype))


def _sample(call: Asked) -> Asked:
    return Asked("sample", [(_row(call.args[0].dtype, 1, 64),)], call.options)


def _attention(call: Asked) -> Asked:
    q = call.args[0]
    return Asked("attention", [tuple(_row(q.dtype, 1, 1, 1, 8) for _ in range(3))], call.options)


def _linear(call: Asked) -> Asked:
    x, weight = call.args
    if not isinstance(weight, QuantizedTensor):
        return asked("linear", _row(x.dtype), _row(weight.dtype, 8, 8))
    fmt, width = ("int8" if weight.data.dtype is torch.int8 else "int4"), weight.block_size or 64
    small = lz.quantize(torch.randn(8, width), fmt, granularity="block" if weight.block_size else "channel")
    return asked("linear", _row(x.dtype, 1, width), small)


_SMALLEST: dict[str, Callable[[Asked], Asked]] = {
    "rms_norm": _rms,
    "add_rms_norm": _add,
    "layer_norm": _layer,
    "rope": _rope,
    "silu_and_mul": _gated,
    "gelu_and_mul": _gated,
    "sample": _sample,
    "attention": _attention,
    "linear": _linear,
}

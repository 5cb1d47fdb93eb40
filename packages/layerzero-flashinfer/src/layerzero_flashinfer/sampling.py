"""Sampling among the k likeliest tokens, found by FlashInfer's radix selection instead of a sort of the vocabulary.

The tokens that stay, their weights and the draw are those of the op: of equal logits the lower id ranks first, exactly
k stay, and equal generator states give the tokens that the built-in kernels draw. FlashInfer's own samplers are not
used: they keep every token that equals the last one kept, and draw by rejection, so neither holds for them. For the
same reason there is no kernel for top-p alone.

What follows the selection is one launch (`draw`) for a number of tokens that a program can hold, else torch operations.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerzero.model.context import Context
from layerzero.reasons import Reason, reason
from layerzero_flashinfer.vendor import lib, part, starts_with
from layerzero_flashinfer.workspace import place, workspace

_SLACK = 1e-9  # mass this close to p counts as reached, as the op has it
_SLOTS = (64, 512)  # of one program: few sizes, each of which is compiled once; larger ones take the compiler too long
_TILE, _WARPS = 4096, 8
_RADIX = ("input", "top_k", "row_states_buffer", "output_values")
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def needs_top_k(ctx: Context) -> list[Reason]:
    """A predicate: without a k there is nothing to select."""
    if ctx.op == "sample_topk" or "sample_top_k" in ctx.needs:
        return []
    return [reason("FEATURE_UNSUPPORTED", "sampling without top_k")]


def sample_topk(logits: Tensor, k: int, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Draw from the k likeliest tokens of each row."""
    return sample(logits, k, None, None, temperature, generator)


def sample(
    logits: Tensor,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Temperature, top-k, top-p of what is left, min-p, one draw a row."""
    if temperature <= 0:
        return _greedy(logits)
    rows, vocab = logits.shape
    index = logits.get_device()
    if top_k is not None and 0 < top_k < min(vocab - 1, _SLOTS[-1]) and rows and _kernel(index < 0) is not None:
        if index < 0 or index == _current_device():
            return _drawn(logits, top_k, top_p, min_p, temperature, generator)
        with torch.cuda.device(index):  # where Triton launches
            return _drawn(logits, top_k, top_p, min_p, temperature, generator)
    weights, ids = _kept(logits, top_k, top_p, min_p, temperature)
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1:].contiguous()
    # Rounding must not carry the target up to the total, where no entry would exceed it.
    target = torch.minimum(_uniform(logits, generator) * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    return torch.where(total > 0, ids.gather(1, place), -1).squeeze(1)


def sampling_probs(
    logits: Tensor, top_k: int | None, top_p: float | None, min_p: float | None, temperature: float
) -> Tensor:
    """The probabilities `sample` draws with, float32 [B, V]."""
    room = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    if temperature <= 0:
        best = _greedy(logits).unsqueeze(1)
        return room.scatter_(1, best.clamp(min=0), (best >= 0).float())
    weights, ids = _kept(logits, top_k, top_p, min_p, temperature)
    total = weights.sum(dim=-1, keepdim=True)
    return room.scatter_(1, ids, torch.where(total > 0, weights / total, 0.0).float())


def _greedy(logits: Tensor) -> Tensor:
    ids = logits.argmax(dim=-1, keepdim=True)
    return torch.where(logits.gather(-1, ids) > -math.inf, ids, -1).squeeze(-1)  # argmax takes a NaN for the largest


def _uniform(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """One number a row, taken from the generator as the op says."""
    shape = (logits.shape[0], 1)
    if generator is None:
        return torch.rand(shape, device=logits.device, dtype=torch.float64)
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return drawn if drawn.device == logits.device else drawn.to(logits.device)


# -- in one launch -----------------------------------------------------------------------------------------
@functools.cache
def _kernel(host: bool) -> Any:
    """The launch after the selection; None where Triton is missing, or the C compiler it needs, or cannot run here."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not triton.knobs.runtime.interpret and (host or compiler is None):
        return None
    from layerzero_flashinfer.draw import draw

    return draw


def _drawn(
    logits: Tensor,
    k: int,
    top_p: float | None,
    min_p: float | None,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:
    rows, vocab = logits.shape
    values, ids = select(logits, k + 1)  # one more shows whether the cut goes through equals
    best = logits.amax(dim=-1)  # the largest, or NaN where there is one: the selection may leave a NaN out
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _kernel(not logits.is_cuda)[(rows,)](
        logits, values, ids, best, _uniform(logits, generator), out, vocab, k,
        _bits(1.0 if top_p is None else top_p), _bits(min_p or 0.0), _bits(temperature),
        SLOTS=_SLOTS[k >= _SLOTS[0]], TILE=_TILE, num_warps=_WARPS,
    )  # fmt: skip
    return out


def _bits(number: float) -> int:
    """Of its float64: Triton passes Python floats as float32."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def prepare(dtype: torch.dtype) -> None:
    """Compile the launch for logits of this type, on the current device; for warming up."""
    if not torch.cuda.is_available() or _kernel(False) is None:
        return
    ids = torch.int64 if _inner() is None else torch.int32  # the public door gives places as int64
    kinds = (dtype, dtype, ids, dtype, torch.float64, torch.int64)
    for slots in _SLOTS:
        _kernel(False).warmup(*kinds, 1, 1, 0, 0, 0, SLOTS=slots, TILE=_TILE, num_warps=_WARPS, grid=(1,))


# -- as torch operations -------------------------------------------------------------------------------------
def _kept(
    logits: Tensor, top_k: int | None, top_p: float | None, min_p: float | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Weights of the kept tokens in the order of their ids, zero for those the other filters take out."""
    count = logits.shape[-1] if top_k is None or top_k <= 0 else min(top_k, logits.shape[-1])
    ids = _head(logits, count)  # ascending
    values, rank = logits.gather(1, ids).to(torch.float64).sort(dim=-1, descending=True, stable=True)
    best = values[:, :1]
    weights = torch.exp(torch.where(values == best, 0.0, values - best) / temperature)
    # A row with a NaN, or with nothing but -inf, has no distribution: its largest is NaN, or -inf.
    weights = torch.where(logits.amax(dim=-1, keepdim=True) > -math.inf, weights, 0.0)
    keep = torch.ones_like(weights, dtype=torch.bool)
    if top_p is not None and top_p < 1:
        before = weights.cumsum(dim=-1) - weights
        keep &= before < (top_p - _SLACK) * weights.sum(dim=-1, keepdim=True)
    if min_p is not None:
        keep &= weights >= min_p * weights[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, rank, weights * keep), ids


def _head(logits: Tensor, count: int) -> Tensor:
    """Ids of the first `count` of the ranking, ascending; of equal logits the lower ids."""
    rows, vocab = logits.shape
    if count == vocab:
        return torch.arange(count, device=logits.device).expand(rows, count)
    values, ids = select(logits, count)
    cut = values.amin(dim=-1, keepdim=True)
    above = values > cut
    # Those that equal the cut may be any; the lowest ids among all equals take their place, in the order of ids. They
    # are counted, not selected: a radix selection among that many equals takes it a thousand times as long.
    counts = (logits == cut).cumsum(dim=-1, dtype=torch.int32)
    steps = torch.arange(1, count + 1, dtype=torch.int32, device=logits.device).repeat(rows, 1)
    equals = torch.searchsorted(counts, steps)  # `vocab` where there are fewer
    wanted = (~above).cumsum(dim=-1) - 1
    filled = torch.where(above, ids, equals.gather(1, wanted.clamp(min=0)))
    return filled.clamp(max=vocab - 1).sort(dim=-1).values


# -- the selection ------------------------------------------------------------------------------------------
# A launch may be several blocks a row that wait for each other, so two launches must not run at a time: each could hold
# the processors that the other waits for, and both count into one buffer. Calls of one stream follow each other anyway;
# a call of another stream waits for the stream before it, and only then is there an event.
@functools.cache
def _inner() -> Callable[..., Any] | None:
    """What the public call ends in, without its conversions; None: only the public door is known."""
    found = getattr(part("topk").get_topk_module(), "radix_topk", None)
    return found if found is not None and starts_with(found, _RADIX) else None


@dataclass(slots=True, eq=False)
class _Order:
    """Calls of one device, one stream after another."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    raw: int = 0  # the stream of the last call, as the driver knows it
    stream: Any = None  # and as torch does


_orders: dict[int, _Order] = {}


def select(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of [B, V] without gaps, in any order, and their places (int32, or int64).

    Which of several equals is taken is nobody's promise.
    """
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

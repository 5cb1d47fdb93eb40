"""Linears of a CPU: ours for the numbers of rows at which it was quicker when the model was loaded, else vLLM's.

vLLM packs the weight of an unquantized linear once (`dispatch_cpu_unquantized_gemm`) and calls what that function left
in `layer.cpu_linear`. Layers of one shape wait there until there are so many of them that their weights come from
memory, as they do in a step, and are raced together. Where ours wins for some numbers of rows the plain weight is kept
beside the packed one; where it wins for all, nothing is packed. Both hide behind one function and, in compiled graphs,
one torch op; a layer that vLLM wins is as vLLM left it. Going from one side's threads to the other's costs what no race
of one shape shows, so shapes that ours wins for a few rows alone are raced once more, in the model's order.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz
from layerzero_vllm.attend import race
from layerzero_vllm.choice import OURS, THEIRS, quicker, rows_won, told
from layerzero_vllm.plugin import pinned

ROWS = (1, 8, 32, 128, 512)  # rows that are measured: decode of one and of a few sequences, a batch, prompts
STREAMED = 8  # up to so many rows reading the weight decides; more are measured on a piece of one weight
PIECE = 1 << 20  # elements of that piece
ENOUGH = 64 << 20  # bytes of weights, more than most caches hold
AT_ONCE = 128  # rows of one call of ours: what our kernels multiply with one visit of the weight
HOPELESS = 8.0  # vLLM's has no kernel for a dtype where it takes so much longer: more rows are not waited for
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Packed(NamedTuple):
    """A layer that vLLM has packed, its plain weight, and what vLLM calls for it."""

    layer: Any
    weight: Tensor
    theirs: Linear
    left: Any = None  # the weight that vLLM left to the layer


class Entry(NamedTuple):
    """Two ways to one product. Rows in between count as the next number in ROWS, more than that as the last one."""

    theirs: Linear
    ours: tuple[bool, ...]


# where both are used: by the address of the plain weight, as long as it lives
_entries: dict[int, Entry] = {}
_library: Any = torch.library.Library("layerzero_vllm", "DEF")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, entry = x.numel() // x.shape[-1], _entries.get(weight.data_ptr())
    if entry is not None and not entry.ours[min(bisect_left(ROWS, rows), len(ROWS) - 1)]:
        return entry.theirs(x, weight, bias)
    if rows <= AT_ONCE:
        return lz.linear(x, weight, bias)
    parts = [lz.linear(part, weight, bias) for part in torch.split(x.reshape(rows, -1), AT_ONCE)]
    return torch.cat(parts).view(*x.shape[:-1], -1)


def either(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `layer.cpu_linear` becomes: one op in a graph; outside of graphs torch's dispatcher is left out."""
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.layerzero_vllm.linear(x, weight, bias)
        return found
    return _linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("linear", _linear, "CPU")
torch.library.register_fake("layerzero_vllm::linear", _fake, lib=_library)


def measure(
    layers: list[Packed], pack: Callable[[Tensor], Linear]
) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
    """Microseconds of both, and the kernel of ours, by rows up to a hopeless race; nothing where the results disagree.

    `pack(weight)` is vLLM's way to the product with another weight.
    """
    times: dict[int, dict[str, float]] = {}
    kernels: dict[int, str] = {}
    first = layers[0].weight
    piece = first[: max(PIECE // first.shape[1], 1)]
    pieces = [Packed(None, piece, pack(piece) if piece.shape != first.shape else layers[0].theirs)]
    for rows in ROWS:
        x = torch.randn(rows, first.shape[1], generator=torch.Generator().manual_seed(0)).to(first.dtype)
        raced = layers if rows <= STREAMED else pieces
        ways = {
            OURS: [functools.partial(torch.ops.layerzero_vllm.linear, x, one.weight, None) for one in raced],
            THEIRS: [functools.partial(one.theirs, x, one.weight, None) for one in raced],
        }
        ours, other = (calls[0]().float() for calls in ways.values())
        limit = (1e-4 if first.dtype is torch.float32 else 2e-2) * float(other.abs().max())
        if not bool(torch.isfinite(ours).all()) or float((ours - other).abs().max()) > limit:
            return {}, {}
        times[rows], kernels[rows] = race(ways, seconds=0.03), lz.which("linear", x[:AT_ONCE], raced[0].weight)
        if times[rows][THEIRS] > HOPELESS * times[rows][OURS]:
            break
    return times, kernels


def measure_all(layers: list[Packed]) -> dict[int, dict[str, float]]:
    """Microseconds of a model's linears one after the other, as chosen and with vLLM's, by the rows of decode steps."""
    held = itertools.accumulate(one.weight.nbytes for one in layers)
    chain = [one for one, size in zip(layers, held, strict=True) if size <= 4 * ENOUGH] or layers[:1]

    op: Any = torch.ops.layerzero_vllm.linear
    chosen = [op if one.layer.cpu_linear is either else one.theirs for one in chain]
    without = [one.theirs if _few_rows_alone(one) else way for one, way in zip(chain, chosen, strict=True)]

    def run(linears: list[Linear], inputs: dict[int, Tensor]) -> None:
        for one, way in zip(chain, linears, strict=True):
            way(inputs[one.weight.shape[1]], one.weight, None)

    times = {}
    for rows in ROWS[: ROWS.index(STREAMED) + 1]:
        drawn = {one.weight.shape[1]: one.weight.dtype for one in chain}
        inputs = {width: torch.randn(rows, width).to(dtype) for width, dtype in drawn.items()}
        ways = {OURS: [functools.partial(run, chosen, inputs)], THEIRS: [functools.partial(run, without, inputs)]}
        times[rows] = race(ways, seconds=0.3)
    return times


def _few_rows_alone(one: Packed) -> bool:
    """Whether ours was taken for a layer, but for no more rows than a decode step has."""
    entry = _entries.get(one.weight.data_ptr())
    return entry is not None and not any(entry.ours[ROWS.index(STREAMED) + 1 :])


@dataclass
class Linears:
    """vLLM's `dispatch_cpu_unquantized_gemm`; `choose(layers)` says for which of ROWS ours runs in a shape's layers.

    `keep(layers, doubtful)` is asked once for all layers whether shapes that ours wins for few rows alone stay so.
    """

    stock: Callable[..., None]
    choose: Callable[[list[Packed]], frozenset[int]]
    keep: Callable[[list[Packed], list[Packed]], bool] = lambda layers, doubtful: True
    settled: list[Packed] = field(default_factory=list)
    waiting: dict[Any, list[Packed]] = field(default_factory=dict)
    known: dict[Any, frozenset[int]] = field(default_factory=dict)

    def dispatch(self, layer: Any, remove_weight: bool) -> None:
        """Pack a layer as vLLM does, unless it is known that nobody would read it; settle it once there are enough."""
        weight, bias = layer.weight, getattr(layer, "bias", None)
        plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_cpu and weight.dtype in _DTYPES
        if not plain or not weight.is_contiguous() or (bias is not None and bias.dtype is not weight.dtype):
            return self.stock(layer, remove_weight)
        kind = (*weight.shape, weight.dtype)
        if self.known.get(kind) == frozenset(ROWS):
            layer.cpu_linear = either
            return None
        self.stock(layer, remove_weight)
        mine = self.waiting.setdefault(kind, [])
        mine.append(Packed(layer, weight.detach(), layer.cpu_linear, layer.weight))
        if kind in self.known or sum(one.weight.nbytes for one in mine) >= ENOUGH:
            self.settle(kind)
        return None

    def settle(self, *kinds: Any) -> None:
        """Choose for the layers that wait: those of some shapes, or all."""
        for kind in kinds or [*self.waiting]:
            layers = self.waiting.pop(kind)
            if kind not in self.known:
                self.known[kind] = self.choose(layers)
            ours = tuple(rows in self.known[kind] for rows in ROWS)
            for layer, weight, theirs, _ in layers if any(ours) else ():
                if layer.weight.data_ptr() != weight.data_ptr():
                    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
                if not all(ours):
                    _entries[weight.data_ptr()] = Entry(theirs, ours)
                    weakref.finalize(layer.weight, _entries.pop, weight.data_ptr(), None)
                layer.cpu_linear = either
            self.settled += layers
        if kinds:
            return
        layers, self.settled = self.settled, []
        doubtful = [one for one in layers if _few_rows_alone(one)]
        if doubtful and not self.keep(layers, doubtful):
            for layer, weight, theirs, left in doubtful:
                layer.weight, layer.cpu_linear = left, theirs
                _entries.pop(weight.data_ptr(), None)
                self.known[(*weight.shape, weight.dtype)] = frozenset()


_linears: Linears | None = None


def settle() -> None:
    """All weights are packed: choose for the layers that still wait."""
    if _linears is not None:
        _linears.settle()


def install() -> None:
    """Have vLLM's linears chosen when their weights are packed; once a process."""
    global _linears
    from vllm.model_executor.layers import utils

    from layerzero_vllm.worker import agreed, key, report

    if _linears is not None:
        return
    stock = utils.dispatch_cpu_unquantized_gemm
    forced = {OURS: frozenset(ROWS), THEIRS: frozenset[int]()}

    def pack(weight: Tensor) -> Linear:
        layer: Any = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        stock(layer, remove_weight=False)
        found: Linear = layer.cpu_linear
        return found

    def choose(layers: list[Packed]) -> frozenset[int]:
        side, weight = pinned(os.environ), layers[0].weight
        times, kernels = ({}, {}) if side == THEIRS else agreed(lambda: measure(layers, pack))
        won = frozenset[int]() if not times else rows_won(times, ROWS) if side is None else forced[side]
        report().linears.extend(told(_name(weight), ROWS, "rows", (times, kernels), won, side))
        key(_name(weight), won=bool(won))
        return won

    def keep(layers: list[Packed], doubtful: list[Packed]) -> bool:
        if pinned(os.environ) is not None:
            return True
        times = agreed(lambda: measure_all(layers))
        if quicker({str(rows): timed for rows, timed in times.items()}) == OURS:
            return True
        shown = ", ".join(f"{timed[THEIRS] / timed[OURS]:.2f}x with {rows} rows" for rows, timed in times.items())
        given_back = {_name(one.weight) for one in doubtful}
        for one in report().linears:
            if one["kind"] in given_back and one["winner"] == OURS:
                said = f"{one['reason']}, but all linears of the model in turn: {shown}"
                one.update(winner=THEIRS, kernel="vLLM's own", reason=said)
        for layer in doubtful:
            key(_name(layer.weight), won=False)
        return False

    _linears = Linears(stock, choose, keep)
    utils.dispatch_cpu_unquantized_gemm = _linears.dispatch


def _name(weight: Tensor) -> str:
    return f"linear {weight.shape[1]} to {weight.shape[0]}, {str(weight.dtype).removeprefix('torch.')}"

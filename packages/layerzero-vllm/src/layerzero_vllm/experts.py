"""Unquantized experts of a CPU: ours for the numbers of tokens at which it was quicker at load, else vLLM's.

vLLM packs the weights of a layer's experts (`CPUUnquantizedExperts.process_weights_after_loading`) and calls `apply`
with the weights and the routing that its router computed; the router stays vLLM's. As with linears, layers of one shape
wait until their weights take more than a cache and are raced together. Where ours wins for some numbers of tokens the
plain weights are kept beside the packed ones, if the machine has room for both; where it wins for all, nothing is
packed. Both hide behind one function and, in compiled graphs, one torch op; layers that vLLM wins are as it left them.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz
from layerzero.device.memory import available_host_bytes
from layerzero_vllm.attend import race
from layerzero_vllm.choice import OURS, THEIRS, experts_won, told, unraced
from layerzero_vllm.linear import ENOUGH, HOPELESS, STREAMED
from layerzero_vllm.plugin import pinned

TOKENS = (1, 8, 64, 256)  # numbers of tokens that are measured: decode of one and of a few sequences, batches, prompts
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # of the gate; vLLM's names for them are ours
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens, shares and ids of their experts


class Kind(NamedTuple):
    """What layers of experts are told apart by."""

    experts: int
    hidden: int
    inner: int
    top_k: int
    dtype: torch.dtype
    activation: str

    def __str__(self) -> str:
        words = f"{self.top_k} of {self.experts} experts, {self.hidden} to {self.inner}"
        return f"{words}, {self.activation}, {str(self.dtype).removeprefix('torch.')}"


class Packed(NamedTuple):
    """A layer whose experts vLLM has packed, its plain weights, and vLLM's way with the packed ones."""

    kind: Kind
    layer: Any
    kernel: Any
    gate_up: Tensor
    down: Tensor
    theirs: Way


class Entry(NamedTuple):
    """Two ways to one sum. Tokens in between count as the next number in TOKENS, more than that as the last one."""

    theirs: Way
    ours: tuple[bool, ...]


# where both are used: by the address of the plain weight, as long as it lives
_entries: dict[int, Entry] = {}
_library: Any = torch.library.Library("layerzero_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("experts(Tensor x, Tensor gate_up, Tensor down, Tensor shares, Tensor ids, str activation) -> Tensor")


def _experts(x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, ids: Tensor, activation: str) -> Tensor:
    entry = _entries.get(gate_up.data_ptr())
    if entry is not None and not entry.ours[min(bisect_left(TOKENS, x.shape[0]), len(TOKENS) - 1)]:
        return entry.theirs(x, shares, ids)
    return lz.moe(x, gate_up, down, shares, ids, activation=activation)


def _fake(x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, ids: Tensor, activation: str) -> Tensor:
    return torch.empty_like(x)


_library.impl("experts", _experts, "CPU")
torch.library.register_fake("layerzero_vllm::experts", _fake, lib=_library)


def either(
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    **rest: Any,
) -> None:
    """What the `apply` of a layer's experts becomes: one op in a graph; outside torch's dispatcher is left out."""
    way = torch.ops.layerzero_vllm.experts if torch.compiler.is_compiling() else _experts
    output.copy_(way(hidden_states, w1, w2, topk_weights, topk_ids, activation.value))


def refusal(layer: Any, kernel: Any) -> str | None:
    """Why the experts of a layer are left to vLLM; None where ours can serve them."""
    parallel, quantized = kernel.moe_config.moe_parallel_config, kernel.quant_config
    options = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
    against = {
        f"activation {layer.activation.value}": layer.activation.value not in ACTIVATIONS,
        "bias": kernel.w1_bias is not None or kernel.w2_bias is not None,
        "options of the gate": any(getattr(quantized, name, None) is not None for name in options),
        "weights on the input": layer.apply_router_weight_on_input,
        "experts of several ranks": parallel.use_ep or parallel.enable_eplb or layer.expert_map is not None,
        f"dtype {layer.w13_weight.dtype}": layer.w13_weight.dtype not in _DTYPES,
    }
    found = [name for name, is_so in against.items() if is_so]
    return ", ".join(found) or None


def kind_of(layer: Any) -> Kind:
    """The kind of a layer whose weights are plain."""
    experts, hidden, inner = layer.w2_weight.shape
    return Kind(experts, hidden, inner, layer.top_k, layer.w2_weight.dtype, layer.activation.value)


def _drawn(layers: list[Packed], tokens: int) -> Iterator[tuple[Packed, Tensor, Tensor, Tensor]]:
    """Layers with tokens and their routing, until the experts that are read take more than a cache.

    Where each expert has many tokens its weights are read once for all of them, and one layer is enough.
    """
    kind, generator = layers[0].kind, torch.Generator().manual_seed(0)
    picked = tokens * kind.top_k
    size = (layers[0].gate_up.nbytes + layers[0].down.nbytes) / kind.experts
    wanted = min(math.ceil(ENOUGH / (size * min(picked, kind.experts))), len(layers) * math.ceil(kind.experts / picked))
    for place in range(1 if picked > STREAMED * kind.experts else wanted):
        x = torch.randn(tokens, kind.hidden, generator=generator, dtype=torch.float32).to(kind.dtype)
        scores = torch.rand(tokens, kind.experts, generator=generator, dtype=torch.float32)
        best = scores.topk(kind.top_k)
        yield layers[place % len(layers)], x, best.values.softmax(-1), best.indices.int()


def measure(layers: list[Packed]) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
    """Microseconds of both, and the kernel of ours, by tokens up to a hopeless race; nothing where results disagree."""
    times: dict[int, dict[str, float]] = {}
    kernels: dict[int, str] = {}
    act = layers[0].kind.activation
    for tokens in TOKENS:
        ways: dict[str, list[Callable[[], Tensor]]] = {OURS: [], THEIRS: []}
        for one, x, shares, ids in _drawn(layers, tokens):
            given = (x, one.gate_up, one.down, shares, ids)
            ways[OURS].append(functools.partial(torch.ops.layerzero_vllm.experts, *given, act))
            ways[THEIRS].append(functools.partial(one.theirs, x, shares, ids))
            kernels[tokens] = lz.which("moe", *given, activation=act)
        ours, other = (calls[0]().float() for calls in ways.values())
        limit = (1e-4 if layers[0].kind.dtype is torch.float32 else 2e-2) * float(other.abs().max())
        if not bool(torch.isfinite(ours).all()) or float((ours - other).abs().max()) > limit:
            return {}, {}
        times[tokens] = race(ways, seconds=0.03)
        if times[tokens][THEIRS] > HOPELESS * times[tokens][OURS]:
            break
    return times, kernels


@dataclass
class Experts:
    """vLLM's `process_weights_after_loading`; `choose(layers)` says for which of TOKENS ours runs in layers of a kind.

    `refused(kind, reason)` hears of layers that are left to vLLM unmeasured.
    """

    stock: Callable[[Any, Any], None]
    choose: Callable[[list[Packed]], frozenset[int]]
    refused: Callable[[Kind, str], None] = lambda kind, reason: None
    waiting: dict[Kind, list[Packed]] = field(default_factory=dict)
    known: dict[Kind, frozenset[int]] = field(default_factory=dict)

    def process(self, kernel: Any, layer: Any) -> None:
        """Pack a layer as vLLM does, unless it is known that nobody would read it; settle it once there are enough."""
        kind, reason = kind_of(layer), refusal(layer, kernel)
        if reason is not None:
            self.refused(kind, reason)
            return self.stock(kernel, layer)
        gate_up, down = layer.w13_weight.detach(), layer.w2_weight.detach()
        if self.known.get(kind) == frozenset(TOKENS):
            kernel.apply = either
            return None
        self.stock(kernel, layer)
        mine = self.waiting.setdefault(kind, [])
        mine.append(Packed(kind, layer, kernel, gate_up, down, _theirs(layer, kernel)))
        if kind in self.known or sum(one.gate_up.nbytes + one.down.nbytes for one in mine) >= ENOUGH:
            self.settle(kind)
        return None

    def settle(self, *kinds: Kind) -> None:
        """Choose for the layers that wait: those of some kinds, or all."""
        for kind in kinds or [*self.waiting]:
            layers = self.waiting.pop(kind)
            if kind not in self.known:
                self.known[kind] = self.choose(layers)
            ours = tuple(tokens in self.known[kind] for tokens in TOKENS)
            for one in layers if any(ours) else ():
                one.layer.w13_weight = torch.nn.Parameter(one.gate_up, requires_grad=False)
                one.layer.w2_weight = torch.nn.Parameter(one.down, requires_grad=False)
                if not all(ours):
                    _entries[one.gate_up.data_ptr()] = Entry(one.theirs, ours)
                    weakref.finalize(one.layer.w13_weight, _entries.pop, one.gate_up.data_ptr(), None)
                one.kernel.apply = either


def _theirs(layer: Any, kernel: Any) -> Way:
    """vLLM's way with the weights that it has just packed."""
    apply, activation, experts = type(kernel).apply, layer.activation, layer.w2_weight.shape[0]
    gate_up, down = layer.w13_weight.detach(), layer.w2_weight.detach()
    nothing = gate_up.new_empty(0)

    def way(x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rest = (activation, experts, None, None, None, nothing, nothing, None, False)
        apply(kernel, out, x, gate_up, down, shares, ids, *rest)
        return out

    return way


_installed: Experts | None = None


def settle() -> None:
    """All weights are packed: choose for the layers that still wait."""
    if _installed is not None:
        _installed.settle()


def install() -> None:
    """Have vLLM's experts chosen when their weights are packed; once a process."""
    global _installed
    if _installed is not None:
        return
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from layerzero_vllm.worker import agreed, key, report

    def twice(layers: list[Packed]) -> bool:
        """Whether the machine has room for plain and packed weights of all layers of experts."""
        config = get_current_vllm_config_or_none()
        count = len(layers) if config is None else len(config.compilation_config.static_all_moe_layers)
        more = count * (layers[0].gate_up.nbytes + layers[0].down.nbytes)
        return 2 * more < (available_host_bytes() or 0)

    def choose(layers: list[Packed]) -> frozenset[int]:
        side, kind = pinned(os.environ), layers[0].kind
        times, kernels, room = ({}, {}, True) if side == THEIRS else agreed(lambda: (*measure(layers), twice(layers)))
        won = frozenset[int]() if not times else experts_won(times, TOKENS, room=room, side=side)
        report().experts.extend(told(str(kind), TOKENS, "tokens", (times, kernels), won, side))
        key(f"experts {kind}", won=bool(won))
        return won

    def refused(kind: Kind, reason: str) -> None:
        row = unraced(str(kind), f"{reason}: left to vLLM")
        if row not in report().experts:
            report().experts.append(row)

    _installed = Experts(CPUUnquantizedExperts.process_weights_after_loading, choose, refused)
    held = _installed

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        held.process(self, layer)

    CPUUnquantizedExperts.process_weights_after_loading = process_weights_after_loading

"""The opaque ops and twins of the feed-forward block and of the mixture of experts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, differentiable, place
from layerzero.torch_ops.written import chosen, write

__all__ = ["BRIDGES", "OPS", "TWINS"]

# By name: backends live on a floor above.
_feed_forward: Any = importlib.import_module("layerzero.backends.reference.feed_forward")
_reference: Any = importlib.import_module("layerzero.backends.reference.moe")
_native: Any = importlib.import_module("layerzero.backends.torch_native.moe")

_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")


# -- running -----------------------------------------------------------------------------------------
def _run_mlp(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str, *rest: Any) -> Tensor:
    up_bias, gate_bias, down_bias, backend = rest
    out: Tensor = functions["mlp"](
        x, up, down, gate, activation, up_bias=up_bias, gate_bias=gate_bias, down_bias=down_bias, backend=backend
    )
    return out.contiguous()


def _run_gate(
    logits: Tensor,
    k: int,
    num_groups: int,
    top_groups: int,
    scoring: str,
    renormalize: bool,
    bias: Tensor | None,
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    weights, ids = functions["topk_gate"](
        logits, k, scoring=scoring, renormalize=renormalize, bias=bias, num_groups=num_groups, top_groups=top_groups,
        scale=scale, backend=backend,
    )  # fmt: skip
    return weights.contiguous(), ids.contiguous()


def _run_grouped(x: Tensor, weights: Tensor, group_sizes: Tensor, backend: str | None) -> Tensor:
    out: Tensor = functions["grouped_gemm"](x, weights, group_sizes, backend=backend)
    return out.contiguous()


def _run_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_offset: int,
    backend: str | None,
) -> Tensor:
    out: Tensor = functions["moe"](
        x, gate_up, down, topk_weights, topk_ids, activation=activation, expert_offset=expert_offset, backend=backend
    )
    return out.contiguous()


# -- shapes ------------------------------------------------------------------------------------------
def _fake_mlp(x: Tensor, up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], down.shape[0]))


def _fake_gate(logits: Tensor, k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _fake_grouped(x: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], weights.shape[1]))


def _fake_moe(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


# -- plain torch -------------------------------------------------------------------------------------
def _plain_mlp(*args: Any) -> Any:
    """As torch would compute it, in the inputs' own dtype: a graph of float32 products would serve nobody."""
    return _feed_forward.feed_forward(*args[:-1])


def _plain_gate(logits: Tensor, k: int, num_groups: int, top_groups: int, *rest: Any) -> Any:
    return _reference.topk_gate(logits, (k, num_groups, top_groups), *rest[:-1])


def _plain_grouped(x: Tensor, weights: Tensor, group_sizes: Tensor, backend: str | None) -> Any:
    x, weights = _cast(x, weights)
    if _groupable(x, weights, weights.shape[1]):
        return _native.grouped_gemm(x, weights, group_sizes)
    return _reference.grouped_gemm(x, weights, group_sizes)


def _plain_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_offset: int,
    backend: str | None,
) -> Any:
    x, gate_up, down, topk_weights = _cast(x, gate_up, down, topk_weights)
    args = (x, gate_up, down, topk_weights, topk_ids, activation, expert_offset)
    alike = gate_up.dtype == down.dtype and down.is_contiguous()
    return _native.moe(*args) if alike and _groupable(x, gate_up, down.shape[2]) else _reference.moe(*args)


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the inputs in its dtype, as the op itself takes them."""
    kind = tensors[0].device.type
    if kind not in _AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(item if item.dtype == torch.float64 else item.to(dtype) for item in tensors)


def _groupable(x: Tensor, weights: Tensor, other: int) -> bool:
    """Whether torch's grouped product takes these; the reference, which multiplies by every expert, comes last."""
    fits = x.shape[1] % 8 == 0 and other % 8 == 0
    return fits and x.dtype == torch.bfloat16 and weights.dtype == torch.bfloat16 and weights.is_contiguous()


OPS: tuple[OpaqueOp, ...] = (
    OpaqueOp(
        "mlp",
        "(Tensor x, Tensor up_weight, Tensor down_weight, Tensor? gate_weight, str activation, Tensor? up_bias, "
        "Tensor? gate_bias, Tensor? down_bias, str? backend=None) -> Tensor",
        _run_mlp,
        _fake_mlp,
        _plain_mlp,
        autocast=True,
    ),
    OpaqueOp(
        "topk_gate",
        "(Tensor logits, SymInt k, SymInt num_groups, SymInt top_groups, str scoring, bool renormalize, "
        "Tensor? bias, Scalar scale, str? backend=None) -> (Tensor, Tensor)",
        _run_gate,
        _fake_gate,
        _plain_gate,
    ),
    OpaqueOp(
        "grouped_gemm",
        "(Tensor x, Tensor weights, Tensor group_sizes, str? backend=None) -> Tensor",
        _run_grouped,
        _fake_grouped,
        _plain_grouped,
        autocast=True,
    ),
    OpaqueOp(
        "moe",
        "(Tensor x, Tensor gate_up, Tensor down, Tensor topk_weights, Tensor topk_ids, str activation, "
        "SymInt expert_offset, str? backend=None) -> Tensor",
        _run_moe,
        _fake_moe,
        _plain_moe,
        autocast=True,
    ),
)


# -- what torch.compile traces -------------------------------------------------------------------------
def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None = None,
    activation: str = "silu",
    *,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.mlp`."""
    args = (x, up_weight, down_weight, gate_weight, activation, up_bias, gate_bias, down_bias)
    grad = differentiable(backend, x, up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
    own = chosen("mlp", args, None, backend, grad)
    if own:
        return write(own, _feed_forward.feed_forward, args, True)
    return place(torch.ops.layerzero.mlp, *args, backend)


def topk_gate(
    router_logits: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.topk_gate`."""
    canonical = (router_logits, (k, num_groups, top_groups), scoring, renormalize, bias, scale)
    own = chosen("topk_gate", canonical, None, backend, differentiable(backend, router_logits))
    if own:
        return write(own, _reference.topk_gate, canonical, False)
    given = (router_logits, k, num_groups, top_groups, scoring, renormalize, bias, scale, backend)
    return place(torch.ops.layerzero.topk_gate, *given)


def grouped_gemm(x: Tensor, weights: Tensor, group_sizes: Tensor, *, backend: str | None = None) -> Any:
    """Twin of `lz.grouped_gemm`."""
    if differentiable(backend, x, weights):
        return _plain_grouped(x, weights, group_sizes, backend)
    return place(torch.ops.layerzero.grouped_gemm, x, weights, group_sizes, backend)


def moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    expert_offset: int = 0,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.moe`."""
    args = (x, gate_up, down, topk_weights, topk_ids, activation, expert_offset, backend)
    if differentiable(backend, x, gate_up, down, topk_weights):
        return _plain_moe(*args)
    return place(torch.ops.layerzero.moe, *args)


TWINS: dict[str, Callable[..., Any]] = {twin.__name__: twin for twin in (mlp, topk_gate, grouped_gemm, moe)}


def _bridge_gate(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    logits, choice, *rest = args
    return ops.topk_gate.default(logits, *choice, *rest, backend)


BRIDGES: dict[str, Callable[..., Any]] = {"topk_gate": _bridge_gate}

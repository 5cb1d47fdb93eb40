"""XPos, Gemma's norms, cross-entropy and cast inside torch's machinery. See `more` for what the tables mean."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.torch_ops import fakes
from layerzero.torch_ops.calls import ordered
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, differentiable, place
from layerzero.torch_ops.written import chosen, write

__all__ = ["BRIDGES", "OPS", "TWINS"]


def _reference(module: str) -> Any:
    # By name: the reference lives on the floor of the backends, which nothing below may import.
    return importlib.import_module(f"layerzero.backends.reference.{module}")


_conversion, _loss, _norm, _positional = (_reference(m) for m in ("conversion", "loss", "norm", "positional"))

_XPOS = (
    "Tensor cos, Tensor sin, bool interleaved, str layout, Tensor? position_ids, Scalar scale_base, Scalar gamma, "
    "Scalar origin, str? backend=None)"
)
_LOSS = (
    "(Tensor logits, Tensor labels, SymInt ignore_index, Scalar? label_smoothing, Scalar? softcap, Scalar? z_loss, "
    "str reduction, str? backend=None)"
)


# -- running ---------------------------------------------------------------------------------------
def _run_xpos(q: Tensor, k: Tensor | None, *rest: Any) -> Any:
    cos, sin, interleaved, layout, position_ids, scale_base, gamma, origin, backend = rest
    return functions["xpos"](
        q,
        k,
        cos,
        sin,
        interleaved=interleaved,
        layout=layout,
        position_ids=position_ids,
        scale_base=scale_base,
        gamma=gamma,
        origin=origin,
        backend=backend,
    )


def _xpos_pair(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out_q, out_k = _run_xpos(q, k, *rest)
    return ordered(out_q, q), ordered(out_k, k)


def _xpos_query(q: Tensor, *rest: Any) -> Tensor:
    return ordered(_run_xpos(q, None, *rest)[0], q)


def _gemma(x: Tensor, weight: Tensor, eps: float, backend: str | None) -> Tensor:
    out: Tensor = functions["gemma_rms_norm"](x, weight, eps, backend=backend)
    return out.contiguous()


def _gemma_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, backend: str | None) -> tuple[Tensor, Tensor]:
    out, stream = functions["gemma_add_rms_norm"](x, residual, weight, eps, backend=backend)
    return out.contiguous(), stream.contiguous()


def _run_loss(*args: Any, return_lse: bool) -> Any:
    logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction, backend = args
    return functions["cross_entropy"](
        logits,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing or 0.0,
        softcap=softcap,
        z_loss=z_loss or 0.0,
        reduction=reduction,
        return_lse=return_lse,
        backend=backend,
    )


def _loss_alone(*args: Any) -> Tensor:
    out: Tensor = _run_loss(*args, return_lse=False)
    return out.contiguous()


def _loss_lse(*args: Any) -> tuple[Tensor, Tensor]:
    loss, lse = _run_loss(*args, return_lse=True)
    return loss.contiguous(), lse.contiguous()


def _cast(x: Tensor, dtype: torch.dtype, saturate: bool, backend: str | None) -> Tensor:
    out: Tensor = functions["cast"](x, dtype, saturate=saturate, backend=backend)
    return out.contiguous()


# -- shapes ----------------------------------------------------------------------------------------
def _fake_loss(logits: Tensor, labels: Tensor, *rest: Any) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(labels.shape if rest[4] == "none" else (), dtype=dtype)


def _fake_loss_lse(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    loss = _fake_loss(logits, labels, *rest)
    return loss, logits.new_empty(labels.shape, dtype=loss.dtype)


def _fake_cast(x: Tensor, dtype: torch.dtype, *rest: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


# -- plain torch -----------------------------------------------------------------------------------
def _plain_xpos(q: Tensor, k: Tensor | None, *rest: Any) -> Any:
    return _positional.xpos(q, k, *rest[:-1])


def _plain_xpos_query(q: Tensor, *rest: Any) -> Any:
    return _plain_xpos(q, None, *rest)[0]


def _plain_gemma(x: Tensor, weight: Tensor, eps: float, backend: str | None = None) -> Any:
    return _norm.gemma_rms_norm(x, weight, eps)


def _plain_gemma_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, backend: str | None = None) -> Any:
    return _norm.gemma_add_rms_norm(x, residual, weight, eps)


def _plain_loss(*args: Any) -> Any:
    return _loss.cross_entropy(*args[:-1], False)


def _plain_loss_lse(*args: Any) -> Any:
    return _loss.cross_entropy(*args[:-1], True)


def _plain_cast(x: Tensor, dtype: torch.dtype, saturate: bool, backend: str | None) -> Any:
    return _conversion.cast(x, dtype, saturate)


OPS: tuple[OpaqueOp, ...] = (
    OpaqueOp("xpos", f"(Tensor q, Tensor k, {_XPOS} -> (Tensor, Tensor)", _xpos_pair, fakes.rope, _plain_xpos),
    OpaqueOp("xpos_query", f"(Tensor q, {_XPOS} -> Tensor", _xpos_query, fakes.rope_query, _plain_xpos_query),
    OpaqueOp(
        "gemma_rms_norm",
        "(Tensor x, Tensor weight, Scalar eps, str? backend=None) -> Tensor",
        _gemma,
        fakes.same,
        _plain_gemma,
    ),
    OpaqueOp(
        "gemma_add_rms_norm",
        "(Tensor x, Tensor residual, Tensor weight, Scalar eps, str? backend=None) -> (Tensor, Tensor)",
        _gemma_add,
        fakes.add_rms_norm,
        _plain_gemma_add,
    ),
    OpaqueOp("cross_entropy", f"{_LOSS} -> Tensor", _loss_alone, _fake_loss, _plain_loss),
    # A kernel may return the log-sum-exp without a gradient.
    OpaqueOp(
        "cross_entropy_lse", f"{_LOSS} -> (Tensor, Tensor)", _loss_lse, _fake_loss_lse, _plain_loss_lse, replay=False
    ),
    OpaqueOp(
        "cast",
        "(Tensor x, ScalarType dtype, bool saturate, str? backend=None) -> Tensor",
        _cast,
        _fake_cast,
        _plain_cast,
    ),
)


# -- from canonical arguments ----------------------------------------------------------------------
def _bridge_xpos(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    q, k, *rest = args
    if k is None:
        return ops.xpos_query.default(q, *rest, backend), None
    return ops.xpos.default(q, k, *rest, backend)


def _bridge_loss(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    *rest, return_lse = args
    return (ops.cross_entropy_lse if return_lse else ops.cross_entropy).default(*rest, backend)


BRIDGES: dict[str, Callable[..., Any]] = {"xpos": _bridge_xpos, "cross_entropy": _bridge_loss}


# -- what Dynamo traces ----------------------------------------------------------------------------
def xpos(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    layout: str = "BHSD",
    position_ids: Tensor | None = None,
    scale_base: float = 512.0,
    gamma: float = 0.4,
    origin: float = 0.0,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.xpos`."""
    rest = (cos, sin, interleaved, layout, position_ids, scale_base, gamma, origin, backend)
    canonical = (q, k, *rest[:-1])
    if chosen("xpos", canonical, layout, backend, differentiable(backend, q, k, cos, sin)):
        return _plain_xpos(q, k, *rest)
    if k is None:
        return place(torch.ops.layerzero.xpos_query, q, *rest), None
    return place(torch.ops.layerzero.xpos, q, k, *rest)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str | None = None) -> Any:
    """Twin of `lz.gemma_rms_norm`."""
    args = (x, weight, eps)
    own = chosen("gemma_rms_norm", args, None, backend, differentiable(backend, x, weight))
    if own:
        return write(own, _plain_gemma, args, False)
    return place(torch.ops.layerzero.gemma_rms_norm, *args, backend)


def gemma_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str | None = None
) -> Any:
    """Twin of `lz.gemma_add_rms_norm`."""
    args = (x, residual, weight, eps)
    own = chosen("gemma_add_rms_norm", args, None, backend, differentiable(backend, x, residual, weight))
    if own:
        return write(own, _plain_gemma_add, args, False)
    return place(torch.ops.layerzero.gemma_add_rms_norm, *args, backend)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.cross_entropy`."""
    smoothing, weight = None if label_smoothing == 0.0 else label_smoothing, None if z_loss == 0.0 else z_loss
    args = (logits, labels, ignore_index, smoothing, softcap, weight, reduction, backend)
    canonical = (*args[:-1], return_lse)
    own = chosen("cross_entropy", canonical, None, backend, differentiable(backend, logits))
    if own:
        return write(own, _loss.cross_entropy, canonical, False)
    ops = torch.ops.layerzero
    return place(ops.cross_entropy_lse if return_lse else ops.cross_entropy, *args)


def cast(x: Tensor, dtype: torch.dtype, *, saturate: bool = False, backend: str | None = None) -> Any:
    """Twin of `lz.cast`."""
    args = (x, dtype, saturate)
    own = chosen("cast", args, None, backend, differentiable(backend, x))
    if own:
        return write(own, _conversion.cast, args, False)
    return place(torch.ops.layerzero.cast, *args, backend)


TWINS: dict[str, Callable[..., Any]] = {
    twin.__name__: twin for twin in (xpos, gemma_rms_norm, gemma_add_rms_norm, cross_entropy, cast)
}

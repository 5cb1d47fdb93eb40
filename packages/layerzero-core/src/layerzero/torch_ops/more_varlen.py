"""Packed attention inside torch's machinery.

Without gradients a graph holds the opaque op, which reads the offsets when it runs. Where a gradient is traced, it
holds one product over all tokens behind a mask, in which the host reads nothing: right for any offsets, but its memory
grows with the square of the tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.model.describe import check_window_fits, parse_causal
from layerzero.model.enums import Causal
from layerzero.torch_ops.calls import CAUSAL
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, differentiable, place

__all__ = ["BRIDGES", "OPS", "TWINS"]

# By name: the reference lives on the floor of the backends, which nothing below may import.
_varlen = importlib.import_module("layerzero.backends.reference.varlen")

_WORDS = {Causal.NONE: "none", Causal.TOP_LEFT: "top_left", Causal.BOTTOM_RIGHT: "bottom_right"}
_VARLEN = (
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, str causal, Scalar? scale, SymInt[]? window, Scalar? softcap, Tensor? alibi_slopes, "
    "str? backend=None)"
)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: str,
    scale: float | None,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    backend: str | None,
    *,
    return_lse: bool,
) -> Any:
    return functions["varlen_attention"](
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        is_causal=CAUSAL[causal],
        scale=scale,
        window=None if window is None else tuple(window),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        backend=backend,
    )


def _call(*args: Any) -> Tensor:
    out: Tensor = _run(*args, return_lse=False)
    return out.contiguous()


def _call_lse(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = _run(*args, return_lse=True)
    return out.contiguous(), lse.contiguous()


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


def _fake_lse(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake(query, key, value), query.new_empty(query.shape[:2], dtype=torch.float32)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: str,
    scale: float | None,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    backend: str | None,
    *,
    return_lse: bool = False,
) -> Any:
    sides = None if window is None else (window[0], window[1])
    return _varlen.varlen_masked(
        query, key, value, cu_seqlens_q, cu_seqlens_k, CAUSAL[causal], scale, sides, softcap, alibi_slopes, return_lse
    )


def _plain_lse(*args: Any) -> Any:
    return _plain(*args, return_lse=True)


def _bridge(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    *head, is_causal, scale, window, softcap, alibi_slopes, return_lse = args
    op = ops.varlen_attention_lse if return_lse else ops.varlen_attention
    return op.default(*head, _WORDS[parse_causal(is_causal)], scale, window, softcap, alibi_slopes, backend)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    window: int | Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.varlen_attention`."""
    sides = None if window is None else [window, 0] if isinstance(window, int) else list(window)
    check_window_fits(sides or ())
    args = (
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _WORDS[parse_causal(is_causal)],
        scale, sides, softcap, alibi_slopes, backend,
    )  # fmt: skip
    if differentiable(backend, query, key, value, alibi_slopes):
        return _plain(*args, return_lse=return_lse)
    ops = torch.ops.layerzero
    return place(ops.varlen_attention_lse if return_lse else ops.varlen_attention, *args)


# The fused kernels give no gradient through the log-sum-exp, so there the backward takes the plain form.
OPS: tuple[OpaqueOp, ...] = (
    OpaqueOp("varlen_attention", f"{_VARLEN} -> Tensor", _call, _fake, _plain, autocast=True),
    OpaqueOp(
        "varlen_attention_lse",
        f"{_VARLEN} -> (Tensor, Tensor)",
        _call_lse,
        _fake_lse,
        _plain_lse,
        autocast=True,
        replay=False,
    ),
)
TWINS: dict[str, Callable[..., Any]] = {"varlen_attention": varlen_attention}
BRIDGES: dict[str, Callable[..., Any]] = {"varlen_attention": _bridge}

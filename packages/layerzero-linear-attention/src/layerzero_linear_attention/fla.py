"""Adapters of fla-core: the delta rules in chunks, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd
from fla.ops.kda import chunk_kda
from fla.ops.kda.chunk import chunk_kda_fwd
from fla.ops.utils.index import prepare_chunk_indices
from torch import Tensor

from layerzero_linear_attention.gpu import l2norm

_CHUNK = 64


def gated_delta_rule(*given: Any) -> tuple[Tensor, Tensor]:
    """In chunks."""
    if torch.is_grad_enabled():
        return _called(chunk_gated_delta_rule, *given)
    _, out, _, state, *_ = chunk_gated_delta_rule_fwd(**_forward(*given))
    return out, state


def kimi_delta_attention(*given: Any) -> tuple[Tensor, Tensor]:
    """In chunks."""
    if torch.is_grad_enabled():
        return _called(chunk_kda, *given)
    out, state, *_ = chunk_kda_fwd(**_forward(*given))
    return out, state


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> dict[str, Any]:
    """What their forward passes take. Around them they make a node for autograd, at the cost of 60 µs a call."""
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    q, k = (l2norm(item) if qk_l2norm else item.contiguous() for item in (query, key))
    return {
        "q": q,
        "k": k,
        "v": value.contiguous(),
        "g": g.float().contiguous(),
        "beta": beta.contiguous(),
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "initial_state": None if initial_state is None else initial_state.float().contiguous(),
        "output_final_state": True,
        "cu_seqlens": offsets,
        "chunk_indices": None if offsets is None else prepare_chunk_indices(offsets, _CHUNK),
        "chunk_size": _CHUNK,
    }


def _called(
    function: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Both functions take the same arguments by name; decays and states in float32, offsets as int64."""
    assert callable(function)
    out, state = function(
        query,
        key,
        value,
        g=g.float(),
        beta=beta,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=qk_l2norm,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
    return out, state

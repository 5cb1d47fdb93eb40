"""Adapters of fla-core: the delta rules in chunks, with gradients, and token by token for decoding."""

from __future__ import annotations

from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from torch import Tensor


def gated_delta_rule(
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
    """In chunks."""
    return _called(chunk_gated_delta_rule, query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


def gated_delta_rule_step(
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
    """Token by token."""
    return _called(
        fused_recurrent_gated_delta_rule, query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm
    )


def kimi_delta_attention(
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
    """In chunks."""
    return _called(chunk_kda, query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


def kimi_delta_attention_step(
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
    """Token by token."""
    return _called(fused_recurrent_kda, query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


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
    """Their four functions take the same arguments by name; decays and states in float32, offsets as int64."""
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

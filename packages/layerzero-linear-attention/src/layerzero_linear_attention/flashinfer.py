"""Adapters of FlashInfer: the gated delta rule on Hopper, and one token of Mamba-2."""

from __future__ import annotations

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.mamba import selective_state_update
from torch import Tensor

from layerzero_linear_attention.gpu import l2norm


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
    """Rows behind each other; decays not as logarithms; lengths taken here (theirs are not); states lie [V, K]."""
    batch, tokens = query.shape[:2]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, batch * tokens + 1, tokens, device=query.device)
    q, k = (l2norm(query), l2norm(key)) if qk_l2norm else (query, key)
    out, state = chunk_gated_delta_rule(
        *(item.flatten(0, 1).contiguous() for item in (q, k, value)),
        g=g.flatten(0, 1).float().exp(),
        beta=beta.flatten(0, 1).float().contiguous(),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float().transpose(-1, -2).contiguous(),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
    return out.view(value.shape), state.transpose(-1, -2).contiguous()


def mamba2_scan_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float | None,
) -> tuple[Tensor, Tensor]:
    """One token. Told not to update the state it reads, it writes the new one where speculative states are kept."""
    batch, _, heads, width = x.shape
    size = B.shape[3]
    step, bias = dt.float(), None if dt_bias is None else dt_bias.float()
    if dt_min > 0 or dt_max is not None:  # theirs has no bounds
        step = step if bias is None else step + bias
        step = (torch.nn.functional.softplus(step) if dt_softplus else step).clamp(dt_min, dt_max)
        bias, dt_softplus = None, False
    shape = (batch, heads, width, size)
    state = x.new_zeros(shape, dtype=torch.float32) if initial_state is None else initial_state.float().contiguous()
    last = x.new_empty((batch, 1, *shape[1:]), dtype=torch.float32)
    skip = x.new_zeros(heads, dtype=torch.float32) if D is None else D.float()
    out = selective_state_update(
        state,
        x.contiguous(),
        step.contiguous().unsqueeze(-1).expand(*x.shape),
        A.float().contiguous()[:, None, None].expand(shape[1:]),
        B.contiguous(),
        C.contiguous(),
        skip.contiguous()[:, None].expand(-1, width),
        dt_bias=None if bias is None else bias.contiguous()[:, None].expand(-1, width),
        dt_softplus=dt_softplus,
        disable_state_update=True,
        intermediate_states_buffer=last,
        cache_steps=1,
    )
    return out, last.squeeze(1)

"""The truth of a layer: plain torch, in float64, written without any op of LayerZero.

An op of a plugin that stands in for a built-in one is held, here as in the kernel tests, against its own reference:
whether that reference is what a real model needs is the question of level 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero._ops.signature import public_op
from layerzero_verify.weights import LayerWeights

__all__ = ["Truth", "rms_norm", "rope_tables", "rotate_half"]

Step = Callable[..., Any]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times weight."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope_tables(length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] in float64."""
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64).outer(rates)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Element i of a head turns with element i + head_dim / 2: the convention of Llama's weights."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Truth:
    """Computes the stages of a layer. `references` replaces built-in steps by the reference of a plugin's own op."""

    def __init__(self, references: Mapping[str, Step] | None = None) -> None:
        self.references = dict(references or {})

    def _step(self, op: str, plain: Step, *args: Any, **kwargs: Any) -> Any:
        given = self.references.get(op)
        if given is None:
            return plain(*args)
        canonical, _, _ = public_op(op).normalize(args, kwargs)
        return given(*canonical)

    def layer(self, weights: LayerWeights, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        """Every stage of a causal layer on x [B, S, H], in the dtype of x."""
        w = weights
        batch, length, _ = x.shape
        found: dict[str, Tensor] = {}
        found["ln1_out"] = normed = self._step("rms_norm", rms_norm, x, w.ln1, w.eps)
        q, k, v = (
            self._step("linear", F.linear, normed, weight, bias)
            for weight, bias in ((w.wq, w.bq), (w.wk, w.bk), (w.wv, w.bv))
        )
        found["q_proj"], found["k_proj"], found["v_proj"] = q, k, v
        q = q.view(batch, length, w.heads, w.head_dim).transpose(1, 2)
        k = k.view(batch, length, w.kv_heads, w.head_dim).transpose(1, 2)
        v = v.view(batch, length, w.kv_heads, w.head_dim).transpose(1, 2)
        if tables is not None:
            q, k = self._step("rope", _rope, q, k, *tables)
            found["q_rope"], found["k_rope"] = q, k
        found["scores"] = causal_scores(q, k)
        attended = self._step("attention", _causal, q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, -1)
        found["attn_out"] = attended
        found["proj_out"] = projected = self._step("linear", F.linear, attended, w.wo, None)
        # The fused form of the layer adds and norms in one op; the reference of a stand-in is asked in the same form.
        normed2, stream = self._step("add_rms_norm", _add_rms_norm, projected, x, w.ln2, w.eps)
        stream = stream.view_as(stream)  # its gradient without the norm's share, see block.py
        found["ln2_out"], found["residual"] = normed2, stream
        found["fc1_out"] = wide = self._step("linear", F.linear, normed2, w.w1, None)
        found["swiglu_out"] = gated = self._step("silu_and_mul", _swiglu, wide)
        found["mlp_out"] = down = self._step("linear", F.linear, gated, w.w2, None)
        found["output"] = stream + down
        return {stage: found[stage] for stage in _ORDER if stage in found}


_ORDER = (
    "ln1_out", "q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "scores", "attn_out", "proj_out", "residual",
    "ln2_out", "fc1_out", "swiglu_out", "mlp_out", "output",
)  # fmt: skip


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores of every query with the keys up to its own, zero elsewhere; what a kernel keeps to itself."""
    groups = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(groups, dim=1)
    return torch.tril(q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1]), diagonal=k.shape[2] - q.shape[2])


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate_half(q, cos, sin), rotate_half(k, cos, sin)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = causal_scores(q, k)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream = x + residual
    return rms_norm(stream, weight, eps), stream


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up

"""Formulas of the basic ops, written apart from the reference: the truth that the reference itself is held against.

Each takes the canonical arguments of its op, as a rule in float64. They are made to be read, not to be fast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.signature import public_op
from layerzero_verify.block import Tables


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: Any,
    scale: float | None,
    window: Any,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Any:
    if not (attn_mask is None or isinstance(attn_mask, Tensor)) or dropout_p:
        return NotImplemented
    heads, seq_q, seq_k = query.shape[1], query.shape[2], key.shape[2]
    share = torch.arange(heads, device=query.device) // (heads // key.shape[1])
    keys, values = key[:, share], value[:, share]
    scores = torch.einsum("bhid,bhjd->bhij", query, keys)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # how far each key lies ahead of each query; positions are counted from the end, but for a top-left triangle
    ends = torch.arange(seq_k - seq_q, seq_k, device=query.device)
    ahead = torch.arange(seq_k, device=query.device)[None] - ends[:, None]
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.ndim == 2 else alibi_slopes[None]
        scores = scores - slopes.double()[:, :, None, None] * ahead.abs().double()
    if is_causal is True:
        ahead = ahead + seq_k - seq_q
    left, right = (math.inf if side < 0 else side for side in window or (-1, -1))
    seen = ((-left <= ahead) & (ahead <= (min(right, 0) if is_causal else right))).expand_as(scores)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    # sums are kept in float32 at least, as softmax keeps them
    powers = torch.where(seen, scores, -math.inf).to(torch.promote_types(scores.dtype, torch.float32))
    limits = torch.finfo(powers.dtype)
    nothing = powers.new_full((*powers.shape[:-1], 1), limits.min)
    top = torch.cat((powers, nothing), -1).amax(-1, keepdim=True)
    if sinks is not None:
        beside = sinks.to(powers.dtype)[:, None, None]
        top = torch.maximum(top, beside)
    parts = torch.exp(powers - top)
    total = parts.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(beside - top)
    out = torch.einsum("bhij,bhjd->bhid", (parts / total.clamp_min(limits.tiny)).to(values.dtype), values)
    if not return_lse:
        return out
    return out, (torch.log(total) + top).squeeze(-1).masked_fill(total.squeeze(-1) == 0, -math.inf)


def _paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Any,
    scale: float | None,
    window: Any,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    layout: str,
    sinks: Tensor | None = None,
    is_causal: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    if key_cache.dtype is not torch.float64:
        return NotImplemented
    if k_scale is not None or v_scale is not None:
        axes = (-1, 1) if layout == "NHD" else (-1, 1, 1)
        key_cache, value_cache = (
            cache if scale is None else cache * torch.as_tensor(scale).to(cache).reshape(axes)
            for cache, scale in ((key_cache, k_scale), (value_cache, v_scale))
        )
    axis = 0 if layout == "NHD" else 1  # of a page's tokens; they come after the heads here
    outs, lses, start = [], [], 0
    for row, (context, new) in enumerate(zip(batch.context_lens_host, batch.query_lens_host, strict=True)):
        if new == 0:
            continue
        pages = batch.block_tables[row, : -(-context // key_cache.shape[axis + 1])].tolist() or [0]
        k, v = (
            torch.cat([cache[page] for page in pages], dim=axis).narrow(axis, 0, context).movedim(axis, 1)[None]
            for cache in (key_cache, value_cache)
        )
        q = query[start : start + new].transpose(0, 1)[None]
        slopes = alibi_slopes[row] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        causal = "bottom_right" if is_causal else False
        out, lse = _attention(q, k, v, None, 0.0, causal, scale, window, softcap, slopes, True, sinks)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
        start += new
    return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / x.shape[-1]
    out = x / torch.sqrt(size + eps)
    return out if weight is None else out * weight


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    out = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, *rest: Any) -> Any:
    """Each pair (a, b) of a head becomes (a cos - b sin, b cos + a sin)."""
    layout, position_ids, inplace = rest
    if inplace:
        return NotImplemented
    length = q.shape[2 if layout == "BHSD" else 1]

    def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
        half = x.shape[-1] // 2
        return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])

    def columns(table: Tensor) -> tuple[Tensor, Tensor]:
        """The table's entries for the first and for the second of each pair, a row for each token."""
        first, second = pairs(table) if table.ndim == 3 else (table[None], table[None])
        found = []
        for side in (first, second):
            if position_ids is not None:
                ids = position_ids if position_ids.ndim == 2 else position_ids[None]
                rows = max(len(side), len(ids))
                side = torch.stack([side[i % len(side)][ids[i % len(ids)].long()] for i in range(rows)])
            found.append(side[:, None, :length] if layout == "BHSD" else side[:, :length, None])
        return found[0].double(), found[1].double()

    cosines, sines = columns(cos), columns(sin)
    width = 2 * cosines[0].shape[-1]

    def rotated(x: Tensor) -> Tensor:
        a, b = pairs(x[..., :width])
        first, second = a * cosines[0] - b * sines[0], b * cosines[1] + a * sines[1]
        out = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
        return torch.cat((out, x[..., width:]), dim=-1)

    return rotated(q), None if k is None else rotated(k)


_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "gelu": lambda x: x / 2 * (1 + torch.special.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: x.clamp_min(0),
}


def _gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    half = x.shape[-1] // 2
    return activation(x[..., :half]) * x[..., half:]


def _linear(x: Tensor, weight: Any, bias: Tensor | None, activation: str | None, *rest: Any) -> Any:
    if not isinstance(weight, Tensor) or any(item is not None for item in rest):
        return NotImplemented
    out = torch.einsum("...k,nk->...n", x, weight)
    return _ACTIVATIONS[activation](out if bias is None else out + bias)


def _mlp(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, name: str, *biases: Tensor | None) -> Any:
    wide = _linear(x, up, biases[0], None)
    wide = wide if gate is None else torch.cat((_linear(x, gate, biases[1], None), wide), dim=-1)
    inner = _gated(wide, _ACTIVATIONS[name]) if wide.shape[-1] > down.shape[1] else _ACTIVATIONS[name](wide)
    return _linear(inner, down, biases[2], None)


def _embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Any:
    if padding_idx is not None:
        return NotImplemented  # its gradient is not that of a product
    return torch.nn.functional.one_hot(ids.long(), weight.shape[0]).to(weight.dtype) @ weight


def _cross_entropy(logits: Tensor, targets: Tensor, *rest: Any) -> Any:
    if any(item not in (None, -100, "mean", 0.0, False) for item in rest):
        return NotImplemented
    log_probs = logits - torch.logsumexp(logits, -1, keepdim=True)
    kept = targets != -100
    chosen = log_probs.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * kept).sum() / kept.sum().clamp_min(1)


ORACLES: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "paged_attention": _paged,
    "rms_norm": _rms_norm,
    "add_rms_norm": lambda x, residual, *rest: (_rms_norm(x + residual, *rest), x + residual),
    "layer_norm": _layer_norm,
    "rope": _rope,
    "silu_and_mul": lambda x: _gated(x, _ACTIVATIONS["silu"]),
    "gelu_and_mul": lambda x, approximate: _gated(x, _ACTIVATIONS["gelu_tanh" if approximate == "tanh" else "gelu"]),
    "relu_and_mul": lambda x: _gated(x, _ACTIVATIONS["relu"]),
    "linear": _linear,
    "mlp": _mlp,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
}


def rope_tables(length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] in float64."""
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64).outer(rates)
    return angles.cos(), angles.sin()


def cast(tables: Tables, dtype: torch.dtype, device: torch.device | None = None) -> Tables:
    """The tables in another dtype (and on another device)."""
    return None if tables is None else (tables[0].to(device, dtype), tables[1].to(device, dtype))


class Truth:
    """Called as a `Caller` is, it runs no kernel: each op by its formula, in whatever dtype is given.

    `references` replaces formulas by the reference of a plugin's op that stands in for a built-in one: whether that is
    what a real model needs is the question of level 4.
    """

    def __init__(self, references: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.formulas = {**ORACLES, **(references or {})}
        self.stages: dict[str, tuple[str, str]] = defaultdict(lambda: ("", ""))

    def __call__(self, stage: str, op: str, *args: Any, **kwargs: Any) -> Any:
        canonical, _, _ = public_op(op).normalize(args, kwargs)
        return self.formulas[op](*canonical)

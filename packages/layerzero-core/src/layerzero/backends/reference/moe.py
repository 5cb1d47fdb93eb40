"""Mixture of experts: routing, a product with one weight per group of rows, and the experts themselves.

Every expert sees every token and keeps its own: no shape depends on what the router chose, so all of it can be traced
and captured. That costs a product per expert; the kernels that sort by expert are in the backend `torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.feed_forward import gated
from layerzero.backends.reference.precision import compute_dtype, no_autocast
from layerzero.backends.reference.quantize import dequantize
from layerzero.errors import invalid


# -- routing -----------------------------------------------------------------------------------------
def _best(values: Tensor, count: int) -> Tensor:
    """Places of the largest values, best first; a stable sort keeps equal ones in order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def topk_gate(
    logits: Tensor,
    choice: tuple[int, int, int],
    scoring: str,
    renormalize: bool,
    bias: Tensor | None,
    scale: float,
    *,
    best: Callable[[Tensor, int], Tensor] = _best,
) -> tuple[Tensor, Tensor]:
    """Weights and ids of each token's experts, best first; `choice` is (k, num_groups, top_groups).

    Without a bias the experts are ranked by logit, which orders them as their score does: no rounding of a softmax
    can make two of them equal. Equal ones go by id, the lowest first. `best` finds the places of the largest values.
    """
    k, num_groups, top_groups = choice
    wide = logits.to(compute_dtype(logits))
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    ranked = (wide if bias is None else scores + bias.to(wide.dtype)).detach()
    if num_groups == 1:
        ids = best(ranked, k)
    else:
        # A group counts by its best expert, or with a bias by its best two.
        size = ranked.shape[-1] // num_groups
        inside = ranked.reshape(ranked.shape[0], num_groups, size)
        value = inside.amax(dim=-1) if bias is None else inside.topk(min(2, size), dim=-1).values.sum(dim=-1)
        groups = best(value, top_groups).sort(dim=-1).values
        experts = (groups.unsqueeze(-1) * size + torch.arange(size, device=logits.device)).flatten(-2)
        ids = experts.gather(-1, best(ranked.gather(-1, experts), k))
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return weights * scale, ids


# -- one weight per group of rows --------------------------------------------------------------------
def grouped_gemm(x: Tensor, weights: Tensor, group_sizes: Tensor) -> Tensor:
    """Rows of x, group after group, each times its group's weight transposed; rows that are left over give zeros."""
    if not torch.compiler.is_compiling() and _readable(group_sizes):
        check_groups(group_sizes.tolist(), x.shape[0])
    wide = compute_dtype(x, weights)
    ends = group_sizes.cumsum(0)
    starts = ends - group_sizes
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
    with no_autocast(x.device.type):
        rows = x.to(wide)
        out = rows.new_zeros(x.shape[0], weights.shape[1])
        for group, weight in enumerate(weights.unbind(0)):
            inside = (row >= starts[group]) & (row < ends[group])
            # Blanked on the way in as well: what the rows of others hold must not reach this weight's gradient.
            product = torch.where(inside, rows, 0.0) @ weight.to(wide).T
            out = torch.where(inside, product, out)
    return out.to(x.dtype)


def check_groups(sizes: list[int], rows: int) -> int:
    """Rows beyond the last group; sizes that are negative or name more rows than there are are refused."""
    left = rows - sum(sizes)
    if left < 0 or min(sizes, default=0) < 0:
        given = f"group_sizes {sizes if len(sizes) <= 16 else f'with sum {sum(sizes)}'}"
        limit = f"sizes of 0 or more that add up to at most {rows}"
        raise invalid("VALUE_INVALID", given, limit, "group_sizes do not fit the rows of x")
    return left


def _readable(tensor: Tensor) -> bool:
    """Whether its numbers can be read without waiting for a device and outside of any transform."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and torch._C._functorch.maybe_current_level() is None


# -- the experts ---------------------------------------------------------------------------------------
def _each(weight: Any, dtype: torch.dtype) -> Sequence[Tensor] | Iterator[Tensor]:
    """The weight of every expert; a quantized one is widened when its turn comes."""
    if isinstance(weight, Tensor):
        return weight.unbind(0)
    source = getattr(weight, "source", weight)

    def widened(expert: int) -> Tensor:
        scale, point = (p[expert] if p is not None and p.ndim else p for p in (source.scale, source.zero_point))
        one = replace(source, data=source.data[expert], scale=scale, zero_point=point, shape=source.shape[1:])
        return dequantize(one, dtype)

    return map(widened, range(source.shape[0]))


def moe(x: Tensor, gate_up: Any, down: Any, topk_weights: Tensor, topk_ids: Tensor, *options: Any) -> Tensor:
    """The weighted sum of each token's experts, in float32; ids that are not of these experts add nothing."""
    activation, expert_offset, gate_up_bias, down_bias, *gate = options
    wide, inner = compute_dtype(x, *(w for w in (gate_up, down) if isinstance(w, Tensor))), down.shape[2]

    def bias(of: Tensor | None, expert: int) -> Tensor | None:
        return None if of is None else of[expert].to(wide)

    ids = topk_ids.to(torch.int64) - expert_offset
    with no_autocast(x.device.type):
        tokens, shares = x.to(wide), topk_weights.to(wide)
        out = torch.zeros_like(tokens)
        for expert, (first, second) in enumerate(zip(_each(gate_up, wide), _each(down, wide), strict=True)):
            named = ids == expert
            mine = named.any(dim=-1, keepdim=True)
            share = torch.where(named, shares, 0.0).sum(dim=-1, keepdim=True)
            inputs = torch.where(mine, tokens, 0.0)
            # Nested, so that what stands between the products is given back as soon as it was used.
            result = F.linear(
                gated(
                    F.linear(inputs, first.to(wide), bias(gate_up_bias, expert)),
                    activation, inner, *gate,
                ),
                second.to(wide),
                bias(down_bias, expert),
            )  # fmt: skip
            out = out + torch.where(mine, result * share, 0.0)
    return out.to(x.dtype)

"""Mixture of experts on torch's own products: tokens sorted by expert, so that each expert is one product.

Two forms. `segments` reads on the host how many tokens each expert has and multiplies slice by slice, in any dtype.
`grouped` leaves the counts on the device and calls `F.grouped_mm`: nothing waits, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference import moe as reference
from layerzero.backends.reference.feed_forward import gated
from layerzero.backends.reference.precision import compute_dtype
from layerzero.backends.torch_native.kernels import narrow_on_cpu

_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


# -- routing -----------------------------------------------------------------------------------------
def topk_gate(
    logits: Tensor, choice: tuple[int, int, int], scoring: str, renormalize: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The best of each token without a sort of all experts, where that is quicker; equal ones go by id.

    A softmax over all experts, divided by what it gives the chosen ones, is the softmax over the chosen ones.
    """
    if not (scoring == "softmax" and renormalize and bias is None and choice[1] == 1):
        return reference.topk_gate(logits, choice, scoring, renormalize, bias, scale, best=_largest)
    k, wide = choice[0], logits.to(compute_dtype(logits))
    if _by_keys(wide):
        ids = _largest(wide.detach(), k)
        best = wide.gather(-1, ids)
    else:
        best, ids = wide.sort(dim=-1, descending=True, stable=True)
        best, ids = best[:, :k], ids[:, :k]
    weights = torch.softmax(best, dim=-1)
    return weights if scale == 1.0 else weights * scale, ids


def _by_keys(values: Tensor) -> bool:
    """Whether `torch.topk` over keys pays: on a CPU, in float32, for more than a few rows."""
    return values.is_cpu and values.dtype is torch.float32 and values.shape[0] >= 16


def _largest(values: Tensor, count: int) -> Tensor:
    """Places of the largest values, NaN above all, equal ones lowest place first.

    On a CPU `torch.topk` over keys that no two places share is up to four times as fast as a stable sort. The bits of
    a float, read as an integer, order positive numbers; flipping those of negative ones orders all. The place, counted
    from the end, fills the lower half of the key.
    """
    if not _by_keys(values):
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = torch.where(values.isnan(), 0x7FFFFFFF, bits)
    last = values.shape[-1] - 1
    places = last - torch.arange(last + 1, device=values.device)
    keys = (bits.to(torch.int64) << 32) | places
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


# -- one weight per group of rows --------------------------------------------------------------------
def grouped_gemm_segments(x: Tensor, weights: Tensor, group_sizes: Tensor) -> Tensor:
    """One product per group that has rows."""
    sizes = group_sizes.tolist()
    left = reference.check_groups(sizes, x.shape[0])
    groups = zip(torch.split(x, [*sizes, left]), weights, strict=False)
    # The first group is kept even if it is empty: through it x and the weights always have a gradient.
    pieces = [rows @ weight.T for group, (rows, weight) in enumerate(groups) if rows.shape[0] or group == 0]
    if left:
        pieces.append(x.new_zeros(left, weights.shape[1]))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def grouped_gemm(x: Tensor, weights: Tensor, group_sizes: Tensor) -> Tensor:
    """`F.grouped_mm`. Rows of no group are kept out of it both ways: it neither writes them nor their gradient."""
    ends = group_sizes.cumsum(0, dtype=torch.int32)
    if (
        group_sizes.is_cpu
        and type(group_sizes) is Tensor
        and not torch.compiler.is_compiling()
        and not reference.check_groups(group_sizes.tolist(), x.shape[0])
    ):  # every row is of a group
        return _grouped_mm(x, weights.transpose(1, 2), offs=ends)  # type: ignore[no-any-return]
    inside = torch.arange(x.shape[0], device=x.device).unsqueeze(-1) < ends[-1]
    out = _grouped_mm(torch.where(inside, x, 0.0), weights.transpose(1, 2), offs=ends)
    return torch.where(inside, out, 0.0)


# -- the experts ---------------------------------------------------------------------------------------
def _by_expert(topk_ids: Tensor, expert_offset: int, experts: int) -> tuple[Tensor, Tensor]:
    """Slots (token * k + place) sorted by expert, those of no expert here at the end; and where each expert ends."""
    ids = topk_ids.flatten().to(torch.int64)
    if expert_offset:
        ids = ids - expert_offset
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    found = ids.sort(stable=True)
    ends = torch.searchsorted(found.values, torch.arange(experts, device=ids.device), right=True)
    return found.indices, ends


def _shares_here(topk_weights: Tensor, topk_ids: Tensor, expert_offset: int, experts: int) -> Tensor:
    """The weights of the slots, zero for those of no expert here."""
    return torch.where((topk_ids >= expert_offset) & (topk_ids < expert_offset + experts), topk_weights, 0.0)


def _combined(results: Tensor, shares: Tensor) -> Tensor:
    """The weighted sum over each token's slots, in float32."""
    shares = shares.to(torch.promote_types(results.dtype, torch.float32))
    tokens, top_k = shares.shape
    rows = results.view(tokens, top_k, results.shape[-1])
    total = rows[:, 0] * shares[:, 0, None]
    for place in range(1, top_k):
        total = total + rows[:, place] * shares[:, place, None]
    return total.to(results.dtype)


def moe_segments(x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, topk_ids: Tensor, *options: Any) -> Tensor:
    """Expert by expert, at most as many rows at a time as there are tokens: that bounds the scratch memory."""
    activation, expert_offset, gate_up_bias, down_bias, *gate = options
    experts, inner = down.shape[0], down.shape[2]
    tokens, top_k = topk_ids.shape
    ordered = topk_ids.flatten().sort(stable=True)
    numbers = torch.arange(expert_offset, expert_offset + experts + 1, device=x.device, dtype=topk_ids.dtype)
    slots, bounds = ordered.indices, torch.searchsorted(ordered.values, numbers).tolist()
    if bounds[0] or bounds[-1] < len(slots):
        shares = _shares_here(shares, topk_ids, expert_offset, experts)

    parts = (gate_up, down, gate_up_bias, down_bias)
    narrow = narrow_on_cpu(x)  # then one expert at a time is widened: nothing is rounded between its products
    token_of = slots // top_k

    def computed(start: int, end: int, expert: Sequence[Any]) -> Tensor:
        rows = x[token_of[start:end]]
        first, second, *biases = expert
        if narrow:
            rows, first, second = rows.float(), first.float(), second.float()
            biases = [None if bias is None else bias.float() for bias in biases]
        middle = gated(F.linear(rows, first, biases[0]), activation, inner, *gate)
        return F.linear(middle, second, biases[1])

    results = x.new_zeros(tokens * top_k, x.shape[1], dtype=torch.float32 if narrow else x.dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *parts, shares)):
        # Taken apart once and written once: else the gradient would copy all weights, and all of `results`, for
        # each expert. An expert without tokens computes on none, so that its weights have a gradient of zero.
        each = (repeat(None, experts) if part is None else part.unbind(0) for part in parts)
        rows = [computed(start, end, expert) for (start, end), *expert in zip(pairwise(bounds), *each, strict=True)]
        results = results.index_copy(0, slots[bounds[0] : bounds[-1]], torch.cat(rows))
    else:
        for expert, (start, end) in enumerate(pairwise(bounds)):
            for first in range(start, end, tokens):
                last = min(first + tokens, end)
                mine = [None if part is None else part[expert] for part in parts]
                results.index_copy_(0, slots[first:last], computed(first, last, mine))
    return _combined(results, shares).to(x.dtype)


def _biased(rows: Tensor, bias: Tensor | None, owner: Tensor | None, inside: Tensor) -> Tensor:
    """Each row plus the bias of its expert; none for rows behind every group, whose gradient nobody writes."""
    return rows if bias is None or owner is None else rows + torch.where(inside, bias[owner], 0.0)


def moe(x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, topk_ids: Tensor, *options: Any) -> Tensor:
    """All experts in two calls of `F.grouped_mm`."""
    activation, expert_offset, gate_up_bias, down_bias, *gate = options
    experts, inner = down.shape[0], down.shape[2]
    slots, ends = _by_expert(topk_ids, expert_offset, experts)
    ends = ends.to(torch.int32)
    # Slots of no expert here lie behind the last group, where nothing is computed: blank both ways, as above.
    inside = torch.arange(slots.shape[0], device=x.device).unsqueeze(-1) < ends[-1]
    rows = torch.where(inside, x[slots // topk_ids.shape[1]], 0.0)
    # Nested, so that what stands between the products is given back as soon as it was used.
    owner = None
    if gate_up_bias is not None or down_bias is not None:  # of slots behind every group, which are blanked, the last
        places = torch.arange(slots.shape[0], device=ends.device, dtype=ends.dtype)
        owner = torch.searchsorted(ends, places, right=True).clamp_max(experts - 1)
    middle = gated(
        _biased(_grouped_mm(rows, gate_up.transpose(1, 2), offs=ends), gate_up_bias, owner, inside),
        activation, inner, *gate,
    )  # fmt: skip
    rows = _biased(_grouped_mm(middle, down.transpose(1, 2), offs=ends), down_bias, owner, inside)
    rows = torch.where(inside, rows, 0.0)
    back = torch.empty_like(slots).scatter_(0, slots, torch.arange(slots.shape[0], device=x.device))
    return _combined(rows[back], _shares_here(shares, topk_ids, expert_offset, experts))


# -- as a compiler traces them where a gradient is needed ------------------------------------------------------------
# torch's own grouped product where it takes the tensors; the reference, which multiplies by every expert, comes last.
def traced_grouped_gemm(x: Tensor, weights: Tensor, group_sizes: Tensor) -> Tensor:
    """Rows of x, group after group, each times its group's weight transposed."""
    if _groupable(x, weights, weights.shape[1]):
        return grouped_gemm(x, weights, group_sizes)
    return reference.grouped_gemm(x, weights, group_sizes)


def traced_moe(x: Tensor, gate_up: Any, down: Any, *rest: Any) -> Tensor:
    """The weighted sum of each token's experts."""
    plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    alike = plain and gate_up.dtype == down.dtype and down.is_contiguous() and _groupable(x, gate_up, down.shape[2])
    return moe(x, gate_up, down, *rest) if alike else reference.moe(x, gate_up, down, *rest)


def _groupable(x: Tensor, weights: Tensor, other: int) -> bool:
    fits = x.shape[1] % 8 == 0 and other % 8 == 0
    return fits and x.dtype == torch.bfloat16 and weights.dtype == torch.bfloat16 and weights.is_contiguous()

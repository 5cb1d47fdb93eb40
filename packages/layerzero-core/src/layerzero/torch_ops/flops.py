"""What `torch.utils.flop_counter.FlopCounterMode` counts for the opaque ops: the products, as for torch's own ops.

Registered when that module is imported. A causal mask saves nothing there, and neither does it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.torch_ops import library


def register() -> None:
    """Tell the counter of every op that multiplies matrices."""
    from torch.utils.flop_counter import register_flop_formula

    ops = library.namespace()
    for names, formula in _FORMULAS.items():
        targets = [getattr(ops, name) for name in names]
        register_flop_formula(targets, get_raw=True)(lambda *args, formula=formula, **_: formula(*args))


def _products(tokens: int, heads: int, keys: int, key: Tensor, value: Tensor) -> int:
    """Query times keys and weights times values, for `tokens` queries over `keys` keys each."""
    return 2 * heads * tokens * keys * (key.shape[-1] + value.shape[-1])


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    flat = query.dim() == 3
    # A word of the op, or part of the string that is all there is beside the tensors (`sites`).
    axis = 1 if flat or any(isinstance(item, str) and "BSHD" in item for item in rest) else 2
    heads = 1 if flat else query.shape[3 - axis]
    return _products(query.shape[0] * query.shape[axis], heads, key.shape[axis], key, value)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: Any, max_k: Any, *rest: Any
) -> int:
    pairs = zip(_lengths(cu_q, max_q, query.shape[0]), _lengths(cu_k, max_k, key.shape[0]), strict=True)
    return sum(_products(tokens, query.shape[1], keys, key, value) for tokens, keys in pairs)


def _lengths(offsets: Tensor, longest: int | None, total: int) -> list[int]:
    """The length of every sequence; of fake ones, which say nothing, the longest they may have."""
    if type(offsets) is Tensor and not offsets.is_meta:
        return torch.diff(offsets.cpu()).tolist()
    return [total if longest is None else longest] * (offsets.shape[0] - 1)


def _paged(
    query: Tensor, key: Tensor, value: Tensor, block_tables: Tensor, context_lens: Tensor, query_lens: Any,
    context_host: Sequence[int] | None, query_host: Sequence[int] | None, *rest: Any,
) -> int:  # fmt: skip
    if context_host is None:
        context_host = context_lens.tolist()
    if query_host is None:
        query_host = [1] * len(context_host) if query_lens is None else query_lens.tolist()
    return sum(_products(q, query.shape[1], k, key, value) for q, k in zip(query_host, context_host, strict=True))


_Formula = Callable[..., int]
_FORMULAS: dict[tuple[str, ...], _Formula] = {
    ("attention", "attention_lse"): _attention,
    ("varlen_attention", "varlen_attention_lse"): _varlen,
    ("paged_attention", "paged_attention_lse"): _paged,
    ("linear",): lambda x, weight, *rest: 2 * x.numel() * weight.shape[0],
    ("linear_quantized",): lambda x, *rest: 2 * x.numel() * int(rest[7][0]),
    ("mlp",): lambda x, *weights: 2 * x.numel() // x.shape[-1] * sum(w.numel() for w in weights[:3] if w is not None),
    ("grouped_gemm",): lambda x, weights, *rest: 2 * x.numel() * weights.shape[1],
    # Each token by the experts it was sent to.
    ("moe",): lambda x, up, down, shares, *rest: 2 * shares.numel() * (up.shape[1:].numel() + down.shape[1:].numel()),
}

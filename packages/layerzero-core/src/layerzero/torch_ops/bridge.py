"""From a call's canonical arguments to its opaque op: the way of tensor subclasses, FakeTensor and export.

What an op cannot carry (dropout, whose backward must see the same random numbers, and a generator) runs in plain
torch instead, op by op, which every subclass that knows torch's own ops can follow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.model.describe import parse_causal
from layerzero.model.enums import Causal
from layerzero.model.masks import MASK_VALUES
from layerzero.model.quant import QuantizedTensor
from layerzero.torch_ops import library, plain
from layerzero.torch_ops.calls import assembled
from layerzero.torch_ops.more import bridge_of

__all__ = ["call", "split"]

_WORDS = {Causal.NONE: "none", Causal.TOP_LEFT: "top_left", Causal.BOTTOM_RIGHT: "bottom_right"}


def call(op_id: str, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    """Run one call through its opaque op."""
    ops = library.namespace()
    special = _SPECIAL.get(op_id) or bridge_of(op_id)
    if special is not None:
        return special(ops, args, layout, backend)
    return getattr(ops, op_id).default(*args, backend)


def split(value: Any, absent: float | None = None) -> tuple[Any, Tensor | None]:
    """A sampling parameter as the schema has it: a number, and beside it the tensor of one value a row."""
    return (absent, value) if isinstance(value, Tensor) else (value, None)


def _attention(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    query, key, value, mask, dropout_p, is_causal, scale, window, softcap, slopes, return_lse = args
    if isinstance(mask, MASK_VALUES):
        mask = plain.written_out(mask, query, key, layout or "BHSD", window)
    flat: tuple[Any, ...] = (
        query,
        key,
        value,
        mask,
        _WORDS[parse_causal(is_causal)],
        scale,
        layout,
        window,
        softcap,
        slopes,
    )
    if dropout_p:
        return plain.attend(*flat, dropout_p=dropout_p, return_lse=return_lse)
    return (ops.attention_lse if return_lse else ops.attention).default(*flat, backend)


def _paged(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    query, key_cache, value_cache, batch, scale, window, softcap, slopes, return_lse, order = args
    op = ops.paged_attention_lse if return_lse else ops.paged_attention
    return op.default(
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_lens,
        batch.context_lens_host,
        batch.query_lens_host,
        scale,
        order,
        window,
        softcap,
        slopes,
        backend,
    )


def _rope(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    q, k, cos, sin, interleaved, order, position_ids, inplace = args
    rest = (cos, sin, interleaved, order, position_ids, backend)
    turned_q, turned_k = (ops.rope_query.default(q, *rest), None) if k is None else ops.rope.default(q, k, *rest)
    if not inplace:
        return turned_q, turned_k
    return q.copy_(turned_q), None if k is None else k.copy_(turned_k)


def _sampling(name: str) -> Callable[..., Any]:
    def run(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
        if args[-1] is not None:
            return getattr(importlib.import_module("layerzero.backends.reference.sampling"), name)(*args)
        flat = [args[0]]
        for value in args[1:-2]:
            flat.extend(split(value, 1 if name != "sample" else None))
        flat.extend(split(args[-2], 1.0))
        return getattr(ops, name).default(*flat, backend)

    return run


def _quantize(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> QuantizedTensor:
    x, scheme = args
    words = (scheme.fmt.value, scheme.granularity, scheme.block_size, not scheme.symmetric)
    return assembled(ops.quantize.default(x, *words, backend), scheme, x)


def _dequantize(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    qt, dtype = args
    return ops.dequantize.default(
        qt.data,
        qt.scale,
        qt.zero_point,
        qt.tensor_scale,
        qt.fmt.value,
        qt.granularity,
        qt.block_size,
        qt.shape,
        dtype or qt.dtype,
        backend,
    )


_SPECIAL: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "paged_attention": _paged,
    "rope": _rope,
    "sample_topk": _sampling("sample_topk"),
    "sample_topp": _sampling("sample_topp"),
    "sample": _sampling("sample"),
    "quantize": _quantize,
    "dequantize": _dequantize,
}

"""What torch.compile traces in place of each public op.

A twin has the signature of its op. While it is traced the kernel is selected (`written`): one that is plain torch is
written into the graph, where the compiler fuses across it, and stays as long as it would be selected again (`basis`);
any other is an opaque op, one node of the graph, whose kernel is selected when the graph runs. Where a gradient is
needed, the best kernel that is plain torch is written out, for AOTAutograd to differentiate. Under torch.export it is
always the opaque op (it has a gradient of its own), and so is a foreign kernel that the caller names by `backend`.

Inside a compiled region
* `lz.plan`, `lz.explain`, `lz.configure` and all else that is no op break the graph and run as ever; with
  `fullgraph=True` that is an error. So does sampling with a generator.
* a `PagedBatch` may come in from outside or be made inside by `lz.paged_batch(…, host_lens=…)`; without `host_lens`
  making it reads lengths from a tensor, which breaks the graph. `lz.paged_attention(q, k, v, block_tables,
  context_lens)` does not: it plans when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import bias as _bias  # not its names: this may run while that very module is imported

from layerzero.errors import InvalidInputError
from layerzero.model.describe import check_window_fits
from layerzero.model.folding import fold, is_folded, unfold
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.model.masks import MASK_VALUES, BlockMask, ChunkMask
from layerzero.model.quant import QuantizedTensor
from layerzero.torch_ops import calls, library, plain
from layerzero.torch_ops.bridge import split
from layerzero.torch_ops.more_quant import linear
from layerzero.torch_ops.more_varlen import varlen_attention
from layerzero.torch_ops.nested import nested_attention
from layerzero.torch_ops.opaque import differentiable, place, recorded
from layerzero.torch_ops.written import chosen, spelled, write, write_attention

__all__ = ["TWINS"]

_OPS = library.namespace()


def _causal(is_causal: bool | str) -> str:
    if is_causal is False or is_causal is None:
        return "none"
    if is_causal is True:
        return "top_left"
    if is_causal == "bottom_right":
        return "bottom_right"
    raise InvalidInputError(code="VALUE_INVALID", value=str(is_causal), limit="False, True or 'bottom_right'")


def _sides(window: int | Sequence[int] | None) -> list[int] | None:
    if window is None:
        return None
    if isinstance(window, int):
        if window < 0:
            raise InvalidInputError(code="WINDOW_INVALID", value=str(window))
        window = (window, 0)
    check_window_fits(window)
    return list(window)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | ChunkMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    *,
    layout: str = "BHSD",
    window: int | Sequence[int] | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.attention`. Dropout is always traced: its random numbers belong to the graph."""
    if query.is_nested or key.is_nested or value.is_nested:
        given = (query, key, value, attn_mask, dropout_p, is_causal, scale, window, softcap, alibi_slopes, return_lse)
        return nested_attention(varlen_attention, given, layout, backend)
    number: Any = scale
    if isinstance(number, Tensor):
        scale = number.item()
    if is_folded(query, key, value, layout):
        how, query, key, value, attn_mask = fold(query, key, value, attn_mask)
        found = attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, layout=layout, window=window, softcap=softcap,
            alibi_slopes=alibi_slopes, return_lse=return_lse, backend=backend,
        )  # fmt: skip
        return unfold(found, how)
    causal = _causal(is_causal)
    if isinstance(attn_mask, _bias.CausalBias):
        if causal != "none":
            raise InvalidInputError(code="MASK_WITH_CAUSAL", value=causal)
        causal = "bottom_right" if attn_mask.variant == _bias.CausalVariant.LOWER_RIGHT else "top_left"
        attn_mask = None
    elif isinstance(attn_mask, MASK_VALUES):
        attn_mask = plain.written_out(attn_mask, query, key, layout, window)
    sides = _sides(window)
    args = (query, key, value, attn_mask, causal, scale, layout, sides, softcap, alibi_slopes)
    grad = differentiable(backend, query, key, value, attn_mask, alibi_slopes)
    if dropout_p != 0.0 or (grad and return_lse):  # the fused kernels give no gradient through the log-sum-exp
        return plain.attend(*args, dropout_p=dropout_p, return_lse=return_lse)
    flag = calls.CAUSAL[causal]
    pair = None if sides is None else tuple(sides)
    canonical = (query, key, value, attn_mask, 0.0, flag, scale, pair, softcap, alibi_slopes, return_lse)
    own = chosen("attention", canonical, layout, backend, grad)
    if own == "plain":
        return plain.attend(*args, return_lse=return_lse)
    if own:
        return write_attention(own, canonical)
    if return_lse:
        return place(_OPS.attention_lse, *args, backend)
    call = "" if recorded(query, key, value, attn_mask, alibi_slopes) else spelled()
    if not call:
        return _OPS.attention.default(*args, backend)
    return _OPS.attention.call(query, key, value, attn_mask, alibi_slopes, call)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch | Tensor,
    context_lens: Tensor | None = None,
    *,
    scale: float | None = None,
    layout: str = "NHD",
    window: int | Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.paged_attention`."""
    parts: tuple[Any, ...]
    if isinstance(batch, PagedBatch):
        parts = (
            batch.block_tables,
            batch.context_lens,
            batch.query_lens,
            list(batch.context_lens_host),
            list(batch.query_lens_host),
        )
    else:
        parts = (batch, context_lens, None, None, None)
    args = (query, key_cache, value_cache, *parts, scale, layout, _sides(window), softcap, alibi_slopes)
    if parts[3] is not None and differentiable(backend, query, key_cache, value_cache, alibi_slopes):
        return plain.page(*args, return_lse=return_lse)
    return place(_OPS.paged_attention_lse if return_lse else _OPS.paged_attention, *args, backend)


def paged_batch(
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    query_lens: Tensor | None = None,
    host_lens: Sequence[int] | tuple[Sequence[int], Sequence[int]] | None = None,
    capture: bool = False,
) -> PagedBatch:
    """Twin of `lz.paged_batch`."""
    if host_lens is None:
        torch._dynamo.graph_break(msg="lz.paged_batch reads lengths from a tensor; give it host_lens to keep one graph")
    return make_paged_batch(block_tables, context_lens, query_lens, host_lens, capture)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, backend: str | None = None) -> Any:
    """Twin of `lz.rms_norm`."""
    args = (x, weight, eps)
    own = chosen("rms_norm", args, None, backend, differentiable(backend, x, weight))
    return write(own, plain.rms_norm, args, False) if own else place(_OPS.rms_norm, *args, backend)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, backend: str | None = None
) -> Any:
    """Twin of `lz.add_rms_norm`."""
    args = (x, residual, weight, eps)
    own = chosen("add_rms_norm", args, None, backend, differentiable(backend, x, residual, weight))
    return write(own, plain.add_rms_norm, args, False) if own else place(_OPS.add_rms_norm, *args, backend)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.layer_norm`."""
    args = (x, weight, bias, eps)
    own = chosen("layer_norm", args, None, backend, differentiable(backend, x, weight, bias))
    return write(own, plain.layer_norm, args, False) if own else place(_OPS.layer_norm, *args, backend)


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    layout: str = "BHSD",
    position_ids: Tensor | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.rope`. In place is a copy at the end, which the compiler turns back into a write."""
    if inplace and k is q:
        raise InvalidInputError(
            code="INPLACE_UNSUPPORTED", value="q and k share memory", limit="tensors that lie apart"
        )
    rest = (cos, sin, interleaved, layout, position_ids, backend)
    canonical = (q, k, cos, sin, interleaved, layout, position_ids, False)
    if chosen("rope", canonical, layout, backend, differentiable(backend, q, k, cos, sin)):
        turned_q, turned_k = plain.rope(q, k, *rest)
    elif k is None:
        turned_q, turned_k = place(_OPS.rope_query, q, *rest), None
    else:
        turned_q, turned_k = place(_OPS.rope, q, k, *rest)
    if not inplace:
        return turned_q, turned_k
    return q.copy_(turned_q), None if k is None else k.copy_(turned_k)


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Any:
    """Twin of `lz.alibi_slopes`."""
    return plain.slopes(num_heads, device)


def silu_and_mul(x: Tensor, *, backend: str | None = None) -> Any:
    """Twin of `lz.silu_and_mul`."""
    own = chosen("silu_and_mul", (x,), None, backend, differentiable(backend, x))
    return write(own, plain.silu_and_mul, (x,), False) if own else place(_OPS.silu_and_mul, x, backend)


def gelu_and_mul(x: Tensor, approximate: str = "none", *, backend: str | None = None) -> Any:
    """Twin of `lz.gelu_and_mul`."""
    args = (x, approximate)
    own = chosen("gelu_and_mul", args, None, backend, differentiable(backend, x))
    return write(own, plain.gelu_and_mul, args, False) if own else place(_OPS.gelu_and_mul, *args, backend)


def relu_and_mul(x: Tensor, *, backend: str | None = None) -> Any:
    """Twin of `lz.relu_and_mul`."""
    own = chosen("relu_and_mul", (x,), None, backend, differentiable(backend, x))
    return write(own, plain.relu_and_mul, (x,), False) if own else place(_OPS.relu_and_mul, x, backend)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, backend: str | None = None) -> Any:
    """Twin of `lz.embedding`."""
    args = (ids, weight, padding_idx)
    own = chosen("embedding", args, None, backend, differentiable(backend, weight))
    return write(own, plain.embedding, args, False) if own else place(_OPS.embedding, *args, backend)


def _no_generator(generator: torch.Generator | None) -> None:
    if generator is not None:
        torch._dynamo.graph_break(msg="LayerZero samples with a generator outside of the graph")


def sample_topk(
    logits: Tensor,
    k: int | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.sample_topk`."""
    _no_generator(generator)
    return place(_OPS.sample_topk, logits, *split(k, 1), *split(temperature, 1.0), backend)


def sample_topp(
    logits: Tensor,
    p: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.sample_topp`."""
    _no_generator(generator)
    return place(_OPS.sample_topp, logits, *split(p, 1.0), *split(temperature, 1.0), backend)


def sample(
    logits: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.sample`."""
    _no_generator(generator)
    return place(_OPS.sample, logits, *split(top_k), *split(top_p), *split(min_p), *split(temperature, 1.0), backend)


def quantize(
    x: Tensor,
    fmt: str,
    *,
    granularity: str = "tensor",
    block_size: int | None = None,
    symmetric: bool = True,
    backend: str | None = None,
) -> QuantizedTensor:
    """Twin of `lz.quantize`."""
    scheme = calls.scheme_of(fmt, granularity, block_size, not symmetric)
    words = (scheme.fmt.value, scheme.granularity, scheme.block_size, not symmetric)
    return calls.assembled(place(_OPS.quantize, x, *words, backend), scheme, x)


def dequantize(qt: QuantizedTensor, dtype: torch.dtype | None = None, *, backend: str | None = None) -> Any:
    """Twin of `lz.dequantize`."""
    parts = (qt.data, qt.scale, qt.zero_point, qt.tensor_scale)
    target = qt.dtype if dtype is None else dtype
    args = (*parts, qt.fmt.value, qt.granularity, qt.block_size, list(qt.shape), target, backend)
    return plain.dequantize(*args) if differentiable(backend, *parts[1:]) else place(_OPS.dequantize, *args)


TWINS: dict[str, Callable[..., Any]] = {
    twin.__name__: twin
    for twin in (
        attention, paged_attention, rms_norm, add_rms_norm, layer_norm, rope, silu_and_mul, gelu_and_mul, relu_and_mul,
        linear, embedding, sample_topk, sample_topp, sample, quantize, dequantize, paged_batch, alibi_slopes,
    )
}  # fmt: skip

"""The eager side of each opaque op: call the public function, then bring the result into the promised memory order.

Which kernel runs is known only at run time, while the strides of an op's result must be known when it is traced.
So each result has one order, and a kernel that leaves another one pays for a copy here. 4-D results (attention,
RoPE) keep the order of their input's two middle axes, as torch's own attention kernels do; all others are contiguous.

Arguments are those of the op's schema in `library`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.model.folding import is_folded
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.model.quant import QuantizedTensor, QuantScheme, format_traits
from layerzero.torch_ops.functions import functions

__all__ = ["CAUSAL", "assembled", "batch_of", "heads_inside", "scheme_of"]

# The causal words of the schema, as the public functions spell them.
CAUSAL: dict[str, bool | str] = {"none": False, "top_left": True, "bottom_right": "bottom_right"}


def heads_inside(like: Tensor) -> bool:
    """Whether a 4-D tensor has axis 1 inside axis 2 in memory (a transposed view)."""
    return like.dim() == 4 and like.stride(1) < like.stride(2)


def ordered(out: Tensor, like: Tensor) -> Tensor:
    """`out` in the memory order of `like`."""
    if heads_inside(like):
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()


def _pair(window: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if window is None else tuple(window)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    backend: str | None,
    *,
    return_lse: bool,
) -> Any:
    return functions.fastest("attention")(
        query,
        key,
        value,
        attn_mask,
        0.0,
        CAUSAL[causal],
        scale,
        layout=layout,
        window=_pair(window),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        backend=backend,
    )


def attention(query: Tensor, *rest: Any) -> Tensor:
    """Attention, the output alone."""
    return _in_order(_attention(query, *rest, return_lse=False), query, rest)


def attention_lse(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp."""
    out, lse = _attention(query, *rest, return_lse=True)
    return _in_order(out, query, rest), lse.contiguous()


def _in_order(out: Tensor, query: Tensor, rest: tuple[Any, ...]) -> Tensor:
    """As `fakes.attention` promises: leading axes that were folded have no order of their own."""
    key, value, layout = rest[0], rest[1], rest[5]
    return out.contiguous() if is_folded(query, key, value, layout) else ordered(out, query)


def batch_of(
    block_tables: Tensor,
    context_lens: Tensor,
    query_lens: Tensor | None,
    context_host: Sequence[int] | None,
    query_host: Sequence[int] | None,
) -> PagedBatch:
    """The batch those parts describe; without host lengths it is planned here, which waits for the device."""
    if context_host is None or query_host is None:
        return make_paged_batch(block_tables, context_lens, query_lens)
    return PagedBatch(block_tables, context_lens, query_lens, tuple(context_host), tuple(query_host))


def _paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_lens: Tensor | None,
    context_host: Sequence[int] | None,
    query_host: Sequence[int] | None,
    scale: float | None,
    layout: str,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    backend: str | None,
    *,
    return_lse: bool,
) -> Any:
    return functions.fastest("paged_attention")(
        query,
        key_cache,
        value_cache,
        batch_of(block_tables, context_lens, query_lens, context_host, query_host),
        scale=scale,
        layout=layout,
        window=_pair(window),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        backend=backend,
    )


def paged_attention(*args: Any) -> Tensor:
    """Paged attention, the output alone."""
    out: Tensor = _paged(*args, return_lse=False)
    return out.contiguous()


def paged_attention_lse(*args: Any) -> tuple[Tensor, Tensor]:
    """Paged attention with its log-sum-exp."""
    out, lse = _paged(*args, return_lse=True)
    return out.contiguous(), lse.contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, backend: str | None) -> Tensor:
    """RMSNorm."""
    out: Tensor = functions.fastest("rms_norm")(x, weight, eps, backend=backend)
    return out.contiguous()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    """RMSNorm of a residual stream, and the stream."""
    out, stream = functions.fastest("add_rms_norm")(x, residual, weight, eps, backend=backend)
    return out.contiguous(), stream.contiguous()


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None) -> Tensor:
    """LayerNorm."""
    out: Tensor = functions.fastest("layer_norm")(x, weight, bias, eps, backend=backend)
    return out.contiguous()


def _rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    backend: str | None,
) -> Any:
    return functions.fastest("rope")(
        q, k, cos, sin, interleaved=interleaved, layout=layout, position_ids=position_ids, backend=backend
    )


def rope(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Rotated q and k."""
    out_q, out_k = _rope(q, k, *rest)
    return ordered(out_q, q), ordered(out_k, k)


def rope_query(q: Tensor, *rest: Any) -> Tensor:
    """Rotated q, where there is no k."""
    return ordered(_rope(q, None, *rest)[0], q)


def silu_and_mul(x: Tensor, backend: str | None) -> Tensor:
    """SwiGLU's activation."""
    out: Tensor = functions.fastest("silu_and_mul")(x, backend=backend)
    return out.contiguous()


def gelu_and_mul(x: Tensor, approximate: str, backend: str | None) -> Tensor:
    """GeGLU's activation."""
    out: Tensor = functions.fastest("gelu_and_mul")(x, approximate, backend=backend)
    return out.contiguous()


def relu_and_mul(x: Tensor, backend: str | None) -> Tensor:
    """ReGLU's activation."""
    out: Tensor = functions.fastest("relu_and_mul")(x, backend=backend)
    return out.contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, backend: str | None) -> Tensor:
    """Linear layer with its activation."""
    out: Tensor = functions.fastest("linear")(x, weight, bias, activation, backend=backend)
    return out.contiguous()


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, backend: str | None) -> Tensor:
    """Embedding lookup."""
    out: Tensor = functions.fastest("embedding")(ids, weight, padding_idx, backend=backend)
    return out.contiguous()


def _either(number: float | None, rows: Tensor | None) -> Any:
    """A sampling parameter: the tensor of one value a row where there is one, else the number."""
    return number if rows is None else rows


def sample_topk(
    logits: Tensor,
    k: int,
    k_rows: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Top-k sampling from the device's default generator."""
    out: Tensor = functions.fastest("sample_topk")(
        logits, _either(k, k_rows), temperature=_either(temperature, temperature_rows), backend=backend
    )
    return out.contiguous()


def sample_topp(
    logits: Tensor,
    p: float,
    p_rows: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Top-p sampling from the device's default generator."""
    out: Tensor = functions.fastest("sample_topp")(
        logits, _either(p, p_rows), temperature=_either(temperature, temperature_rows), backend=backend
    )
    return out.contiguous()


def sample(
    logits: Tensor,
    top_k: int | None,
    top_k_rows: Tensor | None,
    top_p: float | None,
    top_p_rows: Tensor | None,
    min_p: float | None,
    min_p_rows: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Sampling with all filters from the device's default generator."""
    out: Tensor = functions.fastest("sample")(
        logits,
        top_k=_either(top_k, top_k_rows),
        top_p=_either(top_p, top_p_rows),
        min_p=_either(min_p, min_p_rows),
        temperature=_either(temperature, temperature_rows),
        backend=backend,
    )
    return out.contiguous()


def scheme_of(fmt: str, granularity: str, block_size: int | None, asymmetric: bool | None) -> QuantScheme:
    """The scheme that the schema's arguments name."""
    known, _ = format_traits(fmt)
    return QuantScheme(known, granularity, block_size, not asymmetric)


def assembled(parts: Sequence[Tensor], scheme: QuantScheme, like: Tensor) -> QuantizedTensor:
    """The quantized tensor of the parts that `quantize` gives, in their order, made from `like`."""
    zero_point = None if scheme.symmetric else parts[2]
    tensor_scale = parts[-1] if scheme.traits.tensor_scale else None
    shape, block = tuple(like.shape), scheme.block_size
    return QuantizedTensor(
        parts[0], parts[1], scheme.fmt, scheme.granularity, shape, like.dtype, block, zero_point, tensor_scale
    )


def quantize(
    x: Tensor, fmt: str, granularity: str, block_size: int | None, asymmetric: bool | None, backend: str | None
) -> list[Tensor]:
    """Codes, scales, the zero points of an asymmetric scheme, and for NVFP4 the tensor scale."""
    scheme = scheme_of(fmt, granularity, block_size, asymmetric)
    words = {"granularity": scheme.granularity, "block_size": scheme.block_size, "symmetric": scheme.symmetric}
    made: QuantizedTensor = functions.fastest("quantize")(x, fmt, backend=backend, **words)
    if (made.zero_point is None) != scheme.symmetric or made.block_size != scheme.block_size:
        # A traced graph was promised these very parts.
        made = functions.fastest("quantize")(x, fmt, backend="reference", **words)
    return [part.contiguous() for part in made.tensors()]


def dequantize(
    data: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    tensor_scale: Tensor | None,
    fmt: str,
    granularity: str,
    block_size: int | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    """The tensor that quantized parts stand for, in `dtype`."""
    known, _ = format_traits(fmt)
    made = QuantizedTensor(data, scale, known, granularity, tuple(shape), dtype, block_size, zero_point, tensor_scale)
    out: Tensor = functions.fastest("dequantize")(made, dtype, backend=backend)
    return out.contiguous()

"""Calls of norms, rotary embeddings, products, experts and conversions from their contexts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.enums import Layout
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor, QuantScheme
from layerzero.runtime.current import builtin_ops
from layerzero.tuning.inputs import Draw, Maker

__all__ = ["MAKERS"]

Made = tuple[tuple[Any, ...], Mapping[str, Any] | None]


def shaped(draw: Draw, rows: int, width: int) -> tuple[int, ...]:
    """A shape of the recorded rank: all rows on the axis before the last."""
    return (width,) if draw.ctx.rank == 1 else (*(1,) * (draw.ctx.rank - 2), rows, width)


def _other_dtype(draw: Draw) -> torch.dtype:
    """A weight's dtype beside x: the same, or float32 (float16 beside float32) where the call mixes them."""
    if "mixed_weight" not in draw.ctx.needs:
        return draw.dtype()
    return torch.float32 if draw.dtype() is not torch.float32 else torch.float16


def _norm(draw: Draw) -> Made:
    ctx = draw.ctx
    rows, hidden = draw.size("rows"), draw.size("hidden")
    x = draw.main(*shaped(draw, rows, hidden))
    weight = None
    if "no_weight" not in ctx.needs:
        weight = draw.leaf(draw.normal(hidden, dtype=_other_dtype(draw), scale=0.1).add_(1.0))
    if ctx.op in ("add_rms_norm", "gemma_add_rms_norm"):
        # Without a weight it is the residual that has another dtype.
        dtype = _other_dtype(draw) if weight is None else draw.dtype()
        return (x, draw.leaf(draw.normal(*x.shape, dtype=dtype)), weight, 1e-6), None
    if ctx.op == "layer_norm":
        bias = draw.leaf(draw.normal(hidden, dtype=_other_dtype(draw))) if "bias" in ctx.needs else None
        return (x, weight, bias, 1e-5), None
    return (x, weight, 1e-6), None


def _rotary(draw: Draw) -> Made:
    ctx, needs = draw.ctx, draw.ctx.needs
    batch, seq, dim, rotary = (draw.size(name) for name in ("batch", "seq_len_q", "head_dim", "rotary_dim"))
    bshd = ctx.layout is Layout.BSHD
    made: list[Tensor | None] = []
    for place, name in enumerate(("num_heads", "num_kv_heads")):
        if place and "no_key" in needs:
            made.append(None)
            continue
        heads = draw.size(name)
        shape = (batch, seq, heads, dim) if bshd else (batch, heads, seq, dim)
        found = draw.main(*shape, place=place, axis=1 if bshd else 2)
        # In place nothing may be written into a leaf that asks for a gradient.
        made.append(found * 1.0 if "inplace" in needs and found.requires_grad else found)
    dtype = draw.dtype()
    if "mixed_tables" in needs:
        dtype = torch.float32 if dtype is not torch.float32 else torch.float16
    angles = torch.arange(max(seq, 1), dtype=torch.float32, device=draw.device).unsqueeze(-1) / (
        10000.0 ** (torch.arange(rotary // 2, dtype=torch.float32, device=draw.device) * 2 / max(rotary, 1))
    )
    if "batched_tables" in needs:
        angles = torch.cat((angles, angles), -1).expand(batch, -1, -1).contiguous()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.arange(seq, device=draw.device) if "position_ids" in needs else None
    layout = (ctx.layout or Layout.BHSD).value
    first = (*made, cos, sin, "interleaved" in needs, layout, positions)
    if ctx.op == "xpos":
        return (*first, 512.0, 0.4, seq / 2), None
    return (*first, "inplace" in needs), None


def _gated(draw: Draw) -> Made:
    x = draw.main(*shaped(draw, draw.size("rows"), 2 * draw.size("hidden")))
    if draw.ctx.op == "gelu_and_mul":
        return (x, "tanh" if "gelu_tanh" in draw.ctx.needs else "none"), None
    return (x,), None


def _activation(draw: Draw) -> str | None:
    found = [word.removeprefix("activation_") for word in draw.ctx.needs if word.startswith("activation_")]
    return found[0] if found else None


def _linear(draw: Draw) -> Made:
    ctx = draw.ctx
    rows, n, k = draw.size("rows"), draw.size("n"), draw.size("k")
    x = draw.main(*shaped(draw, rows, k))
    weight: Any
    if ctx.quant_format is None:
        weight = draw.leaf(draw.normal(n, k, scale=k**-0.5))
    else:
        weight = _packed(draw, quantized(draw, (n, k)))
    bias = draw.leaf(draw.normal(n)) if "bias" in ctx.needs else None
    return (x, weight, bias, _activation(draw)), None


def quantized(draw: Draw, shape: tuple[int, ...]) -> QuantizedTensor:
    """A quantized tensor in the recorded format, from Gaussian numbers."""
    symmetric = "zero_point" not in draw.ctx.needs
    scheme = _scheme(draw, symmetric)
    dtype = getattr(torch, draw.ctx.dtype)
    reference = builtin_ops["quantize"].fallback_impl
    assert reference is not None
    with torch.no_grad():
        found: QuantizedTensor = reference(draw.normal(*shape, dtype=dtype, scale=max(shape[-1], 1) ** -0.5), scheme)
    return found


def _scheme(draw: Draw, symmetric: bool) -> QuantScheme:
    sizes = dict(draw.ctx.dims)
    fmt: Any = draw.ctx.quant_format
    return QuantScheme(fmt, draw.ctx.granularity or "tensor", sizes.get("block"), symmetric)


def _packed(draw: Draw, weight: QuantizedTensor) -> QuantizedTensor | PackedWeight:
    layout, act = draw.ctx.weight_layout, "dynamic" if "act_dynamic" in draw.ctx.needs else None
    if layout is None:
        return weight if act is None else PackedWeight(weight, act=act)
    from layerzero.runtime.state import state

    for kernel in state.world.registry.by_op("linear"):
        if kernel.weight_layout == layout and kernel.packer is not None:
            module, _, name = kernel.packer.partition(":")
            parts = getattr(importlib.import_module(module), name)(weight)
            return PackedWeight(weight, layout, parts, act)
    raise InvalidInputError(
        f"no kernel here packs a weight as {layout}", code="VALUE_INVALID", value=layout, limit="a known weight layout"
    )


def _mlp(draw: Draw) -> Made:
    needs = draw.ctx.needs
    rows, hidden, inner, out = (draw.size(name) for name in ("rows", "hidden", "inner", "n"))
    x = draw.main(*shaped(draw, rows, hidden))
    up_rows = 2 * inner if "gated" in needs else inner
    up = draw.leaf(draw.normal(up_rows, hidden, scale=hidden**-0.5))
    gate = draw.leaf(draw.normal(inner, hidden, scale=hidden**-0.5)) if "split_gate" in needs else None
    down = draw.leaf(draw.normal(out, inner, scale=inner**-0.5))
    biases: list[Tensor | None] = [None, None, None]
    if "bias" in needs:
        biases = [draw.leaf(draw.normal(up_rows)), None, draw.leaf(draw.normal(out))]
        if gate is not None:
            biases[1] = draw.leaf(draw.normal(inner))
    return (x, up, down, gate, _activation(draw) or "silu", *biases), None


def _embedding(draw: Draw) -> Made:
    tokens, vocab, hidden = draw.size("tokens"), draw.size("vocab"), draw.size("hidden")
    rank = draw.ctx.rank
    shape = () if rank == 0 else (*(1,) * (rank - 1), tokens)
    ids = draw.integers(vocab, *shape, dtype=draw.index())
    return (ids, draw.main(vocab, hidden), 0 if "padding_idx" in draw.ctx.needs else None), None


def _cast(draw: Draw) -> Made:
    """The context of a cast names where it comes from; where it goes is one dtype of the recorded kind."""
    needs, word = draw.ctx.needs, draw.ctx.dtype
    source = torch.float8_e4m3fn if "from_float8" in needs else getattr(torch, word)
    if "to_e4m3" in needs:
        target = torch.float8_e4m3fn
    elif "float_to_integer" in needs:
        target = torch.int32
    elif "one_rounding" in needs or source in (torch.float32, torch.float16):
        target = torch.bfloat16
    else:
        target = torch.float32
    elements, rank = draw.size("elements"), draw.ctx.rank
    rows, width = 1, elements
    if rank > 1 and not draw.ctx.strides.aligned and draw.ctx.strides.order == "given":
        size = source.itemsize  # rows whose starts are no multiples of 16 bytes
        width = next((w for w in (33, 7, 5, 3, 1) if elements % w == 0 and w * size % 16 and elements > w), elements)
        rows = elements // max(width, 1)
    shape = () if rank == 0 else (elements,) if rank == 1 else (*(1,) * (rank - 2), rows, width)
    from layerzero.tuning.inputs import lay

    x = lay(draw.normal(*shape, dtype=source, scale=10.0), draw.ctx.strides)
    return (draw.leaf(x), target, "saturate" in needs), None


def _quantize(draw: Draw) -> Made:
    symmetric = "zero_point" not in draw.ctx.needs
    scheme = _scheme(draw, symmetric)
    x = draw.main(*shaped(draw, draw.size("rows"), draw.size("hidden")))
    named = {
        "x": x,
        "fmt": scheme.fmt.value,
        "granularity": scheme.granularity,
        "block_size": scheme.block_size,
        "symmetric": symmetric,
    }
    return (x, scheme), named


def _dequantize(draw: Draw) -> Made:
    held = quantized(draw, shaped(draw, draw.size("rows"), draw.size("hidden")))
    return (held, getattr(torch, draw.ctx.dtype)), None


MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "gemma_rms_norm", "gemma_add_rms_norm"), _norm),
    **dict.fromkeys(("rope", "xpos"), _rotary),
    **dict.fromkeys(("silu_and_mul", "gelu_and_mul", "relu_and_mul"), _gated),
    "linear": _linear,
    "mlp": _mlp,
    "embedding": _embedding,
    "cast": _cast,
    "quantize": _quantize,
    "dequantize": _dequantize,
}

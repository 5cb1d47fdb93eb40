"""Calls of every op but attention from their contexts: rows of numbers, logits, probabilities and routed tokens."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.enums import Layout
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor, QuantScheme
from layerzero.runtime.current import builtin_ops
from layerzero.tuning.inputs import Draw, lay

Args = tuple[Any, ...]


def _other_dtype(draw: Draw) -> torch.dtype:
    """A weight's dtype beside x: the same, or float32 (float16 beside float32) where the call mixes them."""
    if "mixed_weight" not in draw.ctx.needs:
        return draw.dtype()
    return torch.float32 if draw.dtype() is not torch.float32 else torch.float16


def norm(draw: Draw) -> Args:
    """The norms, with and without residual, weight and bias."""
    ctx = draw.ctx
    hidden, eps = draw.size("hidden"), draw.choice("eps", 1e-5 if ctx.op == "layer_norm" else 1e-6)
    x = draw.main(*draw.rows_of("rows", "hidden"))
    weight = None
    if "no_weight" not in ctx.needs:
        weight = draw.leaf(draw.normal(hidden, dtype=_other_dtype(draw), scale=0.1).add_(1.0))
    if ctx.op in ("add_rms_norm", "gemma_add_rms_norm"):
        # Without a weight it is the residual that has another dtype.
        dtype = _other_dtype(draw) if weight is None else draw.dtype()
        return (x, draw.leaf(draw.normal(*x.shape, dtype=dtype, scale=draw.choice("magnitude", 1.0))), weight, eps)
    if ctx.op == "layer_norm":
        bias = draw.leaf(draw.normal(hidden, dtype=_other_dtype(draw))) if "bias" in ctx.needs else None
        return (x, weight, bias, eps)
    return (x, weight, eps)


def rotary(draw: Draw) -> Args:
    """RoPE and XPos."""
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
    dtype = draw.choice("tables", draw.dtype())
    if "mixed_tables" in needs:
        dtype = torch.float32 if dtype is not torch.float32 else torch.float16
    length = 2 * seq + 16 if "position_ids" in needs else max(seq, 1)
    rates = 10000.0 ** (torch.arange(rotary // 2, device=draw.device) * -2 / max(rotary, 1))
    angles = torch.arange(length, device=draw.device).unsqueeze(-1) * rates
    if "batched_tables" in needs:  # full width; neither the two of a pair nor two sequences need the same entries
        angles = angles.repeat_interleave(2, -1) if "interleaved" in needs else torch.cat((angles, angles), -1)
        apart = torch.linspace(1.0, 0.9, batch, device=draw.device)[:, None, None]
        angles = angles * torch.linspace(1.0, 1.1, angles.shape[-1], device=draw.device) * apart
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = draw.integers(length, batch, seq) if "position_ids" in needs else None
    layout = (ctx.layout or Layout.BHSD).value
    first = (*made, cos, sin, "interleaved" in needs, layout, positions)
    if ctx.op == "xpos":
        return (*first, 64.0 if seq <= 64 else 512.0, 0.4, seq / 2)  # so small that a few positions show the decay
    return (*first, "inplace" in needs)


def gated(draw: Draw) -> Args:
    """Gated activations."""
    *rows, width = draw.rows_of("rows", "hidden")
    x = draw.main(*rows, 2 * width)
    if draw.ctx.op == "gelu_and_mul":
        return (x, "tanh" if "gelu_tanh" in draw.ctx.needs else "none")
    return (x,)


def activation(draw: Draw, usual: str | None = None) -> str | None:
    """The activation that the call names or needs."""
    found = [word.removeprefix("activation_") for word in draw.ctx.needs if word.startswith("activation_")]
    chosen: str | None = draw.choice("activation", found[0] if found else usual)
    return chosen


def linear(draw: Draw) -> Args:
    """A product with a plain, quantized or packed weight."""
    ctx = draw.ctx
    n, k = draw.size("n"), draw.size("k")
    x = draw.main(*draw.rows_of("rows", "k"))
    weight: Any
    if ctx.quant_format is None:
        weight = draw.leaf(draw.normal(n, k, scale=k**-0.5))
    else:
        weight = _packed(draw, quantized(draw, (n, k)))
    bias = draw.leaf(draw.normal(n)) if "bias" in ctx.needs else None
    return (x, weight, bias, activation(draw))


def quantized(draw: Draw, shape: tuple[int, ...]) -> QuantizedTensor:
    """A quantized tensor in the recorded format, from Gaussian numbers."""
    dtype = getattr(torch, draw.ctx.dtype)
    reference = builtin_ops["quantize"].fallback_impl
    assert reference is not None
    with torch.no_grad():
        found: QuantizedTensor = reference(
            draw.normal(*shape, dtype=dtype, scale=max(shape[-1], 1) ** -0.5), _scheme(draw)
        )
    return found


def _scheme(draw: Draw) -> QuantScheme:
    fmt: Any = draw.ctx.quant_format
    symmetric = "zero_point" not in draw.ctx.needs
    return QuantScheme(fmt, draw.ctx.granularity or "tensor", draw.ctx.dim("block"), symmetric)


def _packed(draw: Draw, weight: QuantizedTensor) -> QuantizedTensor | PackedWeight:
    layout, act = draw.ctx.weight_layout, "dynamic" if "act_dynamic" in draw.ctx.needs else None
    if layout is None:
        return weight if act is None else PackedWeight(weight, act=act)
    from layerzero.runtime.state import state

    known = (item.packer for item in state.world.registry.by_op("linear") if item.weight_layout == layout)
    packer = draw.choice("packer") or next(filter(None, known), None)
    if packer is not None:
        return PackedWeight(weight, layout, resolve_name(packer)(weight), act)
    raise invalid("VALUE_INVALID", layout, "a known weight layout", f"no kernel here packs a weight as {layout}")


def mlp(draw: Draw) -> Args:
    """The feed-forward block."""
    needs = draw.ctx.needs
    hidden, inner, out = (draw.size(name) for name in ("hidden", "inner", "n"))
    x = draw.main(*draw.rows_of("rows", "hidden"))
    up_rows = inner if needs & {"ungated", "split_gate"} else 2 * inner
    up = draw.leaf(draw.normal(up_rows, hidden, scale=hidden**-0.5))
    gate = draw.leaf(draw.normal(inner, hidden, scale=hidden**-0.5)) if "split_gate" in needs else None
    down = draw.leaf(draw.normal(out, inner, scale=inner**-0.5))
    biases: list[Tensor | None] = [None, None, None]
    if "bias" in needs:
        biases = [draw.leaf(draw.normal(up_rows)), None, draw.leaf(draw.normal(out))]
        if gate is not None:
            biases[1] = draw.leaf(draw.normal(inner))
    return (x, up, down, gate, activation(draw, "silu"), *biases)


def embedding(draw: Draw) -> Args:
    """A look-up."""
    tokens, vocab, hidden = draw.size("tokens"), draw.size("vocab"), draw.size("hidden")
    rank = draw.ctx.rank
    shape = () if rank == 0 else (*(1,) * (rank - 1), tokens)
    ids = draw.integers(vocab, *shape, dtype=draw.index())
    return (ids, draw.main(vocab, hidden), 0 if "padding_idx" in draw.ctx.needs else None)


def cast(draw: Draw) -> Args:
    """The context of a cast names where it comes from; where it goes is one dtype of the recorded kind."""
    needs, word = draw.ctx.needs, draw.ctx.dtype
    source = draw.choice("source", torch.float8_e4m3fn if "from_float8" in needs else getattr(torch, word))
    if draw.choice("target"):
        target = draw.choice("target")
    elif draw.choice("format"):
        target = getattr(torch, draw.choice("format"))
    elif "to_e4m3" in needs:
        target = torch.float8_e4m3fn
    elif "float_to_integer" in needs:
        target = torch.int32
    elif "one_rounding" in needs or source in (torch.float32, torch.float16):
        target = torch.bfloat16
    else:
        target = torch.float32
    if draw.choice("numbers") == "special":
        return (_special(draw, source), target, "saturate" in needs)
    elements, rank = draw.size("elements"), draw.ctx.rank
    rows, width = 1, elements
    if rank > 1 and not draw.ctx.strides.aligned and draw.ctx.strides.order == "given":
        size = source.itemsize  # rows whose starts are no multiples of 16 bytes
        width = next((w for w in (33, 7, 5, 3, 1) if elements % w == 0 and w * size % 16 and elements > w), elements)
        rows = elements // max(width, 1)
    shape = () if rank == 0 else (elements,) if rank == 1 else (*(1,) * (rank - 2), rows, width)
    x = lay(draw.normal(*draw.choice("shape", shape), dtype=source, scale=10.0), draw.ctx.strides)
    return (draw.leaf(x), target, "saturate" in needs)


def _special(draw: Draw, dtype: torch.dtype) -> Tensor:
    """Small and large numbers, ties of the narrower dtypes, what is no number; integers with every bit in use."""
    if not dtype.is_floating_point:
        found = draw.integers(2**31, 256) - 2**30
        return torch.cat((found * 2**32 + found if dtype is torch.int64 else found, found >> 15, found >> 26)).to(dtype)
    steps = 1.0 + torch.arange(64, dtype=torch.float64) / 64.0
    if dtype is torch.float64:
        steps = torch.cat((steps, steps + 2.0**-40))  # so near a tie that float32 would make it one
    powers = 2.0 ** torch.arange(-24, 25, 3, dtype=torch.float64)
    special = torch.tensor([0.0, 447.0, 464.0, 465.0, 61440.0, 3e9, 1e20, 1e38, torch.nan, torch.inf])
    magnitudes = torch.cat(((steps[:, None] * powers).flatten(), special.double()))
    return torch.cat((magnitudes, -magnitudes)).to(dtype).to(draw.device)


def quantize(draw: Draw) -> Args:
    """Numbers and a scheme."""
    return draw.main(*draw.rows_of("rows", "hidden")), _scheme(draw)


def dequantize(draw: Draw) -> Args:
    """Codes of the recorded format."""
    held = quantized(draw, draw.rows_of("rows", "hidden"))
    return (held, getattr(torch, draw.ctx.dtype))


TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05


class _Parameters:
    """Numbers, or tensors of one number a row where the context has such; how many are floating it says by dtypes."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        needs = draw.ctx.needs
        self._mixed = "mixed_weight" in needs
        self._floats = len(draw.ctx.dtypes) - 1 + self._mixed if "tensor_params" in needs else 0
        self._whole = "tensor_params" in needs and self._floats == 0

    def number(self, name: str, usual: float) -> float | Tensor:
        value = self._draw.choice(name, usual)
        if self._draw.choice("by_row") or isinstance(value, list):
            return self._rows(value, torch.float32)
        if self._floats == 0:
            return float(value)
        self._floats -= 1
        dtype = self._draw.dtype()
        if self._mixed:
            dtype = torch.float32 if dtype is not torch.float32 else torch.float64
        return self._rows(value, dtype)

    def whole(self, name: str, usual: int) -> int | Tensor:
        value = self._draw.choice(name, usual)
        if self._whole or self._draw.choice("by_row") or isinstance(value, list):
            return self._rows(value, torch.int64).clamp(max=self._draw.size("vocab"))
        return min(int(value), self._draw.size("vocab"))

    def _rows(self, value: Any, dtype: torch.dtype) -> Tensor:
        """One value for each row, or the same for all."""
        return torch.tensor(value, dtype=dtype, device=self._draw.device).expand(self._draw.size("batch")).contiguous()


def _logits(draw: Draw) -> Tensor:
    """Gaussian, or rows of distinct numbers that every dtype holds, all with the same distribution."""
    batch, vocab = draw.size("batch"), draw.size("vocab")
    if draw.choice("logits") != "distinct":
        return draw.main(batch, vocab)
    steps = draw.uniform(vocab).argsort() - vocab // 2
    return (steps / 8 + torch.arange(batch, device=draw.device)[:, None] % 6 / 4).to(draw.dtype())


def sampling(draw: Draw) -> Args:
    """Logits and filters."""
    op, needs = draw.ctx.op, draw.ctx.needs
    logits, given = _logits(draw), _Parameters(draw)
    if op == "sample_topk":
        return (logits, given.whole("top_k", TOP_K), given.number("temperature", 1.0), draw.generator())
    if op == "sample_topp":
        return (logits, given.number("top_p", TOP_P), given.number("temperature", 1.0), draw.generator())
    top_k = given.whole("top_k", TOP_K) if "sample_top_k" in needs else None
    top_p = given.number("top_p", TOP_P) if "sample_top_p" in needs else None
    min_p = given.number("min_p", MIN_P) if "sample_min_p" in needs else None
    filters = (logits, top_k, top_p, min_p, given.number("temperature", 1.0))
    return filters if op == "sampling_probs" else (*filters, draw.generator())


def cross_entropy(draw: Draw) -> Args:
    """Logits and labels."""
    needs, rank = draw.ctx.needs, draw.ctx.rank
    rows, vocab = draw.size("rows"), draw.size("vocab")
    shape = () if rank == 1 else (*(1,) * (rank - 2), rows)
    logits, labels = draw.main(*shape, vocab), draw.integers(vocab, *shape, dtype=draw.index())
    share = {"none": 0.0, "some": 0.4, "all": 1.0}[draw.choice("ignored", "none")]
    if share:
        labels = labels.masked_fill(draw.uniform(*shape) < share, -100)
    usual = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}
    options = (draw.choice(name, value) if name in needs else None for name, value in usual.items())
    return (logits, labels, -100, *options, draw.choice("reduction", "mean"), "lse" in needs)


def gate(draw: Draw) -> Args:
    """Router logits."""
    needs = draw.ctx.needs
    experts, k, groups = draw.size("experts"), draw.size("top_k"), draw.size("groups")
    logits = draw.main(draw.size("tokens"), experts)
    if draw.choice("ties"):
        logits = (logits * 1.5).round()
    best = min(groups, max(1, -(-k * groups // experts), groups // 2))
    scoring = "sigmoid" if "scoring_sigmoid" in needs else "softmax"
    bias = draw.normal(experts, dtype=torch.float32) if "choice_bias" in needs else None
    choice = (k, groups, draw.choice("groups_kept", best))
    return (logits, choice, scoring, True, bias, draw.choice("routed_scale", 1.0))


def grouped_gemm(draw: Draw) -> Args:
    """Rows in groups, one weight each."""
    tokens, experts, n, k = (draw.size(name) for name in ("tokens", "experts", "n", "k"))
    even = [tokens // experts + (place < tokens % experts) for place in range(experts)]
    each = draw.choice("group_sizes", even)
    x = draw.main(tokens, k)
    weights = draw.main(len(each), n, k, place=1, odd=False)
    sizes = torch.tensor(each, dtype=draw.index(), device="cpu").to(draw.device)
    return (x, weights, sizes)


def moe(draw: Draw) -> Args:
    """Routed tokens and their experts."""
    needs = draw.ctx.needs
    tokens, experts, k, hidden, inner = (draw.size(name) for name in ("tokens", "experts", "top_k", "hidden", "inner"))
    rows = inner if "ungated" in needs else 2 * inner
    x = draw.main(tokens, hidden)
    shapes = (experts, rows, hidden), (experts, hidden, inner)
    first, second = (
        draw.leaf(draw.normal(*shape, dtype=draw.dtype(place), scale=shape[-1] ** -0.5))
        if draw.ctx.quant_format is None
        else quantized(draw, shape)
        for place, shape in enumerate(shapes, start=1)
    )
    kind = draw.choice("ids", "drawn")
    among = 4 * experts if kind == "foreign" else experts  # those of other ranks included
    ids = draw.uniform(tokens, among).topk(min(k, among), dim=-1).indices
    if kind == "one":
        ids = torch.full_like(ids, 2)
    elif kind == "foreign":  # and some that are no expert's
        ids[0], ids[1, 0] = -1, 10**6
    elif k > experts:  # more than there are: the last one counts again
        ids = torch.cat((ids, ids[:, -1:].expand(-1, k - experts)), -1)
    shares = draw.uniform(tokens, k).add_(0.1)
    shares = shares / shares.sum(-1, keepdim=True)
    ids = ids.to(draw.index()).contiguous()
    biases: tuple[Tensor | None, ...] = (None, None)
    if "expert_bias" in needs:
        biases = tuple(
            draw.leaf(draw.normal(experts, width, dtype=draw.dtype(1 if draw.ctx.quant_format else 3)))
            for width in (rows, hidden)
        )
    word = "swigluoai" if "activation_swigluoai" in needs else activation(draw, "silu")
    limit = 0.5 if "clamped" in needs else None  # low enough that many numbers meet it
    offset = draw.choice("expert_offset", 0)
    return (x, first, second, shares, ids, word, offset, *biases, 1.702, limit, "interleaved" in needs)

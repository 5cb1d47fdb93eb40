"""Drawn calls of every public op that computes on tensors, each beside the plain torch formula of what it means.

The formulas are the fuzzers' own: short, without blocks or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from tests.property.drawn import MANY, Call, Dice

__all__ = ["CASES", "TOKENS", "calls"]


# -- formulas ------------------------------------------------------------------------------------------
def _rms(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return out if weight is None else out * (weight + offset)


def _activated(x: Tensor, word: str | None) -> Tensor:
    if word == "gelu":
        return x * torch.special.erfc(-x / math.sqrt(2.0)) / 2
    if word == "gelu_tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * torch.sigmoid(x) if word == "silu" else x.clamp_min(0) if word == "relu" else x


def _gated(x: Tensor, word: str) -> Tensor:
    gate, up = x.tensor_split(2, -1)
    return _activated(gate, word) * up


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, H, S, D] turned by one angle a pair, tables [S, R / 2]."""
    half = cos.shape[-1]
    if interleaved:
        one, two = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        turned = torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)
    else:
        one, two = x[..., :half], x[..., half : 2 * half]
        turned = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
    return torch.cat((turned, x[..., 2 * half :]), -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None, **more: Any) -> Tensor:
    """Attention of [.., Hq, Sq, D] over [.., Hkv, Sk, D] where `seen` [Sq, Sk]; rows that see nothing give zeros."""
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    cap, bias = more.get("softcap"), more.get("bias")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if bias is None else scores + bias
    top, sinks = scores.amax(-1, keepdim=True).detach(), more.get("sinks")
    weights = torch.exp(scores - top) * seen
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks[:, None, None] - top)
    return weights @ v / total.clamp_min(1e-300)


def _seen(rows: int, cols: int, causal: bool | str = False, window: Sequence[int] | None = None) -> Tensor:
    ahead = torch.arange(cols) - torch.arange(rows)[:, None] - (0 if causal is True else cols - rows)
    left, right = (-1, -1) if window is None else window
    seen = torch.ones(rows, cols, dtype=torch.bool)
    seen &= (ahead <= 0) | (not causal)
    seen &= (ahead >= -left) | (left < 0)
    return seen & ((ahead <= right) | (right < 0))


# -- calls ---------------------------------------------------------------------------------------------
def _rms_norm(dice: Dice) -> Call:
    width = dice.choice([1, 3, 8, 17, 64])
    x, eps = dice.tensor(*dice.lead(), width), dice.choice([1e-6, 1e-5])
    if dice.random() < 0.3:
        return Call("rms_norm", (x,), lambda x: lz.rms_norm(x, None, eps), lambda x: _rms(x, None, eps))
    weight = dice.tensor(width)
    return Call("rms_norm", (x, weight), lambda x, w: lz.rms_norm(x, w, eps), lambda x, w: _rms(x, w, eps))


def _gemma_rms_norm(dice: Dice) -> Call:
    x, weight = dice.tensor(*dice.lead(), 24), dice.tensor(24)
    return Call(
        "gemma_rms_norm", (x, weight), lambda x, w: lz.gemma_rms_norm(x, w, 1e-6), lambda x, w: _rms(x, w, 1e-6, 1.0)
    )


def _add_rms_norm(dice: Dice, name: str = "add_rms_norm", offset: float = 0.0) -> Call:
    shape = (*dice.lead(), dice.choice([3, 16, 33]))
    x, residual, weight = dice.tensor(*shape), dice.tensor(*shape), dice.tensor(shape[-1])

    def formula(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _rms(x + r, w, 1e-6, offset), x + r

    return Call(name, (x, residual, weight), lambda *t: getattr(lz, name)(*t, 1e-6), formula)


def _gemma_add_rms_norm(dice: Dice) -> Call:
    return _add_rms_norm(dice, "gemma_add_rms_norm", 1.0)


def _layer_norm(dice: Dice) -> Call:
    width = dice.choice([3, 8, 33])
    x, weight, bias = dice.tensor(*dice.lead(), width), dice.tensor(width), dice.tensor(width)

    def formula(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        middle = x - x.mean(-1, keepdim=True)
        return middle / (middle.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b

    return Call("layer_norm", (x, weight, bias), lambda x, w, b: lz.layer_norm(x, w, b), formula)


def _and_mul(name: str) -> Callable[[Dice], Call]:
    def drawn(dice: Dice) -> Call:
        x = dice.tensor(*dice.lead(), 2 * dice.choice([1, 4, 9, 33]), spread=2.0)
        word = name.removesuffix("_and_mul")
        if name == "gelu_and_mul" and dice.random() < 0.5:
            return Call(name, (x,), lambda x: lz.gelu_and_mul(x, "tanh"), lambda x: _gated(x, "gelu_tanh"))
        return Call(name, (x,), getattr(lz, name), lambda x: _gated(x, word))

    return drawn


def _angles(dice: Dice, seq: int, half: int) -> tuple[Tensor, Tensor]:
    angle = dice.tensor(seq, half).double()
    return angle.cos().to(dice.dtype), angle.sin().to(dice.dtype)


def _rope(dice: Dice) -> Call:
    batch, heads, seq, half = dice.randint(2, 3), dice.choice([2, 4]), dice.randint(2, 6), dice.choice([1, 4, 8])
    dim, interleaved = 2 * half + dice.choice([0, 2]), dice.random() < 0.5
    q, k = dice.tensor(batch, heads, seq, dim), dice.tensor(batch, heads // 2, seq, dim)
    tables = _angles(dice, seq, half)

    def formula(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return _rotated(q, c, s, interleaved), _rotated(k, c, s, interleaved)

    def run(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Any:
        return lz.rope(q, k, c, s, interleaved=interleaved)

    return Call("rope", (q, k, *tables), run, formula, {"interleaved": interleaved})


def _xpos(dice: Dice) -> Call:
    seq, half = dice.randint(2, 5), dice.choice([2, 4])
    q, k = dice.tensor(2, 2, seq, 2 * half), dice.tensor(2, 1, seq, 2 * half)

    def formula(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        zeta = (torch.arange(0, 2 * half, 2, dtype=q.dtype) / (2 * half) + 0.4) / 1.4
        decay = zeta ** (torch.arange(seq, dtype=q.dtype)[:, None] / 512.0)
        return _rotated(q, c * decay, s * decay, False), _rotated(k, c / decay, s / decay, False)

    return Call("xpos", (q, k, *_angles(dice, seq, half)), lambda q, k, c, s: lz.xpos(q, k, c, s), formula)


def _linear(dice: Dice) -> Call:
    width, rows = dice.choice([1, 8, 33]), dice.choice([1, 5, 16])
    x, weight, bias = dice.tensor(*dice.lead(), width), dice.tensor(rows, width, spread=0.3), dice.tensor(rows)
    word = dice.choice([None, "silu", "gelu", "gelu_tanh"])
    return Call(
        "linear",
        (x, weight, bias),
        lambda x, w, b: lz.linear(x, w, b, word),
        lambda x, w, b: _activated(x @ w.mT + b, word),
        {"activation": word},
    )


def _mlp(dice: Dice) -> Call:
    x, up, gate, down = (
        dice.tensor(*dice.lead(2), 8), *(dice.tensor(6, 8, spread=0.4) for _ in range(2)), dice.tensor(8, 6)
    )  # fmt: skip
    word = dice.choice(["silu", "gelu", "gelu_tanh"])

    def formula(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
        return (_activated(x @ gate.mT, word) * (x @ up.mT)) @ down.mT

    return Call("mlp", (x, up, gate, down), lambda x, u, g, d: lz.mlp(x, u, d, g, word), formula, {"activation": word})


def _moe(dice: Dice) -> Call:
    tokens, experts, width, inner = dice.randint(2, 6), dice.randint(2, 4), 8, 4
    x, first = dice.tensor(tokens, width), dice.tensor(experts, 2 * inner, width, spread=0.4)
    second, share = dice.tensor(experts, width, inner, spread=0.4), dice.tensor(tokens, 2).abs()
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:2] for i in range(tokens)])

    def formula(x: Tensor, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        each = torch.stack([_gated(x @ one.mT, "silu") @ two.mT for one, two in zip(first, second, strict=True)], 1)
        return (each.gather(1, ids[..., None].expand(-1, -1, width)) * share[..., None]).sum(1)

    return Call("moe", (x, first, second, share), lambda x, f, s, w: lz.moe(x, f, s, w, ids), formula)


def _grouped_gemm(dice: Dice) -> Call:
    sizes = [dice.randint(0, 3) for _ in range(3)]
    x, weights = dice.tensor(sum(sizes) + dice.randint(1, 2), 8), dice.tensor(3, 5, 8)
    counts = torch.tensor(sizes)

    def formula(x: Tensor, weights: Tensor) -> Tensor:
        parts = x.split([*sizes, x.shape[0] - sum(sizes)])
        return torch.cat([*(part @ w.mT for part, w in zip(parts, weights, strict=False)), parts[-1][:, :5] * 0])

    return Call("grouped_gemm", (x, weights), lambda x, w: lz.grouped_gemm(x, w, counts), formula, {"sizes": sizes})


def _topk_gate(dice: Dice) -> Call:
    tokens, experts, k = dice.randint(2, 6), dice.choice([4, 7]), dice.randint(1, 3)
    # far enough apart that no rounding changes their order
    rank = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(tokens)])
    logits = rank.to(dice.dtype) / 4 + dice.tensor(tokens, experts, spread=0.01)
    scoring, again = dice.choice(["softmax", "sigmoid"]), dice.random() < 0.5

    def formula(logits: Tensor) -> Tensor:
        scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
        best = scores.gather(-1, rank.argsort(-1, descending=True)[:, :k])
        return best / best.sum(-1, keepdim=True) if again else best

    def run(logits: Tensor) -> Tensor:
        weights: Tensor = lz.topk_gate(logits, k, scoring=scoring, renormalize=again)[0]
        return weights

    return Call("topk_gate", (logits,), run, formula, {"k": k, "scoring": scoring})


def _attention(dice: Dice) -> Call:
    batch, heads, dim = dice.randint(1, 2), dice.choice([1, 2]), dice.choice([1, 4, 8])
    rows, cols = dice.choice([1, 3, 6]), dice.choice([6, 9])
    q, k = dice.tensor(batch, 2 * heads, rows, dim), dice.tensor(batch, heads, cols, dim)
    v = dice.tensor(batch, heads, cols, dice.choice([dim, 5]))
    words: dict[str, Any] = {"is_causal": dice.choice([False, True, "bottom_right"])}
    if dice.random() < 0.4:
        words["window"] = dice.choice([(2, 0), (3, 1), (-1, 2), (2**63 - 1, 0), (1, 2**62)])
    words |= dice.choice([{}, {"scale": 0.3}, {"softcap": 5.0}])
    seen = _seen(rows, cols, words["is_causal"], words.get("window"))
    extra = {name: words[name] for name in ("scale", "softcap") if name in words}
    tensors: tuple[Tensor, ...] = (q, k, v)
    if not words["is_causal"] and dice.random() < 0.4:
        tensors = (*tensors, dice.tensor(batch, 1, rows, cols))

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Any:
        return lz.attention(q, k, v, bias, **words)

    def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return _attend(q, k, v, seen, bias=bias, **extra)

    return Call("attention", tensors, run, formula, words)


def _packed(dice: Dice) -> tuple[list[int], list[int], Tensor, Tensor]:
    rows = [dice.randint(1, 3) for _ in range(dice.randint(1, 3))]
    cols = [size + dice.randint(0, 4) for size in rows]
    ends = (torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32) for sizes in (rows, cols))
    return rows, cols, *ends


def _each(
    q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int], cols: Sequence[int], causal: bool | str,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each packed sequence by itself: [tokens, H, D] cut into these lengths."""
    parts = zip(q.split(list(rows)), k.split(list(cols)), v.split(list(cols)), strict=True)
    found = [
        _attend(*(t.transpose(0, 1) for t in part), _seen(len(part[0]), len(part[1]), causal), sinks=sinks)
        for part in parts
    ]
    return torch.cat([item.transpose(0, 1) for item in found])


def _sinks(dice: Dice) -> tuple[Tensor, ...]:
    """The sinks of four heads, or none."""
    return (dice.tensor(4),) if dice.random() < 0.5 else ()


def _varlen_attention(dice: Dice) -> Call:
    rows, cols, ends_q, ends_k = _packed(dice)
    q, k, v = dice.tensor(sum(rows), 4, 8), dice.tensor(sum(cols), 2, 8), dice.tensor(sum(cols), 2, 8)
    causal = dice.choice([False, "bottom_right"])
    return Call(
        "varlen_attention",
        (q, k, v, *_sinks(dice)),
        lambda q, k, v, sinks=None: lz.varlen_attention(q, k, v, ends_q, ends_k, is_causal=causal, sinks=sinks),
        lambda q, k, v, sinks=None: _each(q, k, v, rows, cols, causal, sinks),
        {"rows": rows, "cols": cols, "is_causal": causal},
    )


def _grouped_attention(dice: Dice) -> Call:
    rows, cols, ends_q, ends_k = _packed(dice)
    q, k, v = dice.tensor(sum(rows), 4, 8), dice.tensor(sum(cols), 2, 8), dice.tensor(sum(cols), 2, 8)
    batch = lz.grouped_batch(ends_q, ends_k, torch.tensor([cols]))
    return Call(
        "grouped_attention",
        (q, k, v),
        lambda q, k, v: lz.grouped_attention(q, k, v, batch),
        lambda q, k, v: _each(q, k, v, rows, cols, "bottom_right"),
        {"rows": rows, "cols": cols},
    )


def _pages(dice: Dice, lengths: Sequence[int], page: int) -> tuple[Tensor, int]:
    """A block table whose pages lie anywhere, and how many there are."""
    each = [-(-length // page) for length in lengths]
    order = dice.sample(range(sum(each) + 1), sum(each))
    table = torch.zeros(len(lengths), max(each), dtype=torch.int64)
    for row, count in enumerate(each):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    return table, sum(each) + 1


def _unpaged(cache: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
    rows = zip(table, lengths, strict=True)
    return torch.cat([cache[row.long()].flatten(0, 1)[:length] for row, length in rows])


def _paged_attention(dice: Dice) -> Call:
    rows, cols, _, _ = _packed(dice)
    table, pages = _pages(dice, cols, 4)
    q, k, v = dice.tensor(sum(rows), 4, 8), dice.tensor(pages, 4, 2, 8), dice.tensor(pages, 4, 2, 8)
    batch = lz.paged_batch(table, torch.tensor(cols), query_lens=torch.tensor(rows))
    words: dict[str, Any] = {"is_causal": dice.random() < 0.7}
    if dice.random() < 0.3:
        words |= {"k_scale": 0.5, "v_scale": 1.75}
    factors = [words.get(name, 1.0) for name in ("k_scale", "v_scale")]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
        return lz.paged_attention(q, k, v, batch, sinks=sinks, **words)

    def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        keys, values = (_unpaged(t, table, cols) * factor for t, factor in zip((k, v), factors, strict=True))
        return _each(q, keys, values, rows, cols, "bottom_right" if words["is_causal"] else False, sinks)

    return Call("paged_attention", (q, k, v, *_sinks(dice)), run, formula, words)


def _mla_paged_attention(dice: Dice) -> Call:
    rows, cols, _, _ = _packed(dice)
    table, pages = _pages(dice, cols, 4)
    q, turned = dice.tensor(sum(rows), 2, 8), dice.tensor(sum(rows), 2, 4)
    cache, keys = dice.tensor(pages, 4, 8), dice.tensor(pages, 4, 4)
    batch = lz.paged_batch(table, torch.tensor(cols), query_lens=torch.tensor(rows))

    def formula(q: Tensor, turned: Tensor, cache: Tensor, keys: Tensor) -> Tensor:
        latent = _unpaged(cache, table, cols)[:, None]
        key = torch.cat((latent, _unpaged(keys, table, cols)[:, None]), -1)
        whole = torch.cat((q, turned), -1) * (0.3 * math.sqrt(12))
        return _each(whole, key, latent, rows, cols, "bottom_right")

    return Call(
        "mla_paged_attention",
        (q, turned, cache, keys),
        lambda q, t, c, k: lz.mla_paged_attention(q, t, c, k, batch, scale=0.3),
        formula,
    )


def _embedding(dice: Dice) -> Call:
    weight, ids = dice.tensor(7, dice.choice([1, 6])), dice.ids(7, *dice.lead())
    return Call("embedding", (weight,), lambda w: lz.embedding(ids, w), lambda w: w[ids])


def _cast(dice: Dice) -> Call:
    x, to = dice.tensor(*dice.lead(), 8), dice.choice([torch.float32, torch.bfloat16, torch.float16])
    to = to if dice.dtype is torch.float32 else torch.float32
    return Call("cast", (x,), lambda x: lz.cast(x, to), lambda x: x.to(to).to(x.dtype), {"to": to})


def _cross_entropy(dice: Dice) -> Call:
    rows, classes = dice.randint(2, 5), dice.choice([3, 11])
    logits, labels = dice.tensor(rows, classes), dice.ids(classes, rows)
    labels[0] = dice.choice([-100, int(labels[0])])
    smooth = dice.choice([0.0, 0.1])
    return Call(
        "cross_entropy",
        (logits,),
        lambda x: lz.cross_entropy(x, labels, label_smoothing=smooth),
        lambda x: F.cross_entropy(x, labels, label_smoothing=smooth),
        {"label_smoothing": smooth},
    )


def _linear_cross_entropy(dice: Dice) -> Call:
    rows, hidden, classes = dice.randint(2, 5), 8, dice.choice([3, 11])
    x, weight, labels = dice.tensor(rows, hidden), dice.tensor(classes, hidden), dice.ids(classes, rows)
    labels[0] = dice.choice([-100, int(labels[0])])
    smooth = dice.choice([None, 0.1])
    return Call(
        "linear_cross_entropy",
        (x, weight),
        lambda x, weight: lz.ops.linear_cross_entropy(x, weight, labels, label_smoothing=smooth),
        lambda x, weight: F.cross_entropy(x @ weight.T, labels, label_smoothing=smooth or 0.0),
        {"label_smoothing": smooth},
    )


def _sampling_probs(dice: Dice) -> Call:
    rows, tokens, k, heat = dice.randint(2, 4), 11, dice.randint(1, 5), dice.choice([0.7, 1.0, 1.5])
    order = torch.stack([torch.randperm(tokens, generator=torch.Generator().manual_seed(i)) for i in range(rows)])
    logits = order.to(dice.dtype) / 4 + dice.tensor(rows, tokens, spread=0.01)

    def formula(logits: Tensor) -> Tensor:
        return torch.softmax((logits / heat).masked_fill(order < tokens - k, -math.inf), -1)

    return Call(
        "sampling_probs", (logits,), lambda x: lz.sampling_probs(x, top_k=k, temperature=heat), formula, {"top_k": k}
    )


def _sample(name: str, words: dict[str, Any]) -> Callable[[Dice], Call]:
    """Draws that can only have one outcome: the likeliest token."""

    def drawn(dice: Dice) -> Call:
        logits = dice.tensor(dice.randint(2, 4), 9, spread=4.0)
        return Call(name, (logits,), lambda x: getattr(lz, name)(x, **words), lambda x: x.argmax(-1))

    return drawn


def _speculative(name: str) -> Callable[[Dice], Call]:
    """Greedy verification of a chain of drafts, the first of which are the target's own choice."""

    def drawn(dice: Dice) -> Call:
        rows, drafts = dice.randint(2, 3), 3
        target = torch.softmax(dice.tensor(rows, drafts + 1, 7, spread=4.0).float(), -1)
        best = target.argmax(-1)
        ids = best[:, :drafts].clone()
        ids[0, dice.randrange(drafts)] += 1
        ids %= 7
        right = (ids == best[:, :drafts]).cumprod(-1).sum(-1)

        def run(target: Tensor) -> Tensor:
            more = (torch.arange(drafts) - 1,) if name == "sample_tree" else ()
            found: Tensor = getattr(lz, name)(ids, None, target, *more, greedy=True)[1]
            return found.to(torch.int64)

        return Call(name, (target,), run, lambda target: right.to(torch.int64))

    return drawn


def _dequantize(dice: Dice) -> Call:
    x, fmt = dice.tensor(dice.randint(2, 4), 16), dice.choice(["int8", "int4", "fp8_e4m3"])
    codes = lz.quantize(x, fmt, granularity="channel")
    # the formula is what quantizing means: no further from x than half a step of its row
    step = x.double().abs().amax(-1, keepdim=True) / {"int8": 127, "int4": 7, "fp8_e4m3": 8}[fmt]

    def run(x: Tensor) -> Tensor:
        back = lz.dequantize(lz.quantize(x, fmt, granularity="channel"), torch.float32)
        assert back.shape == codes.shape
        return ((back.double() - x.double()).abs() <= step * 0.51).all(-1).to(torch.int64)

    return Call("quantize", (x,), run, lambda x: torch.ones(x.shape[0], dtype=torch.int64), {"fmt": fmt})


CASES: dict[str, Callable[[Dice], Call]] = {
    "rms_norm": _rms_norm,
    "gemma_rms_norm": _gemma_rms_norm,
    "add_rms_norm": _add_rms_norm,
    "gemma_add_rms_norm": _gemma_add_rms_norm,
    "layer_norm": _layer_norm,
    "silu_and_mul": _and_mul("silu_and_mul"),
    "gelu_and_mul": _and_mul("gelu_and_mul"),
    "relu_and_mul": _and_mul("relu_and_mul"),
    "rope": _rope,
    "xpos": _xpos,
    "linear": _linear,
    "mlp": _mlp,
    "moe": _moe,
    "grouped_gemm": _grouped_gemm,
    "topk_gate": _topk_gate,
    "attention": _attention,
    "varlen_attention": _varlen_attention,
    "grouped_attention": _grouped_attention,
    "paged_attention": _paged_attention,
    "mla_paged_attention": _mla_paged_attention,
    "embedding": _embedding,
    "cast": _cast,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "sampling_probs": _sampling_probs,
    "sample": _sample("sample", {"temperature": 0.0}),
    "sample_topk": _sample("sample_topk", {"k": 1}),
    "sample_topp": _sample("sample_topp", {"p": 1e-6}),
    "sample_speculative": _speculative("sample_speculative"),
    "sample_tree": _speculative("sample_tree"),
    "quantize": _dequantize,
    "dequantize": _dequantize,
}

# Results that are no smooth function of the inputs: drawn tokens, and codes.
TOKENS = frozenset(
    {"sample", "sample_topk", "sample_topp", "sample_speculative", "sample_tree", "quantize", "dequantize"}
)


def calls(op: str, many: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[Call]:
    """Calls of an op, the same ones each time; `many` times as many where more are wanted."""
    for seed in range(many * MANY):
        yield draw(op, seed, dtype)


def draw(op: str, seed: int, dtype: torch.dtype = torch.float32) -> Call:
    """The call of an op with this number."""
    dice = Dice(f"{op} {seed} {dtype}")
    dice.dtype = dtype
    return CASES[op](dice)

"""The fixed torch baselines: what "torch default" means, so that a ratio means the same tomorrow.

`torch_default(op, arguments)` takes the arguments of a call by their canonical names (and `layout`) and returns the
torch code that somebody without LayerZero would have written, on the same tensors. What only has to be made once
(tables in the dtype of the call, probabilities, a mask) is made before, outside the timing.

They never change: if one is ever found wrong, the right one gets a name of its own. What a call has beyond the cases
they were measured in (a mask, another scale or eps, more axes) is passed on to torch; what torch has no argument for
they leave out, and give another result than the op.

Whoever is chosen has to hold against what a torch user would have written: the code is a contestant (`maker`) in the
same rounds as the kernels, under a name that no kernel can bear, wherever it gives the reference's result for the call
(a softcap, say, it does not know). A quantized weight has none: the code would compute with another, unquantized one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from layerzero.measurements.believed import TORCH_DEFAULT
from layerzero.model.context import Context
from layerzero.model.op import OperationSpec
from layerzero.runtime.current import builtin_ops
from layerzero_tune.timing.race import Times

__all__ = ["BASELINES", "TORCH_DEFAULT", "torch_default"]

Call = Callable[[], Any]


# -- the 34 cases measured on the H200 (benchmarks/grid.toml) --------------------------------------
def attention(given: Mapping[str, Any]) -> Call:
    """SDPA; of BSHD tensors on views, made and undone in the call, since every call has its own tensors.

    Until November 2026 the views were made outside the timing: older figures of BSHD calls are held against that.
    """
    q, k, v = (given[name] for name in ("query", "key", "value"))
    packed = given.get("layout") == "BSHD"
    heads, rows = (2, 1) if packed else (1, 2)
    causal, gqa = bool(given.get("is_causal")), q.shape[heads] != k.shape[heads]
    window, scale, mask = (given.get(name) for name in ("window", "scale", "attn_mask"))
    if window is not None and tuple(window) != (-1, -1):
        mask = _windowed(q.shape[rows], k.shape[rows], q.device, causal, tuple(window))
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": gqa}
    if mask is not None or scale is not None:
        options |= {"attn_mask": mask, "scale": scale, "is_causal": causal and mask is None}
    attend: Callable[..., torch.Tensor] = functools.partial(F.scaled_dot_product_attention, **options)
    if not packed:
        return lambda: attend(q, k, v)
    return lambda: attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def rms_norm(given: Mapping[str, Any]) -> Call:
    """`F.rms_norm`."""
    x, weight, eps = given["x"], given["weight"], given.get("eps", 1e-6)
    width = (x.shape[-1],)
    return lambda: F.rms_norm(x, width, weight, eps)


def add_rms_norm(given: Mapping[str, Any]) -> Call:
    """The sum, then `F.rms_norm`."""
    x, residual, weight, eps = given["x"], given["residual"], given["weight"], given.get("eps", 1e-6)
    width = (x.shape[-1],)
    return lambda: F.rms_norm(x + residual, width, weight, eps)


def silu_and_mul(given: Mapping[str, Any]) -> Call:
    """`F.silu` of one half times the other."""
    x = given["x"]
    half = x.shape[-1] // 2
    return lambda: F.silu(x[..., :half]) * x[..., half:]


def rope(given: Mapping[str, Any]) -> Call:
    """Rotate-half, out of place, tables in the dtype of q and broadcast over the heads."""
    q, k = given["q"], given["k"]
    over_heads = (None, slice(None), None) if given.get("layout") == "BSHD" else (None, None)
    half = q.shape[-1] // 2
    length = q.shape[1 if given.get("layout") == "BSHD" else 2]
    cos, sin = (given[name][:length].to(q.dtype)[over_heads] for name in ("cos", "sin"))

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return lambda: (turned(q), turned(k))


def sample(given: Mapping[str, Any]) -> Call:
    """Top-k and top-p from probabilities: full descending sort, cumulative sum, mask, multinomial, gather."""
    probabilities = torch.softmax(given["logits"].float(), dim=-1)
    top_k, top_p = given["top_k"], given["top_p"]

    def draw() -> torch.Tensor:
        ordered, places = torch.sort(probabilities, dim=-1, descending=True)
        before = torch.cumsum(ordered, dim=-1) - ordered
        kept = before <= top_p
        kept[..., top_k:] = False
        chosen = torch.multinomial(ordered.masked_fill(~kept, 0.0), 1)
        return torch.gather(places, -1, chosen)

    return draw


def paged_attention(given: Mapping[str, Any]) -> Call:
    """Decode over pages: gather them by block table, reshape, SDPA. All contexts of a case are equally long."""
    query, keys, values, batch = (given[name] for name in ("query", "key_cache", "value_cache", "batch"))
    length, page = batch.max_context_len, keys.shape[1]
    tables = batch.block_tables[:, : -(-length // page)].long()
    q = query[:, :, None]
    gqa = query.shape[1] != keys.shape[2]

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        pages = cache[tables]  # [B, pages, page, HKV, D]
        return pages.reshape(pages.shape[0], -1, *pages.shape[3:])[:, :length].transpose(1, 2)

    return lambda: F.scaled_dot_product_attention(q, gathered(keys), gathered(values), enable_gqa=gqa)


# -- beyond them -----------------------------------------------------------------------------------
def varlen_attention(given: Mapping[str, Any]) -> Call:
    """SDPA for one sequence after another."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    ends_q, ends_k = (given[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    causal, gqa = bool(given.get("is_causal")), q.shape[1] != k.shape[1]
    spans = [
        (slice(a, b), slice(c, d))
        for a, b, c, d in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
        if b > a
    ]

    def each() -> torch.Tensor:
        parts = [
            F.scaled_dot_product_attention(
                q[at].transpose(0, 1)[None], k[of].transpose(0, 1)[None], v[of].transpose(0, 1)[None],
                is_causal=causal, enable_gqa=gqa,
            )[0].transpose(0, 1)
            for at, of in spans
        ]  # fmt: skip
        return torch.cat(parts)

    return each


def layer_norm(given: Mapping[str, Any]) -> Call:
    """`F.layer_norm`."""
    x, weight, bias, eps = given["x"], given["weight"], given["bias"], given["eps"]
    width = (x.shape[-1],)
    return lambda: F.layer_norm(x, width, weight, bias, eps)


def gelu_and_mul(given: Mapping[str, Any]) -> Call:
    """`F.gelu` of one half times the other."""
    x, approximate = given["x"], given["approximate"]
    half = x.shape[-1] // 2
    return lambda: F.gelu(x[..., :half], approximate=approximate) * x[..., half:]


def linear(given: Mapping[str, Any]) -> Call:
    """`F.linear`; for a quantized weight with the weight in the dtype of x, as it was before it was quantized."""
    x, weight, bias = given["x"], given["weight"], given["bias"]
    if not isinstance(weight, torch.Tensor):
        plain = builtin_ops["dequantize"].fallback_impl
        assert plain is not None
        weight = plain(weight, x.dtype)
    return lambda: F.linear(x, weight, bias)


_CODE = (attention, paged_attention, varlen_attention, rms_norm, add_rms_norm, layer_norm, rope, silu_and_mul,
         gelu_and_mul, sample, linear)  # fmt: skip
BASELINES: Mapping[str, Callable[[Mapping[str, Any]], Call]] = {code.__name__: code for code in _CODE}


def torch_default(op: str, given: Mapping[str, Any]) -> Call | None:
    """The torch code for a call, ready to be timed; None for an op without a baseline."""
    make = BASELINES.get(op)
    return None if make is None else make(given)


def _windowed(queries: int, keys: int, device: torch.device, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    rows = torch.arange(queries, device=device)[:, None]
    columns = torch.arange(keys, device=device)[None]
    left, right = window
    seen = columns <= rows if causal else torch.ones_like(columns <= rows)
    seen = seen & (columns >= rows - left) if left >= 0 else seen
    return seen & (columns <= rows + right) if right >= 0 else seen


# -- as contestants --------------------------------------------------------------------------------
CALLING_US = 1.0
"""What calling a kernel through its binding may take beyond a call of torch: every choice pays it, so none loses by
it."""

Make = Callable[[tuple[Any, ...]], Call]
"""Arguments of the op -> the torch code for them, ready to be timed."""


def maker(spec: OperationSpec, ctx: Context, layout: str | None) -> Make | None:
    """How torch's code for such calls is made; None for an op or a call that has none."""
    code = BASELINES.get(ctx.op)
    if ctx.quant_format or code is None:
        return None

    def make(args: tuple[Any, ...]) -> Call:
        given = _given(spec, args, layout)
        return (lambda: code(given)()) if ctx.op == "sample" else code(given)  # a draw from logits, as the kernels

    return make


def result_of(spec: OperationSpec, layout: str | None, make: Make) -> Callable[..., Any]:
    """Torch's code as a function of the op's arguments that gives what the op gives, to be held against the truth."""

    def run(*args: Any) -> Any:
        given, found = _given(spec, args, layout), make(args)()
        if spec.op_id == "paged_attention":
            return found.squeeze(2)
        if spec.op_id == "add_rms_norm":
            return found, given["x"] + given["residual"]
        return found.squeeze(-1) if spec.op_id == "sample" else found

    return run


def loses(choice: Times, plain: Times, noise: float) -> bool:
    """Whether a kernel is slower than torch's code, by more than the noise band and what calling a kernel takes."""
    return not choice.near(plain, noise) and choice.median_us > plain.median_us + CALLING_US


def _given(spec: OperationSpec, args: tuple[Any, ...], layout: str | None) -> Mapping[str, Any]:
    return {**dict(zip(spec.arguments, args, strict=False)), "layout": layout}

"""Which rejections an adaptation of the inputs would lift, and what it costs.

Only what a kernel allows in `adapt` is offered, and nothing here ever loses precision: a cast goes to a
wider dtype, or to the dtype of the query for mixed inputs. Autocast is not a transform: it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from layerzero.model.context import Context, element_bytes
from layerzero.model.decision import Transform
from layerzero.model.enums import Causal, Layout, MaskKind, Platform
from layerzero.model.kernel import KernelSpec
from layerzero.reasons import Reason, ReasonCode

# Rough prices, for ranking only: bytes per µs of a copy, and the host cost of one torch call in µs.
_ON_CPU, _ON_GPU = (8_000.0, 1.5), (1_500_000.0, 6.0)
_VIEW_US = 1.0

_WIDER = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64"), "float32": ("float64",)}


def copy_cost_us(ctx: Context, count: float, calls: int = 1) -> float:
    """Estimated µs to read and write `count` elements of the context's dtype in `calls` torch calls."""
    rate, call = _ON_CPU if ctx.device.platform is Platform.CPU else _ON_GPU
    return calls * call + 2.0 * count * element_bytes(ctx.dtype) / rate


def elements(ctx: Context) -> int:
    """Elements of all main inputs together."""
    sizes = dict(ctx.dims)
    if "seq_len_q" in sizes and "num_heads" in sizes:
        per_token = sizes.get("batch", 1) * sizes.get("head_dim", 1)
        keys = sizes.get("num_kv_heads", sizes["num_heads"]) * sizes.get("seq_len_k", 1)
        return per_token * (sizes["num_heads"] * sizes["seq_len_q"] + 2 * keys)
    return math.prod(max(1, size) for size in sizes.values())


def cached(ctx: Context) -> int:
    """Elements of a paged cache that a call reads: the pages in use, or all where that is less."""
    page = ctx.dim("page_size") or 1
    pages = min(ctx.dim("num_blocks") or 0, (ctx.batch or 0) * -(-(ctx.seq_len_k or 0) // page))
    widths = (ctx.head_dim or 0) + (ctx.dim("head_dim_v") or 0)
    return pages * page * (ctx.num_kv_heads or 0) * widths


def _layout(kernel: KernelSpec, ctx: Context) -> Transform | None:
    if ctx.op != "attention":
        return None
    pair = {Layout.BHSD: Layout.BSHD, Layout.BSHD: Layout.BHSD}
    target = pair.get(ctx.layout) if ctx.layout is not None else None
    if target is None or target not in kernel.layouts:
        return None
    return Transform(f"layout:{ctx.layout}->{target}", 4 * _VIEW_US)


def _copied(name: str) -> Callable[[KernelSpec, Context], Transform]:
    return lambda kernel, ctx: Transform(name, copy_cost_us(ctx, elements(ctx), 3))


_contiguous, _aligned = _copied("contiguous"), _copied("aligned_copy")


def _restrided(kernel: KernelSpec, ctx: Context) -> Transform | None:
    """A contiguous copy has 16-byte strides only when its rows are a multiple of 16 bytes."""
    widths = [ctx.dim(name) for name in ("head_dim", "head_dim_v", "hidden", "k")]
    rows = [width * element_bytes(ctx.dtype) for width in widths if width is not None]
    return _contiguous(kernel, ctx) if rows and all(row % 16 == 0 for row in rows) else None


def _cast(kernel: KernelSpec, ctx: Context) -> Transform | None:
    if ctx.quant_format is not None:
        return None  # the codes would remember the wider dtype
    for wide in _WIDER.get(ctx.dtype, ()):
        if wide in kernel.dtypes:
            return Transform(f"cast:{ctx.dtype}->{wide}", 3 * copy_cost_us(ctx, elements(ctx), 4))
    return None


def _unify(kernel: KernelSpec, ctx: Context) -> Transform | None:
    if ctx.dtype not in kernel.dtypes:
        return None
    return Transform(f"cast:mixed->{ctx.dtype}", copy_cost_us(ctx, elements(ctx), 2))


def _cast_kv(kernel: KernelSpec, ctx: Context) -> Transform | None:
    """The cache in the dtype of the query."""
    if ctx.op != "paged_attention" or ctx.dtype not in kernel.dtypes:
        return None
    return Transform(f"cast_kv:{ctx.kv_cache_dtype}->{ctx.dtype}", copy_cost_us(ctx, cached(ctx), 6))


def _rescale(kernel: KernelSpec, ctx: Context) -> Transform | None:
    """Sinks after the kernel: its result times the share that its log-sum-exp has beside them."""
    if "lse" not in kernel.features or ctx.dtype == "float64":  # a log-sum-exp is float32
        return None
    asked = {"lse", "lse_backward"} if ctx.needs_grad else {"lse"}
    plain = replace(ctx, needs=(ctx.needs - {"sinks", "sinks_grad"}) | asked)
    known = {item.code for item in kernel.check_call(ctx)}
    if any(item.code not in known for item in kernel.check_call(plain)):
        return None
    count = (ctx.dim("tokens") or (ctx.batch or 1) * (ctx.seq_len_q or 1)) * (ctx.num_heads or 1)
    return Transform("sinks:rescale", copy_cost_us(ctx, count * (ctx.dim("head_dim_v") or ctx.head_dim or 1), 4))


def _scale_around(kernel: KernelSpec, ctx: Context) -> Transform:
    """Scales of a cache on the query before and on the result after, which are far smaller than the cache."""
    count = (ctx.dim("tokens") or 1) * (ctx.num_heads or 1) * (ctx.head_dim or 1)
    return Transform("kv_scales:around", copy_cost_us(ctx, count, 2))


def _expand_kv(kernel: KernelSpec, ctx: Context) -> Transform | None:
    if ctx.op != "attention":
        return None
    count = (ctx.batch or 1) * (ctx.num_heads or 1) * (ctx.seq_len_k or 1) * (ctx.head_dim or 1) * 2
    return Transform("expand_kv", copy_cost_us(ctx, count, 2))


def _fold(what: str) -> Callable[[KernelSpec, Context], Transform | None]:
    def build(kernel: KernelSpec, ctx: Context) -> Transform | None:
        takes = {"mask_bool", "mask_float"} & kernel.features
        if ctx.op != "attention":
            return None
        if what in ("alibi", "mask") and "mask_float" not in kernel.features:
            return None
        if what == "alibi" and ctx.dtype not in ("float32", "float64"):
            return None  # a bias of hundreds does not survive in 16 bits
        if not takes or (what == "mask" and ctx.mask is not MaskKind.BOOL):
            return None
        return Transform(f"mask:{what}", copy_cost_us(ctx, (ctx.seq_len_q or 1) * (ctx.seq_len_k or 1), 6))

    return build


# reason code -> (word in the kernel's `adapt`, "" where every kernel allows it, builder)
_CURES: dict[ReasonCode, tuple[str, Callable[[KernelSpec, Context], Transform | None]]] = {
    ReasonCode.LAYOUT_UNSUPPORTED: ("layout", _layout),
    ReasonCode.NOT_CONTIGUOUS: ("contiguous", _contiguous),
    ReasonCode.STRIDE_LAST_DIM: ("contiguous", _contiguous),
    ReasonCode.STRIDE_UNALIGNED: ("contiguous", _restrided),
    ReasonCode.POINTER_UNALIGNED: ("contiguous", _aligned),
    ReasonCode.DTYPE_UNSUPPORTED: ("dtype", _cast),
    ReasonCode.DTYPE_MIXED: ("dtype", _unify),
    ReasonCode.KV_CACHE_DTYPE_MISMATCH: ("kv_dtype", _cast_kv),
    ReasonCode.SINKS_UNSUPPORTED: ("", _rescale),
    ReasonCode.KV_SCALES_UNSUPPORTED: ("", _scale_around),
    ReasonCode.GQA_UNSUPPORTED: ("gqa", _expand_kv),
    ReasonCode.CAUSAL_ALIGNMENT_UNSUPPORTED: ("mask", _fold("causal")),
    ReasonCode.WINDOW_UNSUPPORTED: ("mask", _fold("window")),
    ReasonCode.ALIBI_UNSUPPORTED: ("mask", _fold("alibi")),
    ReasonCode.MASK_UNSUPPORTED: ("mask", _fold("mask")),
    ReasonCode.BLOCK_MASK_UNSUPPORTED: ("mask", _fold("block")),
    ReasonCode.CHUNK_MASK_UNSUPPORTED: ("mask", _fold("chunk")),
}


def adaptations(kernel: KernelSpec, ctx: Context, reasons: list[Reason]) -> tuple[list[Reason], tuple[Transform, ...]]:
    """Split reasons into those that stand and the transforms that lift the rest."""
    if "inplace" in ctx.needs:
        return reasons, ()  # every transform may copy, and a copy would be written instead of the caller's tensor
    standing: list[Reason] = []
    steps: dict[str, Transform] = {}
    for item in reasons:
        word, build = _CURES.get(item.code, ("", None))
        step = build(kernel, ctx) if build is not None and (not word or word in kernel.adapt) else None
        if step is None:
            standing.append(item)
        else:
            steps[step.name] = step
    # A kernel cannot take is_causal beside a mask, so whatever becomes a mask takes the causal part along.
    folded = any(name.startswith("mask:") for name in steps)
    if folded and ctx.causal is not Causal.NONE:
        steps.setdefault("mask:causal", Transform("mask:causal", 0.0))
    if folded and ctx.mask is not MaskKind.NONE:
        steps.setdefault("mask:mask", Transform("mask:mask", 0.0))
    if folded and ("mask:alibi" in steps or ctx.mask is MaskKind.FLOAT or "mask_bool" not in kernel.features):
        if "mask_float" not in kernel.features:
            return reasons, ()  # what comes out of the folding is a float mask, which this kernel does not take
        steps["mask:float"] = Transform("mask:float", 0.0)
    return standing, tuple(steps[name] for name in sorted(steps))


# -- a process of its own: what a kernel may no longer promise there, and what the way costs ------------------------
ISOLATED = "isolated"

# Gradients, writes into the caller's tensors, generators and masks with a meaning do not cross a process boundary.
_STAYS_HOME = frozenset({
    "backward", "lse_backward", "mask_grad", "inplace", "dropout", "generator", "block_mask", "chunk_mask", "paged",
    "nested",
})  # fmt: skip

# Rough prices, for ranking only: one round trip with its synchronisation, and bytes per µs of the copies.
_TRIP_ON_CPU, _TRIP_ON_GPU = (150.0, 4_000.0), (200.0, 1_000_000.0)


def apart(kernel: KernelSpec) -> KernelSpec:
    """The kernel as its own process can serve it: never part of a graph, without a backward."""
    return replace(kernel, features=kernel.features - _STAYS_HOME, graph_safe=False)


def passage(ctx: Context) -> Transform:
    """The way there and back, as a priced step of the plan."""
    trip, rate = _TRIP_ON_CPU if ctx.device.platform is Platform.CPU else _TRIP_ON_GPU
    return Transform(ISOLATED, trip + 2 * elements(ctx) * element_bytes(ctx.dtype) / rate)

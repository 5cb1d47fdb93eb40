"""Adapting inputs to a kernel: layout, contiguity, dtype, KV heads, masks. Each step is one named transform.

Steps work on the canonical argument list of attention (or on plain tensors for other ops) and are
composed once, at bind time. They read shapes when they run, so one bound plan serves a whole bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import alibi_bias, band
from layerzero.model.context import Context
from layerzero.model.folding import fold, unfold
from layerzero.model.kv_cache import pages_in_use
from layerzero.model.masks import dense_mask
from layerzero.runtime.current import builtin_ops

Step = Callable[[list[Any]], None]
Finish = Callable[[Any], Any]

_QKV_FIRST = frozenset({"attention", "varlen_attention"})
_QUERY, _KEY, _VALUE, _MASK, _DROPOUT, _CAUSAL, _SCALE, _WINDOW, _SOFTCAP, _ALIBI, _LSE = range(11)
_KEYS, _VALUES, _BATCH, _PAGE_SCALE, _PAGE_LAYOUT = 1, 2, 3, 4, 9  # of the canonical arguments of paged_attention
_K_SCALE, _V_SCALE = 12, 13


def adapt(fn: Callable[..., Any], ctx: Context, names: list[str], follow_autocast: bool) -> Callable[..., Any]:
    """Wrap a kernel so that it takes the call's own arguments."""
    if ctx.folded:
        run = adapt(fn, replace(ctx, folded=False), names, follow_autocast)

        def folded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, *rest: Any) -> Any:
            how, query, key, value, attn_mask = fold(query, key, value, attn_mask)
            return unfold(run(query, key, value, attn_mask, *rest), how)

        return folded
    wanted = set(names)
    if "sinks:rescale" in wanted:
        swapped = any(name.startswith("layout:") for name in wanted)
        bshd = ctx.op == "attention" and ctx.rank == 4 and ctx.layout is not None and ctx.layout.value == "BSHD"
        fn = _rescaled(fn, ctx.op, bshd is not swapped)
    if "kv_scales:around" in wanted:
        fn = _scaled_around(fn)
    before: list[Step] = []
    after: list[Finish] = []
    # A mask may be float32 beside half-precision inputs and slopes are always precise: only q, k, v are cast.
    count = 3 if ctx.op in _QKV_FIRST else None
    if ctx.autocast is not None and follow_autocast:
        before.append(_casting(_dtype(ctx.autocast), count, only_floating_below_double=True))
    for name in sorted(wanted):
        if name.startswith("cast:"):
            target = name.rpartition("->")[2]
            before.append(_casting(_dtype(target), count))
            if not name.startswith("cast:mixed"):
                after.append(_cast_back(_dtype(ctx.dtype), only_first=ctx.op in _QKV_FIRST))
        elif name.startswith("cast_kv:"):
            before.append(_casting_pages(_dtype(name.rpartition("->")[2])))
    if ctx.op == "attention":
        _adapt_attention(ctx, wanted, before, after)
    if "contiguous" in wanted:
        before.append(_contiguous)
    if "aligned_copy" in wanted:
        before.append(_aligned_copy)
    if not before and not after and ctx.autocast is None:
        return fn
    return _composed(fn, tuple(before), tuple(reversed(after)), ctx)


def _without(values: list[Any], defaults: tuple[Any, ...], first: int, *places: int) -> list[Any]:
    """The arguments with defaults in these places, where they may be left out: those of an op from its `first` on."""
    for place in places:
        if place < len(values):
            values[place] = defaults[place - first]
    while len(values) > first and values[-1] is defaults[len(values) - 1 - first]:
        values.pop()
    return values


def _rescaled(fn: Callable[..., Any], op: str, bshd: bool) -> Callable[..., Any]:
    """Attention with sinks by a kernel that has none: what it gives shrinks by the share of the sink."""
    spec = builtin_ops[op]
    defaults, lse_at, at = spec.defaults, spec.arguments.index("return_lse"), spec.arguments.index("sinks")

    def run(*args: Any) -> Any:
        values, return_lse, sinks = list(args), args[lse_at], args[at]
        values[lse_at] = True
        out, lse = fn(*_without(values, defaults, at, at))
        beside = sinks.to(lse.dtype)
        if op == "attention":
            beside = beside[:, None]
        # Finite: a row without any key has no share at all, of sinks that are -inf neither.
        share = torch.sigmoid(lse.clamp_min(torch.finfo(lse.dtype).min) - beside).unsqueeze(-1)
        out = (out * (share.transpose(1, 2) if bshd else share)).to(out.dtype)
        return (out, torch.logaddexp(lse, beside)) if return_lse else out

    return run


def _scaled_around(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Paged attention over scaled caches by a kernel that takes no scales: (q k) s = (q s) k, and w (v s) = (w v) s."""
    defaults, first = builtin_ops["paged_attention"].defaults, builtin_ops["paged_attention"].arguments.index("sinks")

    def run(*args: Any) -> Any:
        values = list(args)
        query, layout = values[_QUERY], values[_PAGE_LAYOUT]
        group = query.shape[1] // values[_KEYS].shape[2 if layout == "NHD" else 1]
        k_scale, v_scale = (*args[_K_SCALE:], None)[:2]
        if isinstance(k_scale, Tensor) and k_scale.numel() == 1 and k_scale.is_cpu and not k_scale.requires_grad:
            k_scale = k_scale.item()
        if isinstance(k_scale, Tensor):
            values[_QUERY] = (query * _of_heads(k_scale, group)).to(query.dtype)
        elif k_scale is not None:
            own = values[_PAGE_SCALE]
            values[_PAGE_SCALE] = k_scale * (query.shape[2] ** -0.5 if own is None else own)
        found = fn(*_without(values, defaults, first, _K_SCALE, _V_SCALE))
        if v_scale is None:
            return found
        out = found[0] if isinstance(found, tuple) else found
        out = (out * (_of_heads(v_scale, group) if isinstance(v_scale, Tensor) else v_scale)).to(out.dtype)
        return (out, *found[1:]) if isinstance(found, tuple) else out

    return run


def _of_heads(scale: Tensor, group: int) -> Tensor:
    """One number for each head of the queries, or for all of them: [Hq or 1, 1]."""
    flat = scale.reshape(-1)
    return (flat if flat.numel() == 1 else flat.repeat_interleave(group)).unsqueeze(-1).float()


def _adapt_attention(ctx: Context, wanted: set[str], before: list[Step], after: list[Finish]) -> None:
    seq_axis = 2
    if ctx.rank == 3:
        before.append(unsqueeze)
        after.append(squeeze)
    elif ctx.layout is not None and ctx.layout.value == "BSHD":
        seq_axis = 1
    folded = sorted(name.removeprefix("mask:") for name in wanted if name.startswith("mask:"))
    if folded:
        # Masks are [B, H, Sq, Sk] whatever the layout, so they are built before any transpose.
        before.append(_folding(frozenset(folded), seq_axis))
    if any(name.startswith("layout:") for name in wanted):
        before.append(swap_layout)
        after.append(swap_back)
        seq_axis = 3 - seq_axis
    if "expand_kv" in wanted:
        before.append(_expanding(3 - seq_axis))


def _composed(
    fn: Callable[..., Any], before: tuple[Step, ...], after: tuple[Finish, ...], ctx: Context
) -> Callable[..., Any]:
    kernel = fn if ctx.autocast is None else _without_autocast(fn, ctx.device.device_type)
    if before == (swap_layout,) and after == (swap_back,):

        def swapped(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:  # the same, in fewer steps
            return swap_back(kernel(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), *rest))

        return swapped

    def run(*args: Any) -> Any:
        values = list(args)
        for step in before:
            step(values)
        out = kernel(*values)
        for finish in after:
            out = finish(out)
        return out

    return run


def _without_autocast(fn: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """The casts are done before; inside the kernel autocast would cast a second time, in its own way."""

    def run(*args: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return fn(*args)

    return run


def _dtype(word: str) -> torch.dtype:
    found = getattr(torch, word)
    assert isinstance(found, torch.dtype)
    return found


def _casting(dtype: torch.dtype, count: int | None = None, only_floating_below_double: bool = False) -> Step:
    """Cast the floating tensors among the first `count` arguments (all of them for None)."""

    def step(values: list[Any]) -> None:
        for i, item in enumerate(values[:count]):
            if not isinstance(item, Tensor) or not item.is_floating_point():
                continue
            if only_floating_below_double and item.dtype is torch.float64:
                continue
            values[i] = item.to(dtype)

    return step


def _casting_pages(dtype: torch.dtype) -> Callable[[list[Any]], None]:
    """A step that casts the caches of a paged attention call: the pages in use, or all where that is less."""

    def step(values: list[Any]) -> None:
        keys, batch = values[_KEYS], values[_BATCH]
        page_size = keys.shape[1 if values[_PAGE_LAYOUT] == "NHD" else 2]
        if batch.batch_size * -(-batch.max_context_len // page_size) < keys.shape[0]:
            pages, values[_BATCH] = pages_in_use(batch, page_size)
            # index_select, unlike indexing, refuses a negative page number.
            values[_KEYS] = torch.index_select(keys, 0, pages).to(dtype)
            values[_VALUES] = torch.index_select(values[_VALUES], 0, pages).to(dtype)
        else:
            values[_KEYS], values[_VALUES] = keys.to(dtype), values[_VALUES].to(dtype)

    return step


def _cast_back(dtype: torch.dtype, only_first: bool) -> Finish:
    """Floating results in the call's own dtype; `only_first` leaves a log-sum-exp in float32, ids stay integers."""

    def back(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

    def finish(out: Any) -> Any:
        if isinstance(out, tuple):
            return (back(out[0]), *out[1:]) if only_first else tuple(back(item) for item in out)
        return back(out)

    return finish


def _contiguous(values: list[Any]) -> None:
    for i, item in enumerate(values):
        if isinstance(item, Tensor):
            values[i] = item.contiguous()


def _aligned_copy(values: list[Any]) -> None:
    """Fresh storage for tensors that start at an odd address; torch aligns what it allocates to 64 bytes."""
    for i, item in enumerate(values):
        if isinstance(item, Tensor) and item.data_ptr() % 64:
            values[i] = item.clone(memory_format=torch.contiguous_format)


def unsqueeze(values: list[Any]) -> None:
    """Give tensors of one head, and their mask, an axis for it."""
    for i in (_QUERY, _KEY, _VALUE):
        values[i] = values[i].unsqueeze(1)
    mask = values[_MASK]
    if getattr(mask, "ndim", 0) == 3:  # [B, Sq, Sk]
        values[_MASK] = mask.unsqueeze(1)
    elif isinstance(mask, Tensor) and mask.ndim < 2:
        values[_MASK] = mask.expand(1, mask.shape[0] if mask.ndim else 1)


def squeeze(out: Any) -> Any:
    """Results without the axis of their one head."""
    if isinstance(out, tuple):
        return tuple(item.squeeze(1) for item in out)
    return out.squeeze(1)


def swap_layout(values: list[Any]) -> None:
    """Swap the axes of heads and tokens."""
    for i in (_QUERY, _KEY, _VALUE):
        values[i] = values[i].transpose(1, 2)


def swap_back(out: Any) -> Any:
    """Swap the axes of a result; a log-sum-exp has one order in any layout."""
    if isinstance(out, tuple):
        return (out[0].transpose(1, 2), *out[1:])
    return out.transpose(1, 2)


def _expanding(head_axis: int) -> Step:
    def step(values: list[Any]) -> None:
        heads = values[_QUERY].shape[head_axis]
        for i in (_KEY, _VALUE):
            values[i] = values[i].repeat_interleave(heads // values[i].shape[head_axis], dim=head_axis)

    return step


def _folding(what: frozenset[str], seq_axis: int) -> Step:
    def step(values: list[Any]) -> None:
        query, key = values[_QUERY], values[_KEY]
        rows, cols = query.shape[seq_axis], key.shape[seq_axis]
        # Causal and window as a mask, ALiBi as a bias; bottom-right but for is_causal=True.
        keep = band(values[_CAUSAL], values[_WINDOW] if "window" in what else None, rows, cols, query.device)
        bias = None
        if "window" in what:
            values[_WINDOW] = None
        if "alibi" in what and values[_ALIBI] is not None:
            wide = torch.float64 if query.dtype is torch.float64 else torch.float32
            bias = alibi_bias(values[_ALIBI].to(wide), rows, cols).to(query.dtype)
            values[_ALIBI] = None
        given = dense_mask(values[_MASK], rows, cols, query.device)
        if given is not None:
            if given.dtype is torch.bool:
                keep = given if keep is None else keep & given
            else:
                bias = given if bias is None else bias + given
        if bias is None and "float" not in what:
            values[_MASK] = keep
        else:
            full = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias
            # A number, not a tensor of it: that would be a copy to the device, at every call and in every capture.
            values[_MASK] = full if keep is None else torch.where(keep, full, float("-inf"))
        values[_CAUSAL] = False

    return step

"""`lz.attention`: a drop-in for `F.scaled_dot_product_attention`, and more."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from layerzero._ops.bucketed import bucketed_key, remember_edges
from layerzero._ops.signature import PUBLIC, declare, fx_node, fx_proxy, looked_up
from layerzero.dispatch.hot import HOT_LIMIT, aside, autocast_key, before_dispatch, describe_tensor, generic_key
from layerzero.dispatch.late import current_world, miss, recover, seen
from layerzero.errors import invalid
from layerzero.model.checks import expect_tensor
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import (
    attention_context,
    check_dropout,
    check_scale,
    check_softcap,
    parse_window,
    plain_number,
)
from layerzero.model.enums import Causal, Layout, Platform
from layerzero.model.folding import fold, folding_of, is_folded
from layerzero.model.masks import MASK_VALUES, BlockMask, ChunkMask
from layerzero.model.op import Call
from layerzero.model.shapes import ordered, ordered_empty
from layerzero.runtime.current import now, scope

_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_scope = scope.get


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | ChunkMask | None = ...,
    dropout_p: float = ..., is_causal: bool | str = ..., scale: float | None = ..., *, layout: str = ...,
    window: int | Sequence[int] | None = ..., enable_gqa: bool = ..., softcap: float | None = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | ChunkMask | None = ...,
    dropout_p: float = ..., is_causal: bool | str = ..., scale: float | None = ..., *, layout: str = ...,
    window: int | Sequence[int] | None = ..., enable_gqa: bool = ..., softcap: float | None = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | ChunkMask | None = ...,
    dropout_p: float = ..., is_causal: bool | str = ..., scale: float | None = ..., *, layout: str = ...,
    window: int | Sequence[int] | None = ..., enable_gqa: bool = ..., softcap: float | None = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: bool, backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


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
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Scaled dot-product attention by the fastest kernel that is correct here.

    query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D] with `layout="BHSD"`; `"BSHD"` swaps axes 1 and 2; 3-D
    inputs are one head. With BHSD any rank from 2 and batches that broadcast are taken as by SDPA. GQA follows from
    the head counts; without keys the result is zeros. `is_causal=True` is top-left aligned as in SDPA,
    `"bottom_right"` as in FlashAttention. `window` is (left, right) keys around the query's position, an int
    means (window, 0). `attn_mask` is a tensor, an `lz.block_mask` or an `lz.chunk_mask`. A fully masked row gives
    zeros. `sinks` [Hq] are one more score per head that joins the softmax's denominator and attends nothing (gpt-oss).
    `return_lse=True` gives (out, lse): natural log, float32, [B, Hq, Sq], sinks included. `backend` restricts the
    choice to one backend or kernel id. Nested tensors of layout torch.jagged go to `lz.varlen_attention`; the result
    is one too.
    """
    if scale is not None:
        if type(scale) is not float:
            scale = plain_number(scale)
        check_scale(scale)
    if (
        _dispatch_modes()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or (_function_modes() and before_dispatch())
    ) and not aside.quiet:
        first = (query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _seen(*first, layout=layout, window=window, enable_gqa=enable_gqa, softcap=softcap,
                     alibi_slopes=alibi_slopes, sinks=sinks, return_lse=return_lse, backend=backend)  # fmt: skip
    if sinks is not None:  # these calls have keys of their own, so that all others do not look at it
        first = (query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _cold(None, (*first, window, softcap, alibi_slopes, return_lse, sinks), layout, backend)
    hot_key: Any
    try:
        hot_key = (
            "attention",
            type(query),
            query.shape,
            query.dtype,
            query.is_cpu or ~query.get_device(),
            query.is_contiguous() or query.stride(),
            type(key),
            key.shape,
            key.dtype,
            key.is_cpu or ~key.get_device(),
            key.is_contiguous() or key.stride(),
            type(value),
            value.shape,
            value.dtype,
            value.is_cpu or ~value.get_device(),
            value.is_contiguous() or value.stride(),
            attn_mask if attn_mask is None else describe_tensor(attn_mask),  # type: ignore[arg-type] # values raise
            alibi_slopes if alibi_slopes is None else describe_tensor(alibi_slopes),
            # 1 == True, but only True itself is a flag; anything else is checked on the cold path.
            is_causal is True or (is_causal is not False and (is_causal,)),
            layout,
            window,
            softcap is None,
            dropout_p != 0.0,
            return_lse,
            backend,
            _grad_enabled()
            and (
                query.requires_grad
                or key.requires_grad
                or value.requires_grad
                or (attn_mask is not None and attn_mask.requires_grad)
                or (alibi_slopes is not None and alibi_slopes.requires_grad)
            ),
            autocast_key() if _any_autocast() else False,
            _deterministic(),
        )
        active = _scope()
        world = now.world if active is None else active.world()
        bound = world.hot.get(hot_key)
        if bound is None and (coarse := bucketed_key(world, hot_key)) is not None:
            bound = world.hot.get(coarse)
            if bound is not None:
                now.bucketed_hits += 1
                # Met twice in a row, by the next layer of the same step, the exact key is worth its place; a key
                # that is met once, by a loop over one layer, would only fill the table.
                if hot_key == now.last_bucketed and len(world.hot) < HOT_LIMIT:
                    world.hot[hot_key] = bound
                else:
                    now.last_bucketed = hot_key
    # Not tensors, a mask value, an unhashable option, a nested tensor (a ragged length cannot be compared).
    except (AttributeError, TypeError, RuntimeError, ValueError):
        hot_key = bound = None
        world = current_world()
    if bound is not None and (bound.guard is None or bound.guard()):
        sides: Any = window
        try:
            if window is not None or softcap is not None or dropout_p != 0.0:
                # The values of these are not in the key, so they are checked at each call.
                dropout_p = plain_number(dropout_p)
                check_dropout(dropout_p)
                check_softcap(softcap)
                sides = parse_window(window)
                if dropout_p == 1.0:  # what is left of it is not for every kernel that drops some
                    bound = None
            if bound is not None:
                return bound.run(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, sides, softcap, alibi_slopes, return_lse
                )
        except Exception as error:
            args = (query, key, value, attn_mask, dropout_p, is_causal, scale, sides, softcap, alibi_slopes, return_lse)
            return recover(ATTENTION, world, bound, args, layout, backend, error)
    given = (query, key, value, attn_mask, dropout_p, is_causal, scale, window, softcap, alibi_slopes, return_lse)
    return _cold(hot_key, given, layout, backend)


def _seen(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
    """A call that torch wants to see (`dispatch.hot.watched`); of nested tensors it sees the packed call below."""
    if any(isinstance(item, Tensor) and item.is_nested for item in (query, key, value)):
        words = (options[name] for name in ("window", "softcap", "alibi_slopes", "return_lse", "sinks"))
        return _cold(None, (query, key, value, *rest, *words), options["layout"], options["backend"])
    args, layout, backend = PUBLIC["attention"].normalize((query, key, value, *rest), options)
    again = functools.partial(attention, query, key, value, *rest, **options)
    return seen(ATTENTION, args, layout, backend, again)


def _cold(hot_key: Any, given: tuple[Any, ...], layout: str, backend: str | None) -> Any:
    """A call that is new here: check what the key could not, then select."""
    query, key, value, attn_mask, dropout_p = given[:5]
    named = dict(zip(ATTENTION.arguments, given, strict=False)) | {"layout": layout, "backend": backend}
    if not isinstance(query, Tensor) and (proxy := fx_proxy((query, key, value))) is not None:
        return fx_node(proxy, PUBLIC["attention"], named)
    for name, item in (("query", query), ("key", key), ("value", value)):
        expect_tensor(item, name)
    if query.is_nested or key.is_nested or value.is_nested:
        from layerzero._ops.varlen import varlen_attention
        from layerzero.torch_ops.attention import nested_attention

        return nested_attention(varlen_attention, given, layout, backend)
    args = ATTENTION.shorten(_canonical({"sinks": None, **named}))
    if isinstance(args[3], MASK_VALUES) or args[11:]:
        return _by_generic_key(args, layout, backend)
    world = current_world()
    # A CausalBias shares its key with all of its shape, a dropout of 1 with all others; that of a tensor comes once.
    if hot_key is None or args[3] is not attn_mask or args[4] is not dropout_p or dropout_p == 1.0:
        return miss(ATTENTION, world, None, args, layout, backend)
    remember_edges(world)
    return miss(ATTENTION, world, hot_key, args, layout, backend, bucketed_key(world, hot_key))


def _by_generic_key(args: tuple[Any, ...], layout: str, backend: str | None) -> Any:
    """A call with sinks, or whose mask is a value, has a key of its own, looked up here: other calls never see it."""

    def key_of(world: Any, args: tuple[Any, ...], backend: str | None) -> Any:
        key = generic_key("attention", args, layout, backend)
        check_dropout(args[4])
        check_softcap(args[8])
        return None if key is None or args[4] == 1.0 else (*key, args[4] != 0.0)

    return looked_up(ATTENTION, key_of, args, layout, backend)


def _causal_bias(mask: Any, is_causal: bool | str, query: Any, key: Any, layout: Any) -> tuple[Any, bool | str]:
    """torch's CausalBias objects say what they mean; take them at their word instead of as a dense mask."""
    if type(mask).__name__ != "CausalBias":
        return mask, is_causal
    if is_causal:
        raise invalid("MASK_WITH_CAUSAL", str(is_causal))
    seq = 1 if layout == "BSHD" else -2
    sizes, made_for = (query.shape[seq], key.shape[seq]), (mask.seq_len_q, mask.seq_len_kv)
    if sizes != made_for:
        raise invalid("MASK_NOT_BROADCASTABLE", str(made_for), str(sizes))
    return None, "bottom_right" if mask.variant.name == "LOWER_RIGHT" else True


def _canonical(given: dict[str, Any]) -> tuple[Any, ...]:
    words = (given[name] for name in ("attn_mask", "is_causal", "query", "key", "layout"))
    mask, causal = _causal_bias(*words)
    numbers = {name: plain_number(given[name]) for name in ("dropout_p", "scale")}
    told = {**given, **numbers, "attn_mask": mask, "is_causal": causal, "window": parse_window(given["window"])}
    return tuple(told[name] for name in ATTENTION.arguments)


def _describe(call: Call) -> Context:
    args = ATTENTION.lengthen(call.args)
    query, key, value, mask, dropout_p, *_ = args
    named: dict[str, Any] = dict(zip(ATTENTION.arguments, args, strict=True)) | {"layout": call.layout or Layout.BHSD}
    ctx = attention_context(**named, backend=call.backend, device=call.device, requires_grad=call.needs_grad)
    if call.device.platform is Platform.CUDA and query.is_cuda:
        return replace(ctx, vetoed=_vetoed(query, key, value, mask, dropout_p, ctx))
    return ctx


def _vetoed(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, ctx: Context) -> frozenset[str]:
    """Which of torch's fused kernels refuse these tensors by torch's own checks; asked on the cold path only.

    Not asked for a causal call with Sq != Sk: torch refuses those for alignment alone, which we handle ourselves.
    """
    if ctx.causal is not Causal.NONE and ctx.seq_relation != "equal":
        return frozenset()
    if ctx.folded:
        _, query, key, value, _ = fold(query, key, value, None)
    elif ctx.rank == 4 and ctx.layout is Layout.BSHD:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    elif ctx.rank == 3:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    gqa = ctx.enable_gqa
    params = torch.backends.cuda.SDPAParams(query, key, value, None, dropout_p, ctx.causal is not Causal.NONE, gqa)
    found = set()
    # Chunk by chunk the flash kernel sees no mask.
    if (mask is None or isinstance(mask, ChunkMask)) and not torch.backends.cuda.can_use_flash_attention(params, False):
        found.add("sdp_flash")
    if not gqa and mask is None and not torch.backends.cuda.can_use_efficient_attention(params, False):
        found.add("sdp_mem_efficient")
    if mask is None and not torch.backends.cuda.can_use_cudnn_attention(params, False):
        found.add("sdp_cudnn")
    return frozenset(found)


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Like the query, as wide as the value; where leading axes broadcast, as they do. The log-sum-exp is [B, H, Sq]."""
    layout, return_lse = rest[4], rest[-1]
    out = ordered_empty(query, value.shape[-1])
    if is_folded(query, key, value, layout):
        how = folding_of(query, key, value)
        axes = (*how.lead, how.heads) if how.rank > 2 else ()
        out = ordered(query.new_empty((*axes, query.shape[-2], value.shape[-1])), query)
    if not return_lse:
        return out
    of_heads = out.transpose(1, 2) if layout == "BSHD" and out.dim() == 4 else out
    return out, query.new_empty(of_heads.shape[:-1], dtype=torch.float32)


ATTENTION = declare(
    function=attention,
    fake=_fake,
    plain="layerzero.torch_ops.attention:attend",
    lowered={"dropout_p": "left out", "enable_gqa": "left out"},
    lowering="layerzero.torch_ops.attention",
    keeps_order=True,
    arguments=(
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "window", "softcap",
        "alibi_slopes", "return_lse", "sinks",
    ),
    trailing=1,
    canonical=_canonical,
    describe=_describe,
    reference="layerzero.backends.reference.attention:attention",
    cost=Roofline(
        "element_bytes * batch * (head_dim + head_dim_v) * (num_heads * seq_len_q + num_kv_heads * seq_len_k) "
        "+ (mask_bool + element_bytes * mask_float) * seq_len_q * seq_len_k",
        "2 * batch * num_heads * seq_len_q * keys_seen * (head_dim + head_dim_v)",
    ),
    shapes={
        "q": "batch,num_heads,seq_len_q,head_dim",
        "k": "batch,num_kv_heads,seq_len_k,head_dim",
        "v": "batch,num_kv_heads,seq_len_k,head_dim_v",
    },
    options=("layout", "causal", "dropout", "window", "softcap", "lse", "mask", "alibi", "sinks",),
    example="layerzero._ops.examples_attention:attention",
    tolerance="attention",
    growing=("seq_len_q", "seq_len_k"),
    random=lambda args: args[4] > 0.0,
    autocast=True,
    keyed="TTTOZWFWAIAOAWW",
)  # fmt: skip

"""`lz.attention`: a drop-in for `F.scaled_dot_product_attention`, and more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero.dispatch.hot import autocast_key, describe_tensor
from layerzero.dispatch.late import current_world, miss, recover
from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.model.describe import attention_context, check_scale, parse_window, stride_class
from layerzero.model.enums import Causal, Layout, OpKind, Platform
from layerzero.model.op import Call, OperationSpec
from layerzero.ops.signature import PublicOp, reference, register
from layerzero.runtime.current import now, scope

if TYPE_CHECKING:
    from layerzero.selection.world import World

__all__ = ["ATTENTION", "attention"]

_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_scope = scope.get


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
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
    """Scaled dot-product attention by the fastest kernel that is correct here.

    query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D] with `layout="BHSD"`; `"BSHD"` swaps axes 1 and 2; 3-D
    inputs are one head. GQA follows from the head counts. `is_causal=True` is top-left aligned as in SDPA,
    `"bottom_right"` as in FlashAttention. `window` is (left, right) keys around the query's position, an int
    means (window, 0). A fully masked row gives zeros. `return_lse=True` gives (out, lse): natural log,
    float32, [B, Hq, Sq]. `backend` restricts the choice to one backend or kernel id.
    """
    if scale is not None:
        check_scale(scale)
    try:
        hot_key = (
            "attention",
            type(query),
            query.shape,
            query.dtype,
            query.is_cpu,
            query.get_device(),
            query.is_contiguous() or query.stride(),
            type(key),
            key.shape,
            key.dtype,
            key.is_cpu,
            key.get_device(),
            key.is_contiguous() or key.stride(),
            type(value),
            value.shape,
            value.dtype,
            value.is_cpu,
            value.get_device(),
            value.is_contiguous() or value.stride(),
            attn_mask if attn_mask is None else describe_tensor(attn_mask),
            alibi_slopes if alibi_slopes is None else describe_tensor(alibi_slopes),
            is_causal,
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
            ),
            autocast_key() if _any_autocast() else False,
            _deterministic(),
        )
        active = _scope()
        world = now.world if active is None else active.world()
        bound = world.hot.get(hot_key)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, an unhashable option, a nested tensor
        return _cold(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            window,
            softcap,
            alibi_slopes,
            return_lse,
            layout,
            backend,
        )
    if bound is not None and (bound.guard is None or bound.guard()):
        try:
            if window is None and softcap is None and dropout_p == 0.0:
                return bound.run(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, window, softcap, alibi_slopes, return_lse
                )
            # The values of these are not in the key, so they are checked at each call.
            return bound.run(
                query,
                key,
                value,
                attn_mask,
                _checked_p(dropout_p),
                is_causal,
                scale,
                parse_window(window),
                _checked_softcap(softcap),
                alibi_slopes,
                return_lse,
            )
        except Exception as error:
            args = (
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                parse_window(window),
                softcap,
                alibi_slopes,
                return_lse,
            )
            return recover(ATTENTION, world, hot_key, bound, args, layout, backend, error)
    return _missed(
        hot_key,
        world,
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        window,
        softcap,
        alibi_slopes,
        return_lse,
        layout,
        backend,
    )


def _missed(
    hot_key: Any,
    world: World,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: Any,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    layout: str,
    backend: str | None,
) -> Any:
    """An exact key that is new: a neighbour in the same bucket may know the answer already."""
    from layerzero.runtime.state import state  # here a call has missed, so the machinery is needed anyway

    if not state.loaded:
        world = state.load()
    if type(attn_mask) not in (type(None), Tensor):
        attn_mask, is_causal = _causal_bias(attn_mask, is_causal)
    args = (
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        parse_window(window),
        softcap,
        alibi_slopes,
        return_lse,
    )
    near = _near_key(hot_key, world, query, key, value, attn_mask, layout)
    bound = world.hot.get(near) if near is not None else None
    if bound is not None and (bound.guard is None or bound.guard()):
        _checked_p(dropout_p)
        _checked_softcap(softcap)
        state.counters.near_hits += 1
        world.hot[hot_key] = bound
        try:
            return bound.run(*args)
        except Exception as error:
            return recover(ATTENTION, world, hot_key, bound, args, layout, backend, error)
    return miss(ATTENTION, world, hot_key, args, layout, backend, near)


def _cold(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: Any,
    scale: float | None,
    window: Any,
    softcap: float | None,
    alibi_slopes: Any,
    return_lse: bool,
    layout: str,
    backend: str | None,
) -> Any:
    for name, item in (("query", query), ("key", key), ("value", value)):
        if not isinstance(item, Tensor):
            raise InvalidInputError(code="TYPE_INVALID", value=f"{name}: {type(item).__name__}", limit="a torch.Tensor")
    if type(attn_mask) not in (type(None), Tensor):
        attn_mask, is_causal = _causal_bias(attn_mask, is_causal)
    args = (
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        parse_window(window),
        softcap,
        alibi_slopes,
        return_lse,
    )
    return miss(ATTENTION, current_world(), None, args, layout, backend)


def _causal_bias(mask: Any, is_causal: bool | str) -> tuple[Any, bool | str]:
    """torch's CausalBias objects say what they mean; take them at their word instead of as a dense mask."""
    variant = getattr(mask, "variant", None)
    if variant is None or type(mask).__name__ != "CausalBias":
        return mask, is_causal
    if is_causal:
        raise InvalidInputError(code="MASK_WITH_CAUSAL", value=str(is_causal))
    return None, "bottom_right" if variant.name == "LOWER_RIGHT" else True


def _near_key(
    hot_key: Any, world: World, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, layout: str
) -> Any:
    """The key with both sequence lengths replaced by their buckets; None when that would not be sound."""
    from layerzero.selection.buckets import boundaries

    if attn_mask is not None or query.ndim != 4:
        return None  # a mask's shape grows along; its calls meet the selection cache instead
    seq = 1 if layout == "BSHD" else 2
    edges_q, edges_k = boundaries(world, "attention", "seq_len_q"), boundaries(world, "attention", "seq_len_k")
    if edges_q is None or edges_k is None:
        return None
    qs, ks, vs = query.shape, key.shape, value.shape
    if len(ks) != 4 or len(vs) != 4 or ks[seq] != vs[seq]:
        return None
    seq_q, seq_k = qs[seq], ks[seq]
    if seq_q == 0 or seq_k == 0 or seq_q > edges_q[-1] or seq_k > edges_k[-1]:
        return None
    heads = 3 - seq
    if hot_key[6] is True and hot_key[12] is True and hot_key[18] is True:
        lies: Any = True
    else:
        lies = stride_class((query, key, value))
    return (
        "~attention",
        hot_key[1],
        hot_key[3:6],
        hot_key[7],
        hot_key[9:12],
        hot_key[13],
        hot_key[15:18],
        hot_key[19:],
        qs[0],
        qs[heads],
        qs[3],
        ks[0],
        ks[heads],
        ks[3],
        vs[0],
        vs[heads],
        vs[3],
        (seq_q > seq_k) - (seq_q < seq_k),
        bisect_left(edges_q, seq_q),
        bisect_left(edges_k, seq_k),
        lies,
    )


def _checked_p(dropout_p: float) -> float:
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidInputError(
            f"dropout_p is {dropout_p}", code="VALUE_INVALID", value=str(dropout_p), limit="in [0, 1)"
        )
    return dropout_p


def _checked_softcap(softcap: float | None) -> float | None:
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise InvalidInputError(
            f"softcap is {softcap}", code="VALUE_INVALID", value=str(softcap), limit="a positive number"
        )
    return softcap


def _describe(call: Call) -> Context:
    query, key, value, mask, dropout_p, is_causal, scale, window, softcap, slopes, return_lse = call.args
    ctx = attention_context(
        query,
        key,
        value,
        layout=call.layout,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=slopes,
        return_lse=return_lse,
        backend=call.backend,
        device=call.device,
        requires_grad=call.needs_grad,
    )
    if call.device.platform is Platform.CUDA and query.is_cuda:
        return replace(ctx, vetoed=_vetoed(query, key, value, mask, dropout_p, ctx))
    return ctx


def _vetoed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, ctx: Context
) -> frozenset[str]:
    """Which of torch's fused kernels refuse these tensors by torch's own checks; asked on the cold path only.

    Not asked for a causal call with Sq != Sk: torch refuses those for alignment alone, which we handle ourselves.
    """
    if ctx.causal is not Causal.NONE and ctx.seq_relation != "equal":
        return frozenset()
    if ctx.rank == 4 and ctx.layout is Layout.BSHD:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    elif ctx.rank == 3:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    gqa = ctx.enable_gqa
    params = torch.backends.cuda.SDPAParams(query, key, value, None, dropout_p, ctx.causal is not Causal.NONE, gqa)
    found = set()
    if mask is None and not torch.backends.cuda.can_use_flash_attention(params, False):
        found.add("sdp_flash")
    if not gqa and mask is None and not torch.backends.cuda.can_use_efficient_attention(params, False):
        found.add("sdp_mem_efficient")
    if mask is None and not torch.backends.cuda.can_use_cudnn_attention(params, False):
        found.add("sdp_cudnn")
    return frozenset(found)


ATTENTION = OperationSpec(
    op_id="attention",
    op_kind=OpKind.TENSOR,
    arguments=(
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
        "window",
        "softcap",
        "alibi_slopes",
        "return_lse",
    ),
    input_kinds=(
        "tensor",
        "tensor",
        "tensor",
        "tensor?",
        "number",
        "flag",
        "number",
        "object",
        "number",
        "tensor?",
        "flag",
    ),
    output_kind="tensor",
    describe=_describe,
    fallback_impl=reference("layerzero.backends.reference.attention:attention"),
    fallback_id="reference.attention.plain",
    elastic=("seq_len_q", "seq_len_k"),
    random=lambda args: args[4] > 0.0,
    autocast=True,
)
register(
    PublicOp(
        ATTENTION,
        attention,
        canonical=lambda a: (
            a["query"],
            a["key"],
            a["value"],
            *_causal_bias(a["attn_mask"], a["is_causal"])[:1],
            a["dropout_p"],
            _causal_bias(a["attn_mask"], a["is_causal"])[1],
            a["scale"],
            parse_window(a["window"]),
            a["softcap"],
            a["alibi_slopes"],
            a["return_lse"],
        ),
    )
)

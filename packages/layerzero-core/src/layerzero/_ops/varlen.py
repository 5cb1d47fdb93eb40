"""`lz.varlen_attention`: attention over sequences of different lengths, packed one after the other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from layerzero._ops.bucketed import batch_key
from layerzero._ops.signature import declare, keyed
from layerzero.dispatch import modes
from layerzero.dispatch.hot import Unkeyed
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_heads, expect_index, expect_rank
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import (
    attention_needs,
    check_devices,
    check_floating,
    check_per_head,
    check_scale,
    check_softcap,
    dtype_name,
    parse_causal,
    parse_window,
)
from layerzero.model.op import Call
from layerzero.model.shapes import with_lse

_PLAIN = (Tensor, Parameter)


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., is_causal: bool | str = ...,
    scale: float | None = ..., window: int | Sequence[int] | None = ..., softcap: float | None = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., is_causal: bool | str = ...,
    scale: float | None = ..., window: int | Sequence[int] | None = ..., softcap: float | None = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., is_causal: bool | str = ...,
    scale: float | None = ..., window: int | Sequence[int] | None = ..., softcap: float | None = ...,
    alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: bool, backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    window: int | Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention of packed query [Tq, Hq, D] over packed key [Tk, Hkv, D] and value [Tk, Hkv, Dv], sequence by sequence.

    Sequence s is rows cu_seqlens[s] to cu_seqlens[s + 1] of its tensor: offsets [B + 1], int32 or int64, from 0 to T,
    ascending; a sequence may be empty. `max_seqlen_q` and `max_seqlen_k` are upper bounds of the lengths; on an
    accelerator giving both saves a wait for the device, and the offsets are then trusted. Options mean what they mean
    in `lz.attention`, in each sequence by itself. A query without any key gives zeros. `return_lse=True` gives
    (out, lse) with lse [Tq, Hq].
    """
    check_scale(scale)
    check_softcap(softcap)
    longest_q, longest_k, equal = _lengths(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sides = parse_window(window)
    args = (
        query, key, value, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, is_causal, scale, sides, softcap,
        alibi_slopes, return_lse, sinks,
    )  # fmt: skip
    args = VARLEN_ATTENTION.shorten(args)
    return keyed(VARLEN_ATTENTION, functools.partial(_key, more=equal), args, None, backend)


def _lengths(
    query: Any, key: Any, cu_q: Any, cu_k: Any, max_q: int | None, max_k: int | None
) -> tuple[int | None, int | None, bool]:
    """Upper bounds of both lengths, and whether every sequence has as many queries as keys.

    Offsets are read and checked where that costs no wait: always on the CPU, elsewhere only when a bound is missing.
    Where they cannot be read (a capture) the number of tokens is a bound; in a traced graph a missing one stays None.
    """
    for name, given in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
            raise invalid("VALUE_INVALID", f"{name}={given}", "a length, or None")
    same = cu_q is cu_k
    if not (_packed(query) and _packed(key)) or modes.followed():  # what a mode or a tracer follows is not read past it
        return max_q, max_k, same
    if not (_readable(cu_q) and (same or _readable(cu_k))):
        if type(query) in _PLAIN and type(key) in _PLAIN:
            max_q = query.shape[0] if max_q is None else max_q
            max_k = key.shape[0] if max_k is None else max_k
        return max_q, max_k, same
    if not cu_q.is_cpu and max_q is not None and max_k is not None:
        return max_q, max_k, same
    offsets_q = cu_q.tolist()
    max_q = _checked(offsets_q, "cu_seqlens_q", query, max_q)
    offsets_k = offsets_q if same else cu_k.tolist()
    return max_q, _checked(offsets_k, "cu_seqlens_k", key, max_k), same or offsets_q == offsets_k


def _readable(offsets: Any) -> bool:
    """Whether these are offsets whose values the host may look at; anything odd is refused on the cold path."""
    if type(offsets) not in _PLAIN or offsets.ndim != 1 or offsets.is_floating_point():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(offsets) or offsets.is_meta:
        return False
    return offsets.is_cpu or not (offsets.is_cuda and torch.cuda.is_current_stream_capturing())


def _packed(tokens: Any) -> bool:
    """Whether these are packed tokens; anything else is refused on the cold path, in its own words."""
    return isinstance(tokens, Tensor) and tokens.ndim == 3 and not tokens.is_nested


def _checked(offsets: list[int], name: str, packed: Tensor, bound: int | None) -> int:
    """The bound of the lengths, or the longest one without it; offsets that are none are refused."""
    total = packed.shape[0]
    if not offsets or offsets[0] != 0 or offsets[-1] != total:
        shown = f"{offsets[0]} … {offsets[-1]}" if offsets else "nothing"
        raise invalid("VALUE_INVALID", f"{name} from {shown}", f"0 … {total}, the tokens")
    lengths = [*map(operator.sub, offsets[1:], offsets)]
    longest = max(lengths, default=0)
    if min(lengths, default=0) < 0:
        place = next(place for place, length in enumerate(lengths, 1) if length < 0)
        shown = f"{name}[{place}] = {offsets[place]} after {offsets[place - 1]}"
        raise invalid("VALUE_INVALID", shown, "ascending offsets")
    if bound is not None and bound < longest:
        short = name.replace("cu_seqlens", "max_seqlen")
        raise invalid("VALUE_INVALID", f"{short}={bound}", f">= {longest}, the longest sequence")
    return longest if bound is None else bound


def _sizes(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, *rest: Any) -> Any:
    if max_q is None or max_k is None:
        raise Unkeyed("lengths that only the device knows have no key")
    sizes = (cu_q.shape[0] - 1, query.shape[0], key.shape[0], max_q, max_k)
    return sizes, (value.shape[0] == key.shape[0], cu_q.shape == cu_k.shape)


def _describe(call: Call) -> Context:
    args = VARLEN_ATTENTION.lengthen(call.args)
    query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window, softcap, slopes, return_lse, sinks = args
    for name, item, rank in (
        ("query", query, 3), ("key", key, 3), ("value", value, 3), ("cu_seqlens_q", cu_q, 1), ("cu_seqlens_k", cu_k, 1),
    ):  # fmt: skip
        expect_rank(item, name, (rank,))
    check_devices(
        query=query, key=key, value=value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, alibi_slopes=slopes, sinks=sinks
    )
    words = tuple(check_floating(t, n) for t, n in ((query, "query"), (key, "key"), (value, "value")))
    _check_offsets(cu_q, cu_k)
    expect_heads(query, key, value)
    (tokens, heads, dim), (tokens_k, kv_heads, _) = query.shape, key.shape
    batch = cu_q.shape[0] - 1
    check_per_head(slopes, sinks, heads, batch)
    causal = parse_causal(is_causal)
    check_scale(scale)
    check_softcap(softcap)
    equal = _lengths(query, key, cu_q, cu_k, max_q, max_k)[2]
    gqa = heads != kv_heads
    needs = attention_needs(call.needs_grad, gqa, causal, window, softcap, slopes, sinks, return_lse)
    dims = {
        "batch": batch,
        "tokens": tokens,
        "tokens_k": tokens_k,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "head_dim_v": value.shape[2],
        "seq_len_q": tokens if max_q is None else max_q,
        "seq_len_k": tokens_k if max_k is None else max_k,
    }
    return context_of(
        call,
        "varlen_attention",
        words[0],
        dims,
        needs,
        (query, key, value),
        dtypes=words,
        rank=3,
        causal=causal,
        window=window,
        index_dtype=dtype_name(cu_q),
        seq_relation="equal" if equal else "ragged",
        scale=scale,
    )


def _check_offsets(cu_q: Tensor, cu_k: Tensor) -> None:
    for name, item in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        expect_index(item, name)
        if item.shape[0] < 1:
            raise invalid("SHAPE_INVALID", f"{name} {tuple(item.shape)}", "[B + 1]")
    if cu_q.dtype != cu_k.dtype:
        shown = f"cu_seqlens_q {dtype_name(cu_q)}, cu_seqlens_k {dtype_name(cu_k)}"
        raise invalid("DTYPE_MIXED", shown)
    if cu_q.shape != cu_k.shape:
        shown = f"cu_seqlens_q {tuple(cu_q.shape)}, cu_seqlens_k {tuple(cu_k.shape)}"
        raise invalid("SHAPE_INVALID", shown, "one number of sequences")


def _canonical(given: dict[str, Any]) -> tuple[Any, ...]:
    first = [given[name] for name in ("query", "key", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    longest_q, longest_k, _ = _lengths(*first)
    sides = parse_window(given["window"])
    told = {**given, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k, "window": sides}
    return tuple(told[name] for name in VARLEN_ATTENTION.arguments)


VARLEN_ATTENTION = declare(
    function=varlen_attention,
    fake=lambda query, key, value, *rest: with_lse(query.new_empty((*query.shape[:2], value.shape[2])), rest[-1]),
    plain="layerzero.backends.reference.varlen:varlen_masked",
    arguments=(
        "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "is_causal",
        "scale", "window", "softcap", "alibi_slopes", "return_lse", "sinks",
    ),
    trailing=1,
    describe=_describe,
    reference="layerzero.backends.reference.varlen:varlen_attention",
    cost=Roofline(
        "element_bytes * (head_dim + head_dim_v) * (tokens * num_heads + tokens_k * num_kv_heads) "
        "+ 2 * index_bytes * (batch + 1)",
        "2 * tokens * num_heads * min(keys_seen, tokens_k / batch) * (head_dim + head_dim_v)",
    ),
    shapes={
        "q": "tokens,num_heads,head_dim",
        "k": "tokens_k,num_kv_heads,head_dim",
        "v": "tokens_k,num_kv_heads,head_dim_v",
        "seq_len_k": "tokens_k",
        "seq_len_q": "min(seq_len_k, tokens)",
        "batch": "max(1, ceil(tokens_k / seq_len_k))",
    },
    options=("context", "causal", "window", "softcap", "lse", "alibi", "sinks",),
    example="layerzero._ops.examples_attention:varlen",
    tolerance="attention",
    growing=("batch", "tokens", "tokens_k", "seq_len_q", "seq_len_k"),
    autocast=True,
    canonical=_canonical,
)  # fmt: skip

_key = batch_key(VARLEN_ATTENTION, _sizes, "packed", "packed", "packed", "offsets", "offsets")

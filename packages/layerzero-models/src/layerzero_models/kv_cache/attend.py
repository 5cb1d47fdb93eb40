"""Attention over a KV cache: which public calls it takes, and how their results become one.

Every call goes through normal selection. Where no op takes what the cache stores (a scale for each token), the tokens
in use are dequantized first, which is said in the call's notes and refused where the policy allows no adaptation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero import attention, paged_attention
from layerzero.dispatch.late import current_world
from layerzero.errors import NoKernelFoundError, invalid
from layerzero.model.checks import expect_tensor
from layerzero.model.kv_cache import PagedBatch, pages_in_use
from layerzero.reasons import Reason, reason
from layerzero_models.kv_cache.codec import pack, unpack, whole_numbers
from layerzero_models.kv_cache.storage import Chunked, Paged, indexable

if TYPE_CHECKING:
    from layerzero_models.kv_cache.cache import KVCache

_OPTIONS = ("scale", "window", "softcap", "alibi_slopes", "return_lse", "backend")


@dataclass(frozen=True, slots=True)
class CacheCall:
    """One public call: `getattr(lz, op)(*args, **kwargs)`. Notes say what was done to the cache's tokens before."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    notes: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class _Query:
    """The queries, packed, and how they came in."""

    packed: Tensor
    lens: tuple[int, ...]
    padded: int | None

    def shaped(self, out: Tensor) -> Tensor:
        """A result [tokens, heads, ...] in the form of the query: [B, heads, S, ...] where that was padded."""
        return out if self.padded is None else unpack(out, self.lens, self.padded).transpose(1, 2)


def attend(cache: KVCache, query: Tensor, layer: int, lens: Sequence[int] | None, options: dict[str, Any]) -> Any:
    """Run the calls, merge their results, and give them the form of the query."""
    given = read_query(cache, query, layer, lens)
    calls = calls_of(cache, given, layer, options)
    functions: dict[str, Any] = {"attention": attention, "paged_attention": paged_attention}
    results = [_packed_result(functions[call.op](*call.args, **call.kwargs), call, given) for call in calls]
    merged, lse = results[0] if len(results) == 1 else _merged(results, given.packed.dtype)
    if cache.value_codec.fixed is not None:
        merged = (merged.to(torch.float32) * cache.value_codec.fixed).to(merged.dtype)
    if not options.get("return_lse", False):
        return given.shaped(merged)
    assert lse is not None
    return given.shaped(merged), given.shaped(lse)


def read_query(cache: KVCache, query: Tensor, layer: int, lens: Sequence[int] | None) -> _Query:
    """The queries, padded or packed, once they are known to fit the cache."""
    tensor = expect_tensor(query, "query")
    if tensor.ndim == 4:
        width = tensor.shape[2]
        new = (width,) * cache.batch if lens is None else whole_numbers(lens, "lens", cache.batch)
        if tensor.shape[0] != cache.batch or max(new) > width:
            shown = f"query {tuple(tensor.shape)} for lens {new}"
            raise invalid("SHAPE_INVALID", shown, f"[{cache.batch}, heads, S, head_dim]")
        made = _Query(pack(tensor.transpose(1, 2), new), new, width)
    elif tensor.ndim == 3:
        new = (1,) * cache.batch if lens is None else whole_numbers(lens, "lens", cache.batch)
        if tensor.shape[0] != sum(new):
            raise invalid("SHAPE_INVALID", f"{tensor.shape[0]} query tokens", f"{sum(new)} from lens")
        made = _Query(tensor, new, None)
    else:
        raise invalid("RANK_INVALID", tensor.ndim, "4, or 3 for packed tokens")
    for seq, (count, length) in enumerate(zip(new, cache.lengths(layer), strict=True)):
        if count > length:
            raise invalid(
                "SHAPE_INVALID", f"{count} query tokens of sequence {seq}", f"its {length} cached tokens: append first"
            )
    return made


def calls_of(cache: KVCache, query: _Query, layer: int, options: dict[str, Any]) -> list[CacheCall]:
    """The calls `attend` makes."""
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise invalid("VALUE_INVALID", f"option {unknown[0]!r}", ", ".join(_OPTIONS))
    words = {name: value for name, value in options.items() if value is not None}
    if cache.key_codec.fixed is not None:  # the scale of the keys is a factor of the scores
        scale = words.get("scale", 1.0 / math.sqrt(cache.key_codec.width))
        words["scale"] = scale * cache.key_codec.fixed
    lengths = cache.lengths(layer)
    if isinstance(cache.storage, Paged):
        return [_over_pages(cache, query, layer, words)]
    relative = words.get("window") is not None or words.get("alibi_slopes") is not None
    if isinstance(cache.storage, Chunked) and not relative and set(query.lens) == {1} and cache.storage.chunks > 1:
        return _over_chunks(cache, query, layer, words)
    if len(set(query.lens)) == 1 and query.lens[0] > 0 and len(set(lengths)) == 1:
        return [_over_dense(cache, query, layer, words)]
    # Sequences of different length: each is one page as long as the longest.
    planes = _rows(cache, layer, max(*lengths, 1))
    return [_paged_call(cache, query, planes, _one_page_each(cache, lengths, query.lens), words)]


def _over_pages(cache: KVCache, query: _Query, layer: int, words: dict[str, Any]) -> CacheCall:
    assert isinstance(cache.storage, Paged)
    batch = cache.paged_batch(query.lens, layer=layer)
    planes = tuple(plane[0] for plane in cache.storage.buffers[layer])
    if _scaled(cache):
        chosen, batch = pages_in_use(batch, cache.storage.page_size)
        planes = tuple(indexable(plane).index_select(0, chosen).view(plane.dtype) for plane in planes)
    return _paged_call(cache, query, planes, batch, words)


def _over_dense(cache: KVCache, query: _Query, layer: int, words: dict[str, Any]) -> CacheCall:
    """All sequences are equally long: plain attention over one slice of the cache."""
    length, count = cache.lengths(layer)[0], query.lens[0]
    keys, values, notes = _decoded(cache, _rows(cache, layer, length))
    rows = query.packed.reshape(cache.batch, count, *query.packed.shape[1:])
    layout = "BSHD" if cache.layout == "NHD" else "BHSD"
    if layout == "BHSD":
        rows = rows.transpose(1, 2)
    causal = {"is_causal": "bottom_right"} if count > 1 else {}
    return CacheCall("attention", (rows, keys, values), {"layout": layout, **causal, **words}, notes)


def _over_chunks(cache: KVCache, query: _Query, layer: int, words: dict[str, Any]) -> list[CacheCall]:
    """One new token each, which sees every chunk whole: attend chunk by chunk, no chunk is copied."""
    storage = cache.storage
    assert isinstance(storage, Chunked)
    calls = []
    for number in range(storage.chunks):
        inside = tuple(storage.used(number, length) for length in cache.lengths(layer))
        if not any(inside):
            continue
        planes = tuple(plane[number] for plane in storage.buffers[layer])
        batch = _one_page_each(cache, inside, query.lens)
        calls.append(_paged_call(cache, query, planes, batch, {**words, "return_lse": True}))
    return calls


def _paged_call(
    cache: KVCache, query: _Query, planes: tuple[Tensor, ...], batch: PagedBatch, words: dict[str, Any]
) -> CacheCall:
    keys, values, notes = _decoded(cache, planes)
    return CacheCall("paged_attention", (query.packed, keys, values, batch), {"layout": cache.layout, **words}, notes)


def _one_page_each(cache: KVCache, contexts: tuple[int, ...], new: tuple[int, ...]) -> PagedBatch:
    tables = torch.arange(cache.batch, dtype=torch.int32, device=cache.device).unsqueeze(-1)
    return cache.planned(tables, contexts, new, 0)


def _rows(cache: KVCache, layer: int, length: int) -> tuple[Tensor, ...]:
    """The first `length` slots of every sequence, all planes, in the layout of the cache; a view where it can be."""
    axis = 1 if cache.layout == "NHD" else 2
    out = []
    for plane in cache.storage.buffers[layer]:
        if len(plane) == 1:
            out.append(plane[0].narrow(axis, 0, length))
            continue
        joined = torch.cat([indexable(part) for part in plane], dim=axis).narrow(axis, 0, length)
        out.append(joined.view(plane[0].dtype))
    return tuple(out)


def _scaled(cache: KVCache) -> bool:
    return len(cache.key_codec.planes) > 1


def _decoded(cache: KVCache, planes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Reason, ...]]:
    """Keys and values that an op can take; scales of tokens are applied, which is an adaptation."""
    if not _scaled(cache):
        return planes[0], planes[1], ()
    assert cache.key_codec.scheme is not None
    step = f"dequantize:{cache.key_codec.scheme.fmt.value}->{str(cache.dtype).removeprefix('torch.')}"
    policy = current_world().policy
    if policy.strict_mode or not policy.allow_adaptation:
        why = reason("ADAPTATION_NOT_ALLOWED", step, detail="no kernel takes a scale for each token")
        raise NoKernelFoundError(reasons=(why,))
    split = len(cache.key_codec.planes)
    note = reason("ADAPTED", step, detail="no kernel takes a scale for each token")
    return cache.key_codec.decode(planes[:split]), cache.value_codec.decode(planes[split:]), (note,)


def _packed_result(result: Any, call: CacheCall, query: _Query) -> tuple[Tensor, Tensor | None]:
    """Output [tokens, heads, D] and log-sum-exp [tokens, heads] of any call."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    if call.op == "paged_attention":
        return out, lse
    rows = out if call.kwargs["layout"] == "BSHD" else out.transpose(1, 2)
    return pack(rows, query.lens), None if lse is None else pack(lse.transpose(1, 2), query.lens)


def _merged(results: list[tuple[Tensor, Tensor | None]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint keys, from the results over each part and their log-sum-exps."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    outs = torch.stack([out.to(wide) for out, _ in results])
    sums = torch.stack([lse.to(wide) for _, lse in results if lse is not None])
    largest = sums.amax(dim=0).clamp(min=torch.finfo(wide).min)  # a sequence without tokens has -inf everywhere
    shares = torch.exp(sums - largest)
    total = shares.sum(dim=0)
    out = (outs * shares.unsqueeze(-1)).sum(dim=0) / total.clamp(min=torch.finfo(wide).tiny).unsqueeze(-1)
    return out.to(dtype), (largest + torch.log(total)).to(torch.float32)

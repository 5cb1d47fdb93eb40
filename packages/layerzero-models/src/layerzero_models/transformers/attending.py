"""`lz.attention` in the form transformers calls: `attn_implementation="layerzero"`, and the mask beside it.

transformers asks for a mask once a forward pass. What comes back is None or a boolean mask that is true word for word,
so that model code may slice or combine it. Where the mask is one that `lz.attention` has words for, it carries a note
(`noted`) that spares the kernel from reading it; a mask that was changed on the way has lost its note and is read.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero import paged_attention
from layerzero.dispatch.late import current_world
from layerzero.errors import BackendNotAvailableError, NoKernelFoundError
from layerzero.model.kv_cache import PagedBatch

_ATTRIBUTE = "_layerzero_note"
attention: Any = lz.attention  # its flags are words of transformers here, which no overload has
# Splits the context by the size of the cache and reads the lengths on the device, so that a graph captured once stays
# right while they grow. No other kernel promises that.
KERNEL = "triton.paged_attention.split"
_PAGES = (128, 64, 32, 16)


# -- one new token over a static cache: attention over the places in use, whose number only the device knows --
def present() -> bool:
    """Whether the kernel is installed."""
    return KERNEL in current_world().registry.kernels


def decode(
    query: Tensor, key: Tensor, value: Tensor, note: Note, scale: float | None, softcap: float | None
) -> Tensor | None:
    """query [B, H, 1, D] over the places in use of [B, Hkv, S, D]: [B, 1, H, D], or None where a mask has to do.

    On the CPU the number can be read. On an accelerator reading it would wait for the device, so the cache is seen as
    pages, and a kernel that reads the lengths there takes them.
    """
    used, window = note.used, note.window
    assert used is not None
    if key.is_cpu:
        count = int(used)
        key, value = key[:, :, :count], value[:, :, :count]
        out: Tensor = attention(query, key, value, scale=scale, window=window, softcap=softcap)
        return out.transpose(1, 2).contiguous()
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return None
    size = next((page for page in _PAGES if key.shape[2] % page == 0), None)
    same = key.shape == value.shape and key.is_contiguous() and value.is_contiguous()
    unusable = current_world().memo.setdefault("static_cache", set())  # what is true of one World may change
    case = (query.shape, key.shape, query.dtype, window is None, softcap is None)
    if size is None or not same or case in unusable or not present():
        return None
    batch = _batch(used, key.shape[0], key.shape[1], key.shape[2], size, key.device)
    try:
        paged: Tensor = paged_attention(
            query[:, :, 0], _pages(key, size), _pages(value, size), batch, scale=scale, window=window, softcap=softcap,
            layout="HND", backend=KERNEL,
        )  # fmt: skip
    except (NoKernelFoundError, BackendNotAvailableError):  # denied, not compiled yet, or not for these tensors
        unusable.add(case)
        return None
    return paged.unsqueeze(1)


def _pages(cache: Tensor, size: int) -> Tensor:
    """[B, Hkv, S, D] seen as pages [n, Hkv, size, D]: a page begins wherever a multiple of `size` rows does."""
    rows, heads, places, dim = cache.shape
    count = (rows - 1) * heads * (places // size) + places // size
    return cache.as_strided((count, heads, size, dim), (size * dim, places * dim, dim, 1))


def _batch(used: Tensor, rows: int, heads: int, places: int, size: int, device: torch.device) -> PagedBatch:
    """The batch of one step, kept on the tensor it was made from: all layers share it."""
    known: tuple[Any, PagedBatch] | None = getattr(used, "_layerzero_batch", None)
    shape = (rows, heads, places, size)
    if known is not None and known[0] == shape:
        return known[1]
    lengths = used.to(torch.int32).expand(rows).contiguous()
    tables = _tables(rows, heads, places, size, device)
    batch = PagedBatch(tables, lengths, None, (places,) * rows, (1,) * rows, capture=True)  # lengths of the device
    used._layerzero_batch = (shape, batch)  # type: ignore[attr-defined]
    return batch


@lru_cache(maxsize=64)
def _tables(rows: int, heads: int, places: int, size: int, device: torch.device) -> Tensor:
    first = torch.arange(rows, device=device, dtype=torch.int32) * (heads * (places // size))
    return first[:, None] + torch.arange(places // size, device=device, dtype=torch.int32)[None, :]


# -- the mask ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Note:
    """What a mask says, in the words of `lz.attention`.

    causal  "bottom_right": nothing after the query's own place, the new tokens being the last ones
    window  (left, right) keys around it
    used    a tensor with the number of places in use, of a cache whose places are all there from the start: one new
            token, the last of them, sees these (in its window, where there is one) and no others
    """

    causal: str | None = None
    window: tuple[int, int] | None = None
    used: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Unread:
    """In place of the note on a mask over a static cache: whether a token is hidden is read when an attention asks.

    Reading it waits for the device. A compiled forward never asks, so its steps are queued without a wait.
    """

    padding: Tensor | None


def noted(attention_mask: Any) -> Note | None:
    """The note on a mask made here and not changed since."""
    found: Note | _Unread | None = getattr(attention_mask, _ATTRIBUTE, None)
    if isinstance(found, _Unread):  # without padding the places in use are those that the mask shows
        found = None if _padded(found.padding) else Note(used=attention_mask[0, 0, 0].sum())
        setattr(attention_mask, _ATTRIBUTE, found)
    return found


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **words: Any
) -> Tensor | None:
    """The mask function registered beside the attention function; the arguments are transformers'."""
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    attention_mask, local_size = words.get("attention_mask"), words.get("local_size")
    config: Any = words.get("config")
    read = _read_by_models(type(config))
    skip = words.get("allow_is_causal_skip", True) and not read
    compiling = torch.compiler.is_compiling()
    window = None if local_size is None else _window(config, local_size)
    known = local_size is None or window is not None
    causal = words.get("mask_function", causal_mask_function) is causal_mask_function
    # One new token at a place of a cache that is all there from the start.
    static = isinstance(q_offset, Tensor) and causal and q_length == 1 and not compiling
    ends_here = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if compiling and causal and skip and ends_here and attention_mask is None and local_size is None:
        if q_length == kv_length and not torch.compiler._is_exporting_flag:
            return None  # where transformers makes one: a kernel that reads it computes what it hides too
    said = known and skip and ends_here and not compiling
    if said and local_size is not None and q_length in (1, kv_length) and not _padded(attention_mask):
        if (q_length == 1 and kv_length <= local_size) or _passes_window(config.__class__):
            return None  # nothing is hidden, or the attention function is told the window by the model
    make: Any = eager_mask if read else sdpa_mask
    found: Tensor | None = make(batch_size, q_length, kv_length, q_offset, kv_offset, **words)
    if found is None or compiling or read:
        return found
    if static:
        return with_note(found, _Unread(attention_mask))
    if said and (causal or window is not None) and not _padded(attention_mask):
        return with_note(found, Note("bottom_right", window))
    return found


def with_note(found: Tensor, note: Note | _Unread) -> Tensor:
    """The same mask, saying what it says."""
    setattr(found, _ATTRIBUTE, note)
    return found


def _padded(attention_mask: Tensor | None) -> bool:
    """Whether a token is hidden. Reading that waits for the device, which a capture forbids: then it may be."""
    if attention_mask is None or (attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return attention_mask is not None
    return not bool(attention_mask.all())


def _window(config: Any, local_size: int) -> tuple[int, int] | None:
    """The window a local size stands for; None for chunks, whose size comes by the same name."""
    if getattr(config, "attention_chunk_size", None) is not None or getattr(config, "is_causal", True) is False:
        return None
    return (local_size - 1, 0) if getattr(config, "sliding_window", None) == local_size else None


def _models_of(kind: type) -> Any:
    """The file with the models of a configuration; that of the configuration where there is none."""
    return sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"), sys.modules[kind.__module__])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _read_by_models(kind: type) -> bool:
    """Whether the models of a configuration are flagged for eager attention only: they may read masks themselves."""
    return _eager_alone(kind)


@lru_cache(maxsize=256)  # Dynamo warns where it meets one
def _eager_alone(kind: type) -> bool:
    models = [item for item in vars(_models_of(kind)).values() if getattr(item, "config_class", None) is kind]
    others = (m._supports_sdpa or (m._supports_flash_attn and m._supports_attention_backend) for m in models)
    return bool(models) and not any(others)


@lru_cache(maxsize=256)
def _passes_window(kind: type) -> bool:
    """Whether models hand their window to the attention function: every call of it in their source."""
    try:
        tree = ast.parse(inspect.getsource(_models_of(kind)))
    except (OSError, SyntaxError, TypeError):
        return False
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [node for node in called if getattr(node.func, "id", "") == "attention_interface"]
    return bool(calls) and all(any(k.arg == "sliding_window" for k in call.keywords) for call in calls)


# -- attention -----------------------------------------------------------------------------------------
def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [B, H, Sq, D], key and value [B, Hkv, Sk, D] to ([B, Sq, H, D], None).

    Without a mask, one query sees all keys; several are causal where the module is (`is_causal` overrides it), from the
    first key on: with more keys than queries the rest are the empty places of a static cache. `s_aux` [H] are sinks: a
    score of each head that takes part in the softmax and has no value. `indices` [B, Sq, K] are the keys that a query
    may see of those that the mask shows, and `block_indices` [B, G, Sq, K] blocks of keys, for groups of heads.
    """
    if indices is not None or block_indices is not None:
        attention_mask = _chosen(module, query, key, attention_mask, indices, block_indices, rest.get("position_ids"))
    if attention_mask is None and query.shape[2] == 1 and position_bias is None and cache is None and s_aux is None:
        # A decode step, the one call that has no time to lose: nothing is hidden but what lies outside a window.
        window = None
        if sliding_window is not None and key.shape[2] > sliding_window:
            window = (sliding_window - 1, 0)
        out = attention(query, key, value, None, dropout, False, scaling, window=window, softcap=softcap)
        return out.transpose(1, 2).contiguous(), None
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=rest)
    queries, keys = query.shape[2], key.shape[2]
    causal: bool | str = False
    window = None
    if attention_mask is None:
        causal = queries > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal = causal and not _read_by_models(type(getattr(module, "config", None)))
        if causal and keys > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
            if position_bias is not None:
                position_bias = position_bias[..., :queries]
            keys = queries
        # transformers counts the query's own place
        if sliding_window is not None and keys > sliding_window and (causal or queries == 1):
            window = (sliding_window - 1, 0)
    else:
        note = None if torch.compiler.is_compiling() else noted(attention_mask)
        if note is not None and position_bias is None and s_aux is None:
            if note.used is not None:
                out = decode(query, key, value, note, scaling, softcap) if dropout == 0.0 else None
                if out is not None:
                    return out, None
            elif note.causal is not None and tuple(attention_mask.shape[-2:]) == (queries, keys):
                attention_mask, causal, window = None, note.causal or False, note.window
    if position_bias is not None:
        attention_mask, causal = biased(position_bias, attention_mask, bool(causal), query, key), False
    words = {"window": window, "softcap": softcap, "sinks": s_aux}
    out = attention(query, key, value, attention_mask, dropout, causal, scaling, **words)
    return out.transpose(1, 2).contiguous(), None


def _chosen(
    module: Any, query: Tensor, key: Tensor, mask: Any, indices: Tensor | None, blocks: Any, positions: Any
) -> Tensor:
    """The mask without the keys that the model's indexer left out. For `sdpa` the models do this themselves."""
    keys, queries = key.shape[2], query.shape[2]
    if indices is None:
        places = torch.arange(keys - queries, keys, device=query.device) if positions is None else positions
        places = places.reshape(-1, queries)
        return module.indexer.build_block_mask(blocks, mask, keys, query.dtype, query.device, places)  # type: ignore[no-any-return]
    seen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=key.device)
    seen = seen.scatter(-1, indices.long(), True).unsqueeze(1)
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)  # type: ignore[no-any-return]


def biased(bias: Tensor, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """T5's position bias with whatever may not be attended at minus infinity."""
    out = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask is not None:
        return out.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else out + mask
    if causal:
        later = torch.ones(out.shape[-2:], dtype=torch.bool, device=out.device).triu(1 + key.shape[2] - query.shape[2])
        return out.masked_fill(later, -torch.inf)
    return out

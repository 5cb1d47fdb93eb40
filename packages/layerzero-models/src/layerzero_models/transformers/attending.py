"""`lz.attention` in the form transformers calls: `attn_implementation="layerzero"`, and the mask beside it.

transformers asks for a mask once a forward pass. What comes back is None or a boolean mask that is true word for word,
so that model code may slice or combine it. Where the mask is one that `lz.attention` has words for, it carries a note
(`noted`) that spares the kernel from reading it; a mask that was changed on the way has lost its note and is read.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
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
_PAGES = (128, 64, 32, 16, 8, 4, 2, 1)  # the last fits every cache


# -- one new token over a static cache: attention over the places in use, whose number only the device knows --
def present() -> bool:
    """Whether the kernel is installed."""
    return KERNEL in current_world().registry.kernels


def decode(
    query: Tensor, key: Tensor, value: Tensor, note: Note, scale: float | None, softcap: float | None
) -> Tensor | None:
    """query [B, H, 1, D] over the places in use of [B, Hkv, S, D]: [B, 1, H, D], or None where a mask has to do.

    Reading their number would wait for the device, so the cache is seen as pages, and a kernel reads it there.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return None
    size = next(page for page in _PAGES if key.shape[2] % page == 0)
    same = key.shape == value.shape and key.is_contiguous() and value.is_contiguous()
    unusable = current_world().memo.setdefault("static_cache", set())  # what is true of one World may change
    case = (query.shape, key.shape, query.dtype, note.window is None, softcap is None)
    if not same or case in unusable or not present():
        return None
    batch = _batch(note.used, key.shape[0], key.shape[1], key.shape[2], size, key.device)
    try:
        paged: Tensor = paged_attention(
            query[:, :, 0], _pages(key, size), _pages(value, size), batch, scale=scale, window=note.window,
            softcap=softcap, layout="HND", backend=KERNEL,
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
    used    the number of places in use, of a cache whose places are all there from the start: the last new token, the
            last of them, sees these (in its window, where there is one) and no others; of one token it is a tensor
    """

    causal: str | None = None
    window: tuple[int, int] | None = None
    used: Any = None


def noted(attention_mask: Any) -> Note | None:
    """The note on a mask made here and not changed since; one that has to be read is read once, for all layers."""
    found: Any = getattr(attention_mask, _ATTRIBUTE, None)
    if callable(found):
        found = found(attention_mask)
        setattr(attention_mask, _ATTRIBUTE, found)
    return found  # type: ignore[no-any-return]


def _read(padding: Tensor | None, mask: Tensor) -> Note | None:
    """What a mask over a static cache says: without padding it shows the places in use, to each row one more.

    Reading waits for the device. A compiled forward never asks, so its steps are queued without a wait.
    """
    if _padded(padding):
        return None
    if mask.shape[2] == 1:
        return Note(used=mask[0, 0, 0].sum())
    first, last = (0, 0) if _captured(mask) else mask[0, 0, (0, -1)].sum(-1).tolist()
    return Note("bottom_right", used=last) if last - first == mask.shape[2] - 1 else None


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **words: Any
) -> Tensor | None:
    """The mask function registered beside the attention function; the arguments are transformers'."""
    from transformers import masking_utils as theirs

    attention_mask, local_size = words.get("attention_mask"), words.get("local_size")
    config: Any = words.get("config")
    read = _read_by_models(type(config))
    allowed = words.get("allow_is_causal_skip", True)
    skip = allowed and not read
    compiling = torch.compiler.is_compiling()
    function, own = words.get("mask_function", theirs.causal_mask_function), theirs.causal_mask_function
    window: Any = theirs.sliding_window_causal_mask_function
    plain = not compiling and not read and _parts(function) == _parts(own if local_size is None else window(local_size))
    # Places behind the new tokens: only a cache that is all there from the start has some, or counts on the device.
    behind = kv_offset + kv_length - q_offset - q_length if isinstance(q_offset, int) else None
    if compiling and function is own and skip and behind == 0 and attention_mask is None and local_size is None:
        if q_length == kv_length and not torch.compiler._is_exporting_flag:
            return None  # where transformers makes one: a kernel that reads it computes what it hides too
    said = plain and skip and behind == 0
    if said and local_size is not None and q_length in (1, kv_length) and not _padded(attention_mask):
        passed = getattr(config, "sliding_window", None) == local_size and _passes_window(config.__class__)
        if passed or (q_length == 1 and kv_length <= local_size):
            return None  # nothing is hidden, or the attention function is told the window by the model
    make: Any = theirs.eager_mask if read else theirs.sdpa_mask
    found: Tensor | None = make(batch_size, q_length, kv_length, q_offset, kv_offset, **words)
    if found is None or not plain:
        return found
    filled = behind is None or behind > 0 or (behind == 0 and q_length == 1 and not allowed)
    if filled and (local_size is None or kv_length <= local_size):  # no key lies before the window
        return with_note(found.contiguous(), partial(_read, attention_mask))  # as `generate` makes it, or it is lost
    if said and not _padded(attention_mask):
        return with_note(found, Note("bottom_right", None if local_size is None else (local_size - 1, 0)))
    return found


def with_note(found: Tensor, note: Note | Callable[[Tensor], Note | None]) -> Tensor:
    """The same mask, saying what it says."""
    setattr(found, _ATTRIBUTE, note)
    return found


def _padded(attention_mask: Tensor | None) -> bool:
    """Whether a token is hidden. Reading that waits for the device, which a capture forbids: then it may be."""
    return attention_mask is not None and (_captured(attention_mask) or not bool(attention_mask.all()))


def _captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _parts(item: Any) -> Any:
    """What a function is made of: its code, and the same of all that it closes over."""
    if isinstance(item, tuple):
        return tuple(map(_parts, item))
    code = getattr(item, "__code__", None)
    return item if code is None else (code, *(_parts(cell.cell_contents) for cell in item.__closure__ or ()))


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
        asked = position_bias is None and s_aux is None and not torch.compiler.is_compiling()
        note = noted(attention_mask) if asked else None
        if note is not None and attention_mask.shape[-2:] == (queries, keys):
            if note.used is None or key.is_cpu or queries > 1:
                used = keys if note.used is None else int(note.used)
                key, value = key[:, :, :used], value[:, :, :used]
                attention_mask, causal, window = None, note.causal or False, note.window
            elif dropout == 0.0 and (found := decode(query, key, value, note, scaling, softcap)) is not None:
                return found, None
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

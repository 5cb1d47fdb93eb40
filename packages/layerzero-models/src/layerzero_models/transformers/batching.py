"""`generate_batch` of transformers (continuous batching) with `attn_implementation="layerzero"`.

A batch is packed: the tokens of all requests one after another, beside offsets. Prompts, and steps of requests that are
at different places, are `lz.varlen_attention` over keys gathered from the cache; a step of one new token each is
`lz.paged_attention` over the pages themselves.

transformers 5.17 looks for `paged|layerzero`; 5.22 takes names that it knows and those with "flash" in them, whose
functions it loads itself. Both make no mask, capture CUDA graphs and prepare the next batch meanwhile only for the
latter. So while a manager lives, a model with our attention has it under the name `BATCHED`, set without the loader.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import layerzero as lz
from layerzero.errors import BackendNotAvailableError, CudaGraphUnsafeError, LayerZeroError, NoKernelFoundError
from layerzero.model.kv_cache import PagedBatch
from layerzero_models.transformers.attending import KERNEL, attend, present

# whether one or two tensors come back is only known to the callers here
attention: Any = lz.attention
paged_attention: Any = lz.paged_attention
varlen_attention: Any = lz.varlen_attention

BATCHED = "layerzero_flash"
PAGE = 128  # tokens: the largest page that our kernels read; transformers' own are 256, seen as two
_OWN = "_layerzero_batching"  # on our functions: transformers' own
_PLAN = "_layerzero_plan"  # on a block table: the plans of one forward pass


def install(name: str, configs: Any) -> None:
    """Let transformers batch models whose attention is `name`; `configs` lists the configurations of a model."""
    try:
        from transformers.generation.continuous_batching import continuous_api, initialization
    except ImportError:  # an early 5.x
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(BATCHED, attend_batch)
    AttentionMaskInterface.register(BATCHED, flash_attention_mask)
    managers: Any = continuous_api.ContinuousBatchingManager
    switch, ensure = managers.switch_to_cb_friendly_attn, initialization.ensure_decode_fast_path_is_available
    if hasattr(switch, _OWN):
        return

    @functools.wraps(switch)
    def switched(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in (name, BATCHED):
            switch(manager, model, *args, **kwargs)
            return
        for config in configs(model):
            if vars(config).get("_attn_implementation_internal") == name:
                config._attn_implementation_internal = BATCHED
        manager._original_attn_impl = name  # what the manager gives back when it ends

    @functools.wraps(ensure)
    def ensured(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        if config._attn_implementation != BATCHED:
            ensure(config, cb_config, *args, **kwargs)
        elif not _pages_serve(config):
            cb_config.max_blocks_per_request = 0

    setattr(switched, _OWN, switch)
    managers.switch_to_cb_friendly_attn = switched
    initialization.ensure_decode_fast_path_is_available = ensured


def _pages_serve(config: Any) -> bool:
    """Whether decode steps can read the pages: no layer has a window, and on a GPU a kernel reads lengths there."""
    kinds = getattr(config, "layer_types", None)
    windowed = (
        getattr(config, "sliding_window", None) is not None if kinds is None else set(kinds) != {"full_attention"}
    )
    return not windowed and (not torch.cuda.is_available() or present())


# The cache is written in place, as views: a graph would copy all of it for every layer.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_batch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] of the new tokens of all requests to ([1, T, H, D], None)."""
    if cache is None:  # a forward pass of the same model beside the batches
        return attend(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window,
            softcap=softcap, s_aux=s_aux, **rest,
        )  # fmt: skip
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = pad(value, (0, query.shape[-1] - width))
    if sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None)
    packed = query[0].transpose(0, 1)
    offsets = rest["cu_seq_lens_k"]
    word = "max_length" if "max_length_q" in rest else "max_seqlen"  # 5.17 has the latter
    longest_q, longest = rest[f"{word}_q"], rest[f"{word}_k"]
    if isinstance(offsets, dict):
        kind = "full_attention" if sliding_window is None else "sliding_attention"
        offsets, longest = offsets[kind], longest[kind]
    words = {"scale": scaling, "softcap": softcap, "return_lse": s_aux is not None}
    if rest.get("block_table") is not None:
        out = _decode(module.layer_idx, packed, key, value, offsets, cache, rest["block_table"], words, s_aux)
        return out[None, ..., :width], None
    keys, values = _gathered(module.layer_idx, key, value, cache, rest)
    count, ends_q, ends = packed.shape[0], rest["cu_seq_lens_q"].int(), offsets.int()
    if packed.is_cpu:  # what lies behind the last request is padding
        packed, keys, values = packed[: int(ends_q[-1])], keys[: int(ends[-1])], values[: int(ends[-1])]
    found = varlen_attention(
        packed, keys, values, ends_q, ends, max_seqlen_q=longest_q, max_seqlen_k=longest, is_causal="bottom_right",
        window=None if sliding_window is None else (sliding_window - 1, 0), **words,
    )  # fmt: skip
    out = _shared(found, s_aux)
    out = pad(out, (0, 0, 0, 0, 0, count - out.shape[0])) if out.shape[0] != count else out
    return out[None, ..., :width], None


def _shared(found: Any, sinks: Tensor | None) -> Tensor:
    """The values' share of the softmax beside a sink for each head; all of it without sinks."""
    if sinks is None:
        return found  # type: ignore[no-any-return]
    out, lse = found
    return out * torch.sigmoid(lse - sinks.float()).to(out.dtype)[..., None]  # type: ignore[no-any-return]


def _gathered(layer: int, key: Tensor, value: Tensor, cache: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Write the new keys and values, then those of all requests [T, Hkv, D], packed in the order of the batch."""
    if hasattr(cache, "layer_to_allocator"):
        keys, values = cache.update(key, value, layer, dict(given))
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)
    keys, values = cache.update(key, value, layer, given["read_index"], given["write_index"])  # transformers 5.17
    return keys, values


def _decode(
    layer: int, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, cache: Any, tables: Tensor,
    words: dict[str, Any], sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One new token each: written into its page, then attention over the pages."""
    if hasattr(cache, "layer_to_allocator"):
        own = cache.layer_to_allocator[layer]
        group, trash = own.index, own.write_trash_index
        keys, values = own.get_cache_for_block_table(layer)
    else:  # transformers 5.17
        group, place = cache.layer_index_to_group_indices[layer]
        trash = cache.write_trash_index
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        keys, values = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    # What all layers of one forward pass share: the latest of them, where the new tokens go, and the batch.
    plans: dict[int, tuple[int, Tensor, PagedBatch]] = vars(tables).setdefault(_PLAN, {})
    plan = plans.get(group)
    if plan is None or plan[0] >= layer:  # another forward pass: a graph has to hold what makes its plan
        slots, batch = _planned(tables[group], offsets, keys.shape[1], trash)
    else:
        _, slots, batch = plan
    plans[group] = (layer, slots, batch)
    for pages, new in ((keys, key), (values, value)):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, new[0].transpose(0, 1))
    if keys.shape[1] > PAGE and keys.shape[1] % PAGE == 0:  # the tables of the plan count pages of this size
        keys, values = (pages.view(-1, PAGE, *pages.shape[2:]) for pages in (keys, values))
    call = (query, keys, values, batch)
    if query.is_cpu:
        return _shared(paged_attention(*call, **words), sinks)
    _compile(call, words)
    try:
        return _shared(paged_attention(*call, **words, backend=KERNEL), sinks)
    except (NoKernelFoundError, BackendNotAvailableError, CudaGraphUnsafeError):  # denied, or not for these tensors
        seen = torch.arange(batch.max_context_len, device=query.device) < batch.context_lens[:, None]
        tables = batch.block_tables.clamp(0, keys.shape[0] - 1)  # beyond a length they hold anything
        both = (pages[tables].flatten(1, 2).transpose(1, 2) for pages in (keys, values))
        found = attention(query[:, :, None], *both, seen[:, None, None], **words)
        return _shared(found, None if sinks is None else sinks[:, None])[:, :, 0]


_compiled: set[Any] = set()  # kinds of calls that the kernel was compiled for, or cannot be


def _compile(call: tuple[Tensor, Tensor, Tensor, PagedBatch], words: dict[str, Any]) -> None:
    """Compile the kernel for such calls now: a graph that transformers captures without it would stay without."""
    query, keys = call[:2]
    kind = (query.shape[1:], keys.shape[1:], query.dtype, keys.dtype, query.get_device(), *words.values())
    if kind in _compiled or torch.cuda.is_current_stream_capturing():
        return
    _compiled.add(kind)
    # This kernel alone: `lz.warmup` would keep the first request waiting for others' compilers as well.
    with contextlib.suppress(LayerZeroError), lz.scoped(jit="block"):  # what it cannot run the call itself says again
        paged_attention(*call, **words, backend=KERNEL)


def _planned(tables: Tensor, offsets: Tensor, page: int, trash: int) -> tuple[Tensor, PagedBatch]:
    """Where among all tokens of the cache the new ones go, and the batch. A row without a request has length 0.

    Pages of several times PAGE tokens are counted as so many pages of that.
    """
    lengths = offsets.diff().int()
    last = (lengths - 1).clamp(min=0).long()
    places = tables.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
    slots = torch.where(lengths > 0, places, trash)
    rows = lengths.shape[0]
    longest = tables.shape[1] * page
    if page > PAGE and page % PAGE == 0:
        parts = torch.arange(page // PAGE, dtype=tables.dtype, device=tables.device)
        tables = (tables[:, :, None] * len(parts) + parts).flatten(1)
    known = tuple(lengths.tolist()) if lengths.is_cpu else (longest,) * rows
    return slots, PagedBatch(tables, lengths, None, known, (1,) * rows, capture=not lengths.is_cpu)

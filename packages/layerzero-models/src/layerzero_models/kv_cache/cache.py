"""`lz.kv_cache`: keys and values of past tokens behind one interface, whatever the strategy, layout and format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero_models.kv_cache.attend import CacheCall, attend, calls_of, read_query
from layerzero_models.kv_cache.codec import make_codec, packed_tokens, whole_numbers
from layerzero_models.kv_cache.storage import STRATEGIES, Paged, Spot

_PLANS = 64  # batches kept; a step needs one, or one for each chunk


def kv_cache(
    strategy: str = "paged",
    *,
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_len: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    layout: str = "NHD",
    layers: int = 1,
    head_dim_v: int | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    chunk_size: int = 512,
    quant: str | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> KVCache:
    """A KV cache for `batch` sequences.

    strategy    "paged" takes pages of `page_size` tokens from a pool of `num_pages` (default: enough for all);
                "contiguous" keeps `max_len` places for each sequence; "chunked" adds `chunk_size` places at a time
    max_len     most tokens of one sequence; only "chunked" can do without
    layout      "NHD" or "HND": which of tokens and heads lies outside
    quant       None, or a format of `lz.quantize`: each head of each token has scales of its own. An FP8 cache with
                `k_scale` and `v_scale` has one scale each instead, which kernels for FP8 caches can use
    """
    return KVCache(
        strategy=strategy, batch=batch, num_kv_heads=num_kv_heads, head_dim=head_dim, max_len=max_len,
        dtype=torch.get_default_dtype() if dtype is None else dtype, device=torch.device(device or "cpu"),
        layout=layout, layers=layers, head_dim_v=head_dim if head_dim_v is None else head_dim_v, page_size=page_size,
        num_pages=num_pages, chunk_size=chunk_size, quant=quant, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


class KVCache:
    """Keys and values of past tokens; make it with `lz.kv_cache`, whose arguments are in `options`.

    Tokens go in with `append`, come out with `attend` (attention over them, by normal selection) or `tokens`. All
    layers share pages and lengths move layer by layer, as a model appends. Nothing here carries a gradient.
    """

    def __init__(self, **options: Any) -> None:
        _check(options)
        self.options = options
        self.strategy: str = options["strategy"]
        self.batch: int = options["batch"]
        self.layers: int = options["layers"]
        self.layout: str = options["layout"]
        self.dtype: torch.dtype = options["dtype"]
        self.device: torch.device = options["device"]
        quant = options["quant"]
        self.key_codec = make_codec(options["head_dim"], self.dtype, quant, options["k_scale"])
        self.value_codec = make_codec(options["head_dim_v"], self.dtype, quant, options["v_scale"])
        self.storage = STRATEGIES[self.strategy](options, (*self.key_codec.planes, *self.value_codec.planes))
        self._split = len(self.key_codec.planes)
        self._lengths = [[0] * self.batch for _ in range(self.layers)]
        self._batches: dict[Any, PagedBatch] = {}
        self._spots: tuple[Any, list[Spot]] | None = None
        self._tables: tuple[int, Tensor] | None = None

    def __repr__(self) -> str:
        shape = f"{self.batch} sequences, {self.options['num_kv_heads']} heads of {self.options['head_dim']}"
        stored = self.options["quant"] or str(self.dtype).removeprefix("torch.")
        return f"KVCache({self.strategy}, {shape}, {stored}, {self.layout}, lengths {list(self.lengths())})"

    # -- what is in it ---------------------------------------------------------------------------
    def lengths(self, layer: int = 0) -> tuple[int, ...]:
        """Tokens of each sequence, in one layer."""
        return tuple(self._lengths[self._layer(layer)])

    @property
    def nbytes(self) -> int:
        """Bytes of storage, scales included."""
        return self.storage.nbytes

    @property
    def free_pages(self) -> int | None:
        """Pages left in the pool; None for a strategy without pages."""
        return len(self.storage.free) if isinstance(self.storage, Paged) else None

    def tokens(self, seq: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, [length, heads, head_dim], as numbers: a copy."""
        planes = self.storage.read(self._layer(layer), self._seq(seq), self._lengths[layer][seq])
        return self.key_codec.decode(planes[: self._split]), self.value_codec.decode(planes[self._split :])

    # -- changing it -----------------------------------------------------------------------------
    def append(
        self, key: Tensor, value: Tensor, *, layer: int = 0, lens: Sequence[int] | None = None, layout: str = "BHSD"
    ) -> None:
        """Add tokens at the end of every sequence: all of them, or none when there is no room (KV_CACHE_FULL).

        key and value are [B, H, S, D] (or [B, S, H, D] with layout="BSHD"), S tokens for each sequence or the first
        `lens[b]` of them; or packed, [tokens, H, D], `lens[b]` tokens of each sequence after those of the one before.
        """
        keys, new = packed_tokens(key, "key", self._wanted(self.key_codec.width), lens, layout)
        values, also = packed_tokens(value, "value", self._wanted(self.value_codec.width), lens, layout)
        if new != also:
            raise invalid("SHAPE_INVALID", f"value tokens {also}", f"key tokens {new}")
        with torch.no_grad():
            planes = (*self.key_codec.encode(keys.detach()), *self.value_codec.encode(values.detach()))
            self._append_planes(planes, new, self._layer(layer))

    def _append_planes(self, planes: Sequence[Tensor], new: tuple[int, ...], layer: int) -> None:
        starts = self._lengths[layer]
        ends = [start + count for start, count in zip(starts, new, strict=True)]
        self.storage.reserve(starts, ends)
        if any(new):
            # The layers of one step write to the same places.
            step = (self.storage.version, tuple(starts), new)
            if self._spots is None or self._spots[0] != step:
                self._spots = (step, self.storage.locate(starts, new))
            self.storage.write(layer, planes, self._spots[1])
        self._lengths[layer] = ends

    def truncate(self, lens: Sequence[int]) -> None:
        """Cut every sequence to at most `lens[b]` tokens, in all layers: rejected drafts, a rolled back turn."""
        wanted = whole_numbers(lens, "lens", self.batch)
        for seq, length in enumerate(wanted):
            for layer in self._lengths:
                layer[seq] = min(layer[seq], length)
            self.storage.release(seq, max(layer[seq] for layer in self._lengths))

    def free(self, seq: int) -> None:
        """Forget a sequence: its place is empty, its pages go back."""
        longest = [max(lens) for lens in zip(*self._lengths, strict=True)]
        longest[self._seq(seq)] = 0
        self.truncate(longest)

    def fork(self, source: int, target: int) -> None:
        """Make `target` another continuation of `source`. Pages are shared until one of the two writes to them."""
        if self._seq(source) == self._seq(target):
            raise invalid("VALUE_INVALID", f"fork of {source} to itself", "two sequences")
        self.free(target)
        self.storage.fork(source, target, max(layer[source] for layer in self._lengths))
        for layer in self._lengths:
            layer[target] = layer[source]

    def to(self, **changes: Any) -> KVCache:
        """A new cache with the same tokens and other options: strategy, layout, page_size, quant, dtype, device, …

        Between caches of one format the stored codes themselves are copied; else tokens are converted.
        """
        made = KVCache(**{**self.options, **changes})
        if made.batch != self.batch or made.layers != self.layers:
            raise invalid("BATCH_MISMATCH", f"{self.batch} and {made.batch} sequences or layers")
        same = (made.key_codec, made.value_codec) == (self.key_codec, self.value_codec)
        for layer in range(self.layers):
            for seq, length in enumerate(self._lengths[layer]):
                new = tuple(length if other == seq else 0 for other in range(self.batch))
                if same:
                    planes = self.storage.read(layer, seq, length)
                else:
                    key, value = (part.to(made.dtype) for part in self.tokens(seq, layer))
                    planes = (*made.key_codec.encode(key), *made.value_codec.encode(value))
                made._append_planes([part.to(made.device) for part in planes], new, layer)
        return made

    # -- attention -------------------------------------------------------------------------------
    def attend(self, query: Tensor, *, layer: int = 0, lens: Sequence[int] | None = None, **options: Any) -> Any:
        """Causal attention of the newest tokens over the cache, which holds their keys and values already.

        query is [B, Hq, S, D], the last S tokens of each sequence (the last `lens[b]` of them, the rest is padding),
        or packed, [tokens, Hq, D], one token each unless `lens` says otherwise. The result has the same form. Options
        are those of `lz.attention`: scale, window, softcap, alibi_slopes, return_lse, backend.
        """
        return attend(self, query, self._layer(layer), lens, options)

    def calls(
        self, query: Tensor, *, layer: int = 0, lens: Sequence[int] | None = None, **options: Any
    ) -> list[CacheCall]:
        """The calls that `attend` makes: `lz.explain(call.op, *call.args, **call.kwargs)` says which kernels run."""
        return calls_of(self, read_query(self, query, self._layer(layer), lens), layer, options)

    def pages(self, layer: int = 0) -> tuple[Tensor, Tensor]:
        """The page pools of keys and values as `lz.paged_attention` takes them. For a paged cache without scales."""
        storage = self._paged()
        if len(self.key_codec.planes) > 1:
            raise invalid("QUANT_SCALE_LAYOUT", "a scale for each token", "lz.paged_attention, which takes none")
        (keys,), (values,) = storage.buffers[self._layer(layer)]
        return keys, values

    def paged_batch(self, lens: Sequence[int] | None = None, *, layer: int = 0) -> PagedBatch:
        """The batch of a paged cache, for any number of `lz.paged_attention` calls; `lens` as in `attend`."""
        storage = self._paged()
        new = (1,) * self.batch if lens is None else whole_numbers(lens, "lens", self.batch)
        contexts = self.lengths(layer)
        if self._tables is None or self._tables[0] != storage.version:
            self._tables = (storage.version, storage.table.to(self.device, copy=True))
        return self.planned(self._tables[1], contexts, new, storage.version)

    def planned(self, tables: Tensor, contexts: tuple[int, ...], new: tuple[int, ...], version: int) -> PagedBatch:
        """A batch, made once for all layers of a step: those are the last few that were asked for."""
        key = (version, contexts, new)
        found = self._batches.get(key)
        if found is None:
            lens, added = (torch.tensor(given, dtype=torch.int32, device=self.device) for given in (contexts, new))
            found = make_paged_batch(tables, lens, added, (contexts, new))
            if len(self._batches) >= _PLANS:
                self._batches.clear()
            self._batches[key] = found
        return found

    # -- checks ----------------------------------------------------------------------------------
    def _layer(self, layer: int) -> int:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.layers:
            raise invalid("VALUE_INVALID", f"layer {layer!r}", f"0 to {self.layers - 1}")
        return layer

    def _seq(self, seq: int) -> int:
        if isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq < self.batch:
            raise invalid("VALUE_INVALID", f"sequence {seq!r}", f"0 to {self.batch - 1}")
        return seq

    def _paged(self) -> Paged:
        if not isinstance(self.storage, Paged):
            raise invalid("VALUE_INVALID", f"a {self.strategy} cache", "a paged one")
        return self.storage

    def _wanted(self, width: int) -> tuple[int, int, int, torch.dtype, torch.device]:
        return self.batch, self.options["num_kv_heads"], width, self.dtype, self.device


def _check(options: dict[str, Any]) -> None:
    if options["strategy"] not in STRATEGIES:
        raise invalid("VALUE_INVALID", f"strategy {options['strategy']!r}", ", ".join(STRATEGIES))
    if options["layout"] not in ("NHD", "HND"):
        raise invalid("LAYOUT_UNKNOWN", str(options["layout"]), "NHD, HND")
    sizes = ["batch", "num_kv_heads", "head_dim", "head_dim_v", "layers", "page_size", "chunk_size"]
    sizes += [name for name in ("max_len", "num_pages") if options[name] is not None]
    for name in sizes:
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid("VALUE_INVALID", f"{name} {value!r}", "a whole number from 1")
    if (options["k_scale"] is None) != (options["v_scale"] is None):
        raise invalid("QUANT_SCALE_LAYOUT", "one of k_scale and v_scale", "both or none")
    if options["max_len"] is None and options["strategy"] != "chunked":
        limit = f"a number: a {options['strategy']} cache is made for a longest sequence"
        raise invalid("VALUE_INVALID", "max_len None", limit)

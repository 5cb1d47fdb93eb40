"""`lz.grouped_attention`: groups of queries over prefixes of shared keys, and `lz.grouped_batch`, planned once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from layerzero._ops.bucketed import batch_key
from layerzero._ops.signature import declare, keyed
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_heads, expect_rank
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import attention_needs, check_devices, check_floating, check_scale, dtype_name
from layerzero.model.enums import Causal
from layerzero.model.grouped import GroupedBatch, make_grouped_batch
from layerzero.model.op import Call
from layerzero.model.shapes import with_lse


def grouped_batch(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_lens: Tensor,
    *,
    host_lens: tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]] | None = None,
) -> GroupedBatch:
    """Plan a grouped batch once, for all layers.

    For G groups over B sequences: `cu_seqlens_q` [G * B + 1] holds the offsets of the query segments, group-major
    (segment g * B + b is group g of sequence b), `cu_seqlens_k` [B + 1] the offsets of the sequences in the packed
    keys, `kv_lens` [G, B] how many of a sequence's first keys a group attends. int32 or int64. `host_lens` gives the
    three as Python numbers where the caller has them already, which saves a copy from the device.
    """
    return make_grouped_batch(cu_seqlens_q, cu_seqlens_k, kv_lens, host_lens)


@overload
def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch | Tensor, cu_seqlens_k: Tensor | None = ...,
    kv_lens: Tensor | None = ..., *, causal: bool = ..., scale: float | None = ..., return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch | Tensor, cu_seqlens_k: Tensor | None = ...,
    kv_lens: Tensor | None = ..., *, causal: bool = ..., scale: float | None = ..., return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch | Tensor, cu_seqlens_k: Tensor | None = ...,
    kv_lens: Tensor | None = ..., *, causal: bool = ..., scale: float | None = ..., return_lse: bool,
    backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: GroupedBatch | Tensor,
    cu_seqlens_k: Tensor | None = None,
    kv_lens: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention of query [total_q, Hq, D] in groups, each over its own prefix of the keys [total_k, Hkv, D].

    Groups of the same sequence read overlapping prefixes of the same keys and values, as in zigzag context
    parallelism; a call for each group would read the early keys again and again. `batch` is a `lz.grouped_batch`; the
    form `(…, cu_seqlens_q, cu_seqlens_k, kv_lens)` also works and plans at every call.

    `causal` is bottom-right aligned, as in FlashAttention: query i of a segment of n queries over m keys sees the
    keys up to m - n + i. A query that sees none gives zeros. GQA follows from the head counts. `return_lse=True` gives
    (out, lse): natural log, float32, [total_q, Hq]. Gradients: those of key and value are summed over the groups in
    float32.
    """
    check_scale(scale)
    args = (query, key, value, _planned(batch, cu_seqlens_k, kv_lens), causal, scale, return_lse)
    return keyed(GROUPED_ATTENTION, _key, args, None, backend)


def _planned(batch: Any, cu_seqlens_k: Any, kv_lens: Any) -> GroupedBatch:
    if isinstance(batch, GroupedBatch):
        return batch
    if cu_seqlens_k is None or kv_lens is None:
        missing = "cu_seqlens_k" if cu_seqlens_k is None else "kv_lens"
        raise invalid("TYPE_INVALID", f"no {missing}", "a grouped_batch, or cu_seqlens_q, cu_seqlens_k and kv_lens")
    return make_grouped_batch(batch, cu_seqlens_k, kv_lens)


def _lengths(query: Any, key: Any, value: Any, batch: GroupedBatch, *rest: Any) -> tuple[Any, Any]:
    return (batch.max_query_len, batch.max_kv_len), (batch.total_q, batch.total_k)


def _describe(call: Call) -> Context:
    query, key, value, batch, causal, scale, return_lse = call.args
    named = (("query", query), ("key", key), ("value", value))
    for name, item in named:
        expect_rank(item, name, (3,))
    check_devices(query=query, key=key, value=value, kv_lens=batch.kv_lens)
    words = tuple(check_floating(item, name) for name, item in named)
    if not isinstance(causal, bool):
        raise invalid("VALUE_INVALID", str(causal), "True (bottom-right) or False", f"causal is {causal!r}")
    check_scale(scale)
    expect_heads(query, key, value)
    (tokens, heads, dim), (total_k, kv_heads, _) = query.shape, key.shape
    for name, given, planned, source in (
        ("query", tokens, batch.total_q, "cu_seqlens_q"),
        ("key", total_k, batch.total_k, "cu_seqlens_k"),
    ):
        if given != planned:
            raise invalid("SHAPE_INVALID", f"of {given} {name} tokens", f"the batch: {planned} from {source}")
    aligned = Causal.BOTTOM_RIGHT if causal else Causal.NONE
    needs = attention_needs(call.needs_grad, heads != kv_heads, aligned, None, None, None, None, return_lse)
    dims = {
        "batch": batch.batch_size,
        "num_groups": batch.num_groups,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "seq_len_q": batch.max_query_len,
        "seq_len_k": batch.max_kv_len,
        "head_dim": dim,
        "head_dim_v": value.shape[2],
    }
    return context_of(
        call,
        "grouped_attention",
        words[0],
        dims,
        needs,
        (query, key, value),
        dtypes=words,
        rank=3,
        causal=aligned,
        index_dtype=dtype_name(batch.kv_lens),
        # Segments differ, so a kernel may never count on queries and keys of equal length.
        seq_relation="shorter",
        scale=scale,
    )


def _canonical(given: dict[str, Any]) -> tuple[Any, ...]:
    told = {**given, "batch": _planned(given["batch"], given["cu_seqlens_k"], given["kv_lens"])}
    return tuple(told[name] for name in GROUPED_ATTENTION.arguments)


GROUPED_ATTENTION = declare(
    function=grouped_attention,
    fake=lambda query, key, value, *rest: with_lse(query.new_empty((*query.shape[:2], value.shape[2])), rest[-1]),
    arguments=("query", "key", "value", "batch", "causal", "scale", "return_lse"),
    describe=_describe,
    reference="layerzero.backends.reference.varlen:grouped_attention",
    cost=Roofline(
        "element_bytes * batch * (head_dim + head_dim_v) * (num_groups * seq_len_q * num_heads "
        "+ seq_len_k * num_kv_heads) + 3 * index_bytes * (batch * num_groups + 1)",
        "2 * batch * num_groups * seq_len_q * num_heads * keys_seen * (head_dim + head_dim_v)",
    ),
    shapes={
        "q": "tokens,num_heads,head_dim",
        "k": "tokens_k,num_kv_heads,head_dim",
        "batch": "1",
        "num_groups": "2",
        "seq_len_q": "tokens - tokens // 2",
        "seq_len_k": "tokens_k",
    },
    options=("causal", "lse"),
    example="layerzero._ops.examples_attention:grouped",
    tolerance="attention",
    growing=("seq_len_q", "seq_len_k"),
    autocast=True,
    canonical=_canonical,
)

_key = batch_key(GROUPED_ATTENTION, _lengths)

"""Attention definitions as calls of our attention ops: pages as tables, and the log-sum-exp in base 2."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import torch
from torch import Tensor

from layerzero_verify.definitions.adapting import Adapter, Inputs, Op, Unsupported, takes
from layerzero_verify.definitions.schema import Definition

__all__ = ["block_tables", "gqa_paged", "gqa_ragged", "is_causal", "last_page_len", "lengths_of", "mla_paged"]

_PAGED = ("kv_last_page_len", "sm_scale")


def lengths_of(indptr: Tensor) -> Tensor:
    """Lengths of the sequences between offsets."""
    return indptr[1:] - indptr[:-1]


def last_page_len(inputs: Inputs, page_size: int) -> Tensor:
    """Tokens in the last page of each sequence: as given, or full pages. Some definitions have a slot to spare."""
    sequences: Tensor = inputs["kv_indptr"][1:]
    given = inputs.get("kv_last_page_len")
    return torch.full_like(sequences, page_size) if given is None else given[: len(sequences)]


def block_tables(inputs: Inputs, page_size: int) -> tuple[Tensor, Tensor]:
    """Page numbers as a padded table [B, most], and the keys of each sequence, from offsets and a list of pages."""
    counts = lengths_of(inputs["kv_indptr"])
    last = last_page_len(inputs, page_size)
    tokens = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
    rows = torch.zeros((len(counts), max(1, int(counts.max()) if len(counts) else 1)), dtype=torch.int32)
    pages = inputs["kv_indices"].cpu()
    start = inputs["kv_indptr"].tolist()
    for row, (first, end) in enumerate(itertools.pairwise(start)):
        rows[row, : end - first] = pages[first:end]
    return rows.to(counts.device), tokens.to(torch.int32)


def _paged_batch(inputs: Inputs, page_size: int) -> Any:
    from layerzero._ops.paged import paged_batch

    tables, tokens = block_tables(inputs, page_size)
    queries = lengths_of(inputs["qo_indptr"]) if "qo_indptr" in inputs else None
    return paged_batch(tables, tokens, query_lens=queries)


def _outputs(definition: Definition, result: Any) -> Any:
    """(out, lse), the lse in base 2 as the definitions have it, as many as the definition wants."""
    out, lse = result
    return (out, lse / math.log(2.0))[: len(definition.outputs)]


def gqa_paged(definition: Definition) -> Adapter:
    """Paged attention with shared heads: decode without `qo_indptr`, prefill with it."""
    takes(definition, ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices"), ("qo_indptr", *_PAGED))
    _only_causal(definition)

    def call(op: Op, i: Inputs) -> Any:
        batch = _paged_batch(i, i["k_cache"].shape[1])
        result = op(i["q"], i["k_cache"], i["v_cache"], batch, scale=i.get("sm_scale"), return_lse=True)
        return _outputs(definition, result)

    return Adapter("paged_attention", call)


def gqa_ragged(definition: Definition) -> Adapter:
    """Attention over packed sequences."""
    takes(definition, ("q", "k", "v", "qo_indptr", "kv_indptr"), ("sm_scale",))
    causal = is_causal(definition)

    def call(op: Op, i: Inputs) -> Any:
        result = op(
            i["q"], i["k"], i["v"], i["qo_indptr"], i["kv_indptr"],
            is_causal="bottom_right" if causal else False, scale=i.get("sm_scale"), return_lse=True,
        )  # fmt: skip
        return _outputs(definition, result)

    return Adapter("varlen_attention", call)


def mla_paged(definition: Definition) -> Adapter:
    """Latent attention over pages."""
    main = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_indptr", "kv_indices", "sm_scale")
    takes(definition, main, ("qo_indptr", *_PAGED))
    _only_causal(definition)

    def call(op: Op, i: Inputs) -> Any:
        batch = _paged_batch(i, i["ckv_cache"].shape[1])
        result = op(i["q_nope"], i["q_pe"], i["ckv_cache"], i["kpe_cache"], batch, scale=i["sm_scale"], return_lse=True)
        return _outputs(definition, result)

    return Adapter("mla_paged_attention", call)


def is_causal(definition: Definition) -> bool:
    """Every published prefill is causal, aligned at the end; another one says so in its name."""
    return re.search(r"non_?causal|bidirectional", definition.name) is None


def _only_causal(definition: Definition) -> None:
    if not is_causal(definition):
        raise Unsupported(f"{definition.name}: paged attention is causal here", value="attention that is not causal")

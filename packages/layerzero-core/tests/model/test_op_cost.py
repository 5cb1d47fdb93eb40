"""What a call costs (`Op.cost`): at least the bytes of its tensors, and the operations of its formula."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.run import current_world, describe
from layerzero.model.context import Context
from layerzero.model.enums import Causal, Layout
from layerzero.tuning.inputs import build

ATTENTION = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len_q": 16, "seq_len_k": 32, "head_dim": 64}
PAGES = {**ATTENTION, "seq_len_q": 1, "tokens": 2, "head_dim_v": 64, "page_size": 16, "num_blocks": 4}
LATENT = {"batch": 2, "tokens": 2, "num_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16, "seq_len_q": 1,
          "seq_len_k": 32, "page_size": 16, "num_blocks": 4}  # fmt: skip
ROWS, VOCAB = {"rows": 8, "hidden": 64}, {"batch": 4, "vocab": 97}
# Sizes at which nothing of a cache, a table or the experts is left unused, so that every byte given is a byte moved.
SIZES: dict[str, dict[str, int]] = {
    "attention": ATTENTION,
    "paged_attention": PAGES,
    "varlen_attention": {**ATTENTION, "tokens": 32, "tokens_k": 64, "head_dim_v": 64},
    "grouped_attention": {**ATTENTION, "num_groups": 2, "head_dim_v": 64},
    "mla_paged_attention": LATENT,
    "linear": {"rows": 8, "n": 48, "k": 64},
    "mlp": {"rows": 8, "hidden": 64, "inner": 32, "n": 48},
    "embedding": {"tokens": 64, "vocab": 32, "hidden": 64},
    "cast": {"elements": 512},
    "cross_entropy": {"rows": 8, "vocab": 97},
    "rope": {**ATTENTION, "seq_len_q": 16, "rotary_dim": 64},
    "xpos": {**ATTENTION, "seq_len_q": 16, "rotary_dim": 64},
    "topk_gate": {"tokens": 8, "experts": 16, "top_k": 2, "groups": 1},
    "grouped_gemm": {"tokens": 8, "experts": 4, "n": 48, "k": 64},
    "moe": {"tokens": 8, "experts": 4, "top_k": 2, "hidden": 64, "inner": 32},
    **dict.fromkeys(("sample", "sample_topk", "sample_topp", "sampling_probs"), VOCAB),
}
OPS = sorted(set(PUBLIC) - {"tokenize", "detokenize"})


def context(op: str, **fields: Any) -> Context:
    given = {
        "rank": 3 if op.startswith(("paged", "varlen", "grouped_a")) else 4 if "seq_len_q" in SIZES.get(op, {}) else 2
    }
    if op in ("quantize", "dequantize"):
        given |= {"quant_format": "int8", "granularity": "channel"}
    if op in ("paged_attention", "mla_paged_attention"):
        given |= {"kv_cache_layout": Layout.NHD, "index_dtype": "int32"}
    if op == "moe":
        given |= {"needs": frozenset({"gated"})}
    sizes = SIZES.get(op, ROWS)
    relation = "shorter" if sizes.get("seq_len_q", 1) < sizes.get("seq_len_k", 1) else "equal"
    return Context(op, dims=tuple(sizes.items()), **{"seq_relation": relation, **given, **fields})


def held(item: Any) -> int:
    if isinstance(item, torch.Tensor):
        return item.nbytes
    if isinstance(item, (tuple, list)):
        return sum(map(held, item))
    if dataclasses.is_dataclass(item):
        return sum(held(getattr(item, field.name)) for field in dataclasses.fields(item))
    return 0


@pytest.mark.parametrize("op", OPS)
def test_a_call_moves_its_tensors_and_its_result_at_least_and_not_much_more(op: str) -> None:
    world = current_world()
    call = build(context(op), seed=1)
    ctx = describe(world.ops[op], call.args, call.layout, None, world)
    given = held(call.args)
    moved, work = PUBLIC[op].cost(ctx)
    result = held(PUBLIC[op].fallback_impl(*call.args))
    assert given < moved <= 2 * (given + result), (given, result, moved)
    assert work > 0 or op == "embedding"


@pytest.mark.parametrize("op", OPS)
def test_twice_the_work_is_twice_the_operations(op: str) -> None:
    grows = {"seq_len_q", "rows", "elements", "vocab"} if op != "embedding" else {"tokens"}
    if op in ("paged_attention", "mla_paged_attention", "varlen_attention", "grouped_gemm", "moe", "topk_gate"):
        grows = {"tokens"}
    ctx = context(op)
    name = next(size for size, _ in ctx.dims if size in grows)
    larger = ctx.with_dims(**{name: 2 * dict(ctx.dims)[name]})
    before, after = PUBLIC[op].cost(ctx), PUBLIC[op].cost(larger)
    assert after.flops == 2 * before.flops and before.bytes < after.bytes <= 2 * before.bytes


def test_what_is_hidden_by_a_triangle_or_a_window_is_not_counted() -> None:
    cost = PUBLIC["attention"].cost
    plain = context("attention").with_dims(seq_len_q=32)
    pairs = {
        "all": plain,
        "causal": dataclasses.replace(plain, causal=Causal.TOP_LEFT),
        "window": dataclasses.replace(plain, window=(3, 0)),
    }
    flops = {name: cost(ctx).flops for name, ctx in pairs.items()}
    assert flops["causal"] * 2 == flops["all"] * 33 // 32
    assert flops["window"] * 8 == flops["all"]


def test_a_quantized_weight_is_read_as_codes() -> None:
    plain = context("linear")
    coded = dataclasses.replace(plain, quant_format="int4", granularity="channel")
    sizes = dict(plain.dims)
    saved = PUBLIC["linear"].cost(plain).bytes - PUBLIC["linear"].cost(coded).bytes
    assert saved == sizes["n"] * sizes["k"] * (4 - 0.5)

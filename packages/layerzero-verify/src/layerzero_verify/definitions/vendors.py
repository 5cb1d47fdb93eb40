"""How FlashInfer and SGLang are called for each op_type. Nothing of theirs is imported before it is called.

Their attention gives the log-sum-exp in base 2, as the definitions have it; what writes in place gets copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from layerzero_verify.definitions.adapting import NORMED, epsilon, first_of, is_causal, last_page_len, lengths_of
from layerzero_verify.definitions.schema import Definition

Inputs = Mapping[str, Any]

_WORKSPACE_BYTES = 128 * 1024 * 1024
_WIDTHS = (64, 128, 256)
_ROTARY = 16


def _norm(module: str) -> Callable[[Definition, Inputs], Any]:
    """rmsnorm, fused_add_rmsnorm and their Gemma kin have one spelling in both libraries."""

    def run(definition: Definition, i: Inputs) -> Any:
        library, eps = import_module(module), epsilon(definition, i)
        kin = "gemma_" if "gemma" in definition.name else ""
        if "residual" not in i:
            return getattr(library, f"{kin}rmsnorm")(i[first_of(definition, *NORMED)], i["weight"], eps)
        out, residual = i[first_of(definition, *NORMED)].clone(), i["residual"].clone()
        getattr(library, f"{kin}fused_add_rmsnorm")(out, residual, i["weight"], eps)
        return (out, residual)[: len(definition.outputs)]

    return run


def _rope(module: str) -> Callable[[Definition, Inputs], Any]:
    def run(definition: Definition, i: Inputs) -> Any:
        if "cos_sin_cache" not in i:
            raise NotImplementedError("only the form with cos_sin_cache and positions")
        _expect_rotary(i["cos_sin_cache"].shape[-1])
        q, k = i["q"].clone(), i["k"].clone()
        neox = bool(i.get("is_neox", not any(word in definition.name for word in ("gptj", "gpt_j", "interleave"))))
        rotate = import_module(module).apply_rope_with_cos_sin_cache_inplace
        rotate(i["positions"], q.flatten(1), k.flatten(1), q.shape[-1], i["cos_sin_cache"], neox)
        return q, k

    return run


def _expect_rotary(width: int) -> None:
    """FlashInfer reads the other half of a pair 16 bytes at a time: where it begins in between, that is a misaligned
    address, and the process has no device any more. SGLang's kernel comes from there."""
    if width % _ROTARY:
        raise NotImplementedError(f"rotary_dim {width}; the library's kernel is for multiples of {_ROTARY}")


def _sampling(module: str) -> Callable[[Definition, Inputs], Any]:
    def run(definition: Definition, i: Inputs) -> Any:
        library, names = import_module(module), [name for name in ("top_k", "top_p") if name in i]
        if "min_p" in i:
            raise NotImplementedError("not with min_p")
        function = getattr(library, "_".join((*names, "sampling_from_probs")), None)
        if function is None:
            raise NotImplementedError(f"{module} has no sampling by {' and '.join(names) or 'probabilities alone'}")
        return function(i["probs"], *(i[name] for name in names)).to(torch.int64)

    return run


# -- FlashInfer's attention: planned for the batch, then run ---------------------------------------
def _expect_width(width: int, known: tuple[int, ...]) -> None:
    """FlashInfer compiles its attention for any width and then reads out of bounds in those it was not written for."""
    if width not in known:
        raise NotImplementedError(f"head_dim {width}; FlashInfer's kernels are for {', '.join(map(str, known))}")


def _workspace(like: Tensor) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)


def _gqa_paged(definition: Definition, i: Inputs) -> Any:
    flashinfer = import_module("flashinfer")
    q, k, v = i["q"], i["k_cache"], i["v_cache"]
    page, kv_heads, dim = k.shape[1:]
    _expect_width(dim, _WIDTHS)
    plan = {"sm_scale": i.get("sm_scale"), "q_data_type": q.dtype, "kv_data_type": k.dtype}
    pages = (i["kv_indptr"], i["kv_indices"], last_page_len(i, page), q.shape[1], kv_heads, dim, page)
    if "qo_indptr" in i:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "NHD")
        wrapper.plan(i["qo_indptr"], *pages, causal=True, **plan)
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(q), "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, **plan)
    return wrapper.run(q, (k, v), return_lse=True)[: len(definition.outputs)]


def _gqa_ragged(definition: Definition, i: Inputs) -> Any:
    q, k = i["q"], i["k"]
    _expect_width(q.shape[2], (*_WIDTHS, 192))
    wrapper = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(_workspace(q), "NHD")
    wrapper.plan(
        i["qo_indptr"], i["kv_indptr"], q.shape[1], k.shape[1], q.shape[2], i["v"].shape[2],
        causal=is_causal(definition), sm_scale=i.get("sm_scale"), q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return wrapper.run(q, k, i["v"], return_lse=True)[: len(definition.outputs)]


def _mla_paged(definition: Definition, i: Inputs) -> Any:
    q, q_pe, ckv, kpe = (i[name] for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache"))
    page = ckv.shape[1]
    _expect_width(q.shape[2], (512,))
    counts = lengths_of(i["kv_indptr"])
    tokens = torch.where(counts > 0, (counts - 1) * page + last_page_len(i, page), 0).to(torch.int32)
    queries = i.get("qo_indptr")
    if queries is None:
        queries = torch.arange(len(counts) + 1, dtype=torch.int32, device=q.device)
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(_workspace(q))
    wrapper.plan(
        queries, i["kv_indptr"], i["kv_indices"], tokens, q.shape[1], q.shape[2], q_pe.shape[2], page,
        "qo_indptr" in i, i["sm_scale"], q.dtype, ckv.dtype,
    )  # fmt: skip
    return wrapper.run(q, q_pe, ckv, kpe, return_lse=True)[: len(definition.outputs)]


# -- SGLang's experts ------------------------------------------------------------------------------
def _moe(definition: Definition, i: Inputs) -> Any:
    """SGLang's own plain form, for experts that are not quantized and tokens already routed; the gate comes first."""
    if not {"topk_ids", "topk_weights"} <= set(i) or any(name.endswith("_scale") for name in i):
        raise NotImplementedError("only experts without scales, with topk_ids and topk_weights given")
    first, second = (
        next(i[n] for n in names if n in i) for names in (("w1", "w13", "gate_up_proj"), ("w2", "down_proj"))
    )
    if any("trtllm" in tag for tag in definition.tags):  # its experts hold the up half first
        first = torch.cat(first.chunk(2, dim=1)[::-1], dim=1)
    native = import_module("sglang.srt.layers.moe.fused_moe_native").moe_forward_native
    config = import_module("sglang.srt.layers.moe.moe_runner").MoeRunnerConfig(activation="silu")
    layer = SimpleNamespace(num_experts=first.shape[0], w13_weight=first, w2_weight=second)
    return native(layer, i["hidden_states"], (i["topk_weights"], i["topk_ids"], None), config)


FLASHINFER: Mapping[str, Callable[[Definition, Inputs], Any]] = {
    "rmsnorm": _norm("flashinfer.norm"),
    "fused_add_rmsnorm": _norm("flashinfer.norm"),
    "gqa_paged": _gqa_paged,
    "gqa_ragged": _gqa_ragged,
    "mla_ragged": _gqa_ragged,
    "mla_paged": _mla_paged,
    "sampling": _sampling("flashinfer.sampling"),
    "rope": _rope("flashinfer.rope"),
}
SGLANG: Mapping[str, Callable[[Definition, Inputs], Any]] = {
    "rmsnorm": _norm("sgl_kernel"),
    "fused_add_rmsnorm": _norm("sgl_kernel"),
    "moe": _moe,
    "sampling": _sampling("sgl_kernel"),
    "rope": _rope("sgl_kernel"),
}

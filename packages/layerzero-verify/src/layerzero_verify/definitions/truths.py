"""Ground truths besides a definition's own code: FlashInfer, SGLang, and plain PyTorch where neither is there.

FlashInfer comes first, SGLang beside it where both are installed (they are then compared with each other too), PyTorch
only when neither is. A library that is missing, or needs a GPU that is not there, is named with its reason; nothing of
the vendors' is imported before it is called. Their attention gives the log-sum-exp in base 2, as the definitions have
it; what writes in place gets copies.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.reasons import Reason, reason
from layerzero_verify.definitions.adapters import (
    NORMED,
    Inputs,
    block_tables,
    epsilon,
    first_of,
    is_causal,
    last_page_len,
)
from layerzero_verify.definitions.schema import Definition

_WORKSPACE_BYTES = 128 * 1024 * 1024
_WIDTHS = (64, 128, 256)
_ROTARY = 16


def _norm(module: str, definition: Definition, i: Inputs) -> Any:
    """rmsnorm, fused_add_rmsnorm and their Gemma kin have one spelling in both libraries."""
    library, eps = import_module(module), epsilon(definition, i)
    kin = "gemma_" if "gemma" in definition.name else ""
    if "residual" not in i:
        return getattr(library, f"{kin}rmsnorm")(i[first_of(definition, *NORMED)], i["weight"], eps)
    out, residual = i[first_of(definition, *NORMED)].clone(), i["residual"].clone()
    getattr(library, f"{kin}fused_add_rmsnorm")(out, residual, i["weight"], eps)
    return (out, residual)[: len(definition.outputs)]


def _rope(module: str, definition: Definition, i: Inputs) -> Any:
    if "cos_sin_cache" not in i:
        raise NotImplementedError("only the form with cos_sin_cache and positions")
    _expect_rotary(i["cos_sin_cache"].shape[-1])
    q, k = i["q"].clone(), i["k"].clone()
    neox = bool(i.get("is_neox", not any(word in definition.name for word in ("gptj", "gpt_j", "interleave"))))
    rotate = import_module(module).apply_rope_with_cos_sin_cache_inplace
    rotate(i["positions"], q.flatten(1), k.flatten(1), q.shape[-1], i["cos_sin_cache"], neox)
    return q, k


def _expect_rotary(width: int) -> None:
    """FlashInfer reads the other half of a pair 16 bytes at a time: where it begins in between, that is a misaligned
    address, and the process has no device any more. SGLang's kernel comes from there."""
    if width % _ROTARY:
        raise NotImplementedError(f"rotary_dim {width}; the library's kernel is for multiples of {_ROTARY}")


def _sampling(module: str, definition: Definition, i: Inputs) -> Any:
    library, names = import_module(module), [name for name in ("top_k", "top_p") if name in i]
    if "min_p" in i:
        raise NotImplementedError("not with min_p")
    function = getattr(library, "_".join((*names, "sampling_from_probs")), None)
    if function is None:
        raise NotImplementedError(f"{module} has no sampling by {' and '.join(names) or 'probabilities alone'}")
    return function(i["probs"], *(i[name] for name in names)).to(torch.int64)


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
    _, tokens = block_tables(i, page)
    queries = i.get("qo_indptr")
    if queries is None:
        queries = torch.arange(len(tokens) + 1, dtype=torch.int32, device=q.device)
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
    "rmsnorm": partial(_norm, "flashinfer.norm"),
    "fused_add_rmsnorm": partial(_norm, "flashinfer.norm"),
    "gqa_paged": _gqa_paged,
    "gqa_ragged": _gqa_ragged,
    "mla_ragged": _gqa_ragged,
    "mla_paged": _mla_paged,
    "sampling": partial(_sampling, "flashinfer.sampling"),
    "rope": partial(_rope, "flashinfer.rope"),
}
SGLANG: Mapping[str, Callable[[Definition, Inputs], Any]] = {
    "rmsnorm": partial(_norm, "sgl_kernel"),
    "fused_add_rmsnorm": partial(_norm, "sgl_kernel"),
    "moe": _moe,
    "sampling": partial(_sampling, "sgl_kernel"),
    "rope": partial(_rope, "sgl_kernel"),
}


# What has to be importable, and the distribution that brings it.
_MODULES = {"flashinfer": ("flashinfer", "flashinfer-python"), "sglang": ("sgl_kernel", "sgl-kernel")}
_EXPERTS = ("sglang", "sglang")
_NEEDS_GPU = frozenset({"flashinfer", "sglang"})


@dataclass(frozen=True, slots=True)
class Truth:
    """Somebody else's result for a definition's inputs. `partial` ones give only the first outputs."""

    source: str
    run: Callable[[Inputs], Any]
    partial: bool = False


def find_truths(definition: Definition, device: torch.device) -> tuple[list[Truth], dict[str, Reason]]:
    """The ground truths to use here, in order, and why each of the others is not used."""
    found: list[Truth] = []
    missing: dict[str, Reason] = {}
    for source, table in (("flashinfer", FLASHINFER), ("sglang", SGLANG)):
        refused = _refusal(source, table, definition, device)
        if refused is None:
            run = partial(table[definition.op_type], definition)
            found.append(Truth(source, run))
        else:
            missing[source] = refused
    if not found:
        plain = _PYTORCH.get(definition.op_type)
        if plain is None:
            missing["pytorch"] = reason("FEATURE_UNSUPPORTED", definition.op_type, detail="PyTorch has no op for it")
        else:  # its attention gives no log-sum-exp
            found.append(Truth("pytorch", partial(plain, definition), partial=plain in (_paged, _ragged)))
    return found, missing


def _refusal(source: str, table: Mapping[str, Any], definition: Definition, device: torch.device) -> Reason | None:
    if definition.op_type not in table:
        return reason("FEATURE_UNSUPPORTED", definition.op_type, detail=f"no function of {source} is known for it")
    module, dist = _EXPERTS if (source, definition.op_type) == ("sglang", "moe") else _MODULES[source]
    if importlib.util.find_spec(module) is None:
        return reason("BACKEND_NOT_INSTALLED", dist, dist)
    if source in _NEEDS_GPU and device.type != "cuda":
        return reason("PLATFORM_MISMATCH", device.type, "cuda")
    try:
        import_module(module)
    except Exception as error:  # a vendor may fail in its own ways; that it cannot be used is all that counts here
        return reason("BACKEND_IMPORT_FAILED", f"{type(error).__name__}: {error}")
    return None


# -- PyTorch -------------------------------------------------------------------------------------
def _linear(definition: Definition, i: Inputs) -> Tensor:
    if "A_scale" in i or "B_scale" in i:
        raise NotImplementedError("torch.nn.functional.linear takes no scales")
    return F.linear(i["A"], i["B"])


def _rms_norm(definition: Definition, i: Inputs) -> Any:
    weight = i["weight"].float() + (1.0 if "gemma" in definition.name else 0.0)
    x = i[first_of(definition, *NORMED)]
    stream = x.float() + i["residual"].float() if "residual" in i else x.float()
    out = F.rms_norm(stream, (stream.shape[-1],), weight, epsilon(definition, i)).to(x.dtype)
    return (out, stream.to(x.dtype))[: len(definition.outputs)]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool = True) -> Tensor:
    """One sequence, [tokens, heads, dim] each; causal means aligned at the end."""
    rows, columns = q.shape[0], k.shape[0]
    if columns == 0:
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    mask = mask.tril(columns - rows) if causal else mask
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _paged(definition: Definition, i: Inputs) -> tuple[Tensor]:
    tables, tokens = block_tables(i, i["k_cache"].shape[1])
    counts = i["qo_indptr"].diff() if "qo_indptr" in i else torch.ones_like(tokens)
    outs = []
    for q, row, length in zip(i["q"].split(counts.tolist()), tables, tokens.tolist(), strict=True):
        k, v = (i[name][row.long()].flatten(0, 1)[:length] for name in ("k_cache", "v_cache"))
        outs.append(_attend(q, k, v, i.get("sm_scale")))
    return (torch.cat(outs),)


def _ragged(definition: Definition, i: Inputs) -> tuple[Tensor]:
    queries, keys = (i[name].diff().tolist() for name in ("qo_indptr", "kv_indptr"))
    parts = zip(i["q"].split(queries), i["k"].split(keys), i["v"].split(keys), strict=True)
    causal = is_causal(definition)
    return (torch.cat([_attend(q, k, v, i.get("sm_scale"), causal) for q, k, v in parts]),)


_PYTORCH: Mapping[str, Callable[[Definition, Inputs], Any]] = {
    "gemm": _linear,
    "rmsnorm": _rms_norm,
    "fused_add_rmsnorm": _rms_norm,
    "gqa_paged": _paged,
    "gqa_ragged": _ragged,
    "mla_ragged": _ragged,
}

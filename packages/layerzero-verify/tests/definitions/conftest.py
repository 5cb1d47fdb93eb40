"""A small dataset with one definition of every kind, in our own words, each with its reference written plainly."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz

VAR: dict[str, Any] = {"type": "var"}


def const(value: int) -> dict[str, Any]:
    return {"type": "const", "value": value}


def tensor(dtype: str, *shape: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def number(dtype: str = "float32") -> dict[str, Any]:
    return {"shape": None, "dtype": dtype}


_NORM = """
def run(hidden_states, weight):
    assert hidden_states.shape[1] == 32
    EPS = 1e-5
    wide = hidden_states.double()
    wide = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (wide * weight.double()).to(hidden_states.dtype)
"""

_ADD_NORM = """
def run(hidden_states, residual, weight):
    eps = 1e-6
    stream = hidden_states.double() + residual.double()
    out = stream / torch.sqrt(stream.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.double()
    return out.to(hidden_states.dtype), stream.to(hidden_states.dtype)
"""

# One sequence at a time, in float64; the log-sum-exp in base 2.
_SOFTMAX = """
def one_sequence(q, k, v, scale):
    queries, keys = q.shape[0], k.shape[0]
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scores = scale * torch.einsum("qhd,khd->hqk", q.double(), k)
    for row in range(queries):
        scores[:, row, keys - queries + row + 1 :] = -math.inf
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out, (scores.logsumexp(-1) / math.log(2)).T
"""

_PAGED = (
    """
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = %d, %d, %d, %d
"""
    + _SOFTMAX
    + """
def run(%s):
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    for b in range(len(kv_indptr) - 1):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        rows = slice(%s)
        if len(pages) == 0:
            continue
        length = (len(pages) - 1) * PAGE_SIZE + %s
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        o, l = one_sequence(q[rows], k, v, sm_scale)
        out[rows], lse[rows] = o.to(q.dtype), l.float()
    return out, lse
"""
)

_RAGGED = (
    _SOFTMAX
    + """
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device)
    for b in range(len(qo_indptr) - 1):
        rows, keys = slice(qo_indptr[b], qo_indptr[b + 1]), slice(kv_indptr[b], kv_indptr[b + 1])
        o, l = one_sequence(q[rows], k[keys], v[keys], sm_scale)
        out[rows], lse[rows] = o.to(q.dtype), l.float()
    return out, lse
"""
)

_MLA = """
def run(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    assert q_nope.shape[1:] == (4, 32) and q_pe.shape[2] == 8
    out, lse = torch.zeros_like(q_nope), torch.full(q_nope.shape[:2], -math.inf, device=q_pe.device)
    for b in range(len(kv_indptr) - 1):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        latent, turned = ckv_cache[pages].flatten(0, 1).double(), kpe_cache[pages].flatten(0, 1).double()
        scores = sm_scale * (q_nope[b].double() @ latent.T + q_pe[b].double() @ turned.T)
        lse[b] = (scores.logsumexp(-1) / math.log(2)).float()
        out[b] = (scores.softmax(-1) @ latent).to(q_nope.dtype)
    return out, lse
"""

_MOE = """
def run(hidden_states, w1, w2, topk_weights, topk_ids):
    out = torch.zeros(hidden_states.shape, dtype=torch.float64, device=hidden_states.device)
    for t in range(hidden_states.shape[0]):
        for slot in range(topk_ids.shape[1]):
            e = int(topk_ids[t, slot])
            gate, up = (w1[e].double() @ hidden_states[t].double()).chunk(2)
            out[t] += topk_weights[t, slot].double() * (w2[e].double() @ (gate * gate.sigmoid() * up))
    return out.to(hidden_states.dtype)
"""

_MOE_FP8 = """
TOP_K = 2
def run(routing_logits, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale,
        gemm2_weights, gemm2_weights_scale, local_expert_offset, routed_scaling_factor):
    blocks = 16
    x = hidden_states.double() * hidden_states_scale.T.double().repeat_interleave(blocks, 1)
    def wide(w, s):
        return w.double() * s.double().repeat_interleave(blocks, 1).repeat_interleave(blocks, 2)
    first, second = wide(gemm1_weights, gemm1_weights_scale), wide(gemm2_weights, gemm2_weights_scale)
    score = routing_logits.double().sigmoid()
    choice = score + routing_bias.double()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(x.shape[0]):
        groups = choice[t].view(2, 4)
        best = int(groups.topk(2, dim=1).values.sum(1).argmax())
        masked = torch.full_like(choice[t], -math.inf)
        masked[best * 4 : best * 4 + 4] = choice[t][best * 4 : best * 4 + 4]
        ids = masked.topk(TOP_K).indices
        weights = score[t][ids] / score[t][ids].sum() * routed_scaling_factor
        for e, w in zip(ids.tolist(), weights):
            local = e - local_expert_offset
            if 0 <= local < first.shape[0]:
                up, gate = (first[local] @ x[t]).chunk(2)
                out[t] += w * (second[local] @ (gate * gate.sigmoid() * up))
    return out.to(torch.float16)
"""

_GEMM = """
def run(A, B):
    return (A.double() @ B.double().T).to(A.dtype)
"""

_GEMM_FP8 = """
def run(A, B, A_scale, B_scale):
    return ((A.double() * A_scale[:, None]) @ (B.double() * B_scale[:, None]).T).to(torch.float16)
"""

_SAMPLE = """
def run(probs, top_k, top_p):
    tokens = torch.empty(probs.shape[0], dtype=torch.int64, device=probs.device)
    for row in range(probs.shape[0]):
        p, ids = probs[row].double().sort(descending=True)
        p[int(top_k[row]) :] = 0
        p = p / p.sum()
        p[(p.cumsum(0) - p) >= float(top_p[row])] = 0
        tokens[row] = ids[torch.multinomial(p, 1)]
    return tokens
"""

_ROPE = """
def run(q, k, cos_sin_cache, positions):
    cos, sin = cos_sin_cache[positions].double().chunk(2, -1)
    width = cos_sin_cache.shape[1]
    def turn(x):
        a, b, rest = x.double().split((width // 2, width // 2, x.shape[-1] - width), -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s, rest), -1).to(x.dtype)
    return turn(q), turn(k)
"""


def _gqa_paged(
    name: str, heads: int, kv_heads: int, dim: int, page: int, *, prefill: bool, last: bool
) -> dict[str, Any]:
    rows = "total_q" if prefill else "batch_size"
    inputs = {
        "q": tensor("bfloat16", rows, "num_qo_heads", "head_dim"),
        "k_cache": tensor("bfloat16", "num_pages", "page_size", "num_kv_heads", "head_dim"),
        "v_cache": tensor("bfloat16", "num_pages", "page_size", "num_kv_heads", "head_dim"),
        **({"qo_indptr": tensor("int32", "len_indptr")} if prefill else {}),
        "kv_indptr": tensor("int32", "len_indptr"),
        "kv_indices": tensor("int32", "num_kv_indices"),
        **({"kv_last_page_len": tensor("int32", "batch_size")} if last else {}),
        "sm_scale": number(),
    }
    span = "qo_indptr[b], qo_indptr[b + 1]" if prefill else "b, b + 1"
    tail = "int(kv_last_page_len[b])" if last else "PAGE_SIZE"
    variable = ("len_indptr", "num_pages", "num_kv_indices", rows, *(("batch_size",) if last else ()))
    return {
        "name": name,
        "op_type": "gqa_paged",
        "tags": ["stage:prefill" if prefill else "stage:decode"],
        "axes": {
            "num_qo_heads": const(heads),
            "num_kv_heads": const(kv_heads),
            "head_dim": const(dim),
            "page_size": const(page),
            **{axis: VAR for axis in dict.fromkeys(variable)},
        },
        "constraints": [
            *(["len_indptr == batch_size + 1"] if "batch_size" in variable else []),
            *(["total_q == qo_indptr[-1].item()"] if prefill else []),
            "num_kv_indices == kv_indptr[-1].item()",
        ],
        "inputs": inputs,
        "outputs": {
            "output": tensor("bfloat16", rows, "num_qo_heads", "head_dim"),
            "lse": tensor("float32", rows, "num_qo_heads"),
        },
        "reference": "import math\nimport torch\n"
        + _PAGED % (heads, kv_heads, dim, page, ", ".join(inputs), span, tail),
    }


def _definition(
    name: str, op_type: str, axes: dict[str, Any], inputs: Any, outputs: Any, code: str, **more: Any
) -> Any:
    return {
        "name": name,
        "op_type": op_type,
        "axes": axes,
        "inputs": inputs,
        "outputs": outputs,
        "reference": code,
    } | more


def samples() -> dict[str, dict[str, Any]]:
    """Every definition by name, fresh."""
    hidden = {"batch_size": VAR, "hidden_size": const(32)}
    rows = ("batch_size", "hidden_size")
    moe_axes = {
        "seq_len": VAR,
        "num_experts": const(6),
        "hidden_size": const(16),
        "inner": const(24),
        "both": const(48),
    }
    heads = {"num_qo_heads": const(4), "num_kv_heads": const(2), "head_dim": const(16)}
    made = [
        _definition(
            "rmsnorm_h32", "rmsnorm", hidden,
            {"hidden_states": tensor("bfloat16", *rows), "weight": tensor("bfloat16", "hidden_size")},
            {"output": tensor("bfloat16", *rows)}, _NORM, description="the norm of a small model",
        ),
        _definition(
            "fused_add_rmsnorm_h32", "rmsnorm", hidden,
            {
                "hidden_states": tensor("float16", *rows),
                "residual": tensor("float16", *rows),
                "weight": tensor("float16", "hidden_size"),
            },
            {"output": tensor("float16", *rows), "new_residual": tensor("float16", *rows)}, _ADD_NORM,
        ),
        _gqa_paged("gqa_paged_decode_h4_kv2_d16_ps1", 4, 2, 16, 1, prefill=False, last=False),
        _gqa_paged("gqa_paged_prefill_causal_h4_kv2_d16_ps4", 4, 2, 16, 4, prefill=True, last=True),
        _definition(
            "gqa_ragged_prefill_causal_h4_kv2_d16", "gqa_ragged",
            {**heads, "total_q": VAR, "total_kv": VAR, "len_indptr": VAR},
            {
                "q": tensor("float32", "total_q", "num_qo_heads", "head_dim"),
                "k": tensor("float32", "total_kv", "num_kv_heads", "head_dim"),
                "v": tensor("float32", "total_kv", "num_kv_heads", "head_dim"),
                "qo_indptr": tensor("int32", "len_indptr"),
                "kv_indptr": tensor("int32", "len_indptr"),
                "sm_scale": number(),
            },
            {
                "output": tensor("float32", "total_q", "num_qo_heads", "head_dim"),
                "lse": tensor("float32", "total_q", "num_qo_heads"),
            },
            _RAGGED, constraints=["total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"],
        ),
        _definition(
            "mla_paged_decode_h4_ckv32_kpe8_ps1", "mla_paged",
            {
                "batch_size": VAR, "num_pages": VAR, "len_indptr": VAR, "num_kv_indices": VAR,
                "num_qo_heads": const(4), "head_dim_ckv": const(32), "head_dim_kpe": const(8), "page_size": const(1),
            },
            {
                "q_nope": tensor("bfloat16", "batch_size", "num_qo_heads", "head_dim_ckv"),
                "q_pe": tensor("bfloat16", "batch_size", "num_qo_heads", "head_dim_kpe"),
                "ckv_cache": tensor("bfloat16", "num_pages", "page_size", "head_dim_ckv"),
                "kpe_cache": tensor("bfloat16", "num_pages", "page_size", "head_dim_kpe"),
                "kv_indptr": tensor("int32", "len_indptr"),
                "kv_indices": tensor("int32", "num_kv_indices"),
                "sm_scale": number(),
            },
            {
                "output": tensor("bfloat16", "batch_size", "num_qo_heads", "head_dim_ckv"),
                "lse": tensor("float32", "batch_size", "num_qo_heads"),
            },
            _MLA, constraints=["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
        ),
        _definition(
            "moe_fp16_topk2_e6_h16_i24", "moe", {**moe_axes, "top_k": const(2)},
            {
                "hidden_states": tensor("float16", "seq_len", "hidden_size"),
                "w1": tensor("float16", "num_experts", "both", "hidden_size"),
                "w2": tensor("float16", "num_experts", "hidden_size", "inner"),
                "topk_weights": tensor("float32", "seq_len", "top_k"),
                "topk_ids": tensor("int32", "seq_len", "top_k"),
            },
            {"output": tensor("float16", "seq_len", "hidden_size")}, _MOE, constraints=["both == 2 * inner"],
        ),
        _definition(
            "moe_fp8_block_scale_ds_routing_topk2_ng2_kg1_e4_h32_i16", "moe",
            {
                "seq_len": VAR, "num_experts": const(8), "num_local_experts": const(4), "hidden_size": const(32),
                "intermediate_size": const(16), "gemm1_out_size": const(32), "num_hidden_blocks": const(2),
                "num_intermediate_blocks": const(1), "num_gemm1_out_blocks": const(2),
            },
            {
                "routing_logits": tensor("float32", "seq_len", "num_experts"),
                "routing_bias": tensor("bfloat16", "num_experts"),
                "hidden_states": tensor("float8_e4m3fn", "seq_len", "hidden_size"),
                "hidden_states_scale": tensor("float32", "num_hidden_blocks", "seq_len"),
                "gemm1_weights": tensor("float8_e4m3fn", "num_local_experts", "gemm1_out_size", "hidden_size"),
                "gemm1_weights_scale": tensor(
                    "float32", "num_local_experts", "num_gemm1_out_blocks", "num_hidden_blocks"
                ),
                "gemm2_weights": tensor("float8_e4m3fn", "num_local_experts", "hidden_size", "intermediate_size"),
                "gemm2_weights_scale": tensor(
                    "float32", "num_local_experts", "num_hidden_blocks", "num_intermediate_blocks"
                ),
                "local_expert_offset": number("int32"),
                "routed_scaling_factor": number(),
            },
            {"output": tensor("float16", "seq_len", "hidden_size")}, "import math\n" + _MOE_FP8,
            tags=["fi_api:flashinfer.fused_moe.trtllm_fp8_block_scale_moe"],
        ),
        _definition(
            "gemm_n24_k64", "gemm", {"M": VAR, "N": const(24), "K": const(64)},
            {"A": tensor("float16", "M", "K"), "B": tensor("float16", "N", "K")},
            {"C": tensor("float16", "M", "N")}, _GEMM,
        ),
        _definition(
            "gemm_fp8_n24_k64", "gemm", {"M": VAR, "N": const(24), "K": const(64)},
            {
                "A": tensor("float8_e4m3fn", "M", "K"), "B": tensor("float8_e4m3fn", "N", "K"),
                "A_scale": tensor("float32", "M"), "B_scale": tensor("float32", "N"),
            },
            {"C": tensor("float16", "M", "N")}, _GEMM_FP8,
        ),
        _definition(
            "top_k_top_p_sampling_from_probs_v48", "sampling", {"batch_size": VAR, "vocab_size": const(48)},
            {
                "probs": tensor("float32", "batch_size", "vocab_size"),
                "top_k": tensor("int32", "batch_size"),
                "top_p": tensor("float32", "batch_size"),
            },
            {"samples": tensor("int64", "batch_size")}, _SAMPLE,
        ),
        _definition(
            "rope_with_cos_sin_cache_neox_style_d16_rd8", "rope",
            {
                "num_tokens": VAR, "num_qo_heads": VAR, "num_kv_heads": VAR, "max_seq_len": VAR,
                "head_size": const(16), "rotary_dim": const(8),
            },
            {
                "q": tensor("bfloat16", "num_tokens", "num_qo_heads", "head_size"),
                "k": tensor("bfloat16", "num_tokens", "num_kv_heads", "head_size"),
                "cos_sin_cache": tensor("float32", "max_seq_len", "rotary_dim"),
                "positions": tensor("int64", "num_tokens"),
            },
            {
                "q_out": tensor("bfloat16", "num_tokens", "num_qo_heads", "head_size"),
                "k_out": tensor("bfloat16", "num_tokens", "num_kv_heads", "head_size"),
            },
            _ROPE,
        ),
    ]  # fmt: skip
    return {item["name"]: copy.deepcopy(item) for item in made}


def template() -> dict[str, Any]:
    """The published shape: 32 query heads over 8, heads of 128, pages of one token."""
    return _gqa_paged("gqa_paged_decode_h32_kv8_d128_ps1", 32, 8, 128, 1, prefill=False, last=False)


def put(root: Path, *definitions: dict[str, Any]) -> Path:
    """Write definitions into a dataset."""
    for item in definitions:
        path = root / "definitions" / item["op_type"] / f"{item['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(item), encoding="utf-8")
    (root / "definitions").mkdir(parents=True, exist_ok=True)
    return root


class Sets:
    """What tests of definitions need: samples to change, and datasets to put them in."""

    samples = staticmethod(samples)
    template = staticmethod(template)
    put = staticmethod(put)
    const = staticmethod(const)
    tensor = staticmethod(tensor)
    var = VAR

    def __init__(self, folder: Path) -> None:
        self.root = folder

    def only(self, name: str, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
        """A dataset with one sample, changed on the way."""
        item = samples()[name]
        if change is not None:
            change(item)
        return put(self.root / f"only-{item['name']}", item)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sets]:
    """Datasets in a folder of the test's own; nothing is trusted by the environment."""
    monkeypatch.delenv("LAYERZERO_TRUSTED_DEFINITIONS", raising=False)
    monkeypatch.delenv("FIB_DATASET_PATH", raising=False)
    lz.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Sets(tmp_path)
    torch.set_num_threads(threads)
    lz.reset()

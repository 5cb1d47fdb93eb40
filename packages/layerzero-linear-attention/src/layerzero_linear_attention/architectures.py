"""Tiny models of transformers that call the ops: what `lz verify` climbs with, by entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero_linear_attention.transformers import by_itself

_SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HYBRID: dict[str, Any] = {
    **_SMALL,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# name -> what transformers calls its config and model, their sizes, the ops of this package that it calls, and what
# takes the packages from it that transformers would call in their place
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...], Callable[[Any], None]]] = {
    "qwen3_next": (
        "Qwen3Next",
        "ForCausalLM",
        {
            **_HYBRID,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "shared_expert_intermediate_size": 48,
        },
        ("gated_delta_rule", "causal_conv1d"),
        by_itself,
    ),
    "kimi_linear": (
        "KimiLinear",
        "ForCausalLM",
        {
            **_HYBRID,
            "num_key_value_heads": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_local_experts": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        ("kimi_delta_attention", "causal_conv1d"),
        by_itself,
    ),
    "mamba2": (
        "Mamba2",
        "ForCausalLM",
        {**_SMALL, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16, "expand": 2},
        ("mamba2_scan", "causal_conv1d"),
        by_itself,
    ),
}

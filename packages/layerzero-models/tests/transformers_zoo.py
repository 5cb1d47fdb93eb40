"""Tiny models of transformers with lively random weights, and everything a patch could leave behind in one."""

from __future__ import annotations

import sys
from typing import Any

import torch

from layerzero_verify import models

VOCAB = 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# architecture -> prefix of its classes, what its configuration has besides
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    # its soft cap is not known to every version's sdpa
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 32, "attn_implementation": "eager"},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB, "n_positions": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 2, "num_heads": 4,
            "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 112, "decoder_ffn_dim": 112,
            "max_position_embeddings": 128, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 2, "forced_eos_token_id": None,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112,
            "image_size": 32, "patch_size": 8, "num_labels": 11,
        },
    ),
}  # fmt: skip
_CONFIGS = {"gpt2": "GPT2Config", "t5": "T5Config", "bart": "BartConfig", "vit": "ViTConfig"}
ALL = (*DECODERS, *OTHERS)


def made(name: str, **changes: Any) -> Any:
    """A model by name, in float32 on the CPU; the same numbers every time."""
    import transformers as t

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in DECODERS:
            prefix, own = DECODERS[name]
            config = getattr(t, f"{prefix}Config")(**{**SMALL, **own, **changes})
            model = getattr(t, f"{prefix}ForCausalLM")(config)
        else:
            kind, fields = OTHERS[name]
            model = getattr(t, kind)(getattr(t, _CONFIGS[name])(**{**fields, **changes}))
    models._lively(model, name, 0)
    return model.eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(model: Any, side: str | None = None) -> dict[str, torch.Tensor]:
    """Inputs of a forward pass; the second row padded on a side."""
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    found = {"input_ids": tokens()}
    if side is not None:
        mask = torch.ones_like(found["input_ids"])
        mask[1, slice(None, 4) if side == "left" else slice(-4, None)] = 0
        found["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = tokens(2, 9, seed=2)
    return found


def logits(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits without those of padding, where nothing is promised."""
    with torch.no_grad():
        found: torch.Tensor = model(**given).logits
    if "attention_mask" in given and not model.config.is_encoder_decoder:
        return found[given["attention_mask"].bool()]
    return found


def generated(model: Any, given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    prompt = {name: item for name, item in given.items() if name != "decoder_input_ids"}
    settings = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    found: torch.Tensor = model.generate(**prompt, **settings)
    return found


def traces(model: Any) -> dict[str, Any]:
    """Whatever a patch could leave behind; the objects themselves, so that equal means the very same."""
    file = sys.modules[type(model).__module__]
    return {
        "instances": {name: dict(vars(part)) for name, part in model.named_modules()},
        "modules": {name: id(part) for name, part in model.named_modules()},
        "forwards": {name: type(part).forward for name, part in model.named_modules()},
        "parameters": {name: id(part) for name, part in model.named_parameters()},
        "storages": {name: part.untyped_storage().nbytes() for name, part in model.named_parameters()},
        "configuration": dict(vars(model.config)),
        "file": {name: id(item) for name, item in vars(file).items() if callable(item)},
    }

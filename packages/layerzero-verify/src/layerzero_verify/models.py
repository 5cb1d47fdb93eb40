"""Level 4's models: real architectures of transformers, tiny, with weights made on the spot from a seed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero_verify.weights import generator

_VOCAB = 131
_SMALL: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Model:
    """A model and its inputs; `padded` are inputs of unequal lengths, None where the architecture has none."""

    name: str
    module: Any
    inputs: dict[str, Tensor]
    padded: dict[str, Tensor] | None = None
    decoder: bool = True
    # Logits of the unmodified model by the kind of input, and copies on other devices and in other dtypes: a run
    # compares several line-ups with the same ones.
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def logits(self, inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            found = self.module(**inputs, **({"use_cache": False} if self.decoder else {}))
        logits: Tensor = found.logits
        return logits


def missing() -> str:
    """Why level 4 cannot run here; empty when it can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'layerzero-verify[models]'"
    return ""


# name -> what transformers calls its config and model, and how these differ from the small ones. A sliding window
# shorter than the sequences, so that it matters; Gemma with wide heads, Qwen with biases.
_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", _SMALL),
    "mistral": ("Mistral", "ForCausalLM", {**_SMALL, "sliding_window": 5}),
    "qwen": ("Qwen2", "ForCausalLM", _SMALL),
    "gemma": ("Gemma", "ForCausalLM", {**_SMALL, "head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt2": (
        "GPT2", "LMHeadModel",
        {"vocab_size": _VOCAB, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0,
         "eos_token_id": 0},
    ),
    "t5": (
        "T5", "ForConditionalGeneration",
        {"vocab_size": _VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 2, "num_heads": 4,
         "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    ),
    "vit": (
        "ViT", "ForImageClassification",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112,
         "image_size": 32, "patch_size": 8, "num_labels": 11},
    ),
    "gemma2": ("Gemma2", "ForCausalLM", {**_SMALL, "head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 32}),
    "qwen3": ("Qwen3", "ForCausalLM", {**_SMALL, "head_dim": 16}),
}  # fmt: skip
MODELS = tuple(_ARCHITECTURES)
BRING = "layerzero.verify"  # entry points of packages that bring ops: models like those above, and the ops they call
MATRIX = ("llama", "gpt2", "t5")  # the three of the preflight: rotary decoder, learned positions, encoder-decoder


@cache
def brought() -> dict[str, tuple[Any, ...]]:
    """Models of other packages by name, each with the ops of those packages that it calls and, where it has to be told,
    a function that lets the model compute by itself."""
    return {name: found for entry in entry_points(group=BRING) for name, found in entry.load().items()}


@lru_cache(maxsize=32)
def made(name: str, seed: int = 0, length: int = 12) -> Model:
    """A model by name, in float32 on the CPU; the same numbers for the same seed."""
    import transformers

    prefix, kind, sizes = _ARCHITECTURES.get(name) or brought()[name][:3]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        module = getattr(transformers, prefix + kind)(getattr(transformers, f"{prefix}Config")(**sizes)).eval()
    _lively(module, name, seed)
    for alone in () if name in _ARCHITECTURES else brought()[name][4:]:
        alone(module)
    draw = generator("tokens", name, seed)
    if name == "vit":
        return Model(name, module, {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}, decoder=False)
    return _with_tokens(name, module, draw, length)


def _with_tokens(name: str, module: Any, draw: torch.Generator, length: int) -> Model:
    vocab = module.config.vocab_size
    ids = torch.randint(1, vocab, (2, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, : length // 3] = 0  # a shorter prompt, padded on the left
    inputs, padded = {"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}
    if getattr(module.config, "is_encoder_decoder", False):
        targets = torch.randint(1, vocab, (2, length - 3), generator=draw)
        inputs, padded = {**inputs, "decoder_input_ids": targets}, {**padded, "decoder_input_ids": targets}
    return Model(name, module, inputs, padded)


def _lively(module: torch.nn.Module, name: str, seed: int) -> None:
    """Weights of the size a trained model has: transformers' own initial ones are so small that faults hardly show."""
    draw = generator("weights", name, seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * noise)


def from_folder(folder: str, seed: int = 0, length: int = 12) -> Model:
    """A causal language model saved in a local folder, with its real weights; nothing is fetched from anywhere."""
    import transformers

    if not Path(folder).is_dir():
        raise invalid("VALUE_INVALID", folder, "a folder written by save_pretrained", f"no folder {folder!r}")
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    module.train(False)
    return _with_tokens(Path(folder).name, module, generator("tokens", seed), length)

"""Whole calls of `generate`: stock as it is fastest, patched and with graphs; tokens compared, tokens a second."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

import layerzero as lz

__all__ = ["ARCHITECTURES", "WAYS", "contestants_of", "generate_case", "log_probability_errors", "made"]

_FEW = 8  # new tokens of the short calls: what a step takes is the difference

Timed = Callable[[dict[str, Any], Callable[[], None], int, float], dict[str, Any]]
Contestants = dict[str, tuple[Any, dict[str, Any]]]

_SHARED: dict[str, Any] = {
    "hidden_size": 2048, "max_position_embeddings": 16384, "tie_word_embeddings": True,
    "num_key_value_heads": 8,
}  # fmt: skip
# name -> prefix of its classes, configuration
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": (
        "Llama",
        {
            **_SHARED, "vocab_size": 128256, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "qwen3-1.7b": (
        "Qwen3",
        {
            **_SHARED, "vocab_size": 151936, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "head_dim": 128, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
}  # fmt: skip
# name -> (how the model is patched, None for not at all; what `generate` is told). The first is what others are divided
# by: transformers compiles the step over a static cache and replays it, where the device has graphs.
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "stock static": (None, {"cache_implementation": "static"}),
    "patched static": ({}, {"cache_implementation": "static"}),
    "graphs": ({"graphs": True}, {}),
    "stock": (None, {}),
    "patched": ({}, {}),
}


def made(name: str, device: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A model of this architecture with random weights, that never ends a text by itself."""
    import transformers

    prefix, fields = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**fields, **changes}, attn_implementation="sdpa")
    with torch.device(device):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def contestants_of(stock: Any, ways: Iterable[str], compiled: bool = False) -> Contestants:
    """The model in each of these ways; models that are patched alike are one.

    `compiled`: the step over a static cache is compiled on this device too, where transformers does not by itself.
    """
    from transformers import CompileConfig

    models: dict[str, Any] = {str(None): stock}
    found = {}
    for way in ways:
        patch, options = WAYS[way]
        if str(patch) not in models:
            models[str(patch)] = lz.patch(copy.deepcopy(stock), **(patch or {}))
        if compiled and "cache_implementation" in options:
            config = CompileConfig()
            config._compile_all_devices = True  # type: ignore[assignment] # transformers declares it as None
            options = {**options, "compile_config": config}
        found[way] = (models[str(patch)], options)
    return found


def generate_case(
    contestants: Contestants, ids: torch.Tensor, new: int, timed: Timed, sync: Callable[[], None], seconds: float
) -> dict[str, Any]:
    """Greedy tokens after a prompt, whole calls of `generate` timed; ms and tokens a second count new tokens."""

    def written(model: Any, options: dict[str, Any], new: int = new) -> torch.Tensor:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
        if model.generation_config.eos_token_id is None:  # nothing ends the text, and nobody has to look for it
            del settings["min_new_tokens"]
        found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return found[:, ids.shape[1] :]

    tokens = {name: written(*contestant) for name, contestant in contestants.items()}
    first = next(iter(tokens.values()))
    same = torch.stack([first == other for other in tokens.values()])
    # Where two tokens are as probable as each other but for rounding, one choice parts the texts for good.
    agree = int(same.long().cumprod(-1).sum(-1).min())
    calls = {name: (lambda pair=pair: written(*pair), _nothing) for name, pair in contestants.items()}
    found = timed(calls, sync, new, seconds)
    few = {name: (lambda pair=pair: written(*pair, new=_FEW), _nothing) for name, pair in contestants.items()}
    short = timed(few, sync, _FEW, seconds / 4)["ms"]
    found["step_ms"] = {
        name: round((ms * new - short[name] * _FEW) / (new - _FEW), 4) for name, ms in found["ms"].items()
    }
    found["tokens_per_s"] = {name: round(ids.shape[0] / ms * 1e3, 1) for name, ms in found["ms"].items()}
    identical = bool(same.all())
    return {"batch": ids.shape[0], "prompt": ids.shape[1], "new": new, "identical": identical, "agree": agree, **found}


def log_probability_errors(stock: Any, contestants: Contestants, ids: torch.Tensor, new: int) -> dict[str, float]:
    """How far the log-probabilities of each way are from float32's over the text it wrote itself, in the mean.

    Prompt and decode steps are those of the timed calls. Of each step the hundred tokens count that float32 holds for
    the most probable.
    """
    truth = copy.deepcopy(stock).float()
    found = {}
    for name, (model, options) in {"stock": (stock, {}), **contestants}.items():
        given = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "output_logits": True, **options}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **given)
        with torch.no_grad():
            logits = truth(text.sequences[:, :-1], logits_to_keep=new).logits.float()
        want, likely = logits.log_softmax(-1).topk(100)
        got = torch.stack(text.logits, 1).float().log_softmax(-1).gather(-1, likely)
        found[name] = float((got - want).abs().mean())
    return found


def _nothing() -> None:
    pass

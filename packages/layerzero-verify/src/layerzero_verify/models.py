"""Level 4's models: real architectures of transformers, tiny, with weights made on the spot from a seed.

Under `lz.patch` every op they call is named and watched; what happens inside them is told by event.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.errors import invalid
from layerzero_verify.block import generator
from layerzero_verify.lineup import Caller

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


_NAME = "layerzero_verify"
# op -> the stage it computes; a norm, product or embedding is the stage of its module
_STAGES = {"attention": "attn_out", "rope": "q_rope", "linear": "linear", "embedding": "embedding"}

Observer = Callable[[str, Tensor], None]


@contextmanager
def applied(model: Any, call: Caller, observe: Observer | None = None) -> Iterator[None]:
    """Within the block the model computes as `lz.patch` makes it, each op through `call`.

    `observe` hears of attention's inputs and output; then every part is an op of its own, so that hooks see each.
    """
    from layerzero_models.patching import Changes  # of the extra `models`
    from layerzero_models.transformers.patching import redirected

    names = {id(module): name for name, module in model.named_modules()}
    others = {op for found in brought().values() for op in found[3]}

    def run(op: str, *args: Any, **kwargs: Any) -> Any:
        name = _part(names)
        stage = op if op in others else _STAGES.get(op) or ("norm" if op.endswith("norm") else "swiglu_out")
        out = call(f"{name} {stage}", op, *args, **kwargs)
        if observe is not None and op == "attention":
            for word, value in (("q_rope", args[0]), ("k_rope", args[1]), ("attn_out", out.transpose(1, 2))):
                observe(f"{name} {word}", value)
        return out

    changes = Changes()
    with redirected(run):
        try:
            for op in others:
                changes.set(lz.ops, op, partial(run, op))
            lz.patch(model, everything=True, joined=observe is None)
            yield
        finally:
            lz.unpatch(model)
            changes.undo()


def _part(names: Mapping[int, str]) -> str:
    """The part of the model whose code calls an op: the nearest frame that works for one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        for word in ("self", "module"):
            name = names.get(id(frame.f_locals.get(word)))
            if name is not None:
                return name
        frame = frame.f_back
    return ""


@contextmanager
def watched(model: Any, observe: Observer) -> Iterator[None]:
    """Within the block the unmodified model runs as always; `observe` hears of attention's inputs and output."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    before = model.config._attn_implementation
    names = {id(module): name for name, module in model.named_modules()}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        out = eager(module, query, key, value, *args, **kwargs)
        for word, seen in (("q_rope", query), ("k_rope", key), ("attn_out", out[0])):
            observe(f"{names.get(id(module), '')} {word}", seen)
        return out

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        """The whole mask, as the eager function adds it."""
        found = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        if found is None:
            return None
        return torch.zeros_like(found, dtype=kwargs.get("dtype", torch.float32)).masked_fill(~found, -1e30)

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)


# -- events: the outputs of modules and the inputs of attention -----------------------------------------
Events = dict[str, Tensor]

# last part of a module's name -> stage
_MODULES = {
    "input_layernorm": "ln1_out", "ln_1": "ln1_out", "layernorm_before": "ln1_out",
    "post_attention_layernorm": "ln2_out", "ln_2": "ln2_out", "layernorm_after": "ln2_out",
    "pre_feedforward_layernorm": "ln2_out",
    "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "q": "q_proj", "k": "k_proj", "v": "v_proj",
    "c_attn": "q_proj", "o_proj": "proj_out", "o": "proj_out", "attn.c_proj": "proj_out",
    "gate_proj": "fc1_out", "up_proj": "fc1_out", "c_fc": "fc1_out", "fc1": "fc1_out", "wi": "fc1_out",
    "wi_0": "fc1_out", "wi_1": "fc1_out",
    "down_proj": "mlp_out", "mlp.c_proj": "mlp_out", "fc2": "mlp_out", "wo": "mlp_out",
    "embed_tokens": "embedding", "wte": "embedding", "wpe": "embedding", "shared": "embedding",
    "lm_head": "head", "classifier": "head", "score": "head",
}  # fmt: skip


def stage_of(name: str) -> str:
    """The stage a module computes, by the names transformers gives; "" for modules that are none."""
    parts = name.split(".")
    known = _MODULES.get(".".join(parts[-2:])) or _MODULES.get(parts[-1])
    return known or ("norm" if parts[-1].endswith("norm") else "")


@contextmanager
def hooked(model: Any, events: Events) -> Iterator[Callable[[str, Tensor], None]]:
    """Collect events while the block runs; yields the observer that attention functions tell of their tensors."""

    def observe(name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        key, number = name, 2
        while key in events:  # a module that runs several times, an encoder's and a decoder's embedding
            key, number = f"{name}#{number}", number + 1
        events[key] = value.detach().clone()

    def before(name: str, module: Any, args: Any) -> None:
        observe(f"{name} swiglu_out", args[0] if args else None)

    def after(name: str, module: Any, args: Any, output: Any) -> None:
        observe(f"{name} {stage_of(name)}", output)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            stage = stage_of(name)
            if stage == "mlp_out":
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name)))
            if stage:
                hooks.enter_context(module.register_forward_hook(partial(after, name)))
        yield observe


def ran(event: str, call: Caller) -> tuple[str, str]:
    """Op and kernel behind an event, ("", "") where the model computed it itself."""
    name, _, stage = event.partition("#")[0].rpartition(" ")
    keys = [f"{name} {word}" for word in ("norm", "linear", "embedding")]
    if stage in ("q_rope", "k_rope"):
        keys = [f"{name} q_rope"]
    elif stage == "attn_out":
        keys = [event.partition("#")[0]]
    elif stage == "swiglu_out":
        keys = [f"{name.rpartition('.')[0]} swiglu_out"]
    return next((call.stages[key] for key in keys if key in call.stages), ("", ""))

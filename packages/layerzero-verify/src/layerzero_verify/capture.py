"""What happens inside a transformers model, event by event: the outputs of its modules and the inputs of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from layerzero_verify.caller import Caller

__all__ = ["Events", "hooked", "ran", "stage_of"]

Events = dict[str, Tensor]

# last part of a module's name -> stage
_STAGES = {
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
    for size in (2, 1):
        found = _STAGES.get(".".join(parts[-size:]))
        if found:
            return found
    return "norm" if parts[-1].endswith("norm") else ""


@contextmanager
def hooked(model: Any, events: Events) -> Iterator[Callable[[str, Tensor], None]]:
    """Collect events while the block runs; yields the observer that attention functions tell of their tensors."""

    def observe(name: str, value: Tensor) -> None:
        key, number = name, 2
        while key in events:  # a module that runs several times, an encoder's and a decoder's embedding
            key, number = f"{name}#{number}", number + 1
        events[key] = value.detach().clone()

    def after(name: str, stage: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                observe(f"{name} {stage}", output)

        return hook

    def before(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                observe(f"{name} swiglu_out", args[0])

        return hook

    handles = []
    for name, module in model.named_modules():
        stage = stage_of(name)
        if stage == "mlp_out":
            handles.append(module.register_forward_pre_hook(before(name)))
        if stage:
            handles.append(module.register_forward_hook(after(name, stage)))
    try:
        yield observe
    finally:
        for handle in handles:
            handle.remove()


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

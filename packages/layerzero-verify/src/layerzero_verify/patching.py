"""A transformers model under `lz.patch`, every op it calls named and watched; and what happens inside it, by event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero_verify.lineup import Caller
from layerzero_verify.models import brought

_NAME = "layerzero_verify"
# op -> the stage it computes; a norm, product or embedding is the stage of its module
_STAGES = {"attention": "attn_out", "rope": "q_rope", "linear": "linear", "embedding": "embedding"}

Observer = Callable[[str, Tensor], None]


@contextmanager
def applied(model: Any, call: Caller, observe: Observer | None = None) -> Iterator[None]:
    """Within the block the model computes as `lz.patch` makes it, each op through `call`.

    `observe` hears of attention's inputs and output; then every part is an op of its own, so that hooks see each.
    """
    from layerzero_models.record import Changes  # of the extra `models`
    from layerzero_models.transformers.redirect import redirected

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
    for size in (2, 1):
        found = _MODULES.get(".".join(parts[-size:]))
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

    def watch(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            observe(name, value)

    def before(name: str, module: Any, args: Any) -> None:
        watch(f"{name} swiglu_out", args[0] if args else None)

    def after(name: str, module: Any, args: Any, output: Any) -> None:
        watch(f"{name} {stage_of(name)}", output)

    handles = []
    for name, module in model.named_modules():
        stage = stage_of(name)
        if stage == "mlp_out":
            handles.append(module.register_forward_pre_hook(partial(before, name)))
        if stage:
            handles.append(module.register_forward_hook(partial(after, name)))
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

"""LayerZero's ops put into a transformers model, for the length of a block.

Attention goes in through transformers' own AttentionInterface. Norms, projections, embeddings and gated MLPs get a
`forward` on the module instances; the rotation is a function of the model's file, replaced there. All of it is undone
at the end of the block, whatever happens inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from layerzero.runtime.late_ops import LATE_OPS
from layerzero_verify.caller import Caller

__all__ = ["applied", "attention_function", "watched"]

_NAME = "layerzero_verify"
_RMS_EPS = ("variance_epsilon", "eps")

Observer = Callable[[str, Tensor], None]


@contextmanager
def applied(model: Any, call: Caller, observe: Observer | None = None) -> Iterator[None]:
    """Within the block the model computes with LayerZero's ops; `observe` hears of attention's inputs and output."""
    with ExitStack() as stack:
        stack.enter_context(_attention(model, attention_function(call), observe))
        for name, module in model.named_modules():
            forward = _replacement(name, module, call)
            if forward is not None:
                stack.enter_context(_forward(module, forward))
        for file in {type(module).__module__ for module in model.modules()}:
            if "apply_rotary_pos_emb" in vars(sys.modules[file]):
                stack.enter_context(_attribute(sys.modules[file], "apply_rotary_pos_emb", _rotary(call)))
        yield


@contextmanager
def watched(model: Any, observe: Observer) -> Iterator[None]:
    """Within the block the unmodified model runs as always; `observe` hears of attention's inputs and output."""
    with _attention(model, None, observe):
        yield


# -- attention -----------------------------------------------------------------------------------------
def attention_function(call: Caller) -> Callable[..., tuple[Tensor, None]]:
    """lz.attention in the form transformers calls."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
        options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
        if position_bias is not None:
            from layerzero_models.transformers.attending import biased  # of the extra `models`

            options["attn_mask"] = biased(position_bias, attention_mask, causal, query, key)
        elif attention_mask is not None:
            options["attn_mask"] = attention_mask
        else:
            # The new tokens are the last ones of the cache, so the triangle ends at the bottom right.
            options["is_causal"] = "bottom_right" if causal else False
            if sliding_window is not None:
                options["window"] = (sliding_window - 1, 0)
        out = call("attn_out", "attention", query, key, value, **options)
        return out.transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def _attention(model: Any, function: Callable[..., Any] | None, observe: Observer | None) -> Iterator[None]:
    """Another attention function for one model; None keeps the model's own, with an observer around it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    before = model.config._attn_implementation
    names = {id(module): name for name, module in model.named_modules()}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        inner = function or _eager(module)
        out = inner(module, query, key, value, *args, **kwargs)
        if observe is not None:
            name = names.get(id(module), "")
            observe(f"{name} q_rope", query)
            observe(f"{name} k_rope", key)
            observe(f"{name} attn_out", out[0])
        return out

    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """None where only causality and window hide anything: these the attention function says itself."""
        if function is not None and attention_mask is None:
            return None
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        kwargs["attention_mask"] = attention_mask
        found = sdpa_mask(*args, **kwargs)
        if function is None and found is not None:  # the eager function adds its mask
            found = torch.zeros_like(found, dtype=kwargs.get("dtype", torch.float32)).masked_fill(~found, -1e30)
        return found

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)


def _eager(module: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return found


# -- the other modules ---------------------------------------------------------------------------------
def _replacement(name: str, module: Any, call: Caller) -> Callable[..., Any] | None:
    kind = type(module).__name__
    if kind.endswith("RMSNorm") or kind == "T5LayerNorm":
        return _rms(name, module, call)
    if isinstance(module, nn.LayerNorm):
        return lambda x: call(f"{name} norm", "layer_norm", x, module.weight, module.bias, module.eps)
    if type(module) is nn.Linear:
        return lambda x: call(f"{name} linear", "linear", x, module.weight, module.bias)
    if kind == "Conv1D":
        return lambda x: call(f"{name} linear", "linear", x, module.weight.t(), module.bias)
    if type(module) is nn.Embedding:
        return lambda ids: call(f"{name} embedding", "embedding", ids, module.weight, module.padding_idx)
    if all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return _gated(name, module, module.gate_proj, module.up_proj, module.down_proj, module.act_fn, call)
    if all(hasattr(module, part) for part in ("wi_0", "wi_1", "wo", "act")):
        return _gated(name, module, module.wi_0, module.wi_1, module.wo, module.act, call)
    return None


def _rms(name: str, module: Any, call: Caller) -> Callable[[Tensor], Tensor] | None:
    eps = next((getattr(module, word) for word in _RMS_EPS if hasattr(module, word)), None)
    if eps is None or not hasattr(module, "weight"):
        return None
    if type(module).__name__.startswith("Gemma"):  # Gemma's weights are offsets from one
        if "gemma_rms_norm" in LATE_OPS:
            return lambda x: call(f"{name} norm", "gemma_rms_norm", x, module.weight, eps)
        return lambda x: call(f"{name} norm", "rms_norm", x, 1.0 + module.weight, eps)
    return lambda x: call(f"{name} norm", "rms_norm", x, module.weight, eps)


# transformers' word for an activation -> the gated op, its arguments
_GATED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "SiLUActivation": ("silu_and_mul", ()),
    "SiLU": ("silu_and_mul", ()),
    "GELUActivation": ("gelu_and_mul", ("none",)),
    "GELUTanh": ("gelu_and_mul", ("tanh",)),
    "PytorchGELUTanh": ("gelu_and_mul", ("tanh",)),
    "NewGELUActivation": ("gelu_and_mul", ("tanh",)),
    "ReLU": ("relu_and_mul", ()),
}


def _gated(
    name: str, module: Any, gate: Any, up: Any, down: Any, activation: Any, call: Caller
) -> Callable[[Tensor], Tensor] | None:
    found = _GATED.get(type(activation).__name__)
    if found is None:
        return None
    op, rest = found

    def forward(x: Tensor) -> Tensor:
        # The parts stay modules, so that their own replacements and hooks run.
        wide = torch.cat((gate(x), up(x)), dim=-1)
        out: Tensor = down(call(f"{name} swiglu_out", op, wide, *rest))
        return out

    return forward


def _rotary(call: Caller) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        layout = "BHSD" if unsqueeze_dim == 1 else "BSHD"
        cos, sin = (table.expand(q.shape[0], -1, -1) for table in (cos, sin))
        found: tuple[Tensor, Tensor] = call("q_rope", "rope", q, k, cos, sin, layout=layout)
        return found

    return rotate


@contextmanager
def _forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """An instance attribute hides the class's method; deleting it brings the method back."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

"""`lz.moe` in the form transformers calls: `experts_implementation="layerzero"`."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from layerzero import moe
from layerzero_models.transformers.probes import activation_of

WORD = "_layerzero_activation"  # where patched experts keep the activation's word in `lz.moe`
# experts that are not patched -> the same, "" for those that `lz.moe` does not compute
_words: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_left: set[tuple[type, str]] = set()  # what was said of those, once for a kind
_log = logging.getLogger("layerzero.transformers")


def unfit(module: Any) -> str:
    """Why `lz.moe` does not compute what these experts do; empty when it does."""
    if not getattr(module, "has_gate", False) or getattr(module, "has_bias", True):
        return "its experts have a bias, or no gate"
    if getattr(module, "is_transposed", True) or not getattr(module, "is_concatenated", True):
        return "its weights are stored transposed or interleaved"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert"
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return "it has a gate of its own"
    if activation_of(module.act_fn, module.down_proj) is None:
        return f"no op has its activation {type(module.act_fn).__name__}"
    return ""


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H] through each token's experts; those LayerZero does not compute go transformers' own way.

    That is the one it takes by default: of the others, one copies the weights of every token's experts.
    """
    word = getattr(module, WORD, None)
    if word is None:  # not patched: the implementation was chosen by name
        word = "" if torch.compiler.is_compiling() else _word(module)
    if not word:
        from transformers.integrations.moe import grouped_mm_experts_forward

        own: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return own
    return moe(hidden_states, module.gate_up_proj, module.down_proj, top_k_weights, top_k_index, activation=word)


def _word(module: Any) -> str:
    found = _words.get(module)
    if found is None:
        why = unfit(module)
        activation = None if why else activation_of(module.act_fn, module.down_proj)
        found = _words[module] = "" if activation is None else activation[2]
        if not found and (type(module), why) not in _left:
            _left.add((type(module), why))
            _log.warning("%s are left to transformers' grouped products: %s", type(module).__name__, why)
    return found

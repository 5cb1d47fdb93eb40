"""An implementation chosen through transformers' own setters, and what every configuration said before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from layerzero_models.record import Changes
from layerzero_models.transformers.enabling import NAME

__all__ = ["choose_attention", "choose_experts"]


def choose_attention(model: Any, changes: Changes) -> None:
    """`attn_implementation="layerzero"` for a model and the models in it."""
    _choose(model, changes, "_attn_implementation_internal", "set_attn_implementation", "_can_set_attn_implementation")


def choose_experts(model: Any, changes: Changes) -> None:
    """`experts_implementation="layerzero"` for a model and the models in it."""
    _choose(
        model, changes, "_experts_implementation_internal", "set_experts_implementation",
        "_can_set_experts_implementation",
    )  # fmt: skip


def _choose(model: Any, changes: Changes, attribute: str, setter: str, possible: str) -> None:
    """Set an implementation through transformers, and remember what every config of the model said before."""
    configs = {id(config): config for config in _configs(model)}
    before = {key: vars(config).get(attribute) for key, config in configs.items()}
    # Models within the model too: an encoder with a copy of the configuration is not always reached from above.
    for part in model.modules():
        if hasattr(part, setter) and vars(part.config).get(attribute) != NAME and getattr(part, possible)():
            getattr(part, setter)(NAME)
    for key, config in configs.items():
        chosen = vars(config).get(attribute)
        if chosen != before[key]:
            setattr(config, attribute, before[key])
            changes.set(config, attribute, chosen)


def _configs(model: Any) -> Iterator[Any]:
    waiting = [m.config for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "sub_configs")]
    while waiting:
        config = waiting.pop()
        yield config
        waiting += [found for name in config.sub_configs if (found := getattr(config, name, None)) is not None]

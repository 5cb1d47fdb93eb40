"""`lz.enable_transformers`: LayerZero among transformers' own choices of attention and experts; a model's choice."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from layerzero_models.record import Changes, version_of

NAME = "layerzero"
_OWN = "_layerzero_loads"  # marks our from_pretrained, which holds transformers' own


def enable_transformers(*, auto_patch: bool | None = None) -> str:
    """Register `attn_implementation="layerzero"` and `experts_implementation="layerzero"` with transformers.

        lz.enable_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="layerzero")

    Returns the version of transformers. `auto_patch=True` also makes every later `from_pretrained` patch the model it
    loads (see `lz.patch`), and `auto_patch=False` ends that; None leaves it as it is. Doing it twice changes nothing,
    and `lz.patch` does it too.
    """
    found = version_of("transformers", (5, 0))
    from transformers import AttentionInterface, AttentionMaskInterface

    from layerzero_models.transformers import batching
    from layerzero_models.transformers.attending import attend
    from layerzero_models.transformers.masking import mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    batching.install(NAME, _configs)
    _register_experts()
    if auto_patch is not None:
        _auto_patch(auto_patch)
    return found


def _register_experts() -> None:
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:  # an early 5.x
        return
    from layerzero_models.transformers.experts import experts

    ExpertsInterface.register(NAME, experts)


def _auto_patch(on: bool) -> None:
    """Put our `from_pretrained` in front of transformers' own, or take it away again."""
    import transformers

    models: Any = transformers.PreTrainedModel
    present: Any = vars(models)["from_pretrained"]
    before: Any = getattr(present.__func__, _OWN, None)
    if on == (before is not None):
        return
    if not on:
        models.from_pretrained = before
        return

    @functools.wraps(present.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from layerzero_models.transformers.patching import patch

        loaded = present.__func__(cls, *args, **kwargs)
        # With output_loading_info it is a pair.
        patch(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    setattr(from_pretrained, _OWN, present)
    models.from_pretrained = classmethod(from_pretrained)


# -- a model's own choice, through transformers' setters -------------------------------------------------
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

"""`lz.enable_transformers`: LayerZero among transformers' own choices of attention and experts."""

from __future__ import annotations

import functools
from typing import Any

from layerzero_models.record import version_of

__all__ = ["NAME", "enable_transformers"]

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

    from layerzero_models.transformers.attending import attend
    from layerzero_models.transformers.masking import mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
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

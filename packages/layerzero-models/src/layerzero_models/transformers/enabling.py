"""`lz.enable_transformers`: LayerZero among transformers' own choices of attention and experts; a model's choice."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from layerzero import moe
from layerzero_models.patching import Changes, version_of
from layerzero_models.transformers import batching
from layerzero_models.transformers.attending import attend, mask
from layerzero_models.transformers.probes import activation_of

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

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    batching.install(NAME, _configs)
    with contextlib.suppress(ImportError):  # an early 5.x has no such choice
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(NAME, experts)
    if auto_patch is not None:
        _auto_patch(auto_patch)
    return found


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


def choose(model: Any, what: str, changes: Changes) -> None:
    """Set our implementation of "attn" or "experts" through transformers' setters, for a model and the models in it."""
    attribute, setter = f"_{what}_implementation_internal", f"set_{what}_implementation"
    possible = f"_can_set_{what}_implementation"
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


# -- experts: `lz.moe` in the form transformers calls ------------------------------------------------------
OPTIONS = "_layerzero_experts"  # where patched experts keep the options of their calls of `lz.moe`
# experts that are not patched -> the same, None for those that `lz.moe` does not compute
_known: WeakKeyDictionary[Any, dict[str, Any] | None] = WeakKeyDictionary()
_left: set[tuple[type, str]] = set()  # what was said of those, once for a kind
_log = logging.getLogger("layerzero.transformers")


def options_of(module: Any) -> dict[str, Any] | str:
    """The options of `lz.moe` with which it computes what these experts do; or why it does not."""
    if not getattr(module, "has_gate", False):
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert"
    interleaved = not getattr(module, "is_concatenated", True)
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        options = _own_gate(module, interleaved)
        return "it has a gate of its own" if options is None else options
    if interleaved:  # the gate that transformers brings takes halves
        return "its weights are stored interleaved"
    found = activation_of(module.act_fn, module.down_proj)
    return f"no op has its activation {type(module.act_fn).__name__}" if found is None else {"activation": found[2]}


@torch.no_grad()
def _own_gate(module: Any, interleaved: bool) -> dict[str, Any] | None:
    """The options of a gate like that of gpt-oss; None where the module's gate gives other numbers."""
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if not isinstance(alpha, float) or not isinstance(limit, float):
        return None
    gate = torch.linspace(-3 * limit, 3 * limit, 257, device=module.down_proj.device)
    up = gate.roll(100)
    got = module._apply_gate(torch.stack((gate, up), dim=-1 if interleaved else 0).flatten())
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    want = gate * torch.sigmoid(alpha * gate) * (up + 1)
    if got.shape != want.shape or not bool(((got - want).abs() <= 1e-5 * want.abs().clamp_min(1.0)).all()):
        return None
    return {"activation": "swigluoai", "alpha": alpha, "limit": limit, "interleaved": interleaved}


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H] through each token's experts; those LayerZero does not compute go transformers' own way.

    That is the one it takes by default: of the others, one copies the weights of every token's experts.
    """
    options = getattr(module, OPTIONS, None)
    if options is None and not torch.compiler.is_compiling():  # not patched: the implementation was chosen by name
        options = _found(module)
    if options is None:
        from transformers.integrations.moe import grouped_mm_experts_forward

        own: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return own
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if module.has_bias:
        options = {**options, "gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
    return moe(hidden_states, gate_up, down, top_k_weights, top_k_index, **options)


def _found(module: Any) -> dict[str, Any] | None:
    if module not in _known:
        options = options_of(module)
        _known[module] = None if isinstance(options, str) else options
        if isinstance(options, str) and (type(module), options) not in _left:
            _left.add((type(module), options))
            _log.warning("%s are left to transformers' grouped products: %s", type(module).__name__, options)
    return _known[module]

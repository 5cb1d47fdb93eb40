"""`lz.patch`, `lz.unpatch`, `lz.patched`: LayerZero inside a model of another library, and out again."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch

from layerzero.dispatch.beside import import_adapters
from layerzero.errors import InvalidInputError
from layerzero_models.record import PatchReport

# Top-level package of a model's class (or of a class it derives from) -> the module that knows its models, loaded by
# name at first use. Such a module has three functions: `patch(model, **options)`, `unpatch(model)` and
# `patched(model)`, the last two returning a PatchReport or None.
PATCHERS: dict[str, str] = {
    "diffusers": "layerzero_models.diffusers",
    "transformers": "layerzero_models.transformers",
}

Model = TypeVar("Model")


def patch(model: Model, **options: Any) -> Model:
    """Let a model compute with LayerZero's ops, in place, and return it; `lz.patched(model)` says what changed.

        model = lz.patch(AutoModelForCausalLM.from_pretrained(name))
        pipe = lz.patch(StableDiffusionPipeline.from_pretrained(name))

    Takes models of transformers and diffusers, and whole pipelines of diffusers. Weights stay what and where they are,
    and `lz.unpatch` restores the very same objects. Patching twice changes nothing. The libraries of a GPU's kernels
    that may be compiled while the model serves are imported here, where nobody waits for a token.
    """
    patcher_of(model).patch(model, **options)
    where = getattr(model, "device", None)
    if isinstance(where, torch.device) and where.type == "cuda":
        import_adapters(where)
    return model


def unpatch(model: Model) -> Model:
    """Undo `lz.patch`, exactly, and return the model. A model that was never patched stays as it is."""
    patcher_of(model).unpatch(model)
    return model


def patched(model: Any) -> PatchReport | None:
    """What `lz.patch` did to a model: parts patched, parts left alone and why. None for one that is not patched."""
    found: PatchReport | None = patcher_of(model).patched(model)
    return found


def patcher_of(model: Any) -> Any:
    """The module that patches models of this kind; an error that names the libraries known otherwise."""
    for kind in type(model).__mro__:
        name = PATCHERS.get(kind.__module__.partition(".")[0])
        if name is not None:
            return importlib.import_module(name)
    raise InvalidInputError(
        f"{type(model).__module__}.{type(model).__name__} is not a model lz.patch knows",
        code="TYPE_INVALID",
        value=type(model).__name__,
        limit=f"a model of {' or '.join(sorted(PATCHERS))}",
        hint="call lz.attention, lz.rms_norm, … in the model's own code, or patch the parts of it that are such models",
    )

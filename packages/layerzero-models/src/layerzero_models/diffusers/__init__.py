"""LayerZero in diffusers: what `lz.patch` does to its models and pipelines.

Attention goes in by the library's own doors: a processor where a layer takes one, a backend of its dispatcher where the
processor asks that. RMSNorm and LayerNorm get a `forward` on the module instance. Nothing is replaced in the library
itself, so other models stay as they are, and `unpatch` puts back the very same objects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from layerzero.errors import InvalidInputError, invalid
from layerzero_models import patching
from layerzero_models.diffusers import walk
from layerzero_models.patching import Left, Patched, PatchReport, Record

__all__ = ["patch", "patched", "unpatch", "version"]


def version() -> str:
    """The version of diffusers here; an error where there is none, or one older than the dispatcher we enter by."""
    return patching.version_of("diffusers", (0, 36))


def patch(
    model: Any, *, attention: bool = True, norms: bool = True, feed_forward: bool = False, text_encoders: bool = True
) -> None:
    """Patch a model, or each model of a pipeline.

    attention      UNet and VAE attention, DiT and joint attention
    norms          RMSNorm and LayerNorm
    feed_forward   GEGLU and SwiGLU blocks through `lz.mlp`: two products instead of one, so ask for it where it pays
    text_encoders  in a pipeline, its models of other libraries too (transformers)
    """
    step = functools.partial(walk.apply, attention=attention, norms=norms, feed_forward=feed_forward)
    release = version()
    if isinstance(model, nn.Module):
        if patched(model) is None:
            patching.apply(model, Record(), "diffusers", release, step)
        return
    done: list[tuple[Any, Any]] = []
    try:
        for _, part, patcher in _components(model):
            if patcher.patched(part) is not None:
                continue
            if patcher.__name__ == __name__:
                patching.apply(part, Record(), "diffusers", release, step)
            elif text_encoders:
                patcher.patch(part)
            done.append((patcher, part))
    except BaseException:  # all of a pipeline or nothing
        for patcher, part in reversed(done):
            patcher.unpatch(part)
        raise


def unpatch(model: Any) -> None:
    """Put back what `patch` replaced, in a model or in each model of a pipeline."""
    if isinstance(model, nn.Module):
        patching.restore(model)
        return
    for _, part, patcher in _components(model):
        patcher.unpatch(part)


def patched(model: Any) -> PatchReport | None:
    """What was patched in a model, or in all models of a pipeline together; None where nothing is."""
    if isinstance(model, nn.Module):
        return patching.report_of(model)
    parts: list[Patched] = []
    left: list[Left] = []
    sizes: frozenset[int] = frozenset()
    found = False
    for name, part, patcher in _components(model):
        report = patcher.patched(part)
        if report is None:
            left.append(Left(name, type(part).__name__, "not patched"))
            continue
        found, sizes = True, sizes | report.sizes
        # "" is the component itself
        parts += [replace(item, name=f"{name}.{item.name}".removesuffix(".")) for item in report.patched]
        left += [replace(item, name=f"{name}.{item.name}".removesuffix(".")) for item in report.left]
    told = PatchReport("diffusers", version(), type(model).__name__, tuple(parts), tuple(left), sizes=sizes)
    return told if found else None


def _components(pipeline: Any) -> Iterator[tuple[str, Any, Any]]:
    """The models of a pipeline by name, each with the module that patches it; one that stands twice comes once."""
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        message = f"{type(pipeline).__name__} is neither a model nor a pipeline"
        raise invalid("TYPE_INVALID", type(pipeline).__name__, "a diffusers model or pipeline", message)
    seen: set[int] = set()
    for name, part in components.items():
        if not isinstance(part, nn.Module) or id(part) in seen:
            continue
        seen.add(id(part))
        try:
            patcher = patching.patcher_of(part)
        except InvalidInputError:  # a model of a library without a patcher: left alone
            continue
        yield name, part, patcher

"""A definition's own code: compiled only from a trusted file, run without gradients, its result brought into order."""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerzero.errors import ConfigurationError, LayerZeroError
from layerzero_verify.definitions.schema import Definition, load_definition, torch_dtype
from layerzero_verify.definitions.trust import Trust

__all__ = ["CompileError", "NotTrustedError", "compile_reference", "in_order"]


class NotTrustedError(LayerZeroError):
    """The code of this definition may not run; says why and how to allow it."""

    default_code = "PATH_NOT_TRUSTED"


class CompileError(ConfigurationError):
    """The code of a trusted definition does not compile, or raises before `run` can be called."""

    default_code = "SCHEMA_INVALID"


def compile_reference(definition: Definition, trust: Trust) -> Callable[..., Any]:
    """The function `run` of the definition's code, with torch, math and np in its scope.

    The file is read again, from the very place that was found to be trusted: what was parsed earlier may have come
    through a link that pointed elsewhere at the time.
    """
    refused = trust.refusal(definition.source)
    if refused is not None:
        raise NotTrustedError(f"the code of {definition.name} is not run: {refused.message}", reasons=(refused,))
    assert definition.source is not None
    again = load_definition(definition.source.resolve(strict=True))
    if again.reference != definition.reference:
        raise NotTrustedError(
            f"the code of {definition.name} is not run: its file has changed since it was read",
            value=str(definition.source),
            limit="the text that was read",
        )
    return _compiled(again)


def _compiled(definition: Definition) -> Callable[..., Any]:
    text = definition.reference
    # A name for tracebacks; the source is registered under it, so they show the lines.
    name = f"<definition {definition.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": f"layerzero_definition_{definition.name}", "torch": torch, "math": math}
    try:
        import numpy

        scope["np"] = scope["numpy"] = numpy
    except ImportError:  # a reference that needs it says so when it runs
        pass
    try:
        exec(compile(text, name, "exec"), scope)
        found = scope["run"]
    except Exception as error:
        raise CompileError(
            f"the code of {definition.name} does not compile: {type(error).__name__}: {error}",
            value=definition.name,
        ) from error
    return found  # type: ignore[no-any-return]


def in_order(definition: Definition, result: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """A result as tensors by output name: from a tensor, a number, a tuple or list in order, or a dict."""
    names = tuple(definition.outputs)
    if isinstance(result, Mapping):
        missing = [name for name in names if name not in result]
        if missing:
            raise TypeError(f"the result has no {missing[0]!r}; it has {', '.join(map(str, result))}")
        items = [result[name] for name in names]
    elif isinstance(result, (tuple, list)):
        items = list(result)
    else:
        items = [result]
    if len(items) != len(names):
        raise TypeError(f"{len(items)} results, expected {len(names)}: {', '.join(names)}")
    return {name: _tensor(definition, name, item, device) for name, item in zip(names, items, strict=True)}


def _tensor(definition: Definition, name: str, item: Any, device: torch.device) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return item.detach().to(device)
    if isinstance(item, (bool, int, float)):
        return torch.tensor(item, dtype=torch_dtype(definition.outputs[name].dtype), device=device)
    raise TypeError(f"{name} is {type(item).__name__}, expected a tensor or a number")

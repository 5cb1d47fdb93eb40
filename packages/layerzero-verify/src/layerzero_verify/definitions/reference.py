"""A definition's own code: compiled only from a trusted file, run without gradients, its result brought into order.

Trusted are folders and files that somebody named on purpose, and no others. The names come from the caller (`--trust
PATH`) or from the user's environment (LAYERZERO_TRUSTED_DEFINITIONS); nothing found in the working directory or in the
dataset adds to them. A link or a `..` that leads out of a trusted folder leads out of trust, and so does a file that
anybody on the machine may rewrite.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layerzero.env import read
from layerzero.errors import ConfigurationError, LayerZeroError
from layerzero.reasons import Reason, reason
from layerzero_verify.definitions.schema import Definition, load_definition, torch_dtype


class NotTrustedError(LayerZeroError, code="PATH_NOT_TRUSTED"):
    """The code of this definition may not run; says why and how to allow it."""


class CompileError(ConfigurationError, code="SCHEMA_INVALID"):
    """The code of a trusted definition does not compile, or raises before `run` can be called."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The trusted paths, resolved. An empty one trusts nothing."""

    paths: tuple[Path, ...] = ()

    @staticmethod
    def of(paths: Iterable[str | Path] = (), environ: Mapping[str, str] | None = None) -> Trust:
        """What the caller names, and what the environment names. A path that does not exist is refused."""
        named = [*map(Path, paths), *map(Path, read(environ).trusted_definitions)]
        found = []
        for path in named:
            try:
                found.append(path.expanduser().resolve(strict=True))
            except (OSError, RuntimeError):
                raise ConfigurationError(
                    f"the trusted path {path} does not exist", code="CONFIG_FILE_MISSING", value=str(path)
                ) from None
        return Trust(tuple(dict.fromkeys(found)))

    def refusal(self, path: Path | None) -> Reason | None:
        """Why the code in this file may not run; None when it may."""
        limit = ", ".join(map(str, self.paths)) or "none named"
        if path is None:
            return reason("PATH_NOT_TRUSTED", "a definition that is not in a file", limit)
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return reason("CONFIG_FILE_MISSING", str(path))
        root = next((root for root in self.paths if real == root or root in real.parents), None)
        if root is None:
            detail = f"it leads to {real}" if Path(os.path.abspath(path)) != real else ""
            return reason("PATH_NOT_TRUSTED", str(path), limit, detail=detail)
        # Whoever may write to the file, or to a folder up to the trusted one, chooses the code.
        chain = [real, *(parent for parent in real.parents if parent == root or root in parent.parents)]
        loose = next((place for place in chain if os.name == "posix" and place.stat().st_mode & stat.S_IWOTH), None)
        if loose is not None:
            return reason("PATH_NOT_TRUSTED", str(path), limit, detail=f"anybody may write to {loose}: chmod o-w it")
        return None


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

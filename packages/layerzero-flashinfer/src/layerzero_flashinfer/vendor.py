"""FlashInfer itself: imported here and nowhere else, with its compile cache named before the import.

FlashInfer reads FLASHINFER_WORKSPACE_BASE when it is imported and keeps every kernel it compiles below it. A user who
has set it keeps it; otherwise compiled kernels go below LayerZero's own cache, which only its owner may write to: what
lies there is loaded as code.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from layerzero.errors import BackendNotAvailableError
from layerzero.reasons import reason

_BASE = "FLASHINFER_WORKSPACE_BASE"
_OURS = "LAYERZERO_JIT_CACHE_DIR"


@functools.cache
def lib() -> Any:
    """The module `flashinfer`; a cache folder that cannot be trusted is one clear error."""
    prepare(os.environ)
    return importlib.import_module("flashinfer")


def part(name: str) -> Any:
    """A module of FlashInfer's, which may also be the name of a function in `flashinfer`."""
    lib()
    return importlib.import_module(f"flashinfer.{name}")


def cache_base(env: MutableMapping[str, str]) -> Path:
    """The folder below which compiled kernels are kept, when the user names none for FlashInfer itself."""
    if env.get(_OURS):
        return Path(env[_OURS]) / "flashinfer"
    root = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "layerzero" / "jit" / "flashinfer"


def prepare(env: MutableMapping[str, str]) -> Path:
    """Name the cache folder in `env`, made with 0700; a folder of others is refused. Done before the import."""
    if env.get(_BASE):
        return Path(env[_BASE])
    base = cache_base(env)
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(base)
    env[_BASE] = str(base)
    return base


def _check_owner(folder: Path) -> None:
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
        why, fix = "is a link or belongs to another user", f"rm {folder}"
    elif mode & 0o022:
        why, fix = f"may be written to by others ({mode:o})", f"chmod 700 {folder}"
    else:
        return
    found_why = reason("VENDOR_REFUSED", f"the compile cache {folder} {why}; {fix}, or set {_OURS}")
    raise BackendNotAvailableError(found_why.message, reasons=(found_why,))


def starts_with(function: Any, names: tuple[str, ...]) -> bool:
    """Whether the first parameters of a function bear these names: how an inner call is told apart from a newer one."""
    try:
        return tuple(inspect.signature(function).parameters)[: len(names)] == names
    except (TypeError, ValueError):
        return False

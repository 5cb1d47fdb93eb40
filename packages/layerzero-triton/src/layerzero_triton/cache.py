"""Where compiled kernels are kept: Triton's own cache, in a folder that only its owner may touch.

Compiled kernels are code. A folder that somebody else may write to is not used; Triton then keeps its own default.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_lock = threading.RLock()


def folder() -> Path | None:
    """Our part of LayerZero's folder of compiled kernels, made with 0700; None when Triton's own setting stands.

    `LAYERZERO_JIT_CACHE_DIR` says where that folder is. A `TRITON_CACHE_DIR` is left alone: the user has set it, or
    LayerZero has, when it bound the first kernel that is compiled.
    """
    from layerzero.plugin.artifacts import cache_folder

    if os.environ.get("TRITON_CACHE_DIR"):
        return None
    whole = private_folder(cache_folder())
    return None if whole is None else private_folder(whole / "triton")


def private_folder(path: Path) -> Path | None:
    """The folder, made if need be; None when it cannot be made, or when others own it or may write into it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
        if os.name == "posix":
            if state.st_uid != os.getuid() or state.st_mode & 0o022:
                return None  # somebody else may have put code there
            if state.st_mode & 0o077:
                path.chmod(0o700)
    except OSError:
        return None
    return path


@contextlib.contextmanager
def scoped() -> Iterator[Path | None]:
    """Inside the block Triton compiles into `folder()`. Triton's setting is global, so one thread at a time."""
    import triton

    with _lock:
        place = folder()
        if place is None:
            yield None
            return
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(place)
            yield place

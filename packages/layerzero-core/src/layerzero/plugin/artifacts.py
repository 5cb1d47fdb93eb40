"""The folder of compiled kernels, and whether it may be trusted. Compiled kernels are code: ours alone, mode 0700."""

from __future__ import annotations

import stat
from pathlib import Path

from layerzero import env
from layerzero.errors import ConfigurationError
from layerzero.files import ours_alone, user_cache
from layerzero.reasons import Reason, reason

OWN = "artifacts"  # what backends compile themselves, beside the folders of Triton and the other libraries


def cache_folder(settings: env.Env | None = None) -> Path:
    """The folder of compiled kernels: LAYERZERO_JIT_CACHE_DIR, else one in the user's cache."""
    given = (settings or env.read()).jit_cache_dir
    return user_cache("jit") if given is None else Path(given)


def distrust(folder: Path) -> Reason | None:
    """Why a folder may not be loaded from: it belongs to someone else, or others may write to it."""
    try:
        mode = folder.stat()
    except OSError:
        return None
    if ours_alone(mode):
        return None
    shown = f"{folder} with mode {stat.S_IMODE(mode.st_mode):04o}"
    return reason("CONFIG_INVALID", shown, "your own folder, mode 0700")


def artifact_folder() -> Path:
    """Where a backend keeps what it compiles itself; begin file names with the backend's own.

    Raises ConfigurationError when the folder is not ours alone: code is not loaded from such a place.
    """
    root = cache_folder()
    (root / OWN).mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in (root, root / OWN):
        if (why := distrust(folder)) is not None:
            raise ConfigurationError(reasons=(why,), hint=f"chown it to yourself and chmod 700 {folder}")
    return root / OWN

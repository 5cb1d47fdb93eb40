"""Where compiled kernels are kept: one folder, ours alone, for every library that compiles at run time.

Compiled kernels are code. The folder is made with 0700, and one that others may write to is not used. Triton,
TorchInductor, FlashInfer, FlashAttention 4 and QuACK are pointed into it before they are imported, unless the user has
pointed them elsewhere.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path

from layerzero import files
from layerzero.plugin.artifacts import OWN, cache_folder, distrust
from layerzero.reasons import reason

_log = logging.getLogger("layerzero.jit")

# variable of a library -> our folder for it
VENDOR_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
# The same for libraries that keep all kernels of a version in one folder inside: a new kernel is no new name there.
DEEP_FOLDERS = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
    "QUACK_CACHE_DIR": "quack",
}
# What makes a library keep compiled kernels at all: without it FlashAttention 4 compiles for seconds in every process.
_SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
EVIDENCE = 8  # names kept per artifact
# Locks and files on their way to their real name.
_PASSING = re.compile(r"(^|[._-])te?mp|\.lock$|^[0-9a-f]{32}\b")
_distrusted: set[Path] = set()


def prepare() -> Path | None:
    """Make the folder and point the libraries into it; None, said once, when it is not ours alone or cannot be made."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        why = distrust(folder)
    except OSError as error:
        why = reason("CONFIG_INVALID", f"{folder}: {error}", "a folder that can be written")
    if why is not None:
        if folder not in _distrusted:
            _distrusted.add(folder)
            _log.warning("compiled kernels are not kept: %s", why)
        return None
    for variable, name in {**VENDOR_FOLDERS, **DEEP_FOLDERS}.items():
        if not os.environ.get(variable):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
            os.environ[variable] = str(folder / name)
    for variable, word in _SWITCHES.items():
        os.environ.setdefault(variable, word)
    (folder / OWN).mkdir(mode=0o700, exist_ok=True)
    return folder


def variables() -> dict[str, str]:
    """The variables that say where libraries keep what they compile, as they are set now."""
    names = ("LAYERZERO_JIT_CACHE_DIR", *VENDOR_FOLDERS, *DEEP_FOLDERS, *_SWITCHES)
    return {name: value for name in names if (value := os.environ.get(name))}


def places() -> dict[str, Path]:
    """Our name of each folder of compiled kernels, and where it is."""
    folder = cache_folder()
    both = {**VENDOR_FOLDERS, **DEEP_FOLDERS}
    found = {name: Path(os.environ.get(variable) or folder / name) for variable, name in both.items()}
    return {**found, OWN: folder / OWN}


def is_passing(name: str) -> bool:
    """Whether a name is a lock's, or of a file on its way to its real name."""
    return _PASSING.search(name) is not None


def snapshot() -> frozenset[str]:
    """Names directly inside the caches, to tell afterwards what a compile has left behind."""
    found: set[str] = set()
    given = [Path(value) for name in VENDOR_FOLDERS if (value := os.environ.get(name))]
    for folder in (*given, cache_folder() / OWN):
        try:
            found.update(entry.path for entry in os.scandir(folder))
        except OSError:
            continue
    return frozenset(found)


def new_entries(before: frozenset[str]) -> tuple[str, ...]:
    """What appeared since a snapshot, without passing names: the evidence that an artifact is still on disk.

    What other processes compile meanwhile may be among it; its loss then costs a compile beside the requests.
    """
    found = sorted(path for path in snapshot() - before if not is_passing(os.path.basename(path)))
    return tuple(found[:EVIDENCE])


def locked(folder: Path, name: str, timeout_s: float) -> AbstractContextManager[bool]:
    """Two processes that need one artifact compile it once: the second finds it in the library's cache."""
    (folder / "locks").mkdir(mode=0o700, exist_ok=True)
    return files.locked(folder / "locks" / f"{name}.lock", timeout_s=timeout_s)

"""An import hook for the folders of loaded kernels: sources only, each compared with the lock as it is read.

The store was verified a moment ago; this closes the gap between then and the import, and covers modules that a kernel
imports later. It also keeps Python from leaving `__pycache__` in the store.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from layerzero_hub.errors import refuse
from layerzero_hub.lockfile import LockedVariant

__all__ = ["guard"]

_guarded: dict[str, Mapping[str, str]] = {}


class VerifiedSource(importlib.machinery.SourceFileLoader):
    """Loads a source file whose bytes have the locked hash; no compiled file is read or written."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile from source, always."""
        path = self.get_filename(fullname)
        data = self.get_data(path)
        expected = _expected(path)
        if hashlib.sha256(data).hexdigest() != expected:
            raise refuse("HUB_STORE_TAMPERED", os.path.basename(path), "another hash")
        code: CodeType = self.source_to_code(data, path)
        return code


class VerifiedExtension(importlib.machinery.ExtensionFileLoader):
    """Loads a shared object whose bytes had the locked hash when it was opened."""

    def create_module(self, spec: Any) -> Any:
        """Hash, then let the system load it."""
        with open(self.path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != _expected(self.path):
            raise refuse("HUB_STORE_TAMPERED", os.path.basename(self.path), "another hash")
        return super().create_module(spec)


def guard(folder: Path, variant: LockedVariant) -> None:
    """From now on, imports below `folder` go through the verified loaders."""
    root = os.fspath(folder)
    _guarded[root] = {os.path.join(root, path): item.sha256 for path, item in variant.files.items()}
    if _hook not in sys.path_hooks:
        sys.path_hooks.insert(0, _hook)
    for known in list(sys.path_importer_cache):
        if known == root or known.startswith(root + os.sep):
            del sys.path_importer_cache[known]


def _hook(path: str) -> importlib.machinery.FileFinder:
    if not any(path == root or path.startswith(root + os.sep) for root in _guarded):
        raise ImportError("not a folder of a hub kernel")
    return importlib.machinery.FileFinder(
        path,
        (VerifiedExtension, importlib.machinery.EXTENSION_SUFFIXES),
        (VerifiedSource, importlib.machinery.SOURCE_SUFFIXES),
    )


def _expected(path: str) -> str:
    for root, files in _guarded.items():
        if path.startswith(root + os.sep):
            found = files.get(path)
            if found is not None:
                return found
    raise refuse("HUB_STORE_EXTRA_FILE", os.path.basename(path))

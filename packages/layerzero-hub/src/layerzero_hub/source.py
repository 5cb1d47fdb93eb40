"""Imports of hub kernels from verified bytes: sources from memory, shared objects from sealed descriptors.

A folder of the store is known to Python by its path, so that tracebacks and data files are found; but modules below it
come from what was verified, whatever lies there by now: no directory is listed, no source and no binary opened again,
no bytecode read or written.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import Any

from layerzero_hub.contents import Contents
from layerzero_hub.errors import refuse

Inner = Callable[[str, int | None], ModuleType]
"""What a kernel gets that asks `kernels` for another one by itself: repository, version → module, or HubError."""

_builds: dict[str, Contents] = {}
_inner: dict[str, Inner] = {}
_open_library = ctypes._dlopen  # type: ignore[attr-defined]


def import_build(contents: Contents, needed: Mapping[str, ModuleType], inner: Inner) -> ModuleType:
    """The module of a verified build, begun as `kernels` would; its code gets other kernels from `inner` alone."""
    from kernels import importer
    from kernels._rust import Metadata
    from kernels.deps import use_kernel_deps

    metadata = Metadata.from_bytes(contents.files["metadata.json"])
    if metadata.id != contents.variant.id:
        raise refuse("HUB_METADATA_INVALID", contents.variant.id, f"it calls itself {metadata.id}")
    for start in ("__init__.py", f"{metadata.name.python_name}/__init__.py"):
        if start in contents.files:
            break
    else:
        raise refuse("HUB_METADATA_INVALID", contents.variant.id, "there is no __init__.py")
    prepare()
    _guard(contents)
    _inner[contents.variant.digest] = inner
    spec = _package(metadata.id, os.path.join(contents.folder, start))
    module = importlib.util.module_from_spec(spec)
    sys.modules[metadata.id] = module
    assert spec.loader is not None
    try:
        with use_kernel_deps(dict(needed)):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(metadata.id, None)
        raise
    importer._loaded_kernels[contents.folder] = importer.LoadedKernel(metadata, module, None)
    return module


def id_of(module: object) -> str | None:
    """The id of the hub kernel a module belongs to; None for any other."""
    loader = getattr(module, "__loader__", None)
    if isinstance(loader, VerifiedSource | VerifiedExtension):
        return _build_of(loader.path)[0].variant.id
    return None


class VerifiedSource(importlib.machinery.SourceFileLoader):
    """Compiles the bytes that were verified; no compiled file is read or written."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile from source, always."""
        path = self.get_filename(fullname)
        data = self.get_data(path)
        # For tracebacks, and for compilers that read source (Triton, TorchScript): the same text, not the file's.
        text = importlib.util.decode_source(data)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        code: CodeType = self.source_to_code(data, path)
        return code

    def get_data(self, path: str) -> bytes:
        """The verified bytes; data files are hashed as they are read."""
        build, inside = _build_of(path)
        if inside in build.files:
            return build.files[inside]
        locked = build.variant.files.get(inside)
        if locked is None:
            raise FileNotFoundError(path)
        with open(path, "rb") as file:
            data = file.read(locked.size + 1)
        if hashlib.sha256(data).hexdigest() != locked.sha256:
            raise refuse("HUB_STORE_TAMPERED", inside, "another hash")
        return data


class VerifiedExtension(importlib.machinery.ExtensionFileLoader):
    """Lets the system load a sealed copy of the verified bytes."""

    def create_module(self, spec: Any) -> Any:
        """The module of the shared object."""
        sealed = importlib.machinery.ModuleSpec(spec.name, self, origin=_sealed(self.path))
        module = super().create_module(sealed)
        module.__file__ = self.path
        return module


class _Finder:
    """Finds the modules of one folder of a build in the list of its files."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not any(path == root or path.startswith(root + os.sep) for root in _builds):
            raise ImportError("not a folder of a hub kernel")

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """Package, extension or source of that name, in Python's own order."""
        place = os.path.join(self.path, fullname.rpartition(".")[2])
        build, inside = _build_of(place)
        if f"{inside}/__init__.py" in build.files:
            return _package(fullname, os.path.join(place, "__init__.py"))
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            if inside + suffix in build.objects:
                loader = VerifiedExtension(fullname, place + suffix)
                return importlib.util.spec_from_file_location(fullname, place + suffix, loader=loader)
        if f"{inside}.py" in build.files:
            path = f"{place}.py"
            return importlib.util.spec_from_file_location(fullname, path, loader=VerifiedSource(fullname, path))
        if any(path.startswith(f"{inside}/") for path in build.variant.files):
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [place]
            return spec
        return None

    def invalidate_caches(self) -> None:
        """Nothing is cached: the list of files does not change."""


def _package(fullname: str, path: str) -> importlib.machinery.ModuleSpec:
    loader = VerifiedSource(fullname, path)
    found = importlib.util.spec_from_file_location(
        fullname, path, loader=loader, submodule_search_locations=[os.path.dirname(path)]
    )
    assert found is not None
    return found


def _guard(contents: Contents) -> None:
    """From now on, what is imported or opened as a library below the folder comes from these contents."""
    for root in {os.fspath(contents.folder), os.path.realpath(contents.folder)}:
        _builds[root] = contents
        for known in list(sys.path_importer_cache):
            if known == root or known.startswith(root + os.sep):
                del sys.path_importer_cache[known]


def prepare() -> None:
    """Put the hooks in place; once, and before anything is compared."""
    if _Finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _Finder)
        # `torch.ops.load_library` and ctypes.CDLL come through here with a path of the store.
        ctypes._dlopen = _dlopen  # type: ignore[attr-defined]
        from kernels import load

        global _get_kernel
        _get_kernel, load.get_kernel_with_resolver = load.get_kernel_with_resolver, _get_kernel_for


def _get_kernel(**_: Any) -> ModuleType:
    raise RuntimeError("no hub kernel was imported yet")


def _get_kernel_for(**asked: Any) -> ModuleType:
    """In the place of the function through which `kernels` loads: hub kernels get what `inner` gives them."""
    frame = sys._getframe(1)
    while frame is not None:
        loader = frame.f_globals.get("__loader__")
        if isinstance(loader, VerifiedSource):
            build, _ = _build_of(loader.path)
            version = getattr(asked["kernel"].version, "version", None)
            return _inner[build.variant.digest](asked["kernel"].repo_id, version)
        frame = frame.f_back  # type: ignore[assignment]
    return _get_kernel(**asked)


def _dlopen(name: Any, *arguments: Any) -> Any:
    if isinstance(name, (str, os.PathLike)):
        path = os.path.normpath(os.fspath(name))
        if any(path.startswith(root + os.sep) for root in _builds):
            name = _sealed(path)
    return _open_library(name, *arguments)


def _sealed(path: str) -> str:
    """The name under which the system finds the sealed copy of a shared object."""
    build, inside = _build_of(path)
    if inside not in build.objects:
        raise refuse("HUB_STORE_EXTRA_FILE", inside)
    return f"/proc/self/fd/{build.objects[inside]}"


def _build_of(path: str) -> tuple[Contents, str]:
    for root, build in _builds.items():
        if path.startswith(root + os.sep):
            return build, path.removeprefix(root + os.sep)
    raise refuse("HUB_STORE_EXTRA_FILE", os.path.basename(path))

"""Imports of hub kernels from verified bytes: sources from memory, shared objects from sealed descriptors.

A folder of the store is known to Python by its path, so that tracebacks and data files are found; but modules below it
come from what was verified, whatever lies there by now: no directory is listed, no source and no binary opened again,
no bytecode read or written.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, ModuleType
from typing import Any, Final

from layerzero_hub.contents import Contents, read_file
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
        if inside not in build.variant.files:
            raise FileNotFoundError(path)
        return read_file(build.folder, inside, build.variant)


class VerifiedExtension(importlib.machinery.ExtensionFileLoader):
    """Lets the system load a sealed copy of the verified bytes."""

    def create_module(self, spec: Any) -> Any:
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


# -- what sources import from elsewhere -----------------------------------------------------------------------------
# `import torch._dynamo`, `torch.distributed.tensor` or Triton register ops of their own. Imported before the kernel,
# they are part of what was there; what changes afterwards, the kernel did. Below, attributes of torch that import on
# first use.
_LAZY: Final = {
    "compile": "torch._inductor.compile_fx",
    "_dynamo": "torch._dynamo",
    "_inductor": "torch._inductor",
    "_export": "torch._export",
    "export": "torch.export",
    "onnx": "torch.onnx",
}


def import_for(builds: Iterable[Contents]) -> None:
    """Import the installed modules that the sources import when they are imported. What fails is left to the kernel."""
    wanted: set[str] = set()
    for contents in builds:
        found: set[str] = set()
        for path, data in contents.files.items():
            if path.endswith(".py"):
                with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                    _visit(ast.parse(data), found)
        wanted |= {name for name in found if name.partition(".")[0] != contents.variant.id}
    import_all(sorted(wanted))


def import_all(names: Iterable[str]) -> bool:
    """Import these installed modules, as far as that goes; whether anything new came."""
    before = len(sys.modules)
    for name in names:
        if name not in sys.modules and name.partition(".")[0] not in sys.stdlib_module_names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compile(lambda: None)  # its first use replaces functions of torch
    return len(sys.modules) > before


def _visit(node: ast.AST, found: set[str]) -> None:
    """What runs when a module is imported: not the bodies of functions."""
    if isinstance(node, ast.Import):
        found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        found.add(node.module)
        if node.module == "torch":
            found.update(_LAZY[alias.name] for alias in node.names if alias.name in _LAZY)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        if node.attr in _LAZY:
            found.add(_LAZY[node.attr])
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inner = [*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one)]
    elif isinstance(node, ast.Lambda):
        inner = []
    for one in inner:
        _visit(one, found)

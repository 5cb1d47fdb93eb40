"""Pretend that a vendor library is installed, or is not, so that a backend's honest status can be tested anywhere."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import importlib_metadata

from layerzero.plugin.discovery import dist_version, normalized


@dataclass(frozen=True)
class _Dist:
    """As much of a distribution as discovery reads."""

    version: str

    def read_text(self, name: str) -> str:
        return f"Metadata-Version: 2.1\nVersion: {self.version}\n"


class _Imports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives empty modules, or raises, for the named modules and what lies below them; keeps a list of who asked."""

    def __init__(self, modules: Mapping[str, BaseException | None]) -> None:
        self.modules = modules
        self.tried: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = next((name for name in self.modules if f"{fullname}.".startswith(f"{name}.")), None)
        parent = any(name.startswith(f"{fullname}.") for name in self.modules)
        if root is None and not parent:
            return None
        self.tried.append(fullname)
        error = self.modules[root] if root is not None else None
        if error is not None:
            raise error
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing inside."""


@contextmanager
def pretend(
    dists: Mapping[str, str | None], modules: Mapping[str, BaseException | None] | None = None
) -> Iterator[list[str]]:
    """Within the block these distributions have these versions (None: are not installed), whatever is true here.

    `modules` replaces what an import gives: None an empty module, an exception is raised. Yields the list of those
    of them that were imported.
    """
    wanted = {normalized(name): version for name, version in dists.items()}
    real = importlib_metadata.distributions

    def distributions(**asked: Any) -> Any:
        name = normalized(asked.get("name") or "")
        if name not in wanted:
            return real(**asked)
        version = wanted[name]
        return iter(() if version is None else (_Dist(version),))

    def distribution(name: str) -> Any:
        found = next(iter(distributions(name=name)), None)
        if found is None:
            raise importlib_metadata.PackageNotFoundError(name)
        return found

    finder = _Imports(modules or {})
    hidden = {name: found for name, found in sys.modules.items() if _ours(name, finder)}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    dist_version.cache_clear()
    try:
        with mock.patch.multiple(importlib_metadata, distribution=distribution, distributions=distributions):
            yield finder.tried
    finally:
        dist_version.cache_clear()
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _ours(name, finder)]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _ours(name: str, finder: _Imports) -> bool:
    return any(f"{name}.".startswith(f"{root.partition('.')[0]}.") for root in finder.modules)

"""The conformance kit of layerzero-verify, under the name that plugins have used since the core held it.

`layerzero.testing.kit` is the module `layerzero_verify.testing.kit` itself, and so for every other module of the kit:
`from layerzero.testing.suite import *`, `-p layerzero.testing.pytest_plugin`, `python -m layerzero.testing.proofs`.
Where layerzero-verify is not installed, the import says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from layerzero.companions import part

__path__: list[str] = []  # makes this module a package, whose modules are looked for by the finder below

_KIT: ModuleType = part(__name__)


def _real(name: str) -> str:
    return _KIT.__name__ + name.removeprefix(__name__)


class _Aliases(MetaPathFinder, Loader):
    """Finds a module of the kit under its name here, and gives back the kit's own: there is only one of each."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        real = find_spec(_real(fullname)) if fullname.startswith(f"{__name__}.") else None
        if real is None:
            return None
        package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=real.origin, loader_state=real, is_package=package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(_real(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # its own again: Python has put the alias's there

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        real: Any = find_spec(_real(fullname))
        code: CodeType | None = real.loader.get_code(real.name)
        return code


sys.meta_path.insert(0, _Aliases())

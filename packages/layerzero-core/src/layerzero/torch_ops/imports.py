"""Do something when a module is imported, without importing it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType, SimpleNamespace
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> None:
    """Run `action` once: now if the module is there already, else right after its first successful import.

    An import that fails leaves the hook in place for the next one. A reload does not run the action again.
    """
    finder = _Finder(name, action)
    # The finder goes in before the look at sys.modules, so that an import starting in between cannot slip through.
    sys.meta_path.insert(0, finder)
    if name in sys.modules:
        module = importlib.import_module(name)  # waits where another thread is still in the middle of it
        if getattr(module.__spec__, "_initializing", False):
            # This thread itself is in the middle of it, so only another one can wait for the end.
            threading.Thread(target=_when_imported, args=(name, finder), daemon=True).start()
        else:
            finder.finish()


def _when_imported(name: str, finder: _Finder) -> None:
    importlib.import_module(name)
    finder.finish()


class _Finder(MetaPathFinder):
    """Finds one module by way of the other finders, and wraps its loader."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self._action = action
        self._lock = threading.Lock()
        self._done = False
        self._here = threading.local()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        # Another finder of this kind asks us in turn while we ask it.
        if fullname != self.name or getattr(self._here, "asking", False):
            return None
        if self._done:
            self._remove()
            return None
        self._here.asking = True
        try:
            for finder in tuple(sys.meta_path):
                found = None if finder is self else finder.find_spec(fullname, path, target)
                if found is not None:
                    if found.loader is not None:
                        self._announce(found)
                    return found
            return None
        finally:
            self._here.asking = False

    def _announce(self, spec: Any) -> None:
        """Put another loader in place for the module's first execution, which leaves no trace in the module."""
        inner = spec.loader

        def exec_module(module: Any) -> None:
            spec.loader = module.__loader__ = inner
            inner.exec_module(module)
            self.finish()

        spec.loader = SimpleNamespace(create_module=inner.create_module, exec_module=exec_module)

    def finish(self) -> None:
        """Leave the list of finders, and act, once."""
        self._remove()
        with self._lock:
            if not self._done:
                self._action()
                self._done = True

    def _remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

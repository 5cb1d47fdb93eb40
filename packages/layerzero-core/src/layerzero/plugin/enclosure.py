"""A process that sees other packages than its parent: folders first on the path, modules made invisible.

Entered once, at the start of an isolated child or of its probe, before any vendor is imported. A hidden module is
absent, not broken: `importlib.util.find_spec` gives None for it, because some libraries ask that way.
"""

from __future__ import annotations

import site
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Enclosure(NamedTuple):
    """What is different inside: folders searched first, and modules that are not there."""

    path: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"path": list(self.path), "hide": list(self.hide)}

    @staticmethod
    def from_json(data: Any) -> Enclosure:
        return Enclosure(tuple(str(item) for item in data["path"]), tuple(str(item) for item in data["hide"]))


_entered: Enclosure | None = None


def inside() -> bool:
    """Whether this process is an enclosure: what would clash with its parent does not clash here."""
    return _entered is not None


def is_hidden(module: str) -> bool:
    """Whether a module, or a package around it, is invisible in this process."""
    return _entered is not None and _covers(_entered.hide, module)


def _covers(names: Iterable[str], module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


class _Without:
    """An import finder that does not find the hidden modules and is otherwise the one it stands for."""

    def __init__(self, finder: Any, hide: tuple[str, ...]) -> None:
        self._finder, self._hide = finder, hide

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if _covers(self._hide, name):
            return None
        find = getattr(self._finder, "find_spec", None)
        return None if find is None else find(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def enter(enclosure: Enclosure) -> None:
    """Make this process the enclosure. `.pth` files of its folders are obeyed: some vendors live behind one."""
    global _entered
    _entered = enclosure
    before = list(sys.path)
    for place in enclosure.path:
        site.addsitedir(place)
    added = [place for place in sys.path if place not in before]
    first = list(dict.fromkeys([*enclosure.path, *added]))
    sys.path[:] = [*first, *(place for place in before if place not in first)]
    for name in [name for name in sys.modules if _covers(enclosure.hide, name)]:
        del sys.modules[name]
    sys.meta_path[:] = [_Without(finder, enclosure.hide) for finder in sys.meta_path]

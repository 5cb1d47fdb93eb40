"""Names and versions of installed distributions, read from the head of their metadata files.

importlib_metadata parses whole files, descriptions and all: ten milliseconds for torch's, and five more for the import
of the parser. The head is a few lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from importlib_metadata import distributions


def installed_version(dist: str) -> str | None:
    """The version of a distribution; None when it is not installed."""
    return first_version(distributions(name=dist, path=there(tuple(sys.path))))


def first_version(found: Iterable[Any]) -> str | None:
    """The first version any of these distributions has; a folder that an uninstall left behind has none."""
    return next((version for item in found if (version := identity(item)[1])), None)


@lru_cache(maxsize=4)
def there(path: tuple[str, ...]) -> list[str]:
    """The folders of a path that exist; importlib_metadata takes others for zip files, again at each question."""
    return [place for place in path if os.path.exists(place or os.curdir)]


def identity(dist: Any) -> tuple[str, str]:
    """Name and version of a distribution object; empty where its metadata does not say."""
    found: dict[str, str] = {}
    read = getattr(dist, "read_text", None)
    try:
        text = (read("METADATA") or read("PKG-INFO") or "") if read is not None else ""
        for line in text.splitlines():
            if not line:
                break
            key, _, value = line.partition(":")
            if key in ("Name", "Version"):
                found[key] = value.strip()
        name, version = found.get("Name"), found.get("Version")
        return name or str(getattr(dist, "name", "") or ""), version or str(getattr(dist, "version", "") or "")
    except Exception:  # broken metadata of one distribution must not hide the others
        return found.get("Name", ""), found.get("Version", "")

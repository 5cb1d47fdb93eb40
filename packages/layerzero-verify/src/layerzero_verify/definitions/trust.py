"""Which definitions may run their code: those in folders or files that somebody named on purpose, and no others.

The names come from the caller (`--trust PATH`) or from the user's environment (LAYERZERO_TRUSTED_DEFINITIONS); nothing
found in the working directory or in the dataset adds to them. A link or a `..` that leads out of a trusted folder
leads out of trust, and so does a file that anybody on the machine may rewrite.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from layerzero.env import read
from layerzero.errors import ConfigurationError
from layerzero.reasons import Reason, reason

__all__ = ["Trust"]


@dataclass(frozen=True, slots=True)
class Trust:
    """The trusted paths, resolved. An empty one trusts nothing."""

    paths: tuple[Path, ...] = ()

    @staticmethod
    def of(paths: Iterable[str | Path] = (), environ: Mapping[str, str] | None = None) -> Trust:
        """What the caller names, and what the environment names. A path that does not exist is refused."""
        named = [*map(Path, paths), *map(Path, read(environ).trusted_definitions)]
        found = []
        for path in named:
            try:
                found.append(path.expanduser().resolve(strict=True))
            except (OSError, RuntimeError):
                raise ConfigurationError(
                    f"the trusted path {path} does not exist", code="CONFIG_FILE_MISSING", value=str(path)
                ) from None
        return Trust(tuple(dict.fromkeys(found)))

    def refusal(self, path: Path | None) -> Reason | None:
        """Why the code in this file may not run; None when it may."""
        limit = ", ".join(map(str, self.paths)) or "none named"
        if path is None:
            return reason("PATH_NOT_TRUSTED", "a definition that is not in a file", limit)
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return reason("CONFIG_FILE_MISSING", str(path))
        root = next((root for root in self.paths if real == root or root in real.parents), None)
        if root is None:
            given = Path(os.path.abspath(path))
            detail = f"it leads to {real}" if given != real else ""
            return reason("PATH_NOT_TRUSTED", str(path), limit, detail=detail)
        loose = next((place for place in _between(root, real) if _anybody_writes(place)), None)
        if loose is not None:
            return reason("PATH_NOT_TRUSTED", str(path), limit, detail=f"anybody may write to {loose}: chmod o-w it")
        return None


def _between(root: Path, real: Path) -> list[Path]:
    """The file and every folder up to the trusted one: whoever may write to any of them chooses the code."""
    return [real, *(parent for parent in real.parents if parent == root or root in parent.parents)]


def _anybody_writes(path: Path) -> bool:
    return os.name == "posix" and bool(path.stat().st_mode & stat.S_IWOTH)

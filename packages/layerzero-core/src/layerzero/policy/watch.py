"""Hot reload of a policy file: notice a change, keep the last good policy when the new one is bad."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from layerzero.errors import ConfigurationError
from layerzero.policy.layers import PolicyLayer
from layerzero.policy.load import from_bytes, read_bytes


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file looked like. The digest tells a rewrite with equal content from a change."""

    mtime_ns: int
    size: int
    sha256: str


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of a file as it is now. A missing one has a stamp too, so that its return is a change."""
    try:
        before = os.stat(path)
        raw = read_bytes(path)
    except (OSError, ConfigurationError) as error:
        return Stamp(-1, -1, type(error).__name__)
    return Stamp(before.st_mtime_ns, before.st_size, hashlib.sha256(raw).hexdigest())


def _touched(path: str | os.PathLike[str], seen: Stamp) -> Stamp | None:
    """The new stamp when time or size moved; while they rest the file is not read."""
    try:
        status = os.stat(path)
    except OSError:
        return None if seen.mtime_ns == -1 else stamp(path)
    return None if (status.st_mtime_ns, status.st_size) == (seen.mtime_ns, seen.size) else stamp(path)


@dataclass(frozen=True, slots=True)
class Reload:
    """What a poll found. On an error `layer` is still the last good one."""

    layer: PolicyLayer
    changed: bool = False
    error: ConfigurationError | None = None


class FileWatch:
    """One watched file. The first load raises when the file is bad; later polls never do.

    Polling is the caller's: `poll()` costs one stat while nothing changes. An error is reported once per change.
    """

    def __init__(self, path: str | os.PathLike[str], load: Callable[[bytes, str], PolicyLayer] = from_bytes) -> None:
        self.path = Path(path)
        self._load = load
        self._stamp = stamp(self.path)
        self.layer = load(read_bytes(self.path), str(self.path))

    def poll(self) -> Reload:
        """Look once. Call it from a timer, a request boundary or `lz.reload_config`."""
        now, before = _touched(self.path, self._stamp), self._stamp
        if now is None:
            return Reload(self.layer)
        self._stamp = now
        if now.sha256 == before.sha256:
            return Reload(self.layer)
        try:
            layer = self._load(read_bytes(self.path), str(self.path))
        except ConfigurationError as error:
            return Reload(self.layer, error=error)
        different = layer != self.layer
        self.layer = layer
        return Reload(layer, changed=different)

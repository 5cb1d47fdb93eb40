"""Find plugins: entry points of the group `layerzero.backends`, the built-in list, and who is kept out.

Reads package metadata only; nothing of a plugin is imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import importlib_metadata

from layerzero.device.signature import identity, installed_version, there
from layerzero.env import Env
from layerzero.plugin.spec import ENTRY_POINT_GROUP
from layerzero.version import __version__

CORE_DIST = "layerzero-core"

# The always-there backends. They are declared as entry points like everybody's, and a test holds both lists equal; this
# one is read at start-up, so that our own metadata need not be parsed and a core in its source tree has them as well.
# It also says which plugins a wildcard never denies.
BUILTINS: dict[str, str] = {
    "reference": "layerzero.backends.reference.plugin",
    "sdpa": "layerzero.backends.sdpa.plugin",
    "torch": "layerzero.backends.torch_native.plugin",
    "inductor": "layerzero.backends.inductor.plugin",
}


_GROUP_BYTES = f"[{ENTRY_POINT_GROUP}]".encode()


class Found(NamedTuple):
    """One entry point with the distribution that declares it."""

    name: str
    entry: Any
    dist: str = ""
    version: str = ""
    builtin: bool = False


def normalized(name: str) -> str:
    """A distribution name in its canonical spelling."""
    return name.replace("_", "-").replace(".", "-").lower()


def discover(entry_points: Iterable[Any] | None = None) -> tuple[Found, ...]:
    """Every plugin that declares itself (among `entry_points`, where given), built-ins first, then by name."""
    declared = _declared() if entry_points is None else entry_points
    found: dict[tuple[str, str, str], Found] = {}
    for entry in declared:
        if BUILTINS.get(entry.name) == entry.value:
            continue  # added below, without reading our own metadata (its parser takes 20 ms to import)
        dist_name, version = identity(getattr(entry, "dist", None))
        key = (entry.name, entry.value, normalized(dist_name))  # one distribution may be seen through two path entries
        found.setdefault(key, Found(entry.name, entry, dist_name, version))
    own = {name: importlib_metadata.EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in BUILTINS.items()}
    builtin = (Found(name, entry, CORE_DIST, __version__, builtin=True) for name, entry in own.items())
    return (*builtin, *sorted(found.values(), key=lambda item: (item.name, item.dist)))


def _declared() -> Iterator[Any]:
    """Entry points of our group over all installed distributions, in the order of sys.path."""
    for dist in _speaking():
        try:
            yield from [entry for entry in dist.entry_points if entry.group == ENTRY_POINT_GROUP]
        except Exception as error:  # a damaged file of one distribution must not hide the others
            yield Unreadable(identity(dist)[0] or "unknown", dist, error)


def _speaking() -> Iterator[importlib_metadata.Distribution]:
    """Distributions whose entry_points.txt names our group.

    The files are looked into before they are parsed: an environment holds hundreds of distributions, of which a
    handful are ours. A sys.path entry that is a zip file is left to importlib_metadata.
    """
    for place in sys.path:
        folder = place or os.curdir
        names: list[str] = []
        with suppress(OSError):  # not there, no folder, or not to be read
            names = sorted(os.listdir(folder))
        for path in (os.path.join(folder, name) for name in names if name.endswith((".dist-info", ".egg-info"))):
            with suppress(OSError), open(os.path.join(path, "entry_points.txt"), "rb", buffering=0) as file:
                if _GROUP_BYTES in file.read():
                    yield importlib_metadata.Distribution.at(path)
        if os.path.isfile(folder):
            yield from importlib_metadata.distributions(path=[folder])


class Unreadable:
    """Stands for the plugins of a distribution whose entry_points.txt cannot be parsed; loading it says so."""

    def __init__(self, name: str, dist: Any, error: Exception) -> None:
        self.name, self.dist, self.error = name, dist, error
        self.value = "entry_points.txt"

    def load(self) -> Any:
        raise ValueError(f"entry_points.txt cannot be parsed: {self.error}")


def kept_out(item: Found, env: Env) -> str | None:
    """The variable that keeps a plugin out, or None.

    LAYERZERO_PLUGINS lists who may come in besides the built-ins; LAYERZERO_PLUGINS_DENY who may not.
    A built-in is kept out only when the deny list names it literally.
    """
    names = (item.name, normalized(item.dist)) if item.dist else (item.name,)
    if item.builtin:
        return "LAYERZERO_PLUGINS_DENY" if item.name in env.plugins_deny else None
    if _matches(names, env.plugins_deny):
        return "LAYERZERO_PLUGINS_DENY"
    if env.plugins is not None and not _matches(names, env.plugins):
        return "LAYERZERO_PLUGINS"
    return None


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    wanted = [normalized(pattern) for pattern in patterns]
    return any(fnmatchcase(normalized(name), pattern) for name in names for pattern in wanted)


@lru_cache(maxsize=256)
def dist_version(dist: str) -> str | None:
    """The version of the first distribution of the name on the path that has one; None when it is not installed."""
    return installed_version(dist)


def forget_versions() -> None:
    """Look at the installed distributions anew: a package may have come or gone."""
    dist_version.cache_clear()
    there.cache_clear()


def dist_version_on(dist: str, path: Iterable[str]) -> str | None:
    """The version of a distribution in these folders, else of the one this process has."""
    for found in importlib_metadata.distributions(name=dist, path=list(path)):
        return identity(found)[1] or None
    return dist_version(dist)


# The distributions that an install hint may name: ours, the vendors our packages were written for, and installed ones.
# Any other name may belong to nobody or to anybody on a package index: it is named as what it is, never as a command.
OURS = frozenset(f"layerzero-{name}" for name in (
    "core", "hostile", "kernels", "models", "tune", "verify", "vllm",
    "accel", "cpu", "flashattn", "flashinfer", "hub", "liger", "linear-attention", "tokenizers", "triton", "xformers",
))  # fmt: skip
# What the packages above and the core itself call, under the names their authors publish.
VENDORS = frozenset({
    "torch", "transformers", "diffusers", "cryptography", "prometheus-client", "opentelemetry-api",
    "flash-attn", "flash-attn-3", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl",
    "flashinfer-python", "sglang", "sgl-kernel", "xformers", "liger-kernel", "fla-core", "triton",
    "tokenizers", "tiktoken", "sentencepiece", "kernels", "model-signing",
})  # fmt: skip


def is_known(dist: str) -> bool:
    """Whether a hint may name this distribution as something to install."""
    return normalized(dist) in OURS or normalized(dist) in VENDORS or dist_version(dist) is not None


def install_hint(requirement: str, wanted_by: str) -> str:
    """The command that installs a requirement, or, for an unknown distribution, who asks for it and nothing to run."""
    from packaging.requirements import InvalidRequirement, Requirement  # most processes never give a hint

    try:
        name = Requirement(requirement).name
    except InvalidRequirement:  # a descriptor's own spelling; not a command then
        name = ""
    if name and is_known(name):
        return f"pip install {requirement}" if name == requirement else f"pip install '{requirement}'"
    return f"{wanted_by} asks for {requirement}, a distribution LayerZero does not know: look whose it is first"


def quoted(command: str, dist: str, wanted_by: str) -> str:
    """An install command somebody wrote: as it is for a known distribution, else as their words."""
    return command if is_known(dist) else f"{wanted_by} says: {command}; LayerZero does not know {dist}"

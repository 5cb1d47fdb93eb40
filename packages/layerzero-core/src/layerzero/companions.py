"""Public names and services that packages beside the core bring: `lz.tune`, `lz.verify`, `lz.patch`.

A package declares them as entry points, names in the group `layerzero.names`; what the core asks for by itself, such as
the conformance kit behind `layerzero.testing`, in `layerzero.parts`. Nothing of it is imported before it is used. Where
the package is missing, the answer is what to install. Verbs of `lz` are found in the same way, by `layerzero_cli`.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any, NoReturn

from layerzero.errors import PackageMissingError

NAMES = "layerzero.names"
PARTS = "layerzero.parts"

# What our own packages bring, so that the core can say which one is missing.
_OURS: dict[str, dict[str, tuple[str, ...]]] = {
    "layerzero-hostile": {NAMES: ("find_cheats",), PARTS: ("hostile.outside", "hostile.refusals", "verify.hostile")},
    "layerzero-models": {NAMES: (
        "column_linear", "enable_transformers", "kv_cache", "pack_weight", "patch", "patched", "relative_bias",
        "rope_tables", "row_linear", "sample_speculative", "sample_tree", "shard_weight", "tree_mask",
        "tree_positions", "unpatch",
    )},
    "layerzero-tokenizers": {NAMES: ("detokenize", "tokenize")},
    "layerzero-tune": {NAMES: ("compare", "compile", "plan_block", "solve", "tune"), PARTS: (
        "grid-files", "model-calls", "perfdb.drift_s", "telemetry.metrics", "telemetry.registry", "telemetry.spans",
        "telemetry.trace", "warmup.pack", "warmup.unpack",
    )},
    "layerzero-verify": {NAMES: ("verify",), PARTS: ("layerzero.testing", "flashinfer-bench.traces")},
}  # fmt: skip


def package_of(kind: str, name: str) -> str | None:
    """The package of ours that brings this public name (NAMES) or part (PARTS), or None."""
    return next((dist for dist, brings in _OURS.items() if name in brings.get(kind, ())), None)


def known_names() -> set[str]:
    """Public names of packages that are installed, or that could be."""
    return {name for brings in _OURS.values() for name in brings[NAMES]} | set(names())


def refuse(kind: str, name: str) -> NoReturn:
    """Say which package is missing."""
    dist = package_of(kind, name)
    called = f"lz.{name}" if kind == NAMES else name
    raise PackageMissingError(f"{called} needs {dist}", value=dist, hint=f"pip install {dist}")


class Missing:
    """Stands for a public name whose package is not installed: importing it is fine, using it says what to install."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: object, **__: object) -> NoReturn:
        refuse(NAMES, self.__name__)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<lz.{self.__name__}: not installed, pip install {package_of(NAMES, self.__name__)}>"


def names(kind: str = NAMES) -> dict[str, importlib.metadata.EntryPoint]:
    """Every public name (or whatever else of this kind) that an installed package brings."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=kind)}


def public(name: str) -> Any:
    """The object behind a public name of another package; raises AttributeError for a name that nobody brings."""
    entry = names().get(name)
    if entry is not None:
        return entry.load()
    if package_of(NAMES, name) is not None:
        return Missing(name)
    raise AttributeError(f"module 'layerzero' has no attribute {name!r}")


def part(name: str) -> Any:
    """What a package brings for the core to use (PARTS); raises PackageMissingError where it is not installed."""
    entry = names(PARTS).get(name)
    return refuse(PARTS, name) if entry is None else entry.load()

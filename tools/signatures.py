"""Record the call signatures of vendor libraries, so that adapters can be held to them where the library cannot run.

    python -m tools.signatures OUT_DIR [PACKAGE ...]

Every backend package names what it calls in `tests/signatures/calls.txt`, a dotted name (`flashinfer.rmsnorm`) on each
line. This tool imports each name on a machine where the library lives and writes `OUT_DIR/<library>.json`: the version,
and for each name its parameters in order with kind and whether there is a default. Nothing is written for a library
that does not import; the reason is printed. The files are kept beside the names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def resolve(dotted: str) -> Any:
    """The object behind a dotted name: the longest importable prefix, then attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is not None and ".".join(parts[:cut]).startswith(error.name):
                continue
            raise
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(f"no part of {dotted} can be imported", name=parts[0])


def describe(target: Any) -> list[dict[str, Any]]:
    """The parameters of a callable as plain values, in order."""
    return [
        {
            "name": parameter.name,
            "kind": parameter.kind.name,
            "default": None if parameter.default is parameter.empty else repr(parameter.default)[:80],
        }
        for parameter in inspect.signature(target).parameters.values()
    ]


def version_of(library: str) -> str:
    """The version of the distribution that provides a top-level module."""
    names = importlib.metadata.packages_distributions().get(library, [])
    return ", ".join(sorted({f"{name} {importlib.metadata.version(name)}" for name in names})) or "unknown"


def record(calls: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Library → its version and the signatures of the named calls; a name that fails keeps its error as text."""
    found: dict[str, dict[str, Any]] = {}
    for dotted in calls:
        library = dotted.split(".")[0]
        entry = found.setdefault(
            library, {"library": library, "version": version_of(library), "calls": {}, "absent": {}}
        )
        try:
            entry["calls"][dotted] = describe(resolve(dotted))
        except Exception as error:  # a vendor's import may raise anything; the reason is the finding
            entry["absent"][dotted] = f"{type(error).__name__}: {error}"[:300]
    return found


def named_calls(package: Path) -> tuple[str, ...]:
    """What a package calls, by its own word; nothing for a package without vendors."""
    path = package / "tests" / "signatures" / "calls.txt"
    return tuple(path.read_text(encoding="utf-8").split()) if path.exists() else ()


def main(arguments: list[str]) -> int:
    """Write one file per library; returns 1 when nothing could be recorded."""
    out = Path(arguments[0])
    packages = [ROOT / "packages" / name for name in arguments[1:]] or sorted((ROOT / "packages").iterdir())
    out.mkdir(parents=True, exist_ok=True)
    written = 0
    for package in packages:
        for library, entry in sorted(record(named_calls(package)).items()):
            print(
                f"{package.name}: {library} {entry['version']}: {len(entry['calls'])} calls, "
                f"{len(entry['absent'])} absent"
            )
            for dotted, why in entry["absent"].items():
                print(f"  {dotted}: {why}")
            if entry["calls"]:
                text = json.dumps(entry, indent=1, sort_keys=True) + "\n"
                (out / f"{library}.json").write_text(text, encoding="utf-8")
                written += 1
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

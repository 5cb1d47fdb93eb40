"""What the workspace is made of: its packages, and the third-party requirements to install before them.

Read straight from the pyproject files with the standard library alone, so that it runs in an empty virtual environment:

    python -m tools.workspace packages             folders of all packages, core first
    python -m tools.workspace requirements run     what the packages and their build need, torch left out
    python -m tools.workspace requirements dev     the root's dependency group `dev` and the extras that no kernel needs
    python -m tools.workspace requirements bare    what is installed without its own dependencies
    python -m tools.workspace requirements tools   the root's dependency group `tools`, for an environment of its own
    python -m tools.workspace requirements release the programs that look at a release, the same way
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Package", "dev_requirements", "group", "main", "packages", "run_requirements"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Package:
    """One member of the workspace: its folder and its pyproject.toml."""

    path: Path
    data: dict[str, Any]

    @property
    def name(self) -> str:
        """Distribution name, e.g. layerzero-core."""
        return str(self.data["project"]["name"])

    @property
    def short(self) -> str:
        """What follows `layerzero-`: core, flashattn, …"""
        return self.name.removeprefix("layerzero-")

    @property
    def dependencies(self) -> tuple[str, ...]:
        """Declared dependencies, our own packages left out."""
        return tuple(d for d in self.data["project"].get("dependencies", ()) if not is_ours(d))

    @property
    def ours(self) -> tuple[str, ...]:
        """The packages of this workspace among its dependencies."""
        return tuple(project_name(d) for d in self.data["project"].get("dependencies", ()) if is_ours(d))

    @property
    def has_code(self) -> bool:
        """Whether there is anything to import: not in the metapackage."""
        return (self.path / "src").is_dir()

    @property
    def build_requires(self) -> tuple[str, ...]:
        """What the build backend asks for."""
        return tuple(self.data.get("build-system", {}).get("requires", ()))

    @property
    def extras(self) -> dict[str, list[str]]:
        """Optional dependencies by extra."""
        return dict(self.data["project"].get("optional-dependencies", {}))


def project_name(requirement: str) -> str:
    """The normalised project name of a requirement line: `PyYAML>=6` gives `pyyaml`."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    if found is None:
        raise ValueError(f"expected a requirement, got {requirement!r}")
    return re.sub(r"[-_.]+", "-", found[1].rstrip("._-")).lower()


def is_ours(requirement: str) -> bool:
    """Whether a requirement names a package of this workspace."""
    return re.fullmatch(r"layerzero-.+", project_name(requirement)) is not None


def packages(root: Path = ROOT) -> tuple[Package, ...]:
    """Every package of the workspace, core first: the others are built on it."""
    found = [
        Package(file.parent, tomllib.loads(file.read_text(encoding="utf-8")))
        for file in sorted((root / "packages").glob("*/pyproject.toml"))
    ]
    return tuple(sorted(found, key=lambda package: (package.short != "core", package.name)))


def group(name: str, root: Path = ROOT) -> tuple[str, ...]:
    """A dependency group of the root pyproject.toml, with the groups it includes; those that uv does not lock too."""
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    groups = data["dependency-groups"] | data["tool"]["workspace"]["dependency-groups"]
    lines: list[str] = []
    for entry in groups[name]:
        lines += group(entry["include-group"], root) if isinstance(entry, dict) else [entry]
    return tuple(dict.fromkeys(lines))


def _merged(lines: Iterable[str]) -> tuple[str, ...]:
    # torch is installed first and alone, because which build of it fits is the machine's matter
    return tuple(sorted({line for line in lines if project_name(line) != "torch"}, key=str.lower))


def run_requirements(root: Path = ROOT) -> tuple[str, ...]:
    """What the packages need to be built in place and to run; vendors are extras and not among it."""
    found = packages(root)
    needed = [line for p in found for line in (*p.dependencies, *p.build_requires)]
    # editables: for editable installs without build isolation; numpy: torch warns at import when it is missing
    return _merged([*needed, "editables>=0.5", "numpy>=2"])


def dev_requirements(root: Path = ROOT) -> tuple[str, ...]:
    """What tests, lint, types, docs and locks need on top: the group `dev`, and extras that no kernel needs."""
    ours = [p for p in packages(root) if p.short in ("core", "models", "tune", "verify")]
    extras = [line for p in ours for lines in p.extras.values() for line in lines if not is_ours(line)]
    return _merged((*group("dev", root), *extras))


def main(argv: Sequence[str]) -> int:
    """Print one item per line."""
    match list(argv):
        case ["packages"]:
            lines: Iterable[str] = (str(p.path.relative_to(ROOT)) for p in packages())
        case ["requirements", "run"]:
            lines = run_requirements()
        case ["requirements", "dev"]:
            lines = dev_requirements()
        case ["requirements", "bare"]:
            lines = group("bare")
        case ["requirements", "tools" | "release" as name]:
            lines = group(name)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

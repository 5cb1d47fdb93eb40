"""The folder of wheels that a machine without a network is installed from; see docs/offline.md.

    python -m tools.wheelhouse fill     download what requirements.lock pins, and torch; copy our wheels from dist/
    python -m tools.wheelhouse check    hold every wheel of the folder against its hash
    python -m tools.wheelhouse sync     check, then install torch, what uv.lock names, and our packages
        --into .venv                    the environment; made where there is none
        --package layerzero-core        of our packages only this one and what it needs; may be given again

`check` and `sync` need the standard library alone: uv itself is taken from the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.workspace import ROOT, packages, project_name

__all__ = ["FOLDER", "SUMS", "Refused", "check", "download", "fill", "lock", "machines", "main", "sync"]

FOLDER = ROOT / "wheelhouse"
LOCK = ROOT / "requirements.lock"
CONSTRAINTS = ROOT / "constraints.txt"
# torch, the libraries a build of it brings, and our own wheels: no lock can know their hashes beforehand, so they are
# written down when the folder is filled
SUMS = "SHA256SUMS"
_PIP_DOWNLOAD = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", str(FOLDER)]


class Refused(Exception):
    """A wheel that is not the one that was locked."""


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def wheel_name(file: Path) -> str:
    """The project a wheel belongs to."""
    return project_name(file.name.partition("-")[0])


def locked(lock: Path = LOCK) -> dict[str, set[str]]:
    """The hashes that requirements.lock allows, by project."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", " ")):
            name = project_name(line)
        found.setdefault(name, set()).update(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return found


def noted(folder: Path) -> dict[str, str]:
    """The hashes written down when the folder was filled, by file."""
    sums = folder / SUMS
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    return {file: value for value, _, file in (line.partition("  ") for line in lines)}


def check(folder: Path = FOLDER, lock: Path = LOCK) -> int:
    """How many wheels there are; `Refused` names those whose bytes are not the ones locked or written down."""
    hashes, sums = locked(lock), noted(folder)
    wheels = sorted(folder.glob("*.whl"))
    wrong = []
    for file in wheels:
        allowed = hashes.get(wheel_name(file)) or {sums.get(file.name, "")}
        if digest(file) not in allowed:
            where = lock.name if wheel_name(file) in hashes else SUMS
            wrong.append(f"{file.name}: its SHA-256 is not in {where}")
    if wrong or not wheels:
        problems = wrong or [f"there is no wheel in {folder.name}"]
        raise Refused("\n".join([*problems, "nothing was installed; fill the folder anew: make wheelhouse"]))
    return len(wheels)


def _torch() -> str:
    return next(line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))


def _run(command: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {shlex.join(words)}")


def machines() -> list[str]:
    """The processor families that uv.lock is for, as pyproject.toml names them."""
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    return [found for line in uv["environments"] for found in re.findall(r"platform_machine == '(\w+)'", line)]


def _elsewhere(machine: str) -> list[str]:
    """pip's words for the wheels of a Linux on another processor family, those for the newest glibc first as there."""
    old = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # other names of the same
    names = [name for minor in range(40, 4, -1) for name in (f"manylinux_2_{minor}", old.get(minor)) if name]
    tags = [f"{name}_{machine}" for name in names]
    words = [word for tag in tags for word in ("--platform", tag)]
    return [*words, "--implementation", "cp", "--python-version", "3.11"]


def download(*machines: str) -> None:
    """What requirements.lock pins, hashes required, for this machine and others; wheels of earlier pins go."""
    FOLDER.mkdir(exist_ok=True)
    hashes, sums = locked(), noted(FOLDER)
    for file in FOLDER.glob("*.whl"):
        if digest(file) not in (hashes.get(wheel_name(file)) or {sums.get(file.name)}):
            file.unlink()
    pinned = [*_PIP_DOWNLOAD, "--no-deps", "--require-hashes", "-r", LOCK]
    _run(pinned)
    for machine in machines:
        if machine != platform.machine():
            _run([*pinned, *_elsewhere(machine)])


def fill() -> None:
    """All that a machine needs: the pinned wheels, torch with what its build brings, and our own wheels."""
    download()
    _run([*_PIP_DOWNLOAD, "-c", CONSTRAINTS, _torch()])
    ours = list((ROOT / "dist").glob("*.whl"))
    built = {wheel_name(file) for file in ours}
    if missing := [package.name for package in packages() if package.name not in built]:
        raise SystemExit(f"no wheel of {', '.join(missing)} in dist: make wheels")
    for file in ours:
        shutil.copy2(file, FOLDER)
    hashes = locked()
    unknown = [file for file in sorted(FOLDER.glob("*.whl")) if wheel_name(file) not in hashes]
    (FOLDER / SUMS).write_text("".join(f"{digest(file)}  {file.name}\n" for file in unknown), encoding="utf-8")
    print(f"{check()} wheels in {FOLDER.name}")


def _environ(**more: str) -> dict[str, str]:
    # where packages come from is said by flags; settings of the machine must not add another place
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_")) or k == "UV_CACHE_DIR"}
    return kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_PYTHON_DOWNLOADS": "never", **more}


def lock() -> None:
    """Write uv.lock from the wheels of the folder; where they lie is said in pyproject.toml."""
    _run([sys.executable, "-m", "uv", "--quiet", "lock"], _environ())
    if "://" in (ROOT / "uv.lock").read_text(encoding="utf-8"):
        (ROOT / "uv.lock").unlink()
        raise SystemExit("uv.lock held an address and was removed")


def sync(into: Path, names: Sequence[str] = ()) -> None:
    """Install torch, what uv.lock names and our packages into an environment, from the folder alone."""
    print(f"{check()} wheels are the ones that were locked")
    chosen = names or [package.name for package in packages()]
    source = ["--no-index", "--find-links", FOLDER]
    with tempfile.TemporaryDirectory() as place:
        _run([sys.executable, "-m", "venv", place])
        own = Path(place, "bin", "python")
        _run([own, "-m", "pip", "install", "-q", *source, "uv"], _environ())
        env = _environ(UV_PROJECT_ENVIRONMENT=str(into.resolve()))
        uv = [own, "-m", "uv", "--quiet"]
        if not into.exists():
            _run([*uv, "venv", "--python", sys.executable, into], env)
        install = [*uv, "pip", "install", "--python", into, "--no-config", *source]
        # torch comes first, with what its build needs; numpy, because torch warns at import when it is missing
        _run([*install, "--constraints", CONSTRAINTS, _torch(), "numpy"], env)
        wanted = [word for name in names for word in ("--package", name)] or ["--all-packages"]
        uv_sync = [*uv, "sync", "--frozen", "--inexact", "--no-default-groups", "--no-install-workspace"]
        _run([*uv_sync, *wanted, *source], env)
        _run([*install, *chosen], env)
    print(f"{', '.join(chosen)} in {into}")


def main(argv: Sequence[str]) -> int:
    """The three commands."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheelhouse")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("fill", help="download what is pinned, torch, and copy our own wheels from dist/")
    verbs.add_parser("check", help="hold every wheel of the folder against its hash")
    syncing = verbs.add_parser("sync", help="check, then install from the folder alone")
    syncing.add_argument("--into", type=Path, default=ROOT / ".venv")
    syncing.add_argument("--package", action="append", default=[])
    asked = parser.parse_args(argv)
    try:
        match asked.verb:
            case "fill":
                fill()
            case "check":
                print(f"{check()} wheels are the ones that were locked")
            case "sync":
                sync(asked.into, asked.package)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

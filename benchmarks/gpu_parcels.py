"""What travels to and from the GPU machine: parcels of wheels, archives in pieces. No GPU needed to test it.

That machine has no network, takes what is carried to it, and gives back at most eight files of 16 MiB each.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["MAX_FILES", "PIECE", "join", "pack", "pieces_of", "split", "unpack"]

PIECE = 16 * 2**20
MAX_FILES = 8
_PIECE_NAME = re.compile(r"(?P<name>.+)\.(?P<number>\d{2})\Z")
# Wheels built for another CUDA runtime live apart: in one process with the others they would not load.
_APART = ("xformers", "nvidia_cuda_runtime_cu12")


def unpack(parcel: Path, lib: Path, apart: Path, home: Path) -> str:
    """Put a parcel where it belongs; says in one line what was done.

    A folder of wheels goes to `lib` (by its own unpack.sh where it has one), an archive or its pieces to `home`.
    """
    if not parcel.exists():
        raise SystemExit(f"no such parcel: {parcel}")
    if parcel.is_file():
        with tarfile.open(parcel) as archive:
            archive.extractall(home, filter="data")
        return f"{parcel.name} -> {home}"
    found = pieces_of(parcel)
    if found:
        for name, parts in found.items():
            whole = parcel / name
            join(parts, whole)
            with tarfile.open(whole) as archive:
                archive.extractall(home, filter="data")
            whole.unlink()
        return f"{', '.join(sorted(found))} -> {home}"
    script = parcel / "unpack.sh"
    if script.exists():
        subprocess.run(["bash", str(script)], check=True)
        return f"{parcel.name}: unpack.sh"
    wheels = sorted(parcel.glob("*.whl"))
    for wheel in wheels:
        where = apart if wheel.name.startswith(_APART) else lib
        where.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(where)
    return f"{parcel.name}: {len(wheels)} wheels"


def pieces_of(folder: Path) -> dict[str, list[Path]]:
    """Archives that lie in pieces in a folder: name -> pieces in order. Raises SystemExit where one is missing."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _PIECE_NAME.match(path.name)
        if match and ".tar" in match["name"]:
            found.setdefault(match["name"], {})[int(match["number"])] = path
    for name, parts in found.items():
        if sorted(parts) != list(range(len(parts))):
            raise SystemExit(f"{name}: pieces {sorted(parts)}, one is missing")
    return {name: [parts[number] for number in sorted(parts)] for name, parts in found.items()}


def join(parts: Sequence[Path], whole: Path) -> None:
    """One file from its pieces."""
    with open(whole, "wb") as out:
        for part in parts:
            out.write(part.read_bytes())


def split(whole: Path, folder: Path, *, piece: int = PIECE, most: int = MAX_FILES) -> list[Path]:
    """A file in pieces `name.00`, `name.01`, …; raises SystemExit before writing any where they would be too many."""
    size = whole.stat().st_size
    count = max(1, -(-size // piece))
    if count > most:
        raise SystemExit(f"{whole.name}: {size >> 20} MiB make {count} pieces, {most} can be brought back")
    found = []
    with open(whole, "rb") as source:
        for number in range(count):
            part = folder / f"{whole.name}.{number:02d}"
            part.write_bytes(source.read(piece))
            found.append(part)
    return found


def pack(sources: Iterable[Path], root: Path, archive: Path) -> int:
    """Files and folders below `root` as one compressed archive; how many files went in."""
    count = 0
    with tarfile.open(archive, "w:xz", preset=1) as out:
        for source in sources:
            for path in [source] if source.is_file() else sorted(source.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    out.add(path, path.relative_to(root))
                    count += 1
    return count

"""What a shared object asks of the machine, read the way the loader reads it: program headers, PT_DYNAMIC, its tables.

Section headers are never looked at: the loader does not either, so a file may say anything there. Addresses go through
the PT_LOAD segments, as in memory. What the loader would resolve are the symbols its relocations name. Every walk is
bounded, so that a hostile table ends in a refusal, and soon.
"""

from __future__ import annotations

import mmap
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from layerzero_hub.errors import refuse

MAGIC: Final = b"\x7fELF"
# What a manylinux_2_28 build may ask for without being asked about: libc's own parts, libstdc++, and what torch brings.
_SYSTEM_LIBS: Final = (
    "libc.so.6 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0 libgcc_s.so.1 libstdc++.so.6 ld-linux-x86-64.so.2 "
    "ld-linux-aarch64.so.1 libgomp.so.1 libtorch.so libtorch_cpu.so libtorch_cuda.so libtorch_python.so libc10.so "
    "libc10_cuda.so libcudart.so.12 libcudart.so.13 libcuda.so.1"
).split()
# manylinux_2_28
LIMITS: Final = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
_VERSIONED: Final = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\Z")
_PYTHON: Final = re.compile(r"_?Py(?!Init_)[A-Z_]")
_STABLE_SINCE: Final = (3, 11)  # the oldest Python LayerZero runs on

_MACHINES: Final = {62: "x86_64", 183: "aarch64"}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_PAGE: Final = 4096
_NEEDED, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ = 1, 5, 6, 7, 8, 10
_RPATH, _REL, _PLTRELSZ, _JMPREL, _RUNPATH = 15, 17, 2, 23, 29
_VERNEED: Final = 0x6FFFFFFE
_SINGLE: Final = {_STRTAB, _STRSZ, _SYMTAB, _RELA, _RELASZ, _PLTRELSZ, _JMPREL, _VERNEED, _RPATH, _RUNPATH}
_NEVER: Final = {
    0x6FFFFEFC: "DT_AUDIT",
    0x6FFFFEFB: "DT_DEPAUDIT",
    0x6FFFFEFA: "DT_CONFIG",
    0x7FFFFFFF: "DT_FILTER",
    0x7FFFFFFD: "DT_AUXILIARY",
    _REL: "DT_REL",
}
# Far above any real kernel; below what takes a second to walk.
_MAX_HEADERS, _MAX_DYNAMIC, _MAX_VERSIONS, _MAX_RELOCATIONS, _MAX_NAME = 256, 4096, 16384, 2**21, 4096


class _Bad(Exception):
    """A table that no honest linker writes."""


def is_elf(path: Path) -> bool:
    """Whether the file begins as a shared object does, whatever its name."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def check_shared_object(path: Path, name: str, *, needed: Iterable[str] = ()) -> None:
    """Raise HubError unless the object fits manylinux_2_28, Python's stable ABI and the known libraries."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            image = _Image(data)
            _check_dynamic(image, name, {*_SYSTEM_LIBS, *needed})
            _check_versions(image, name)
            _check_python(image, name)
    except (_Bad, OSError, ValueError, struct.error) as error:
        # ValueError: an empty file has nothing to map.
        raise refuse("HUB_ELF_INVALID", name, str(error)) from None


class _Image:
    """The file as it would lie in memory: segments in order, none over another, and the dynamic table's entries."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        if data[:4] != MAGIC or len(data) < 64:
            raise _Bad("it does not begin as one")
        if data[4] != 2 or data[5] != 1:
            raise _Bad("not 64 bits, little-endian")
        kind, machine = struct.unpack_from("<HH", data, 16)
        (offset,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        if kind != 3:
            raise _Bad(f"of type {kind}, no shared object")
        if machine not in _MACHINES:
            raise _Bad(f"for machine {machine}")
        if size != 56 or not 0 < count <= _MAX_HEADERS or offset + size * count > len(data):
            raise _Bad("its program headers lie outside the file")
        self.segments: list[tuple[int, int, int]] = []  # address, bytes of the file, offset
        dynamic: list[int] = []
        for index in range(count):
            what, _, at, address, _, filled, memory, _ = struct.unpack_from("<IIQQQQQQ", data, offset + 56 * index)
            if what == _PT_DYNAMIC:
                dynamic.append(address)
            elif what == _PT_LOAD:
                self._add_segment(at, address, filled, memory)
        if len(dynamic) != 1:
            raise _Bad("it has no dynamic table" if not dynamic else "it has two dynamic tables")
        self.starts = [start for start, _, _ in self.segments]
        self.needed: list[int] = []
        self.entries: dict[int, int] = {}
        self._read_dynamic(dynamic[0])

    def _add_segment(self, offset: int, address: int, filled: int, memory: int) -> None:
        if filled > memory or offset + filled > len(self.data) or address + memory >= 2**48:
            raise _Bad("a segment lies outside the file")
        if (address - offset) % _PAGE:
            raise _Bad("a segment is not aligned")
        # The loader maps whole pages, later over earlier: two segments on one page would hide what was looked at.
        if address // _PAGE * _PAGE < getattr(self, "_end", 0):
            raise _Bad("segments overlap or are out of order")
        self._end = -(-(address + memory) // _PAGE) * _PAGE
        self.segments.append((address, filled, offset))

    def place(self, address: int, size: int) -> int:
        """Offset in the file of so many bytes in memory; they lie in one segment."""
        index = bisect_right(self.starts, address) - 1
        if index >= 0:
            start, filled, offset = self.segments[index]
            if address + size <= start + filled:
                return offset + address - start
        raise _Bad(f"address {address:#x} is not in the file")

    def _read_dynamic(self, address: int) -> None:
        for number in range(_MAX_DYNAMIC):
            tag, value = struct.unpack_from("<QQ", self.data, self.place(address + 16 * number, 16))
            if tag == 0:
                break
            if tag == _NEEDED:
                self.needed.append(value)
            elif tag in _SINGLE and tag in self.entries:
                raise _Bad(f"dynamic tag {tag:#x} stands twice")
            else:
                self.entries[tag] = value
        else:
            raise _Bad("its dynamic table has no end")
        for tag in (_STRTAB, _STRSZ, _SYMTAB):
            if tag not in self.entries:
                raise _Bad(f"dynamic tag {tag:#x} is missing")
        self.strings = self.place(self.entries[_STRTAB], self.entries[_STRSZ])

    def text(self, at: int) -> str:
        size = self.entries[_STRSZ]
        end = self.data.find(b"\0", self.strings + at, self.strings + min(size, at + _MAX_NAME)) if at < size else -1
        if end < 0:
            raise _Bad("a name lies outside the string table")
        return self.data[self.strings + at : end].decode("ascii", "backslashreplace")

    def versions(self) -> Iterator[str]:
        """Names of the versions that are needed; like the loader, by the links and not by their count."""
        entry = self.entries.get(_VERNEED)
        steps = 0
        while entry is not None:
            _, _, _, first, following = struct.unpack_from("<HHIII", self.data, self.place(entry, 16))
            item = entry + first
            while True:
                steps += 1
                if steps > _MAX_VERSIONS:
                    raise _Bad("its table of versions has no end")
                _, _, _, name, step = struct.unpack_from("<IHHII", self.data, self.place(item, 16))
                yield self.text(name)
                if not step:
                    break
                item += step
            entry = entry + following if following else None

    def resolved(self) -> Iterator[str]:
        """Names of the symbols that relocations name: what the loader looks up."""
        wanted: set[int] = set()
        for table, size in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
            if table not in self.entries:
                continue
            length = self.entries.get(size, 0)
            if length % 24 or length // 24 > _MAX_RELOCATIONS:
                raise _Bad("its relocations are too many or cut")
            start = self.place(self.entries[table], length)
            words = memoryview(self.data)[start : start + length].cast("Q")
            try:
                wanted.update(info >> 32 for info in set(words[1::3]))
            finally:
                words.release()
        for index in sorted(wanted - {0}):
            (name,) = struct.unpack_from("<I", self.data, self.place(self.entries[_SYMTAB] + 24 * index, 24))
            yield self.text(name)


def _check_dynamic(image: _Image, name: str, allowed: set[str]) -> None:
    for tag in (_RPATH, _RUNPATH):
        if tag in image.entries:
            raise refuse("HUB_RUNPATH", name, image.text(image.entries[tag]))
    for at in image.needed:
        library = image.text(at)
        if library not in allowed:
            raise refuse("HUB_NEEDED_REFUSED", name, library)
    for tag, word in _NEVER.items():
        if tag in image.entries:
            raise refuse("HUB_ELF_INVALID", name, f"it carries {word}")


def _check_versions(image: _Image, name: str) -> None:
    for version in image.versions():
        if version == "GLIBC_PRIVATE" or version.startswith("GLIBC_ABI_"):
            raise refuse("HUB_ABI_GLIBC", version, "public symbols of GLIBC_2.28", detail=name)
        match = _VERSIONED.match(version)
        if match is None:
            continue
        family, number = match.group(1), tuple(int(part[:9]) for part in match.group(2).split(".") if part)
        if number > LIMITS[family]:
            limit = f"{family}_{'.'.join(map(str, LIMITS[family]))}"
            raise refuse("HUB_ABI_GLIBC", version, limit, detail=name)


def _check_python(image: _Image, name: str) -> None:
    from abi3info import DATAS, FUNCTIONS
    from abi3info.models import Symbol

    for symbol in filter(_PYTHON.match, image.resolved()):
        known = FUNCTIONS.get(Symbol(symbol)) or DATAS.get(Symbol(symbol))
        since = getattr(known, "added", None)
        if known is None or (since is not None and (since.major, since.minor) > _STABLE_SINCE):
            raise refuse("HUB_ABI_SYMBOL", symbol, detail=name)

"""What a shared object asks of the machine, read from what the loader reads: .dynsym, version needs, the dynamic table.

Stripping a binary removes .symtab and none of these, so a stripped one has nothing to hide behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from layerzero_hub.errors import HubError, refuse
from layerzero_hub.policy import SYSTEM_LIBS

__all__ = ["check_shared_object", "is_elf"]

MAGIC: Final = b"\x7fELF"
# manylinux_2_28
LIMITS: Final = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
_VERSIONED: Final = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\Z")
_PYTHON: Final = re.compile(r"_?Py[A-Z_]")
_STABLE_SINCE: Final = (3, 11)  # the oldest Python LayerZero runs on


def is_elf(path: Path) -> bool:
    """Whether the file begins as a shared object does, whatever its name."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def check_shared_object(path: Path, name: str, *, needed: Iterable[str] = ()) -> None:
    """Raise HubError unless the object fits manylinux_2_28, Python's stable ABI and the known libraries."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            if elf["e_type"] != "ET_DYN":
                raise refuse("HUB_ELF_INVALID", name, f"of type {elf['e_type']}")
            sections = {section.name: section for section in elf.iter_sections()}
            dynamic, symbols = sections.get(".dynamic"), sections.get(".dynsym")
            if dynamic is None or symbols is None:
                raise refuse("HUB_ELF_INVALID", name, "it has no dynamic section")
            _check_dynamic(dynamic, name, {*SYSTEM_LIBS, *needed})
            _check_versions(sections.get(".gnu.version_r"), name)
            _check_python(symbols, name)
    except HubError:
        raise
    except (ELFError, OSError, ValueError, KeyError, AttributeError, TypeError, IndexError, UnicodeError) as error:
        # A hostile file can make the reader stumble anywhere; whatever it is, the file is not loaded.
        raise refuse("HUB_ELF_INVALID", name, f"{type(error).__name__}: {error}") from None


def _check_dynamic(dynamic: Any, name: str, allowed: set[str]) -> None:
    for tag in dynamic.iter_tags():
        if tag.entry.d_tag == "DT_RPATH":
            raise refuse("HUB_RUNPATH", name, tag.rpath)
        if tag.entry.d_tag == "DT_RUNPATH":
            raise refuse("HUB_RUNPATH", name, tag.runpath)
        if tag.entry.d_tag == "DT_NEEDED" and tag.needed not in allowed:
            raise refuse("HUB_NEEDED_REFUSED", name, tag.needed)
        if tag.entry.d_tag in ("DT_AUDIT", "DT_DEPAUDIT", "DT_FILTER", "DT_AUXILIARY"):
            raise refuse("HUB_ELF_INVALID", name, f"it carries {tag.entry.d_tag}")


def _check_versions(section: Any, name: str) -> None:
    if section is None:
        return
    for _, entries in section.iter_versions():
        for entry in entries:
            if entry.name == "GLIBC_PRIVATE":
                raise refuse("HUB_ABI_GLIBC", entry.name, "public symbols", detail=name)
            match = _VERSIONED.match(entry.name)
            if match is None:
                continue
            family, version = match.group(1), tuple(int(part) for part in match.group(2).split(".") if part)
            if version > LIMITS[family]:
                limit = f"{family}_{'.'.join(map(str, LIMITS[family]))}"
                raise refuse("HUB_ABI_GLIBC", entry.name, limit, detail=name)


def _check_python(symbols: Any, name: str) -> None:
    from abi3info import DATAS, FUNCTIONS
    from abi3info.models import Symbol

    for symbol in symbols.iter_symbols():
        if symbol["st_shndx"] != "SHN_UNDEF" or not _PYTHON.match(symbol.name):
            continue
        known = FUNCTIONS.get(Symbol(symbol.name)) or DATAS.get(Symbol(symbol.name))
        since = getattr(known, "added", None)
        if known is None or (since is not None and (since.major, since.minor) > _STABLE_SINCE):
            raise refuse("HUB_ABI_SYMBOL", symbol.name, detail=name)

"""How much memory is free, asked at selection time by memory-aware filters. Never cached."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch_module

_MEMINFO = "/proc/meminfo"
_CGROUP = "/sys/fs/cgroup"


def free_bytes(device: torch_module.device | str | None = None, *, torch: Any = None) -> int | None:
    """Bytes a kernel could still take: free at the driver, plus what torch holds unused; None if nobody can say."""
    torch = importlib.import_module("torch") if torch is None else torch
    kind, _, number = str("cpu" if device is None else device).partition(":")
    if kind == "cpu":
        return available_host_bytes()
    try:
        module = getattr(torch, kind)
        if kind == "mps":
            return max(0, int(module.recommended_max_memory()) - int(module.driver_allocated_memory()))
        index = int(number) if number else int(module.current_device())
        free, _total = module.mem_get_info(index)
        return int(free) + max(0, int(module.memory_reserved(index)) - int(module.memory_allocated(index)))
    except Exception:  # a lost device, an old vendor module or none: not knowing is the answer
        return None


def available_host_bytes(meminfo: str | None = None, *, cgroup: str = _CGROUP) -> int | None:
    """What the host can still give, and no more than the container's limit leaves."""
    free = host_bytes("MemAvailable", "SC_AVPHYS_PAGES", meminfo)
    limit, used = text_of(f"{cgroup}/memory.max").strip(), text_of(f"{cgroup}/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        left = max(0, int(limit) - int(used))
        return left if free is None else min(free, left)
    return free


def host_bytes(field: str, pages: str, meminfo: str | None = None) -> int | None:
    """A field of /proc/meminfo (or of its text), else what sysconf says of `pages`; None where neither speaks."""
    for line in (text_of(_MEMINFO) if meminfo is None else meminfo).splitlines():
        name, _, size = line.partition(":")
        if name == field and size.split()[0].isdigit():
            return int(size.split()[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    except (AttributeError, ValueError, OSError):
        return None


def text_of(path: str | os.PathLike[str]) -> str:
    """A file of the system; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""

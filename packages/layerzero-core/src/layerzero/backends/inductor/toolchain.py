"""Is there a C++ compiler? TorchInductor calls one for every program, those for a GPU included."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

from layerzero.plugin import DeviceSpec, Reason, reason


def compiler() -> str | None:
    """The C++ compiler TorchInductor would call: CXX, else g++, else clang++."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


def needs_compiler(device: DeviceSpec) -> list[Reason]:
    """Against compiling anything here; what was compiled before still loads."""
    if compiler() is not None:
        return []
    why = reason("BACKEND_NOT_INSTALLED", "of a C++ compiler")
    return [replace(why, message="no C++ compiler was found", hint="install g++ or clang++, or set CXX to one")]

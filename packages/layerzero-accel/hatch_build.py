"""Build hook: compile the hot path into the wheel, or beside the sources for an editable install.

Without a compiler, or with one that cannot build it, the package is made all the same, without the library: everything
then runs in Python, and `lz doctor` says so and how to get it. LAYERZERO_ACCEL_REQUIRE_NATIVE=1 makes that an error,
for release builds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_GLIBC = (2, 17)  # of manylinux2014


def _builder(root: Path) -> Any:
    file = root / "src" / "layerzero_accel" / "build.py"
    spec = importlib.util.spec_from_file_location("layerzero_accel_build", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def platform_tag(library: Path) -> str:
    """The platforms the library runs on: manylinux of the newest C library whose symbols it asks for."""
    here = re.sub(r"[^A-Za-z0-9]", "_", sysconfig.get_platform())
    asked = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())]
    if not here.startswith("linux_") or not asked:  # another system, or another C library
        return here
    family = here.removeprefix("linux_")
    if max(asked) > OLDEST_GLIBC:
        major, minor = max(asked)[:2]
        return f"manylinux_{major}_{minor}_{family}"
    return f"manylinux_2_17_{family}.manylinux2014_{family}"


class NativeHotPath(BuildHookInterface[Any]):
    """Runs before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; `version` is "editable" or "standard"."""
        builder = _builder(Path(self.root))
        try:
            if version == "editable":
                builder.main(["--if-needed"])
                return
            self.room = tempfile.TemporaryDirectory(prefix="layerzero-accel-wheel-")
            made = builder.build(Path(self.room.name) / builder.NAME)
        except builder.BuildError as error:
            if os.environ.get("LAYERZERO_ACCEL_REQUIRE_NATIVE") == "1":
                raise
            print(f"layerzero-accel is built without its library: {error}", file=sys.stderr)
            return
        build_data["force_include"][str(made)] = f"layerzero_accel/{builder.NAME}"
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform_tag(made)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Drop what was compiled for the wheel."""
        room = getattr(self, "room", None)
        if room is not None:
            room.cleanup()

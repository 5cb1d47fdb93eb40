"""Build hook: compile the kernels into the wheel, or beside the sources for an editable install.

Without a compiler, or with one that cannot build them, the package is made all the same, without kernels: `lz doctor`
then says that they are missing and how to get them. LAYERZERO_CPU_REQUIRE_NATIVE=1 makes that an error, for release
builds. LAYERZERO_CPU_OBJECTS names a folder that keeps what was compiled for the next build of the same sources;
LAYERZERO_CPU_LATER=1 leaves compiling for an editable install to `python -m layerzero_cpu.build`.
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
    spec = importlib.util.spec_from_file_location("layerzero_cpu_build", root / "src" / "layerzero_cpu" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def platform_tag(library: Path, family: str) -> str:
    """The platforms the library runs on: manylinux of the newest C library whose symbols it asks for."""
    here = re.sub(r"[^A-Za-z0-9]", "_", sysconfig.get_platform())
    if here.startswith("linux_"):  # CXX may name a compiler for another processor
        here = f"linux_{family}"
    asked = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())]
    if not here.startswith("linux_") or not asked:  # another system, or another C library
        return here
    if max(asked) > OLDEST_GLIBC:
        major, minor = max(asked)[:2]
        return f"manylinux_{major}_{minor}_{family}"
    return f"manylinux_2_17_{family}.manylinux2014_{family}"


class NativeKernels(BuildHookInterface[Any]):
    """Runs before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; `version` is "editable" or "standard"."""
        builder = _builder(Path(self.root))
        objects = os.environ.get("LAYERZERO_CPU_OBJECTS")
        try:
            if version == "editable":
                if os.environ.get("LAYERZERO_CPU_LATER") == "1":
                    return
                builder.main(["--if-needed", *(["--cache", objects] if objects else [])])
                return
            self.room = tempfile.TemporaryDirectory(prefix="layerzero-cpu-wheel-")
            made = builder.build(Path(self.room.name) / builder.NAME, cache=Path(objects) if objects else None)
        except builder.BuildError as error:
            if os.environ.get("LAYERZERO_CPU_REQUIRE_NATIVE") == "1":
                raise
            print(f"layerzero-cpu is built without its kernels: {error}", file=sys.stderr)
            return
        build_data["force_include"][str(made)] = f"layerzero_cpu/{builder.NAME}"
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform_tag(made, builder.target(builder.compiler()))}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Drop what was compiled for the wheel."""
        room = getattr(self, "room", None)
        if room is not None:
            room.cleanup()

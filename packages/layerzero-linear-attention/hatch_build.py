"""Build hook: compile the CPU kernels into the wheel, or beside the sources for an editable install.

Without a compiler, or with one that cannot build them, the package is made all the same, without them.
LAYERZERO_CPU_REQUIRE_NATIVE=1 makes that an error. LAYERZERO_CPU_OBJECTS names a folder that keeps what was compiled
for the next wheel of the same sources, as for layerzero-cpu.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _builder(root: Path) -> Any:
    file = root / "src" / "layerzero_linear_attention" / "build.py"
    spec = importlib.util.spec_from_file_location("layerzero_linear_attention_build", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def platform_tag(library: Path) -> str:
    """The platforms the library runs on: manylinux of the newest C library whose symbols it asks for."""
    here = re.sub(r"[^A-Za-z0-9]", "_", sysconfig.get_platform())
    asked = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())]
    if not here.startswith("linux_") or not asked:
        return here
    major, minor = max([(2, 17), *asked])
    return here.replace("linux_", f"manylinux_{major}_{minor}_", 1)


def compiled(builder: Any, out: Path) -> Path:
    """The library, compiled or kept from a build of the same file, by the same program and the same compiler."""
    objects = os.environ.get("LAYERZERO_CPU_OBJECTS")
    if not objects:
        return Path(builder.build(out))
    digest = hashlib.sha256(builder.SOURCE.read_bytes() + b"\0" + Path(builder.__file__).read_bytes())
    digest.update(f"\0{os.environ.get('CXX', '')}\0{sysconfig.get_platform()}".encode())
    kept = Path(objects) / f"linear-attention-{digest.hexdigest()[:16]}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        builder.build(kept)  # whole or not at all
    shutil.copyfile(kept, out)
    return out


class NativeKernels(BuildHookInterface[Any]):
    """Runs before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; `version` is "editable" or "standard"."""
        builder = _builder(Path(self.root))
        if version == "editable":
            builder.main()
            return
        self.room = tempfile.TemporaryDirectory(prefix="layerzero-linear-attention-wheel-")
        try:
            made = compiled(builder, Path(self.room.name) / builder.LIBRARY.name)
        except builder.BuildError as error:
            if os.environ.get("LAYERZERO_CPU_REQUIRE_NATIVE") == "1":
                raise
            print(f"layerzero-linear-attention is built without its CPU kernels: {error}", file=sys.stderr)
            return
        build_data["force_include"][str(made)] = f"layerzero_linear_attention/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(made)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Drop what was compiled for the wheel."""
        room = getattr(self, "room", None)
        if room is not None:
            room.cleanup()

"""Compile the CPU kernels: `python -m layerzero_linear_attention.build`. The wheel's build hook uses it, too.

One file, one library beside this one, tied to no version of Python or torch: it is called by ctypes. Needs g++ or
clang++ (or what CXX names) and nothing else.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "native" / "recurrence.cpp"
LIBRARY = SOURCE.parent.parent / "_native.so"
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast",
    "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-Wall", "-Wextra",
)  # fmt: skip
# no C++ library is used: linked as C, so that none is asked for when the library is loaded
LINK = (
    "-shared", "-nodefaultlibs", "-Wl,--as-needed", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack", "-Wl,-s",
    "-Wl,-Bstatic", "-lgcc", "-Wl,-Bdynamic", "-lc",
)  # fmt: skip


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why and what to do."""


def build(out: Path = LIBRARY) -> Path:
    """Compile into `out`, whole or not at all. Raises BuildError."""
    named = shlex.split(os.environ.get("CXX", "")) or next(
        ([name] for name in ("g++", "clang++", "c++") if shutil.which(name)), []
    )
    if not named or not shutil.which(named[0]):
        raise BuildError("no C++ compiler: install g++ or clang++, or name one in CXX")
    partial = out.with_name(f"{out.name}.{os.getpid()}.part")
    link = LINK if sys.platform != "darwin" else ("-shared",)
    command = [*named, *FLAGS, str(SOURCE), *link, "-o", str(partial)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if found.returncode != 0:
            raise BuildError(f"{shlex.join(command)}\n{found.stdout[-2000:]}{found.stderr[-6000:]}")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return out


def main() -> int:
    """Build in place, unless the library is newer than its source."""
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= SOURCE.stat().st_mtime:
        return 0
    try:
        print(f"{build().name}: {LIBRARY.stat().st_size // 1024} KB")
    except BuildError as error:
        print(f"the CPU kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

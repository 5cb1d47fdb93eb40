"""Compile the hot path: `python -m layerzero_accel.build`. The wheel's build hook uses it: it imports nothing of ours.

One file of C and a few headers of our own become one library beside this file, tied to no version of Python or torch.
Needs gcc or clang (or what CC names) and nothing else: no headers of Python or torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "native"
NAME = "_hot.abi3.so"
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-plt", "-Wall", "-Wextra",
    "-Wno-format-security",
)  # fmt: skip
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1")


class BuildError(RuntimeError):
    """The library could not be compiled; the message says why and what to do."""


def compiler() -> list[str] | None:
    """The C compiler to use: CC, gcc, clang or cc; None where there is none."""
    named = os.environ.get("CC", "").strip()
    if named:
        command = shlex.split(named)
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("gcc", "clang", "cc") if shutil.which(name)), None)


def source_hash() -> str:
    """What the sources and this file are, in 16 digits; the library carries it."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted((*NATIVE.glob("*.c"), *NATIVE.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def build(out: Path | None = None, *, sanitize: bool = False) -> Path:
    """Compile into `out` (default: beside this file), whole or not at all; returns its path. Raises BuildError."""
    command = compiler()
    if command is None:
        raise BuildError("no C compiler: install gcc or clang, or name one in CC")
    out = out or HERE / NAME
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    link = ["-shared", "-Wl,--as-needed", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
    if sys.platform == "darwin":
        link = ["-shared", "-undefined", "dynamic_lookup"]
    elif not sanitize:
        link += ["-Wl,-s"]
        # Since glibc 2.34 dlopen is in the C library itself and this one is empty; before, it is here.
        glibc = platform.libc_ver()[0] == "glibc"
        link += ["-Wl,--no-as-needed", "-l:libdl.so.2", "-Wl,--as-needed"] if glibc else ["-ldl"]
    line = [
        *command, *FLAGS, *(SANITIZE if sanitize else ()), f'-DSOURCE_HASH="{source_hash()}"', f"-I{NATIVE}",
        str(NATIVE / "hot.c"), *link, "-o", str(part),
    ]  # fmt: skip
    try:
        found = subprocess.run(line, capture_output=True, text=True, timeout=300)
        if found.returncode != 0:
            raise BuildError(f"{shlex.join(line)}\n{found.stdout[-2000:]}{found.stderr[-6000:]}")
        if found.stderr.strip():
            print(found.stderr.rstrip(), file=sys.stderr)
        os.replace(part, out)
    except OSError as error:
        raise BuildError(f"{shlex.join(line)}\n{error}") from error
    finally:
        part.unlink(missing_ok=True)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: build in place, say how long it took."""
    parser = argparse.ArgumentParser(prog="python -m layerzero_accel.build", description="compile the hot path")
    parser.add_argument("--out", type=Path, help="where the library goes (default: into the installed package)")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    parser.add_argument("--if-needed", action="store_true", help="do nothing where the library is of these sources")
    given = parser.parse_args(argv)
    out = given.out or HERE / NAME
    if given.if_needed and out.exists() and source_hash().encode() in out.read_bytes():
        return 0
    begin = time.monotonic()
    try:
        made = build(out, sanitize=given.sanitize)
    except BuildError as error:
        print(f"the hot path was not built: {error}", file=sys.stderr)
        return 1
    print(f"{made.name}: {made.stat().st_size // 1024} KB in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

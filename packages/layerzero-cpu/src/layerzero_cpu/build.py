"""Compile the kernels: `python -m layerzero_cpu.build`. The wheel's build hook uses it, so it imports nothing of ours.

A file of `native/` whose first line reads `// unit: ISA…` is compiled once for each of those instruction sets this kind
of processor has; the other files once. The result is one library beside this file, tied to no version of Python or
torch. Needs g++ or clang++ (or what CXX names) and nothing else: no headers of Python or torch, no C++ library at run
time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["BuildError", "build", "compiler", "main", "source_hash", "target"]

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "native"
NAME = "_native.abi3.so"

# Flags by processor family and instruction set; a unit names those it wants, and gets those the family has.
# gcc 12 takes the placeholders in its own intrinsics for forgotten values
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
VNNI = (*AVX512, "-mavx512vnni")
BF16 = (*VNNI, "-mavx512bf16")
FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable": (),
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512_vnni": VNNI,
        "avx512_bf16": BF16,
        "amx": (*BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    },
    "aarch64": {
        "portable": (),
        "neon": ("-march=armv8-a",),
        "dotprod": ("-march=armv8.2-a+dotprod+fp16",),
    },
}
COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-plt", "-Wall", "-Wextra",
    "-Werror=return-type", "-Wno-psabi", "-Wno-ignored-attributes",
)  # fmt: skip
SANITIZE = (
    "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1",
    "-DLZ_SANITIZED",
)  # fmt: skip


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why and what to do."""


def compiler() -> list[str] | None:
    """The C++ compiler to use: CXX, g++, clang++ or c++; None where there is none."""
    named = os.environ.get("CXX", "").strip()
    if named:
        command = shlex.split(named)
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


def target(command: Sequence[str]) -> str:
    """The processor family the compiler makes code for: x86_64, aarch64 or another."""
    found = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, timeout=60)
    machine = found.stdout.split("-")[0].strip() or platform.machine()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine)


def units(family: str, isas: Sequence[str] | None = None, skip: Sequence[str] = ()) -> Iterator[tuple[Path, str]]:
    """(file, instruction set) of every compilation; the instruction set is "" for files compiled once."""
    known = FLAGS.get(family, {"portable": ()})
    for file in sorted(NATIVE.glob("*.cpp")):
        with file.open(encoding="utf-8") as lines:
            first = lines.readline().strip()
        if not first.startswith("// unit:"):
            yield file, ""
            continue
        for isa in first.removeprefix("// unit:").split() if file.stem not in skip else ():
            if isa in known and (isas is None or isa in isas):
                yield file, isa


def source_hash() -> str:
    """What the sources and this file are, in 16 digits; the library carries it."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted((*NATIVE.glob("*.cpp"), *NATIVE.glob("*.hpp"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _table(found: Sequence[tuple[Path, str]]) -> str:
    named = [(file.stem, isa) for file, isa in found if isa]
    lines = ['#include "isa.hpp"', "namespace lz {"]
    lines += [f"namespace {isa} {{ extern const Kernel {stem}_exports[]; }}" for stem, isa in named]
    lines.append("const Unit UNITS[] = {")
    lines += [f'  {{"{isa}", {isa}::{stem}_exports}},' for stem, isa in named]
    lines += ["  {nullptr, nullptr}};", f'const char SOURCE_HASH[] = "{source_hash()}";', "}  // namespace lz", ""]
    return "\n".join(lines)


def _run(command: Sequence[str]) -> None:
    found = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if found.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{found.stdout[-2000:]}{found.stderr[-6000:]}")
    if found.stderr.strip():
        print(found.stderr.rstrip(), file=sys.stderr)


def _knows(command: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether the compiler is new enough for an instruction set."""
    if not flags:
        return True
    line = [*command, *flags, "-E", "-x", "c++", os.devnull, "-o", os.devnull]
    return subprocess.run(line, capture_output=True, timeout=60).returncode == 0


def _with_headers(file: Path) -> bytes:
    """A file's text and that of the headers of `native/` it includes, directly or not."""
    seen: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        text = waiting.pop().read_bytes()
        for name in re.findall(rb'#include "([\w.]+)"', text):
            if name.decode() not in seen:
                seen[name.decode()] = (NATIVE / name.decode()).read_bytes()
                waiting.append(NATIVE / name.decode())
    return file.read_bytes() + b"".join(seen[name] for name in sorted(seen))


def _object_name(command: Sequence[str], file: Path) -> str:
    digest = hashlib.sha256(_with_headers(file) + "\0".join(command).encode())
    return f"{file.stem}-{digest.hexdigest()[:16]}.o"


def build(
    out: Path | None = None,
    *,
    cache: Path | None = None,
    sanitize: bool = False,
    isas: Sequence[str] | None = None,
    jobs: int | None = None,
    extra: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> Path:
    """Compile everything into `out` (default: beside this file), whole or not at all; returns its path.

    `cache` keeps objects between builds; `isas` compiles fewer instruction sets; `skip` leaves files out; `sanitize`
    adds the address and undefined-behaviour sanitizers. Raises BuildError.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler: install g++ or clang++, or name one in CXX")
    out = out or HERE / NAME
    family = target(command)
    flags = {isa: each for isa, each in FLAGS.get(family, {"portable": ()}).items() if _knows(command, each)}
    found = [(file, isa) for file, isa in units(family, isas, skip) if not isa or isa in flags]
    common = [*COMMON, *(SANITIZE if sanitize else ()), *extra]
    with tempfile.TemporaryDirectory(prefix="layerzero-cpu-") as scratch:
        objects = cache or Path(scratch)
        objects.mkdir(parents=True, exist_ok=True)
        table = Path(scratch) / "table.cpp"
        table.write_text(_table(found), encoding="utf-8")
        work: list[tuple[list[str], Path]] = []
        for file, isa in [*found, (table, "")]:
            named = [*flags[isa], f"-DLZ_ISA={isa}", f"-DLZ_ISA_{isa}"] if isa else []
            line = [*command, *common, *named, f"-I{NATIVE}", "-c", str(file)]
            made = objects / _object_name([*command, *common, *named], file)
            work.append((line, made))

        def one(item: tuple[list[str], Path]) -> None:
            line, made = item
            if not made.exists():
                partial = made.with_suffix(f".{os.getpid()}.part")
                _run([*line, "-o", str(partial)])
                os.replace(partial, made)

        with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            list(pool.map(one, sorted(work, key=lambda item: -Path(item[0][-1]).stat().st_size)))
        linked = out.with_name(f"{out.name}.{os.getpid()}.part")
        link = ["-shared", "-Wl,--as-needed", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
        # no C++ library is used: linked as C, so that none is asked for when the library is loaded
        libraries = ["-nodefaultlibs", "-Wl,-Bstatic", "-lgcc", "-Wl,-Bdynamic", "-lc"]
        link.append("-Wl,-s")
        if sanitize:
            link, libraries = [*link[:-1], "-fsanitize=address,undefined"], []
        if sys.platform == "darwin":
            link, libraries = ["-shared", "-undefined", "dynamic_lookup"], []
        try:
            objs = [str(made) for _, made in work]
            _run([*command, *extra, *link, *objs, *libraries, "-o", str(linked)])
            os.replace(linked, out)
        finally:
            linked.unlink(missing_ok=True)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: build in place, say how long it took."""
    parser = argparse.ArgumentParser(prog="python -m layerzero_cpu.build", description="compile the CPU kernels")
    parser.add_argument("--out", type=Path, help="where the library goes (default: into the installed package)")
    parser.add_argument("--cache", type=Path, help="a folder that keeps objects between builds")
    parser.add_argument("--isa", action="append", help="only this instruction set; may be repeated")
    parser.add_argument("--skip", action="append", default=[], help="leave this file of native/ out; may be repeated")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    parser.add_argument("--if-needed", action="store_true", help="do nothing where the library is of these sources")
    given = parser.parse_args(argv)
    out = given.out or HERE / NAME
    if given.if_needed and out.exists() and source_hash().encode() in out.read_bytes():
        return 0
    begin = time.monotonic()
    try:
        made = build(out, cache=given.cache, sanitize=given.sanitize, isas=given.isa, skip=given.skip)
    except BuildError as error:
        print(f"the CPU kernels were not built: {error}", file=sys.stderr)
        return 1
    print(f"{made.name}: {made.stat().st_size // 1024} KB in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The x86 code of the kernels that go over rows, where no such processor is: AVX-512 with its intrinsics written out in
C++, AVX2 under an emulator. The sources are the package's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero_cpu import build

HERE = Path(__file__).parent
PROVE = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=cpu")
CROSS = "x86_64-linux-gnu-g++"
ROWS = ("gated", "norm", "norm_grad", "quant", "rope", "sampling")


def run(*command: str, **variables: str) -> str:
    found = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, capture_output=True, text=True, timeout=3000
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-6000:]
    return found.stdout


@PROVE
@pytest.mark.needs_tool("g++")
@pytest.mark.timeout(3600)
def test_avx512_sources_give_right_results_with_their_intrinsics_written_out(tmp_path):
    library = tmp_path / build.NAME
    run(sys.executable, str(HERE / "emulated" / "rows.py"), str(library))
    fuzz = (
        sys.executable,
        str(HERE / "fuzz" / "run.py"),
        "--library",
        str(library),
        "--isa",
        "avx512",
        "--only",
        "rows",
    )
    said = run(*fuzz, "--count", "6000", "--seed", "11")
    counted = re.match(r"(\d+) calls, none wrong", said)
    assert counted is not None and int(counted[1]) >= 6000, said


@PROVE
@pytest.mark.needs_tool("g++")
@pytest.mark.timeout(3600)
def test_the_sanitizers_find_nothing_in_the_avx512_sources(tmp_path):
    compiler = build.compiler()
    assert compiler is not None
    runtimes = [run(*compiler, f"-print-file-name={name}").strip() for name in ("libasan.so", "libstdc++.so.6")]
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("this compiler has no sanitizers")
    library = tmp_path / build.NAME
    run(sys.executable, str(HERE / "emulated" / "rows.py"), str(library), "--sanitize")
    said = run(
        sys.executable, str(HERE / "fuzz" / "run.py"), "--library", str(library), "--isa", "avx512", "--only", "rows",
        "--count", "6000", "--seed", "12",
        LD_PRELOAD=" ".join(runtimes), ASAN_OPTIONS="detect_leaks=0:abort_on_error=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )  # fmt: skip
    counted = re.match(r"(\d+) calls, none wrong", said)
    assert counted is not None and int(counted[1]) >= 6000, said


@PROVE
@pytest.mark.timeout(3600)
def test_avx2_gives_what_the_portable_code_gives(tmp_path):
    if not shutil.which(CROSS) or not shutil.which("qemu-x86_64"):
        pytest.skip(f"wants {CROSS} and qemu-x86_64")
    common = [*(flag for flag in build.COMMON if flag != "-fvisibility=hidden"), f"-I{build.NATIVE}"]
    work = []
    for isa in ("portable", "avx2"):
        flags = [*build.FLAGS["x86_64"][isa], f"-DLZ_ISA={isa}", f"-DLZ_ISA_{isa}"]
        work += [([*flags, str(build.NATIVE / f"{stem}.cpp")], tmp_path / f"{stem}-{isa}.o") for stem in ROWS]
    work.append((["-DLZ_SANITIZED", str(build.NATIVE / "pool.cpp")], tmp_path / "pool.o"))
    work.append(([str(HERE / "emulated" / "compare.cpp")], tmp_path / "compare.o"))
    for flags, made in work:
        run(CROSS, *common, *flags, "-c", "-o", str(made))
    program = str(tmp_path / "compare")
    run(CROSS, *(str(made) for _, made in work), "-o", program, "-lpthread")
    assert "none differs" in run("qemu-x86_64", "-cpu", "max", "-L", "/usr/x86_64-linux-gnu", program, "500")

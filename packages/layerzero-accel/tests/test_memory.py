"""No leak in 100 000 calls; nothing the address and undefined-behaviour sanitizers object to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerzero.env import read
from layerzero_accel import build as builder

PROVE = read().prove
FUZZ = Path(__file__).with_name("accel_fuzz.py")
LIBRARY = Path(builder.__file__).with_name(builder.NAME)


def fuzz(library: Path, calls: int, **environ: str) -> dict[str, Any]:
    env = {**os.environ, "LAYERZERO_PLUGINS": "", "LAYERZERO_ACCEL": "on", "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, "-W", "ignore", str(FUZZ), str(library), str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1500)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "runtime error" not in done.stderr and "AddressSanitizer" not in done.stderr, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(900)
def test_a_hundred_thousand_calls_leave_every_count_as_it_was(native: Any) -> None:
    found = fuzz(LIBRARY, 20_000 if PROVE else 2_000)
    assert found["calls"] == 100_000
    assert found["grown_kb"] < 1024
    assert min(found["met"][name] for name in ("exact", "bucketed", "python", "learnt", "dropped")) > 0


def runtime_library(name: str) -> str:
    command = [*(builder.compiler() or ()), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not PROVE, reason="make prove NAME=accel: torch takes its time under a sanitizer")
@pytest.mark.needs_tool("gcc")
@pytest.mark.timeout(1800)
def test_the_sanitizers_find_nothing(native: Any, tmp_path: Path) -> None:
    made = builder.build(tmp_path / builder.NAME, sanitize=True)
    # Beside the sanitizer's own library that of C++: torch throws, and the sanitizer must find what it stands before.
    preload = [runtime_library(name) for name in ("libasan.so", "libstdc++.so.6")]
    if not all(map(os.path.isabs, preload)):
        pytest.skip("the compiler has no address sanitizer")
    found = fuzz(
        made,
        20_000,
        LD_PRELOAD=" ".join(preload),
        # Python frees nothing at its end, torch's libraries allocate before us: only what this library does is judged.
        ASAN_OPTIONS="detect_leaks=0:abort_on_error=0:exitcode=99",
        UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1",
        PYTHONMALLOC="malloc",
    )
    assert min(found["met"][name] for name in ("exact", "bucketed", "python", "learnt")) > 0

"""The C++ under AddressSanitizer and UndefinedBehaviorSanitizer, and drawn calls without number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero_cpu import build
from layerzero_cpu.library import native

FUZZ = Path(__file__).parent / "fuzz" / "run.py"
PROVING = os.environ.get("LAYERZERO_PROVE") == "1"
PROVE = pytest.mark.skipif(not PROVING, reason="long lane: make prove NAME=cpu")


def library_of(compiler: list[str], name: str) -> str | None:
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


def calls_made(*arguments: str, timeout: float, **variables: str) -> int:
    found = subprocess.run(
        [sys.executable, str(FUZZ), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-6000:]
    print(found.stdout.strip())
    counted = re.match(r"(\d+) calls, none wrong", found.stdout)
    assert counted is not None, found.stdout
    return int(counted[1])


@pytest.mark.timeout(300)
def test_drawn_calls_give_right_results():
    assert calls_made("--count", "1000", "--seed", "1", timeout=280) >= 1000


@PROVE
@pytest.mark.timeout(7200)
def test_two_hundred_thousand_drawn_calls_give_right_results():
    assert calls_made("--count", "200000", "--seed", "2", timeout=7000) >= 200_000


@PROVE
@pytest.mark.needs_tool("g++")
@pytest.mark.timeout(3600)
def test_sanitizers_find_nothing(tmp_path):
    compiler = build.compiler()
    assert compiler is not None
    # the C++ library beside it: the sanitizer looks for its own way to throw when it is loaded, before torch brings one
    runtimes = [library_of(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if None in runtimes:
        pytest.skip("this compiler has no sanitizers")
    runtime = " ".join(map(str, runtimes))
    # the best set and the one whose loops are the same on every processor; the others would take minutes to compile
    sets = tuple(dict.fromkeys(("portable", *native.isas_here()[-2:])))
    made = build.build(tmp_path / build.NAME, sanitize=True, isas=sets)
    settings = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    count = 5000 if PROVING else 300
    made_calls = calls_made(
        "--count", str(count), "--seed", "3", "--library", str(made), "--isa", *sets,
        timeout=3000, LD_PRELOAD=runtime, **settings,
    )  # fmt: skip
    assert made_calls >= count

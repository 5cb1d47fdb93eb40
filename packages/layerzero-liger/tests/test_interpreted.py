"""Liger's real kernels, run on the CPU by Triton's interpreter in a process of its own (see tests/interpreted)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
PROVE = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=liger")

pytestmark = [pytest.mark.needs_package("liger_kernel"), pytest.mark.needs_package("triton")]


def passed(*arguments: str, **variables: str) -> int:
    """How many tests passed in an inner run of pytest; a failure there is one here."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
        cwd=FOLDER.parents[3],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    counted = re.search(r"(\d+) passed", found.stdout)
    return 0 if counted is None else int(counted[1])


@pytest.mark.req("R-BK-LG-02")
@pytest.mark.req("R-BK-LG-04")
def test_every_adapter_is_right_over_the_real_library():
    assert passed(str(FOLDER)) >= 20


@PROVE
@pytest.mark.req("R-BK-LG-02")
def test_the_conformance_kit_passes_over_the_real_library():
    """But for its test with threads: the interpreter knows no two kernels at a time."""
    kit = str(FOLDER / "kit")
    options = (
        "-p",
        "layerzero_verify.testing.pytest_plugin",
        "--lz-plugin",
        "liger_on_cpu.plugin",
        "-k",
        "not thread_safe",
    )
    count = passed(*options, kit, PYTHONPATH=os.pathsep.join((kit, *sys.path[1:])), LIGER_KIT="liger_on_cpu")
    print(f"{count} tests of the conformance kit passed")
    assert count >= 150

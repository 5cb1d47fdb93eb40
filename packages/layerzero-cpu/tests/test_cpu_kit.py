"""The backend passes the same kit as third parties, with the instruction set in force; in the long lane with all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero_cpu.library import native
from layerzero_verify.testing.compositions import THOROUGH

PROVING = os.environ.get("LAYERZERO_PROVE") == "1"


@pytest.mark.timeout(600)
@pytest.mark.req("R-BK-CPU-04")
@pytest.mark.parametrize("isa", native.isas_here() if PROVING else [native.isa()])
def test_the_backend_passes_the_kit(isa: str, tmp_path: Path) -> None:
    (tmp_path / "test_kit.py").write_text("from layerzero_verify.testing.suite import *\n", encoding="utf-8")
    # Where the processor has no bf16, torch's own product says so once: the reference's words, not a kernel's.
    settings = "[pytest]\nfilterwarnings =\n    error\n    ignore:mkldnn_matmul failed\n"
    (tmp_path / "pytest.ini").write_text(settings, encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", "-p", "no:logging",
        "-p", "layerzero_verify.testing.pytest_plugin", "--lz-plugin", "layerzero_cpu.plugin", str(tmp_path),
        *(("--lz-compositions", str(THOROUGH)) if PROVING else ()),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "LAYERZERO_CPU_ISA": isa, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]

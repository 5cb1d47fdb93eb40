"""Each vendor's kernels are compiled by a process without a CUDA context, and loaded here without a compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_elsewhere.py"
VENDORS = {
    "triton": ("triton.rms_norm.rows",),
    "quack": ("quack.rms_norm.cute", "quack.rope.cute", "quack.cross_entropy.cute"),
    "flash_attn.cute": ("flashattn4.attention.sm90", "flashattn4.paged_attention.sm90_decode"),
    "flashinfer": ("flashinfer.silu_and_mul.fused", "flashinfer.attention.single_decode"),
}


@pytest.mark.parametrize("vendor", VENDORS)
def test_another_process_compiles_without_a_context_and_this_one_only_loads(vendor: str) -> None:
    pytest.importorskip(vendor, reason="the vendor is not installed")
    done = subprocess.run([sys.executable, str(SCRIPT), *VENDORS[vendor]], capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(VENDORS[vendor]), done.stderr[-3000:]
    assert [item for item in found if not item["ok"]] == [], done.stderr[-3000:]

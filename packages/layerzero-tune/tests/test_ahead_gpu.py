"""On a GPU other processes compile what a tuning run lacks, and this one only loads it before the race."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.dispatch import compiling as jit
from layerzero.jit import cache as jit_cache
from layerzero.telemetry.events import events
from layerzero_tune import ahead

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
KERNEL = "triton.rms_norm.rows"


def test_a_tuning_run_loads_what_other_processes_have_compiled(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="the vendor is not installed")
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "jit"))
    for name in {**jit_cache.VENDOR_FOLDERS, **jit_cache.DEEP_FOLDERS}:
        monkeypatch.setenv(name, "")
    for module, name in ((jit, "_queue"), (ahead, "_helpers")):
        monkeypatch.setattr(module, name, None)
    lz.reset()
    lz.configure(allow=["triton", "torch", "reference"])
    where: dict[str, str] = {}
    stop = events.subscribe(
        lambda tree: where.update(
            {
                item.attributes["kernel"]: item.attributes.get("compiled", item.error)
                for item in tree
                if item.kind == "compile"
            }
        )
    )
    try:
        with torch.no_grad():
            x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((24, 2048), (2048,)))
            ctx = lz.select("rms_norm", x, weight).context
            seen: list[int] = []
            found = lz.tune(
                [ctx], database=tmp_path / "p.db", thorough=True, progress=lambda now: seen.append(now.to_compile)
            )
    finally:
        stop()
        lz.reset()
    assert KERNEL in found.outcomes[0].trial.times and where[KERNEL] == "elsewhere" and max(seen) > 0

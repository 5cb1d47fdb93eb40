"""The gate on a GPU: streams that are not waited for, and that none of our kernels is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerzero_hostile.gate import find_cheats
from tools.planted_cheats import CHEATS, install, install_stream_cheats

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_work_on_a_stream_that_nobody_waits_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = install_stream_cheats(tmp_path)
    names += [install(tmp_path, name) for name in ("honest", "cached_by_pointer", "memory_of_the_last_result")]
    monkeypatch.setenv("LAYERZERO_PLUGINS", ",".join(names))
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(tmp_path / "quarantine.json"))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_cheats(kernels=[f"{name}.rms_norm.fast" for name in names], device="cuda", seed=1)
    codes = {item["kernel"].split(".")[0]: item["code"] for item in found}
    assert codes["honest"] is None
    assert codes["cached_by_pointer"] == CHEATS["cached_by_pointer"][0]
    assert codes["memory_of_the_last_result"] == "HOSTILE_UNWRITTEN"
    # Which phase first reads a result that is not there yet is a matter of the moment.
    unfinished = ("HOSTILE_UNFINISHED", "HOSTILE_UNWRITTEN", "HOSTILE_STALE", "HOSTILE_TIMED")
    for name in names[:2]:
        assert codes[name] in unfinished, (name, codes[name])


def test_no_kernel_of_ours_is_refused_on_a_gpu() -> None:
    backends = os.environ.get("LAYERZERO_HOSTILE_BACKENDS", "torch,sdpa,triton").split(",")
    found = [item for backend in backends for item in find_cheats(backend=backend, device="cuda", seed=1)]
    assert {item["kernel"]: item["message"] for item in found if item["code"]} == {}
    assert sum(not item["skipped"] for item in found) > 20

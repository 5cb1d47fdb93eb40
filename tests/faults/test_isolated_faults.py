"""Isolated backends through the ordinary call: a hang is answered and got over, two versions of a library live at once.

Each test starts several processes that import torch: the long lane, make prove NAME=faults.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.isolation.process import Settings
from layerzero.isolation.worker import Worker, close_all, workers
from layerzero.runtime.state import state

pytestmark = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=faults")

ROOT = Path(__file__).resolve().parents[2]
Q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
KERNEL = "toy.attention.plain"


def toy() -> ModuleType:
    path = ROOT / "packages/layerzero-core/tests/isolation/isolated_backend.py"
    spec = importlib.util.spec_from_file_location("isolated_backend", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def isolated(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    made = toy()
    made.install(tmp_path / "site", tmp_path / "vendor")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "toy")
    monkeypatch.setenv("LAYERZERO_ON_FIRST_USE", "off")  # the fixture vouches for its kernels
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(tmp_path / "quarantine.json"))
    lz.reset()
    # Only what never answers has to wait for its deadline.
    deadline_s = 2.0 if request.node.callspec.params["fault"] == "hangs" else 60.0
    entry = {"mode": "subprocess", "path": [str(tmp_path / "vendor")], "deadline_s": deadline_s}
    lz.configure(isolation={"toy": entry}, prefer=["toy"], breaker={"cooldown_s": 0.2, "probe": False})
    yield made
    close_all()
    lz.reset()


def scaled(scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(Q, Q, Q, scale=scale)


@pytest.mark.req("R-FAIL-10", "R-HLTH-03")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("hangs", "ISOLATION_TIMEOUT"),
        ("killed", "ISOLATION_CRASHED"),
        ("segfault", "ISOLATION_CRASHED"),
        ("garbage", "ISOLATION_GARBAGE"),
        ("half", "ISOLATION_TRUNCATED"),
        ("out_of_memory", "OUT_OF_MEMORY"),
    ],
)
def test_a_fault_of_the_child_is_a_detour_and_then_over(
    isolated: ModuleType, fault: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.testing.assert_close(lz.attention(Q, Q, Q), F.scaled_dot_product_attention(Q, Q, Q))
    assert lz.which("attention", Q, Q, Q) == KERNEL
    number = 100.0 + isolated.FAULTS.index(fault)
    with caplog.at_level(logging.ERROR, logger="layerzero.dispatch"):
        torch.testing.assert_close(lz.attention(Q, Q, Q, scale=number), scaled(number))
    assert code in caplog.text
    end = time.monotonic() + 60
    while state.health.snapshot().blocks(KERNEL, "toy"):
        assert time.monotonic() < end
        time.sleep(0.05)
    for worker in workers():
        worker._not_before = 0.0  # the wait between starts is tested elsewhere
    torch.testing.assert_close(lz.attention(Q, Q, Q, scale=0.5), scaled(0.5))
    assert lz.explain("attention", Q, Q, Q, scale=0.5).ran == KERNEL  # in a new process, as if nothing had been
    assert not state.health.snapshot().kernels


@pytest.mark.req("R-ISO-04")
def test_two_versions_of_one_library_run_at_once(tmp_path: Path) -> None:
    made = toy()
    for version in ("1.5", "2.0"):
        made.install(tmp_path / f"site{version}", tmp_path / version, version=version)
        module = tmp_path / version / "toyvendor.py"
        module.write_text(module.read_text() + f"\ndef version(x): return x * {version}\n")
    both = {
        version: Worker(Settings("toy", path=(str(tmp_path / version),), deadline_s=30.0)) for version in ("1.5", "2.0")
    }
    wrong: list[Any] = []

    def use(version: str) -> None:
        for _ in range(50):
            if not torch.equal(both[version].call("toyvendor:version", (Q,), {}), Q * float(version)):
                wrong.append(version)

    try:
        threads = [threading.Thread(target=use, args=(version,)) for version in both for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and both["1.5"].pid != both["2.0"].pid and {w.starts for w in both.values()} == {1}
    finally:
        for worker in both.values():
            worker.close()

"""The plugins of pytest and the profilers, each on a hot path of ours."""

from __future__ import annotations

import asyncio
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import freezegun
import pytest
import torch

import layerzero as lz
from layerzero.dispatch import run as dispatch_run
from tools.prove import header

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.req("R-ENV-13"), pytest.mark.usefixtures("fresh")]


@pytest.fixture
def fresh() -> Any:
    lz.reset()
    yield
    lz.reset()


@pytest.fixture
def call() -> Any:
    """A hot call: an RMS norm of four rows, chosen once."""
    x, weight = torch.randn(4, 64), torch.ones(64)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return lz.rms_norm(x, weight)

    run()
    return run


@pytest.mark.limit_leaks("64 KB", filter_fn=lambda stack: not any("memray" in frame[1] for frame in stack.frames))
def test_ten_thousand_hot_calls_leak_nothing(call: Any) -> None:
    for _ in range(10_000):
        call()


def test_a_leak_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pytest\nkept = []\n@pytest.mark.limit_leaks('64 KB')\ndef test_a():\n"
        "    kept.extend(bytearray(100_000) for _ in range(50))\n"
    )
    flags = [part for name in ("cacheprovider", "benchmark", "asyncio") for part in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", *flags, "test_a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert "1 failed" in done.stdout and "memray" in done.stdout, done.stdout


@pytest.mark.limit_memory("64 MB")
def test_a_hot_call_is_small(call: Any) -> None:
    call()


def test_a_hot_call_under_the_benchmark_plugin(benchmark: Any, call: Any) -> None:
    out = benchmark.pedantic(call, rounds=50, iterations=20, warmup_rounds=2)
    assert out.shape == (4, 64) and benchmark.stats.stats.rounds == 50


@pytest.mark.asyncio
async def test_calls_of_an_event_loop_choose_alike(call: Any) -> None:
    want = call()
    found = await asyncio.gather(*(asyncio.to_thread(call) for _ in range(16)))
    assert all(torch.equal(item, want) for item in found)


def test_a_hot_call_selects_nothing(mocker: Any, call: Any) -> None:
    decide = mocker.spy(dispatch_run, "decide")
    call()
    assert decide.call_count == 0
    with torch.no_grad():
        lz.rms_norm(torch.randn(3, 48), torch.ones(48))
    assert decide.call_count >= 1, "a call not seen before does"


def test_a_log_bears_the_time_of_its_start() -> None:
    with freezegun.freeze_time("2026-11-15 12:34:56"):
        assert "started 2026-11-15 12:34:56 UTC" in header("lane", ["true"])
        assert datetime.datetime.now(datetime.UTC).year == 2026


def test_pyinstrument_names_where_the_time_goes() -> None:
    from pyinstrument import Profiler

    x, weight = torch.randn(4, 64), torch.ones(64)
    profiler = Profiler(interval=0.0005)
    with profiler:
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:  # what a call costs that is not hot: it is described and decided anew
            lz.explain("rms_norm", x, weight)
    text = profiler.output_text(unicode=False, show_all=True)
    assert "select" in text and "layerzero/" in text
    out = ROOT / "build" / "prove" / "tools-profile.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(profiler.output_html(), encoding="utf-8")


def test_memray_sees_what_a_loop_allocates(tmp_path: Path, call: Any) -> None:
    import memray

    file = tmp_path / "loop.bin"
    with memray.Tracker(file):
        kept = [call() for _ in range(100)]
    found = list(memray.FileReader(file).get_leaked_allocation_records(merge_threads=True))
    # the tensors' own Python objects; their storage comes from an allocator inside torch, which the soak watches by RSS
    assert sum(record.size for record in found) >= sum(map(sys.getsizeof, kept)), "results that are kept are seen"


def test_coverage_workers_and_timeouts_work_together(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import time\nfrom tools.workspace import group\n"
        "def test_a(): assert group('lint')\n"
        "def test_b(): time.sleep(60)\n"
    )
    flags = ["-q", "-n", "2", "--timeout=2", "--cov=tools.workspace", "--cov-report=term"]
    flags += [part for name in ("cacheprovider", "memray", "benchmark", "asyncio") for part in ("-p", f"no:{name}")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *flags, "test_a.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert "1 failed, 1 passed" in done.stdout and "Timeout" in done.stdout, done.stdout
    assert "workspace.py" in done.stdout


def test_hypothesis_draws_and_shrinks() -> None:
    from hypothesis import find
    from hypothesis import strategies as st

    assert find(st.integers(), lambda value: value > 1000) == 1001


def test_nvml_says_what_torch_says() -> None:
    import pynvml

    if torch.cuda.device_count() == 0:
        with pytest.raises(pynvml.NVMLError):  # no driver, or it was never initialised
            pynvml.nvmlDeviceGetHandleByIndex(0)
        return
    pynvml.nvmlInit()
    try:
        assert pynvml.nvmlDeviceGetCount() >= torch.cuda.device_count()
    finally:
        pynvml.nvmlShutdown()


@pytest.mark.req("R-FUZZ-01")
def test_where_atheris_cannot_be_built_our_own_engine_fuzzes() -> None:
    from tests.fuzz.targets import TARGETS
    from tools.fuzz import Fuzzer

    fuzzer = Fuzzer(TARGETS[0], seed=1)
    fuzzer.begin()
    before = len(fuzzer.lines)
    fuzzer.play(300)
    assert sum(fuzzer.outcomes.values()) >= 300 and len(fuzzer.lines) > before

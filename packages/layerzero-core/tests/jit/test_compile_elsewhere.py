"""Compilers live elsewhere: another process compiles and sees no GPU, this one loads; what goes wrong harms nobody."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.dispatch import beside
from layerzero.dispatch import compiling as jit
from layerzero.isolation import process
from layerzero.isolation.compilers import compilers, follow, order_text
from layerzero.jit.index import Index
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Platform
from layerzero.model.grouped import make_grouped_batch
from layerzero.model.kv_cache import make_paged_batch
from layerzero.runtime.observation import families
from layerzero.runtime.state import state
from layerzero.telemetry.events import events
from tools.pytest_fixtures import module_beside

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")

_shared = module_beside(__file__, "compiled_lab")
cache, ready, wait_until = _shared.cache, _shared.ready, _shared.wait_until
STEP_BACK = process._step_back
KERNEL, X, W, EXPECTED = _shared.KERNEL, _shared.X, _shared.W, _shared.EXPECTED


@pytest.fixture
def planted(lab: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel with one of the `planted_compilers`; gives the file in which those tell of themselves.

    They do not go last here: on a machine whose processors are all busy their turn would not come.
    """
    told = tmp_path / "told.json"
    monkeypatch.setattr(process, "_step_back", lambda pid: None)
    monkeypatch.setenv("PLANTED_TOLD", str(told))
    monkeypatch.syspath_prepend(str(HERE))

    def use(compiler: str, **fields: Any) -> Path:
        named = compiler if compiler == "device" else f"planted_compilers:{compiler}"
        spec = _shared.spec_of(compiler=named, **fields)
        object.__setattr__(spec, "function", "planted_compilers:rms_norm")
        lab.use(spec)
        return told

    yield use
    assert not jit.queue().wait(timeout_s=200)
    compilers.end_idle(-1.0)
    assert compilers.pids == ()


def _reason() -> Any:
    (why,) = lz.explain("rms_norm", X, W).decision.candidate(KERNEL).reasons
    return why


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_kernel_compiles_in_a_process_that_sees_no_gpu_and_goes_last(
    planted: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_step_back", STEP_BACK)
    told = planted("good")
    compiled, loaded = events.histograms["compile"].read()[0][-1], events.histograms["load"].read()[0][-1]
    torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
    wait_until(ready, 400.0)
    assert lz.explain("rms_norm", X, W).chosen == KERNEL
    torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
    seen = json.loads(told.read_text())
    ctx = lz.explain("rms_norm", X, W).decision.context
    assert seen["pid"] != os.getpid() and seen["parent"] == os.getpid()
    assert seen["nice"] == 19 and seen["policy"] == os.SCHED_BATCH and seen["memory"] == 16 << 30 and seen["gpus"] == ""
    assert seen["x"] == ["meta", [3, 8], [8, 1], "torch.float32"]
    assert (seen["kernel"], seen["device"], seen["hidden"]) == (KERNEL, ctx.device.signature, 8)
    by = (cache / "triton" / "compiled_by.log").read_text().split()
    assert by == [str(seen["pid"])]  # this process has only loaded
    assert not jit.queue().wait(timeout_s=60)  # it is written down and counted after it is ready
    (entry,) = Index(cache).entries()
    assert any(path.endswith("scale_8.so") for path in entry.evidence) and entry.seconds > 0
    assert events.histograms["compile"].read()[0][-1] == compiled + 1
    assert events.histograms["load"].read()[0][-1] == loaded + 1
    names = {item.name for item in families()}
    assert {"layerzero_load_seconds", "layerzero_long_loads_total"} <= names


FAULTS = {
    "hang": ("JIT_TIMEOUT", "2 s", False),
    "hold": ("JIT_TIMEOUT", "2 s", False),
    "crash": ("JIT_FAILED", "SIGSEGV", True),
    "fill": ("JIT_FAILED", "File too large", False),
    "eat": ("JIT_FAILED", "MemoryError", False),
    "refuse": ("JIT_FAILED", "no such instruction", True),
}


@pytest.mark.req("R-WARM-01", "R-WARM-08")
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_go_on_whatever_a_compiler_does_and_the_failure_is_told(
    planted: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Hangs, holds the interpreter, crashes, fills the disk, takes all memory, raises: each with its reason."""
    code, words, lasting = FAULTS[fault]
    if code == "JIT_TIMEOUT":
        monkeypatch.setenv("LAYERZERO_JIT_TIMEOUT", "2")
    told = planted(fault)
    lz.rms_norm(X, W, 1e-6)
    while not state.world.uncompilable:  # requests of all the time it takes
        torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
        time.sleep(0.001)
    why = _reason()
    assert why.code == code and words in str(why)
    assert not ready() and jit.queue().wait(timeout_s=60) == frozenset()
    assert bool(Index(cache).failed()) is lasting  # what says nothing about the kernel is tried again tomorrow
    torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
    assert jit.queue().busy == 0  # and is not begun again here
    seen = json.loads(told.read_text())
    if fault in ("hang", "hold", "crash"):  # what was killed or died is gone with all it had started
        wait_until(lambda: not _alive(seen["pid"]) and not _alive(seen["started"]))
    else:
        os.kill(seen["started"], signal.SIGKILL)


def test_a_compiler_that_went_wrong_does_not_hold_up_the_next_one(planted: Any) -> None:
    planted("crash")
    lz.rms_norm(X, W, 1e-6)
    wait_until(lambda: bool(state.world.uncompilable))
    planted("good")
    jit.forget_failures()
    lz.rms_norm(X, W, 1e-6)
    wait_until(ready)


def test_loads_beside_requests_are_a_second_apart_and_long_ones_are_counted(
    planted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "LONG_S", 0.0)
    planted("good")
    at: list[float] = []
    stop = events.subscribe(lambda tree: at.extend(item.start / 1e9 for item in tree if item.kind == "load"))
    try:
        for hidden in (8, 16):
            lz.rms_norm(torch.ones(3, hidden), torch.ones(hidden), 1e-6)
        wait_until(lambda: len(state.world.ready) == 2)
        wait_until(lambda: len(at) == 2)
        assert not jit.queue().wait(timeout_s=60)  # the line of the log is written after that of the event
    finally:
        stop()
    assert at[1] - at[0] >= 0.9
    assert state.counters.long_loads == 2 and caplog.text.count(f"loading {KERNEL}") == 2


def test_what_must_be_tuned_on_the_device_is_left_to_warm_up_and_explain_says_so(planted: Any, cache: Path) -> None:
    planted("tuned")
    lz.rms_norm(X, W, 1e-6)
    wait_until(lambda: bool(state.world.uncompilable))
    assert not jit.queue().wait(timeout_s=60)
    why = _reason()
    assert why.code == "JIT_NEEDS_DEVICE" and "12 configurations" in str(why) and "lz.warmup" in why.hint
    assert lz.explain("rms_norm", X, W).decision.pending == (KERNEL,) and not Index(cache).failed()
    lz.rms_norm(X, W, 1e-6)
    assert jit.queue().busy == 0
    result = lz.warmup([lz.explain("rms_norm", X, W).decision.context], background=False)
    assert result.ok and ready() and lz.explain("rms_norm", X, W).chosen == KERNEL


def test_what_a_compiler_declines_is_compiled_by_a_thread_here(planted: Any, cache: Path) -> None:
    planted("declined")
    lz.rms_norm(X, W, 1e-6)
    wait_until(ready)
    assert (cache / "triton" / "compiled_by.log").read_text().split() == [str(os.getpid())]


def test_libraries_are_mapped_before_the_turn_to_load_comes(
    planted: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the C library, which does not hold the interpreter; the adapter then finds them mapped."""
    mapped: list[bool] = []
    turn = beside.turn

    def looked(paced: bool) -> Any:
        mapped.append("scale_8.so" in Path("/proc/self/maps").read_text())
        return turn(paced)

    monkeypatch.setattr(beside, "turn", looked)
    planted("library")
    lz.rms_norm(X, W, 1e-6)
    wait_until(ready)
    assert mapped == [True]


def test_adapters_are_imported_at_the_start_and_only_once(
    lab: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_adapter.py").write_text("def rms_norm(x, weight, eps):\n    return x\n")
    (tmp_path / "broken_adapter.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(beside.DeviceSpec, "detect", lambda word: DeviceSpec.for_sm(90))
    fields: dict[str, Any] = {
        "platforms": frozenset({Platform.CUDA}), "grid_layout": "library", "compiler": "planted_compilers:good",
    }  # fmt: skip
    spec = _shared.spec_of(**fields)
    lab.use(
        replace(spec, kernel_id="cc.rms_norm.k0", function="late_adapter:rms_norm"),
        replace(spec, kernel_id="cc.rms_norm.k1", function="broken_adapter:rms_norm"),
    )
    gpu = torch.device("cuda")
    assert beside.import_adapters(torch.device("cpu")) == ()
    with lz.scoped(jit="off"):
        assert beside.import_adapters(gpu) == ()
    found = beside.import_adapters(gpu)
    assert "late_adapter" in found and "late_adapter" in sys.modules and "broken_adapter" not in found
    assert state.world.unbindable["cc.rms_norm.k1"].code == "BACKEND_IMPORT_FAILED"
    assert "late_adapter" not in beside.import_adapters(gpu)


def test_batches_reach_a_compiler_as_what_they_are_made_of(planted: Any) -> None:
    lens = torch.tensor([3, 5], dtype=torch.int32)
    paged = make_paged_batch(torch.zeros(2, 4, dtype=torch.int32), lens)
    grouped = make_grouped_batch(
        torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([[2], [4]], dtype=torch.int32),
    )  # fmt: skip
    spec = _shared.spec_of(compiler="planted_compilers:keep")
    weight = torch.ones(8, requires_grad=True)
    context = {"device": DeviceSpec.detect("cpu").to_json()}
    assert "seconds" in follow(order_text(spec, (paged, grouped, weight), {}, context, True))
    one, two, three = importlib.import_module("planted_compilers").kept.pop().args
    assert one.context_lens_host == (3, 5) and one.query_lens is None and one.is_decode
    assert one.block_tables.device.type == "meta" and one.block_tables.shape == (2, 4)
    assert two.kv_lens_host == grouped.kv_lens_host and two.kv_lens.shape == (2, 1)
    assert three.requires_grad and not one.context_lens.requires_grad


def test_a_kernel_that_declares_the_device_is_not_begun_beside_requests(planted: Any) -> None:
    planted("device")
    lz.rms_norm(X, W, 1e-6)
    assert jit.queue().busy == 0 and compilers.pids == ()
    assert _reason().code == "JIT_NEEDS_DEVICE"


def test_an_order_that_metadata_cannot_describe_is_compiled_in_the_thread_as_before(
    planted: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted("good")
    monkeypatch.setattr(beside, "order_for", lambda *given: None)
    lz.rms_norm(X, W, 1e-6)
    wait_until(ready)
    assert (cache / "triton" / "compiled_by.log").read_text().split() == [str(os.getpid())]


def test_compilers_end_when_nobody_asks_them(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = planted("good")
    lz.rms_norm(X, W, 1e-6)
    wait_until(ready)
    pid = json.loads(told.read_text())["pid"]
    assert compilers.pids == (pid,) and compilers.end_idle() is not None
    assert compilers.end_idle(0.0) is None
    wait_until(lambda: not _alive(pid))


def test_compilers_end_with_their_parent_even_if_one_holds_the_interpreter(
    planted: Any, cache: Path, tmp_path: Path
) -> None:
    faults = ("hang", "hold")
    planted("hang")
    program = textwrap.dedent(f"""
        import sys, threading
        sys.path.insert(0, {str(HERE)!r})
        from layerzero.isolation import process
        process._step_back = lambda pid: None
        from layerzero.isolation.compilers import compilers, order_text
        from layerzero.model.device import DeviceSpec
        from layerzero.model.enums import Platform
        from layerzero.model.kernel import KernelSpec
        context = {{"device": DeviceSpec(Platform.CPU, "cpu").to_json()}}
        def ask(fault):
            kernel = KernelSpec("cc.rms_norm.plain", "rms_norm", "cc", "planted_compilers:rms_norm",
                                platforms=frozenset({{Platform.CPU}}), dtypes=frozenset({{"float32"}}),
                                compiler="planted_compilers:" + fault)
            told = {{"PLANTED_TOLD": {str(tmp_path)!r} + "/" + fault}}
            compilers.ask(order_text(kernel, (), {{}}, context, False), 300.0, told)
        for fault in {faults!r}:
            threading.Thread(target=ask, args=(fault,)).start()
    """)
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: all((tmp_path / fault).exists() for fault in faults))
        seen = [json.loads((tmp_path / fault).read_text()) for fault in faults]
        pids = [item[name] for item in seen for name in ("pid", "started")]
        assert len(set(pids)) == 4 and all(map(_alive, pids))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(_alive, pids)))


def test_a_process_that_ends_does_not_wait_for_its_compilers(planted: Any, cache: Path) -> None:
    told = planted("hang")
    program = textwrap.dedent(f"""
        import sys, time, os, torch
        sys.path.insert(0, {str(HERE)!r})
        import layerzero as lz
        from layerzero.isolation import process
        from layerzero.model.enums import Platform
        from layerzero.model.kernel import KernelSpec
        from layerzero.runtime.state import state
        process._step_back = lambda pid: None
        world = state.world
        kernel = KernelSpec("cc.rms_norm.plain", "rms_norm", "cc", "planted_compilers:rms_norm", priority=200.0,
                            platforms=frozenset({{Platform.CPU}}), dtypes=frozenset({{"float32"}}), jit=True,
                            jit_key=("hidden",), compiler="planted_compilers:hang")
        state.publish(registry=world.registry.add((kernel,)))
        lz.rms_norm(torch.ones(3, 8), torch.ones(8))
        end = time.monotonic() + 120
        while not os.path.exists({str(told)!r}):
            assert time.monotonic() < end, lz.explain("rms_norm", torch.ones(3, 8), torch.ones(8))
            time.sleep(0.01)
    """)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "this process ends" in done.stderr and "not done after" not in done.stderr
    seen = json.loads(told.read_text())
    wait_until(lambda: not _alive(seen["pid"]) and not _alive(seen["started"]))
    assert not Index(cache).failed() and time.monotonic() - began < 300  # its deadline

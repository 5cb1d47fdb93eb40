"""Faults of a real GPU, each in a process of its own: illegal access, assert, hang, no memory; and many streams.

pytest -m gpu tests/faults/test_gpu_faults.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.isolation.process import Settings
from layerzero.isolation.wire import IsolationFault
from layerzero.isolation.worker import Worker
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.state import state
from tools.kernel_process import run_with_kernel

pytestmark = pytest.mark.gpu

POKE = """
    import torch, triton
    import triton.language as tl

    calls = 0

    @triton.jit
    def poke(p, offset):
        tl.store(p + offset, 1.0)

    def rms_norm(x, weight, eps):
        global calls
        calls += 1
        if x.is_cuda and calls > {good}:
            poke[(1,)](x, 1 << 42)
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)
"""
ASSERT = """
    import torch

    def rms_norm(x, weight, eps):
        if x.is_cuda:
            x.view(-1)[torch.full((4,), 1 << 20, device=x.device)]
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)
"""
LOST = """
    import torch

    calls = 0

    def rms_norm(x, weight, eps):
        global calls
        calls += x.is_cuda
        if x.is_cuda and calls > 3:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")  # as torch says it of a dying card
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)
"""
DIES = """
    first = caught(lz.rms_norm, X, W)
    for _ in range(200):
        if first is not None:
            break
        time.sleep(0.01)  # an error of the GPU comes late, at some later call
        first = caught(lz.rms_norm, X, W)
    again = caught(lz.rms_norm, X, W)
    cpu = torch.linspace(-1, 1, 24).reshape(3, 8)
    print(json.dumps({
        "first": first, "again": again, "cpu": right(cpu, lz.rms_norm(cpu, torch.ones(8), backend="reference")),
        "lost": {name: item.code.value for name, item in state.lost.items()}, "why": why(cpu, torch.ones(8)),
        "doctor": [item.code.value for item in lz.doctor(probe=False).checks if item.group == "health" and item.code],
    }))
    sys.stdout.flush()
    os._exit(0)  # the CUDA context cannot be torn down in order any more
"""
NEXT = """
    out = lz.rms_norm(X, W)
    print(json.dumps({"why": why(), "which": lz.which("rms_norm", X, W), "right": right(X, out)}))
"""


@pytest.mark.req("R-FAIL-02", "R-HLTH-03")
@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        (POKE.format(good=0), "DEVICE_POISONED"),
        (POKE.format(good=3), "DEVICE_POISONED"),
        (ASSERT, "DEVICE_POISONED"),
        pytest.param(LOST, "DEVICE_LOST", marks=pytest.mark.req("R-FAIL-11")),
    ],
    ids=["illegal_access_at_first_run", "illegal_access_when_hot", "device_side_assert", "device_lost_when_hot"],
)
def test_a_kernel_that_breaks_the_device_is_named_and_skipped_at_the_next_start(
    tmp_path: Path, kernel: str, code: str
) -> None:
    ended = run_with_kernel(tmp_path, kernel, DIES, device="cuda")
    assert ended.said is not None, ended.err
    assert ended.said["first"] == ["DeviceLostError", code], ended.said
    assert ended.said["again"] == ["DeviceLostError", code]
    assert ended.said["cpu"], "the CPU still computes in that process"
    assert ended.said["lost"] == {"cuda:0": code} and code in ended.said["doctor"]
    assert ended.said["why"] == ["QUARANTINED"]
    after = run_with_kernel(tmp_path, kernel, NEXT, device="cuda")
    assert after.said is not None, after.err
    assert after.said["why"] == ["QUARANTINED"] and after.said["right"]
    assert after.said["which"] != "bad.rms_norm.kernel"


@pytest.mark.req("R-FAIL-02", "R-HLTH-03")
def test_an_illegal_access_in_an_isolated_process_leaves_this_one_well(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "poking.py").write_text(textwrap.dedent(POKE.format(good=0)))
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = Worker(Settings("poking", path=(str(tmp_path),), deadline_s=60.0))
    x, weight = torch.randn(4, 64, device="cuda"), torch.ones(64, device="cuda")
    try:
        with pytest.raises(IsolationFault):
            worker.call("poking:rms_norm", (x, weight, 1e-6), {})
        pid = worker.pid
        torch.testing.assert_close(lz.rms_norm(x, weight), torch.rms_norm(x, (64,), weight, 1e-6))
        worker._not_before = 0.0
        # The next call has a process with a sound context: the broken one was not used again.
        torch.testing.assert_close(worker.call("torch:neg", (x,), {}), -x)
        assert worker.pid != pid or pid is None
    finally:
        worker.close()


@pytest.mark.req("R-FAIL-10", "R-HLTH-03")
def test_a_kernel_that_hangs_on_the_gpu_is_ended_with_its_process(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "spinning.py").write_text("import torch\ndef spin(x):\n    torch.cuda._sleep(1 << 50)\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = Worker(Settings("spinning", path=(str(tmp_path),), deadline_s=3.0))
    x = torch.randn(1024, device="cuda")
    try:
        worker.load("spinning:spin")
        worker.call("torch:neg", (x,), {})
        with pytest.raises(IsolationFault) as caught:
            worker.call("spinning:spin", (x,), {})
        assert caught.value.reason.code == "ISOLATION_TIMEOUT" and caught.value.reason.limit == 3.0
        torch.testing.assert_close(x + 1, x + 1)
        torch.cuda.synchronize()
    finally:
        worker.close()


OOM = """
    import gc
    torch.cuda.set_per_process_memory_fraction(0.02)  # a small GPU, as far as torch is concerned
    total = torch.cuda.get_device_properties(0).total_memory * 0.02
    side = int((total / (2 * 2 * 32)) ** 0.5)  # one half of it for the scores of 32 heads
    q = torch.randn(1, 32, side, 64, device="cuda", dtype=torch.float16)
    state.use(load_plugins(entry_points=()).registry)
    with lz.scoped(boosts={"sdpa.attention.math": 500.0}):
        first = lz.which("attention", q, q, q)
        out = lz.attention(q, q, q)
        ran = lz.explain("attention", q, q, q).ran
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    close = bool(torch.allclose(out.float(), want.float(), atol=2e-2))
    with lz.scoped(allow=["sdpa.attention.math"], fallback_enabled=False):
        none = caught(lz.attention, q, q, q)
    print(json.dumps({"first": first, "ran": ran, "close": close, "none": none}))
"""


@pytest.mark.req("R-MEM-04")
def test_out_of_memory_on_the_gpu_a_leaner_kernel_runs(tmp_path: Path) -> None:
    ended = run_with_kernel(tmp_path, POKE.format(good=10**9), OOM, device="cuda", timeout=180)
    assert ended.said is not None, ended.err
    assert ended.said["first"] == "sdpa.attention.math"
    assert ended.said["ran"] not in ("sdpa.attention.math", "reference.attention.plain") and ended.said["close"]
    assert ended.said["none"] is not None and ended.said["none"][1] in ("OUT_OF_MEMORY", "NO_KERNEL")


@pytest.mark.req("R-MEM-03", "R-MEM-05")
def test_memory_taken_by_another_process_counts() -> None:
    """Another process takes nearly all of the GPU: the kernel with large scratch is out until it has gone."""
    q = torch.randn(1, 32, 4096, 64, device="cuda", dtype=torch.float16)
    need = lz.explain("attention", q, q, q).decision.candidate("sdpa.attention.math").memory[0]
    end = time.monotonic() + 120
    while need >= (free := torch.cuda.mem_get_info()[0]) // 4:
        assert time.monotonic() < end, "a GPU that is nearly full already shows nothing here"
        time.sleep(0.5)
    hog = (
        "import sys, torch; x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda')\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    lz.reset()
    lz.configure(memory_headroom_mb=256)

    def reasons() -> list[str]:
        lz.attention(q, q, q)  # hot: the timer looks at what is free, not the call
        found = lz.explain("attention", q, q, q).decision.candidate("sdpa.attention.math")
        return [item.code.value for item in found.reasons]

    def settles(exceeded: bool) -> None:
        end = time.monotonic() + 60
        while ("MEMORY_HEADROOM_EXCEEDED" in reasons()) is not exceeded:
            assert time.monotonic() < end, (reasons(), dict(state.world.free_memory or {}), need)
            time.sleep(0.1)

    try:
        settles(False)
        taken = free - (256 << 20) - need // 2
        other = subprocess.Popen(
            [sys.executable, "-c", hog, str(taken)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None and other.stdin is not None
        try:
            assert other.stdout.readline().strip() == "up"
            settles(True)
        finally:
            other.communicate(timeout=60)  # closes what it reads from, so it ends, and what we read
        settles(False)
    finally:
        lz.reset()


@pytest.mark.req("R-MEM-06")
def test_many_allocations_of_changing_sizes_do_not_wear_the_memory_down() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.ones(1024, device="cuda", dtype=torch.float16)
    torch.cuda.empty_cache()
    reserved = []
    for step in range(600):
        rows = int(torch.randint(1, 3000, (1,), generator=generator))
        seq = int(torch.randint(1, 900, (1,), generator=generator))
        q = torch.randn(1, 16, seq, 64, device="cuda", dtype=torch.float16)
        lz.attention(q, q, q, is_causal=True)
        lz.rms_norm(torch.randn(rows, 1024, device="cuda", dtype=torch.float16), weight)
        if step >= 200:
            reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[200:]) <= 1.25 * max(reserved[:200]), "the allocator holds ever more"


@pytest.mark.req("R-CONC-02")
def test_many_streams_at_once_compute_what_one_computes() -> None:
    """8 threads with a stream each, mixed ops, policy changes meanwhile: results as on one stream, no error."""
    half = torch.float16
    weight = torch.rand(512, device="cuda", dtype=half) + 0.5
    inputs = [torch.randn(4, 8, 256, 64, device="cuda", dtype=half) for _ in range(8)]
    rows = [torch.randn(64 + index, 512, device="cuda", dtype=half) for index in range(8)]
    wanted = [
        (torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double(), is_causal=True),
         torch.rms_norm(x.double(), (512,), weight.double(), 1e-6))
        for q, x in zip(inputs, rows, strict=True)
    ]  # fmt: skip
    torch.cuda.synchronize()
    problems: list[BaseException] = []
    begun = threading.Barrier(9)

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        try:
            begun.wait()
            with torch.cuda.stream(stream):
                for _ in range(60):
                    out = lz.attention(inputs[index], inputs[index], inputs[index], is_causal=True)
                    norm = lz.rms_norm(rows[index], weight)
                    stream.synchronize()
                    assert_close(out, wanted[index][0], tolerance("attention", half))
                    assert_close(norm, wanted[index][1], tolerance("rms_norm", half))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    swaps = 0
    try:
        while any(thread.is_alive() for thread in threads):
            lz.configure(deny=[("sdpa.attention.math", "torch.rms_norm.native")[swaps % 2]])
            swaps += 1
            time.sleep(0.005)
    finally:
        for thread in threads:
            thread.join()
        lz.reset()
    assert not problems, problems[0]
    assert swaps > 3


@pytest.mark.req("R-CONC-02")
@pytest.mark.parametrize("op", ["attention", "rms_norm", "layer_norm", "silu_and_mul", "linear"])
def test_every_kernel_runs_on_the_stream_of_its_caller(op: str) -> None:
    """Inputs of two streams are written late: a kernel on any other stream reads the zeros that were there before."""
    half = torch.float16
    values = [torch.randn(2, 4, 128, 64, device="cuda", dtype=half) for _ in range(2)]
    weight = torch.rand(64, device="cuda", dtype=half) + 0.5
    square = torch.randn(64, 64, device="cuda", dtype=half) / 8

    def args(x: Any) -> tuple[Any, ...]:
        more = {"attention": (x, x), "silu_and_mul": (), "linear": (square,)}
        return (x, *more.get(op, (weight,)))

    def wanted(x: Any) -> Any:
        x = x.double()
        if op == "attention":
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)
        if op == "silu_and_mul":
            return torch.nn.functional.silu(x[..., :32]) * x[..., 32:]
        if op == "linear":
            return torch.nn.functional.linear(x, square.double())
        if op == "layer_norm":
            return torch.nn.functional.layer_norm(x, (64,), weight.double(), None, 1e-5)
        return torch.rms_norm(x, (64,), weight.double(), 1e-6)

    lz.configure(on_first_use="off")
    try:
        kernels = lz.select(op, *args(values[0])).ranking
        assert kernels
        for kernel in kernels:
            getattr(lz, op)(*args(values[0]), backend=kernel)  # what is made at the first call is made here
            inputs = [torch.zeros_like(x) for x in values]
            streams = [torch.cuda.Stream() for _ in values]
            torch.cuda.synchronize()
            outs = []
            for stream, x, late in zip(streams, inputs, values, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
                    x.copy_(late)
                    outs.append(getattr(lz, op)(*args(x), backend=kernel))
            torch.cuda.synchronize()
            for out, late in zip(outs, values, strict=True):
                assert_close(out, wanted(late), tolerance(op, half, k=64), path=kernel)
    finally:
        lz.reset()


@pytest.mark.req("R-CONC-03")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_forked_after_the_gpu_was_used_computes_on_the_cpu() -> None:
    """CUDA cannot be used in such a child; calls on the CPU, hot and new, do not need it."""
    x, w = torch.randn(5, 64), torch.rand(64) + 0.5
    lz.rms_norm(x.cuda(), w.cuda())
    lz.rms_norm(x, w)  # a kernel that is not proven on this processor is checked here, and torch's result returned
    right = lz.rms_norm(x, w)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(100)  # a child that hangs is ended
            assert torch.equal(lz.rms_norm(x, w), right)
            for rows in (1, 3, 9):
                new = torch.randn(rows, 64)
                assert_close(lz.rms_norm(new, w), torch.rms_norm(new, (64,), w, 1e-6), tolerance("rms_norm", "float32"))
                assert lz.explain("rms_norm", new, w).ran == lz.which("rms_norm", new, w)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lz.rms_norm(x.cuda(), w.cuda()).is_cuda

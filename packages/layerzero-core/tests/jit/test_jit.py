"""No request compiles: kernels without their artifact wait, are compiled beside the requests, and then take part."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.dispatch import compiling as jit
from layerzero.errors import LockedKernelError, PolicyValidationError
from layerzero.jit import cache as jit_cache
from layerzero.jit.index import Index
from layerzero.jit.queue import Queue
from layerzero.model.artifact import artifact_of
from layerzero.runtime.state import state
from tools.pytest_fixtures import module_beside

HERE = Path(__file__).parent

_shared = module_beside(__file__, "compiled_lab")
cache, compiler = _shared.cache, _shared.compiler
Compiler, KERNEL, load_kernel, ready = _shared.Compiler, _shared.KERNEL, _shared.load_kernel, _shared.ready
spec_of, use, wait_until = _shared.spec_of, _shared.use, _shared.wait_until
X, W, EXPECTED = _shared.X, _shared.W, _shared.EXPECTED


def test_the_artifact_of_a_call_names_the_version_the_environment_and_the_key() -> None:
    ctx = lz.select("rms_norm", X, W).context
    found = artifact_of(spec_of(version="1.2"), ctx, "machine")
    assert found == (KERNEL, ("1.2", "machine", "dtype=float32", "hidden=8"))
    assert artifact_of(spec_of(jit_key=()), ctx, "machine") == (KERNEL, ("0", "machine"))


def test_a_kernel_without_its_artifact_does_not_run_and_says_why(lab: Any, cache: Path, compiler: Compiler) -> None:
    use(lab)
    with lz.scoped(jit="off"):
        out = lz.rms_norm(X, W, 1e-6)
        found = lz.explain("rms_norm", X, W)
    torch.testing.assert_close(out, EXPECTED)
    (why,) = found.decision.candidate(KERNEL).reasons
    assert why.code == "JIT_NOT_READY" and "dtype=float32, hidden=8" in f"{why.value}" and "lz.warmup" in why.hint
    assert found.decision.pending == (KERNEL,)
    assert compiler.runs == 0 and jit.queue().busy == 0


@pytest.mark.req("R-WARM-01", "R-WARM-05")
def test_requests_go_on_while_a_kernel_compiles_beside_them_and_then_it_takes_over(
    lab: Any, cache: Path, compiler: Compiler
) -> None:
    use(lab)
    compiler.gate.touch()
    before = [lab.run(lz.rms_norm, X, W, 1e-6)[1] for _ in range(50)]
    assert all(ran and ran != [KERNEL] for ran in before) and not ready()
    wait_until(lambda: compiler.runs == 1)
    lz.rms_norm(X, W, 1e-6)  # while the compiler is at work
    compiler.gate.unlink()
    wait_until(ready)
    assert lz.explain("rms_norm", X, W).chosen == KERNEL
    torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
    lz.rms_norm(X[:1], W, 1e-6)  # another length, the same artifact
    assert compiler.runs == 1


def test_a_call_that_says_block_waits_for_the_compiler(lab: Any, cache: Path, compiler: Compiler) -> None:
    use(lab)
    with lz.scoped(jit="block"):
        torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
        assert lz.explain("rms_norm", X, W).chosen == KERNEL and compiler.runs == 1
    assert ready()
    assert lz.explain("rms_norm", X, W).chosen == KERNEL  # outside the scope, too: it is there now


def test_the_mode_comes_from_policy_and_environment(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lz.get_config().jit == "background"
    lz.configure(jit="off")
    assert lz.get_config().jit == "off"
    lz.reset()
    monkeypatch.setenv("LAYERZERO_JIT", "block")
    lz.reset()
    assert lz.get_config().jit == "block"
    with pytest.raises(PolicyValidationError, match="'background', 'block' or 'off'"):
        lz.configure(jit="later")


def test_a_locked_kernel_that_is_not_compiled_raises_and_is_being_compiled(
    lab: Any, cache: Path, compiler: Compiler
) -> None:
    use(lab)
    lz.lock("rms_norm", KERNEL)
    with pytest.raises(LockedKernelError, match="no compiled artifact"):
        lz.rms_norm(X, W, 1e-6)
    wait_until(ready)
    torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)


def test_a_kernel_that_would_lose_anyway_is_not_compiled(lab: Any, cache: Path, compiler: Compiler) -> None:
    use(lab, priority=-5.0)
    lz.rms_norm(X, W, 1e-6)
    assert jit.queue().busy == 0 and compiler.runs == 0
    assert lz.explain("rms_norm", X, W).decision.pending == ()


@pytest.mark.req("R-WARM-06")
def test_artifacts_are_reused_after_a_restart_and_not_after_an_upgrade(
    lab: Any, cache: Path, compiler: Compiler
) -> None:
    use(lab, version="1.0")
    with lz.scoped(jit="block"):
        lz.rms_norm(X, W, 1e-6)
    assert compiler.runs == 1
    load_kernel().forget()
    use(lab, version="1.0")  # resets: the index on disk is all that is left
    assert lab.run(lz.rms_norm, X, W, 1e-6) and lz.explain("rms_norm", X, W).chosen == KERNEL
    assert compiler.runs == 1
    use(lab, version="2.0")
    with lz.scoped(jit="off"):
        assert lz.explain("rms_norm", X, W).decision.candidate(KERNEL).reasons[0].code == "JIT_NOT_READY"
    use(lab, version="1.0")
    next(load_kernel().folder().glob("*.so")).unlink()
    use(lab, version="1.0")  # the files are gone: the index is not believed, nothing compiles in a request
    with lz.scoped(jit="off"):
        assert lz.explain("rms_norm", X, W).decision.candidate(KERNEL).reasons[0].code == "JIT_NOT_READY"


@pytest.mark.req("R-WARM-08")
def test_a_failed_compile_disables_the_kernel_once_and_is_not_tried_again(
    lab: Any, cache: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    use(lab)
    compiler.fault.touch()
    with caplog.at_level(logging.WARNING, "layerzero.jit"):
        torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
        wait_until(lambda: bool(state.world.uncompilable))
        assert not jit.queue().wait(timeout_s=60)  # what failed is told first, then written down
    for _ in range(20):
        torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
    (why,) = lz.explain("rms_norm", X, W).decision.candidate(KERNEL).reasons
    assert why.code == "JIT_FAILED" and "no such instruction" in str(why)
    with lz.scoped(jit="block"):
        torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
    assert compiler.runs == 1 and sum("left alone" in line for line in caplog.messages) == 1
    load_kernel().forget()
    use(lab)  # the next process of these versions does not try again either
    lz.rms_norm(X, W, 1e-6)
    assert jit.queue().busy == 0 and compiler.runs == 1
    compiler.fault.unlink()
    jit.forget_failures(frozenset({KERNEL}))
    lz.rms_norm(X, W, 1e-6)
    wait_until(ready)
    assert compiler.runs == 2


def test_a_kernel_that_fails_for_three_shapes_is_left_alone_for_all(lab: Any, cache: Path, compiler: Compiler) -> None:
    use(lab)
    compiler.fault.touch()
    for hidden in (8, 16, 32, 64):
        lz.rms_norm(torch.ones(2, hidden), torch.ones(hidden))
        assert not jit.queue().wait(timeout_s=60)
    assert compiler.runs == 3 and KERNEL in state.world.uncompilable


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, UserWarning, torch.AcceleratorError])
def test_what_says_nothing_about_the_compiler_is_no_failed_compile(lab: Any, cache: Path, kind: Any) -> None:
    def hungry(*args: Any) -> Any:
        raise kind("not now")

    lab.use(lab.kernel(KERNEL, hungry, jit=True, priority=90.0))
    with lz.scoped(jit="block"):
        lz.rms_norm(X, W)
    assert not state.world.uncompilable and not ready()


def test_a_device_that_another_kernel_broke_says_nothing_about_the_compiler() -> None:
    """Triton has words of its own for an error of the device; written down, the kernel would be lost to all to come."""
    assert jit._innocent(RuntimeError("Triton Error [CUDA]: misaligned address"))
    assert jit._innocent(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not jit._innocent(RuntimeError("the tile is misaligned")) and not jit._innocent(ValueError("no such layout"))


@pytest.mark.req("R-WARM-03")
def test_a_compile_that_takes_too_long_gives_its_place_away_and_counts_when_it_is_done(
    lab: Any, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERZERO_JIT_TIMEOUT", "0.2")
    use(lab)
    compiler.gate.touch()
    lz.rms_norm(X, W, 1e-6)
    wait_until(lambda: bool(state.world.uncompilable))
    assert lz.explain("rms_norm", X, W).decision.candidate(KERNEL).reasons[0].code == "JIT_TIMEOUT"
    assert jit.queue().busy == 0  # another kernel may be compiled meanwhile
    torch.testing.assert_close(lz.rms_norm(X, W, 1e-6), EXPECTED)
    compiler.gate.unlink()
    wait_until(ready)
    assert lz.explain("rms_norm", X, W).chosen == KERNEL and not state.world.uncompilable
    assert not Index(cache).failed()  # slow today is not broken tomorrow


def test_a_gradient_call_is_ready_only_when_its_backward_ran(lab: Any, cache: Path) -> None:
    steps: list[str] = []

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            steps.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            steps.append("backward")
            return grad * 2

    lab.use(lab.kernel(KERNEL, lambda x, w, eps: Norm.apply(x), jit=True, jit_key=("needs_grad",), priority=90.0))
    leaf = X.clone().requires_grad_()
    lz.rms_norm(leaf, W)
    wait_until(ready)
    assert steps[:2] == ["forward", "backward"] and leaf.grad is None  # on a likeness of the inputs, not the caller's


def test_the_callers_random_state_is_untouched_by_a_compile(lab: Any, cache: Path) -> None:
    def drawing(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return x + torch.rand(())

    lab.use(lab.kernel(KERNEL, drawing, jit=True, priority=90.0))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with lz.scoped(jit="block"):
        lz.rms_norm(X.clone().requires_grad_(), W)
    # one draw in the call itself, none for the backward pass that was tried first
    assert torch.equal(torch.rand(2), expected[1:])


@pytest.mark.req("R-TUNE-01", "R-WARM-01")
def test_tuning_compiles_several_kernels_at_a_time_before_it_times_any(
    lab: Any, cache: Path, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERZERO_JIT_WORKERS", "3")
    use(lab)
    lz.configure(deny=["inductor"])  # it would call the compiler too
    compiler.gate.touch()
    with torch.no_grad(), lz.scoped(jit="off"):
        contexts = [lz.select("rms_norm", torch.ones(3, n), torch.ones(n)).context for n in (8, 16, 32)]
    found: list[Any] = []
    told: list[Any] = []

    def tune() -> None:
        options = {"database": tmp_path / "times.db", "seconds": 0.01}
        found.append(lz.tune(contexts, progress=told.append, **options))

    thread = threading.Thread(target=tune)
    thread.start()
    try:
        wait_until(lambda: compiler.runs == 3)  # one by one there would be a single one waiting here
        wait_until(lambda: any(KERNEL in step.compiling for step in told))
        assert {step.name for step in told} == {""}  # no call is raced
    finally:
        compiler.gate.unlink()
        thread.join()
        lz.configure(deny=[])
    assert compiler.runs == 3 and told[0].to_compile == 3
    assert [KERNEL in item.trial.times for item in found[0].outcomes] == [True] * 3
    assert jit.queue().workers == 3


# -- the folder and the index -----------------------------------------------------------------------------------
@pytest.mark.req("R-WARM-04")
def test_the_libraries_caches_are_one_folder_of_ours_unless_the_user_chose(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/the/users/own")
    assert jit_cache.prepare() == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == "/the/users/own"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "inductor")
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(cache / "flashinfer")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(cache / "flash_attention")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    jit_cache.prepare()
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"


def test_a_folder_that_others_can_write_to_is_not_used(
    lab: Any, cache: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    Index(cache).add((KERNEL, ("0", "planted")))
    with caplog.at_level(logging.WARNING, "layerzero.jit"):
        assert jit_cache.prepare() is None and jit_cache.prepare() is None
    assert sum("not kept" in line for line in caplog.messages) == 1
    assert not os.environ["TRITON_CACHE_DIR"]
    use(lab)
    assert not state.world.ready


def test_a_corrupt_index_is_set_aside(cache: Path) -> None:
    cache.mkdir(0o700)
    index = Index(cache)
    index.add((KERNEL, ("1", "here")))
    for broken in ("{", "[]", json.dumps({"schema_version": "1.0", "entries": [{"kernel_id": 3}]})):
        index.path.write_text(broken)
        assert index.ready() == frozenset()
        assert not index.path.exists()
    assert len(list(cache.glob("index.json.corrupt-*"))) == 3
    index.add((KERNEL, ("1", "here")))
    assert index.ready() == {(KERNEL, ("1", "here"))}


WORKER = """
import importlib.util, sys, torch, layerzero as lz
from layerzero.model.kernel import KernelSpec
from layerzero.model.enums import Platform
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state

spec = importlib.util.spec_from_file_location("layerzero_compiled_kernel", {kernel!r})
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
kernel = KernelSpec(
    kernel_id={kernel_id!r}, op="rms_norm", backend="cc", function="layerzero_compiled_kernel:rms_norm",
    jit=True, jit_key=("dtype", "hidden"), priority=90.0, dtypes=frozenset({{"float32"}}),
    platforms=frozenset({{Platform.CPU}}),
)
state.use(load_plugins(entry_points=()).registry.add([kernel]))
for hidden in (8, 16, 24):
    with lz.scoped(jit="block"):
        x, w = torch.ones(2, hidden), torch.ones(hidden)
        assert lz.explain("rms_norm", x, w).chosen == kernel.kernel_id
        torch.testing.assert_close(lz.rms_norm(x, w), torch.nn.functional.rms_norm(x, (hidden,), w, 1e-6))
"""


@pytest.mark.req("R-WARM-07")
def test_many_processes_share_the_cache_and_compile_once(tmp_path: Path, cache: Path, compiler: Compiler) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(kernel=str(HERE / "compiled_kernel.py"), kernel_id=KERNEL))
    workers = [
        subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(3)
    ]
    for worker in workers:
        _, told = worker.communicate(timeout=240)
        assert worker.returncode == 0, told
    assert compiler.runs == 3
    assert len(Index(cache).ready()) == 3


@pytest.mark.parametrize("outcome", ["compiled", "failed", "late"])
def test_a_compile_that_ends_after_a_reset_changes_no_world_and_is_kept(
    lab: Any, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    if outcome == "late":
        monkeypatch.setenv("LAYERZERO_JIT_TIMEOUT", "0.5")
    use(lab)
    compiler.gate.touch()
    lz.rms_norm(X, W, 1e-6)
    wait_until(lambda: compiler.runs == 1)
    use(lab)  # resets
    world = state.world
    if outcome == "failed":
        compiler.fault.touch()
    if outcome != "late":
        compiler.gate.unlink()
    assert not jit.queue().wait(timeout_s=60)
    assert state.world is world and not ready() and not world.uncompilable
    compiler.gate.unlink(missing_ok=True)
    index = Index(cache)
    wait_until(lambda: bool(index.failed() if outcome == "failed" else index.ready()))
    assert state.world is world


def test_what_is_being_compiled_for_a_forgotten_world_is_compiled_for_the_next_one_too(
    lab: Any, cache: Path, compiler: Compiler
) -> None:
    use(lab)
    compiler.gate.touch()
    lz.rms_norm(X, W, 1e-6)
    wait_until(lambda: compiler.runs == 1)
    use(lab)
    lz.rms_norm(X, W, 1e-6)
    assert jit.queue().busy == 1 and not ready()
    compiler.gate.unlink()
    wait_until(ready)
    assert compiler.runs == 1 and lz.explain("rms_norm", X, W).chosen == KERNEL  # the second found it on disk


# -- the queue --------------------------------------------------------------------------------------------------
def test_the_queue_does_urgent_work_first_and_nothing_twice() -> None:
    queue = Queue(1, 60.0, lambda artifact: None)
    gate, order = threading.Event(), []

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            gate.wait(60)
            order.append(name)

        return run

    for name in "abcdef":
        assert queue.submit((name, ("", "")), work(name), urgent=name in "ef")
    assert not queue.submit(("c", ("", "")), work("c"))  # it is waiting already
    assert queue.holds(("c", ("", ""))) and queue.busy == 6
    assert queue.wait([("a", ("", ""))], timeout_s=0.01) == {("a", ("", ""))}
    gate.set()
    assert not queue.wait(timeout_s=60)
    assert order == list("aefbcd") and queue.busy == 0


def test_a_compiler_with_one_caller_at_a_time_does_not_hold_up_the_others() -> None:
    """Five jobs of a backend whose compiler takes one caller, then two of another: those do not wait for all five."""
    queue = Queue(2, 60.0, lambda artifact: None)
    one, gate, others, order = threading.Lock(), threading.Event(), threading.Semaphore(0), []

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            if name.startswith("single"):
                with one:
                    gate.wait(60)
                    if name == "single.b":  # it takes until the others are done, which is never if they wait for it
                        assert all(others.acquire(timeout=60) for _ in range(2))
            else:
                others.release()
            order.append(name)

        return run

    for name in ("single.a", "single.b", "single.c", "single.d", "single.e", "other.a", "other.b"):
        queue.submit((name, ("", "")), work(name))
    # The second place went to single.b, since nobody else waited by then; given back, it goes to the other backend.
    gate.set()
    assert not queue.wait(timeout_s=60)
    assert sorted(order.index(name) for name in ("other.a", "other.b"))[-1] < order.index("single.e")


def test_the_queue_is_bounded_and_can_be_emptied() -> None:
    queue = Queue(2, 60.0, lambda artifact: None)
    gate, lock, running, most = threading.Event(), threading.Lock(), [0], [0]

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.wait(60)
        with lock:
            running[0] -= 1

    for number in range(6):
        queue.submit((str(number), ("", "")), work)
    wait_until(lambda: running[0] == 2)
    queue.drop_waiting()
    assert queue.busy == 2
    for number in range(6, 12):
        queue.submit((str(number), ("", "")), work)
    gate.set()
    assert not queue.wait(timeout_s=60)
    assert most[0] == 2


def test_work_that_raises_does_not_stop_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    queue, done = Queue(1, 60.0, lambda artifact: None), []
    queue.submit(("a", ("", "")), lambda: 1 / 0)
    queue.submit(("b", ("", "")), lambda: done.append("b"))
    assert not queue.wait(timeout_s=60) and done == ["b"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_queue_that_works() -> None:
    queue = Queue(1, 60.0, lambda artifact: None)
    gate = threading.Event()
    queue.submit(("a", ("", "")), lambda: gate.wait(100))
    child = os.fork()
    if child == 0:
        done: list[str] = []
        queue.submit(("b", ("", "")), lambda: done.append("b"))
        os._exit(0 if not queue.wait(timeout_s=60) and done == ["b"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    assert not queue.wait(timeout_s=60)


@pytest.mark.req("R-WARM-01")
def test_a_process_that_ends_waits_for_the_compiler_and_begins_nothing_more() -> None:
    """An interpreter that ends a thread inside a C++ compiler is aborted."""
    queue = Queue(workers=1, timeout_s=0.01, on_late=lambda artifact: None)
    begun, go, done = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        go.wait()
        done.append("first")

    first, second = (("a.b.c", (str(number),)) for number in range(2))
    assert queue.submit(first, work)
    begun.wait()
    assert not queue.wait([first], timeout_s=30.0)  # late: it has lost its place and is still running
    queue.workers = 0
    assert queue.submit(second, lambda: done.append("second"))
    ended = threading.Thread(target=queue.close)
    ended.start()
    ended.join(0.05)
    assert ended.is_alive() and not done
    go.set()
    ended.join()
    assert done == ["first"] and queue.busy == 0 and not queue.submit(second, lambda: None)


@pytest.mark.req("R-WARM-01")
def test_an_interpreter_ends_after_its_compiler() -> None:
    program = """
import threading, time
from layerzero.jit.queue import Queue
said = threading.Event()
def work():
    said.wait(60.0)
    time.sleep(0.3)
    print("compiled", flush=True)
queue = Queue(1, 60.0, lambda artifact: None)
queue.submit(("a.b.c", ()), work)
print("end", flush=True)
said.set()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["end", "compiled"]

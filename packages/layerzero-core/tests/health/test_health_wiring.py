"""Health in a process: backends set aside, self tests before traffic, deadlines, device errors, crash markers."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.dispatch.bind import bind
from layerzero.dispatch.failover import check_device, excuse
from layerzero.errors import DeviceLostError
from layerzero.health import crash_markers
from layerzero.health.breaker import BreakerPhase, BreakerSettings, HealthRegistry
from layerzero.health.crash_markers import CrashMarker, CrashMarkers, gather, here, started
from layerzero.health.quarantine import Quarantine
from layerzero.health.sticky import LOST, POISONED, sticky
from layerzero.plugin import hookimpl
from layerzero.runtime import timers
from layerzero.runtime.crashes import place
from layerzero.runtime.state import state
from layerzero.runtime.timers import watchdog
from layerzero_cli.root import cli
from tools import faulty_plugins as faults
from tools.threads import wait_until

X, W = torch.linspace(-1, 1, 24).reshape(3, 8), torch.ones(8)
OPEN, HALF_OPEN, CLOSED = BreakerPhase.OPEN, BreakerPhase.HALF_OPEN, BreakerPhase.CLOSED


def phase(name: str, kind: str = "kernels") -> BreakerPhase:
    found = getattr(state.health.snapshot(), kind).get(name)
    return CLOSED if found is None else found.phase


# -- a breaker for each backend ---------------------------------------------------------------------
@pytest.mark.req("R-HLTH-01", "R-HLTH-02")
@pytest.mark.parametrize("kind", ["kernel", "backend"])
@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(0, 8), st.integers(1, 3)),
    st.lists(st.one_of(st.sampled_from(["fail", "succeed"]), st.integers(0, 6)), max_size=40),
)
def test_the_book_agrees_with_pybreaker_for_kernels_and_backends(
    kind: str, limits: tuple[int, int, int], events: list[str | int]
) -> None:
    import pybreaker

    now = [0.0]

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(now[0], tz=UTC)

    peer = pybreaker.CircuitBreaker(fail_max=limits[0], reset_timeout=limits[1], success_threshold=limits[2])
    rules = BreakerSettings(limits[0], float(limits[1]), limits[2], backend_kernels=100)
    health = HealthRegistry(rules, clock=lambda: now[0])
    name = "mine.op.kernel" if kind == "kernel" else "mine"
    failed, succeeded = getattr(health, f"{kind}_failed"), getattr(health, f"{kind}_succeeded")

    def run(fails: bool) -> None:
        ran.append(1)
        if fails:
            raise ValueError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pybreaker, "datetime", Frozen)
        for event in events:
            if isinstance(event, int):
                now[0] += event
                continue
            ran: list[int] = []
            try:
                peer.call(run, event == "fail")
            except (ValueError, pybreaker.CircuitBreakerError):
                pass
            health.tick()
            assert bool(ran) is not health.snapshot().blocks("mine.op.kernel")
            if ran:
                failed(name, "boom") if event == "fail" else succeeded(name)
            states = health.snapshot().kernels if kind == "kernel" else health.snapshot().backends
            ours = states[name].phase.value if name in states else "closed"
            assert peer.current_state.replace("-", "_") == ours


@pytest.mark.req("R-HLTH-01", "R-HLTH-02")
def test_three_kernels_set_aside_open_the_backend_and_a_good_call_closes_it(lab: Any, hand_clock: Any) -> None:
    names = [f"bad.rms_norm.k{index}" for index in range(4)]
    kernels = [lab.kernel(name, priority=90 - index) for index, name in enumerate(names)]
    lab.use(*kernels, lab.kernel("other.rms_norm.k", priority=40), breaker={"cooldown_s": 0.2})
    for name in names[:3]:
        lab.faults[name] = RuntimeError("the driver is gone")
    assert lab.run(lz.rms_norm, X, W)[1] == [names[3]]  # three were tried, the fourth ran
    assert lab.tries == names
    assert phase("bad", "backends") is OPEN
    (why,) = lz.validate(names[3], X, W)
    assert why.code == "CIRCUIT_OPEN" and "backend bad" in why.message and "3 of its kernels" in str(why.value)
    assert lab.run(lz.rms_norm, X, W)[1] == ["other.rms_norm.k"]  # the fourth is left alone too
    lab.faults.clear()
    hand_clock.move(0.21)
    assert phase("bad", "backends") is HALF_OPEN and phase(names[0]) is HALF_OPEN
    assert lab.run(lz.rms_norm, X, W)[1] == [names[0]]
    assert phase("bad", "backends") is CLOSED and phase(names[0]) is CLOSED


def test_a_half_open_backend_that_fails_is_set_aside_again(lab: Any) -> None:
    lab.use(lab.kernel("bad.rms_norm.k", priority=90), breaker={"cooldown_s": 0.1})
    state.health.backend_failed("bad", "its server is gone")
    wait_until(lambda: phase("bad", "backends") is HALF_OPEN)
    lab.faults["bad.rms_norm.k"] = RuntimeError("still")
    state.health.configure(BreakerSettings(cooldown_s=60.0))
    lz.rms_norm(X, W)
    assert phase("bad", "backends") is OPEN


def test_the_last_resort_is_never_set_aside_as_a_backend(lab: Any) -> None:
    for op in ("rms_norm", "layer_norm", "linear", "mlp"):
        state.health.kernel_failed(f"reference.{op}.plain", "boom", "reference")
    assert phase("reference", "backends") is CLOSED


# -- self tests before traffic ----------------------------------------------------------------------
@pytest.fixture
def answers(lab: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The self test of the built-in backend `torch` gives what is in this list, last one last."""
    monkeypatch.setenv("LAYERZERO_PLUGINS", "")
    lz.reset()
    lz.configure(breaker={"cooldown_s": 0.05})
    world = state.world
    plugin = state.plugin_manager.get_plugin(next(r.name for r in state.records if "torch" in r.backends))
    told: list[Any] = []

    def self_test(backend: str) -> Any:
        said = told.pop(0)
        if isinstance(said, Exception):
            raise said
        return said(backend)

    monkeypatch.setattr(plugin, "layerzero_health", hookimpl(self_test))
    assert world.registry.kernels["torch.rms_norm.native"].backend == "torch"
    return told


@pytest.mark.req("R-HLTH-02")
def test_a_cooldown_ends_with_the_backends_own_self_test(answers: list[Any], hand_clock: Any) -> None:
    from layerzero.plugin import HealthReport

    answers += [
        RuntimeError("the library is half installed"),
        lambda backend: HealthReport(backend, False, "got 5, expected 4"),
        lambda backend: HealthReport(backend, True, "2 + 2 = 4", 0.0),
    ]
    state.health.backend_failed("torch", "boom")
    hand_clock.move(0.06)
    assert len(answers) == 2 and "half installed" in state.health.snapshot().backends["torch"].last_error
    assert phase("torch", "backends") is OPEN, "a failed self test keeps it set aside"
    assert lz.which("rms_norm", X, W) == "reference.rms_norm.plain"
    hand_clock.move(0.06)
    assert len(answers) == 1 and phase("torch", "backends") is OPEN
    hand_clock.move(0.06)  # the third passes, and counts as a good run
    assert phase("torch", "backends") is CLOSED and not answers
    assert lz.which("rms_norm", X, W) == "torch.rms_norm.native"


def test_a_self_test_that_hangs_counts_as_failed(answers: list[Any], hand_clock: Any) -> None:
    gate = threading.Event()
    lz.configure(breaker={"cooldown_s": 0.02, "probe_timeout_s": 0.1})
    answers += [lambda backend: gate.wait(60)]
    state.health.backend_failed("torch", "boom")
    hand_clock.move(0.03)
    assert not answers and "KERNEL_TIMEOUT" in state.health.snapshot().backends["torch"].last_error
    assert phase("torch", "backends") is OPEN
    lz.reset()
    gate.set()


def test_no_call_waits_for_a_self_test(answers: list[Any]) -> None:
    gate, over = threading.Event(), []

    def hangs(backend: str) -> None:
        gate.wait(60)
        over.append(backend)

    answers += [hangs] * 9
    state.health.kernel_failed("torch.rms_norm.native", "boom")
    wait_until(lambda: len(answers) == 8)
    for rows in range(4, 40, 9):
        lz.rms_norm(torch.ones(rows, 8), W)  # cold calls, while the self test hangs
    assert not over and phase("torch.rms_norm.native") is OPEN
    gate.set()


def test_the_policy_may_do_without_self_tests(answers: list[Any]) -> None:
    lz.configure(breaker={"cooldown_s": 0.05, "probe": False})
    state.health.kernel_failed("torch.rms_norm.native", "boom")
    wait_until(lambda: phase("torch.rms_norm.native") is HALF_OPEN)


@pytest.mark.req("R-HLTH-02")
def test_a_third_partys_self_test_runs_in_a_process_of_its_own(
    site: Path, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vendor may crash or hang. Asked while it fails; in the long lane once more, mended."""
    monkeypatch.setenv("LAYERZERO_PLUGINS", "frail")
    faults.install(site, "fails_health", "frail")
    lz.reset()
    lz.configure(breaker={"cooldown_s": 3600.0})
    assert "frail" in state.world.registry.backends and timers.has_self_test("frail")
    state.health.backend_failed("frail", "boom")
    wrong = timers.self_test("frail")
    assert wrong is not None and "HEALTH_CHECK_FAILED" in wrong and "got 5, expected 4" in wrong
    if os.environ.get("LAYERZERO_PROVE") != "1":  # each costs a process that imports torch
        return
    faults.install(site, "chatters_in_probe", "frail")
    state.health.configure(BreakerSettings(cooldown_s=0.0))
    assert timers.advance()
    assert phase("frail", "backends") is CLOSED


# -- deadlines --------------------------------------------------------------------------------------
@pytest.mark.req("R-HLTH-03", "R-FAIL-10")
def test_a_kernel_that_hangs_is_seen_said_and_left_by_the_others(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    gate, inside = threading.Event(), threading.Event()

    def hangs(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        inside.set()
        gate.wait(60)
        return torch.rms_norm(x, (8,), weight, eps)

    lab.use(lab.kernel("slow.rms_norm.hangs", hangs, priority=90), breaker={"deadline_s": 0.05, "cooldown_s": 60.0})
    out: list[torch.Tensor] = []
    stuck = threading.Thread(target=lambda: out.append(lz.rms_norm(X, W)))
    with caplog.at_level(logging.WARNING, logger="layerzero.health"):
        stuck.start()
        assert inside.wait(60)
        wait_until(lambda: phase("slow.rms_norm.hangs") is OPEN)
        assert lab.run(lz.rms_norm, X, W)[1] == ["torch.rms_norm.native"]  # another thread goes elsewhere, at once
        assert not out and stuck.is_alive()
        (why,) = lz.validate("slow.rms_norm.hangs", X, W)
        assert why.code == "CIRCUIT_OPEN" and "KERNEL_TIMEOUT" in str(why.value)
        gate.set()
        stuck.join(60)
    # By name: on a busy machine some other call may have been late as well.
    said = [line for line in caplog.messages if line.startswith("slow.rms_norm.hangs")]
    assert len(said) == 2 and "the call goes on" in said[0] and "has come back after its deadline" in said[1]
    torch.testing.assert_close(out[0], torch.rms_norm(X, (8,), W, 1e-6))  # what it gave at last was given


def test_calls_within_the_deadline_are_nobodys_business(lab: Any) -> None:
    lab.use(lab.kernel("quick.rms_norm.fine", priority=90), breaker={"deadline_s": 3600.0})
    before = watchdog.overdue
    for _ in range(50):
        assert lab.run(lz.rms_norm, X, W)[1] == ["quick.rms_norm.fine"]
    assert watchdog.overdue == before and not watchdog._under_way


# -- errors no process survives ---------------------------------------------------------------------
class Accelerator(RuntimeError):
    """As torch raises it: CUDA's own number beside the text."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.error_code = number


TAIL = "\nCUDA kernel errors might be asynchronously reported at some other API call"
GONE = [
    RuntimeError(f"CUDA error: an illegal memory access was encountered{TAIL}"),
    RuntimeError(f"CUDA error: device-side assert triggered{TAIL}"),
    RuntimeError(f"CUDA error: unspecified launch failure{TAIL}"),
    RuntimeError("CUDA error: misaligned address"),
    RuntimeError("HIP error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA driver error: CUDA_ERROR_LAUNCH_FAILED"),
    RuntimeError("Error code: cudaErrorIllegalAddress"),
    Accelerator("some words of a later release", 700),
]
LOST_TEXTS = [
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    Accelerator("other words", 214),
]
SURVIVABLE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("CUDA error: invalid configuration argument"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"),
    ValueError("misaligned address book"),
    RuntimeError("an illegal memory access was encountered by the parser"),
    Accelerator("CUDA error: out of memory", 2),
    KeyboardInterrupt("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.req("R-FAIL-02", "R-HLTH-03")
@pytest.mark.parametrize("error", GONE, ids=lambda e: str(e)[:40])
def test_errors_that_poison_a_context_are_recognised(error: Exception) -> None:
    why = sticky(error, "cuda:3")
    assert why is not None and why.code == "DEVICE_POISONED" and why.limit == "cuda:3"
    wrapped = KeyError("vendor")
    wrapped.__cause__ = error
    assert sticky(wrapped) is not None


@pytest.mark.req("R-FAIL-11", "R-HLTH-03")
@pytest.mark.parametrize("error", LOST_TEXTS, ids=lambda e: str(e)[:40])
def test_a_device_that_is_gone_is_recognised(error: Exception) -> None:
    why = sticky(error, "cuda:0")
    assert why is not None and why.code == "DEVICE_LOST" and why.value == "cuda:0"


@pytest.mark.req("R-FAIL-11", "R-HLTH-03")
@pytest.mark.parametrize("error", [GONE[0], LOST_TEXTS[0]], ids=["poisoned", "lost"])
def test_a_device_that_was_lost_is_not_used_again_and_the_first_to_fail_there_is_put_away(
    lab: Any, kept: Quarantine, error: Exception
) -> None:
    """Tensors without memory stand for those of the device that is gone."""
    lab.use(lab.kernel("bad.rms_norm.pokes", priority=90), lab.kernel("good.rms_norm.later", priority=80))
    there = (torch.empty(3, 8, device="meta"),)
    decision, spec = lz.select("rms_norm", X, W), state.world.ops["rms_norm"]
    bound = [bind(spec, decision, state.world, name) for name in ("bad.rms_norm.pokes", "good.rms_norm.later")]
    code = sticky(error).code  # type: ignore[union-attr]
    for item in bound:
        with pytest.raises(DeviceLostError, match=item.kernel_id) as caught:
            excuse(item, there, error)
        assert caught.value.code == code
    assert [entry.kernel_id for entry in kept.entries()] == ["bad.rms_norm.pokes"], "after it every kernel fails there"
    with pytest.raises(DeviceLostError) as caught:
        check_device([X, *there])
    assert caught.value.code == code
    excuse(bound[0], (X,), error)  # a CPU is not lost to an error that speaks of a GPU
    assert lab.run(lz.rms_norm, X, W)[1] == ["good.rms_norm.later"], "the CPU computes on, without the suspect"


@pytest.mark.parametrize("error", SURVIVABLE, ids=lambda e: str(e)[:40])
def test_errors_a_fallback_survives_are_not_taken_for_sticky(error: BaseException) -> None:
    assert sticky(error) is None


def test_no_number_is_in_both_lists() -> None:
    assert not set(POISONED) & set(LOST)


# -- crash markers -----------------------------------------------------------------------------------------
KEY = ("bad.rms_norm.x", "1.0", "sig")


def dead_markers(folder: Path, *keys: tuple[str, str, str]) -> Path:
    """A file of crash markers as a process leaves it that ends without a word."""
    code = (
        "import importlib.util, json, os, sys; from pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('markers', sys.argv[3])\n"
        "sys.modules['markers'] = module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "mine = module.CrashMarkers(Path(sys.argv[1]))\n"
        "for key in json.loads(sys.argv[2]): mine.enter(*key)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, str(folder), json.dumps(keys), crash_markers.__file__]
    assert subprocess.run(command, check=False).returncode == -9
    (path,) = folder.glob("*.marker")
    return path


def test_a_crash_marker_outlives_its_process_and_is_reported_once(tmp_path: Path) -> None:
    dead_markers(tmp_path, (*KEY, "rms_norm"), ("bad.rope.y", "2", "sig", "rope"))
    found: list[CrashMarker] = []
    assert gather(tmp_path, found.append) == 2
    assert {(c.kernel_id, c.op, c.fault) for c in found} == {
        ("bad.rms_norm.x", "rms_norm", ""),
        ("bad.rope.y", "rope", ""),
    }
    assert gather(tmp_path, found.append) == 0 and not list(tmp_path.iterdir())


def test_what_is_over_leaves_no_crash_marker_and_the_living_are_left_alone(tmp_path: Path) -> None:
    mine = CrashMarkers(tmp_path)
    first, second = mine.enter(*KEY), mine.enter("bad.rope.y", "1", "sig")
    mine.leave(first)
    assert gather(tmp_path, lambda marker: pytest.fail("this process lives")) == 0
    (path,) = tmp_path.glob("*.marker")
    assert path.stem == f"{here()}-{os.getpid()}-{started(os.getpid())}"
    path.rename(tmp_path / f"{here()}-999999-1.marker")  # as if somebody else had left it
    found: list[CrashMarker] = []
    gather(tmp_path, found.append)
    assert [c.kernel_id for c in found] == ["bad.rope.y"]
    mine.leave(second)
    mine.close()


def test_crash_markers_of_other_machines_and_containers_are_nobodys_to_judge(tmp_path: Path) -> None:
    """A home folder that many machines share: a pid means nothing elsewhere. What is a week old is swept up."""
    mine = dead_markers(tmp_path, (*KEY, "op"))
    other = mine.with_name(f"0123456789ab-{mine.stem.partition('-')[2]}.marker")
    mine.rename(other)
    assert gather(tmp_path, lambda marker: pytest.fail("not ours to judge")) == 0 and other.exists()
    os.utime(other, (time.time() - 8 * 86_400,) * 2)
    assert gather(tmp_path, lambda marker: pytest.fail("not ours to judge")) == 0 and not other.exists()


def test_what_cannot_be_written_down_is_found_again(tmp_path: Path) -> None:
    dead_markers(tmp_path, (*KEY, "op"))

    def full(marker: CrashMarker) -> None:
        raise OSError(28, "No space left on device")

    assert gather(tmp_path, full) == 0
    found: list[CrashMarker] = []
    assert gather(tmp_path, found.append) == 1


@given(st.binary(max_size=2000))
@settings(max_examples=60, deadline=None)
def test_no_content_of_a_crash_marker_file_is_an_error(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{here()}-999999-1.marker").write_bytes(data)
        (Path(folder) / f"{here()}-999999-1.fault").write_bytes(data)
        gather(Path(folder), lambda marker: None)
        assert not list(Path(folder).iterdir())


def test_more_first_runs_at_once_than_places_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    mine = CrashMarkers(tmp_path / "a")
    slots = [mine.enter(*KEY) for _ in range(20)]
    assert sum(slot is not None for slot in slots) == 16
    for slot in slots:
        mine.leave(slot)
    assert mine.enter(*KEY) is not None
    mine.close()
    (tmp_path / "file").write_text("")
    blocked = CrashMarkers(tmp_path / "file" / "crash_markers")
    assert blocked.enter(*KEY) is None
    blocked.leave(None)


def test_a_fault_handler_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """In a process where C code handles SIGSEGV already, ours is not put in its place."""
    code = (
        "import ctypes, faulthandler, importlib.util, signal, sys; from pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('markers', sys.argv[2])\n"
        "sys.modules['markers'] = module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "mine = module.CrashMarkers(Path(sys.argv[1]))\n"
        "slot = mine.enter('a.b.c', '1', 's'); print(faulthandler.is_enabled()); mine.leave(slot)\n"
        "print(faulthandler.is_enabled())\n"
        "handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)\n"
        "ctypes.CDLL(None).signal(signal.SIGSEGV, handler); sys.modules['new'] = module\n"
        "slot = mine.enter('a.b.c', '1', 's'); print(faulthandler.is_enabled()); mine.leave(slot)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), crash_markers.__file__]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


# -- what people see --------------------------------------------------------------------------------
def lz_cli(*words: str) -> tuple[int, Any]:
    done = CliRunner().invoke(cli, [*words, "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.req("R-HLTH-03")
def test_a_quarantined_kernel_is_skipped_shown_and_lifted(kept: Quarantine) -> None:
    device = lz.explain("rms_norm", X, W).decision.context.device.signature
    version = state.world.registry.kernels["torch.rms_norm.native"].version
    kept.add("torch.rms_norm.native", version, device, "KERNEL_CRASHED", "Segmentation fault")
    kept.add("torch.rope.halves", version, "another device", "KERNEL_CRASHED")
    kept.add("torch.layer_norm.native", "another version", device, "KERNEL_CRASHED")
    lz.reset()
    assert lz.which("rms_norm", X, W) == "reference.rms_norm.plain"
    (why,) = lz.validate("torch.rms_norm.native", X, W)
    assert why.code == "QUARANTINED" and "Segmentation fault" in why.message
    assert set(state.health.snapshot().quarantined) == {"torch.rms_norm.native"}  # not on another device or version
    checks = [check for check in lz.doctor(probe=False).checks if check.name == "quarantine"]
    assert "lz quarantine clear torch.rms_norm.native" in {check.fix for check in checks}
    code, data = lz_cli("quarantine", "list")
    assert code == 0 and [row["kernel_id"] for row in data["entries"]][-1] == "torch.rope.halves"
    code, data = lz_cli("quarantine", "clear", "torch.rms_norm.native", "no.such.kernel")
    assert code == 1 and data["absent"] == ["no.such.kernel"] and data["lifted"]["torch.rms_norm.native"] == 1
    lz.reset()
    assert lz.which("rms_norm", X, W) == "torch.rms_norm.native"
    told = CliRunner().invoke(cli, ["quarantine", "clear", "torch.rope.half", "x"]).output
    assert "torch.rope.half: was not in quarantine; did you mean torch.rope.halves?" in told
    assert "x: was not in quarantine; lz quarantine list shows what is" in told
    assert lz_cli("quarantine", "clear", "--all")[0] == 0 and not kept.entries()
    assert lz_cli("quarantine", "clear")[0] == 2


def test_the_list_is_told_of_crashes_that_no_other_process_has_seen_yet(kept: Quarantine) -> None:
    for count in (0, 1):  # who is killed during a first run is a suspect, the second time it is no chance
        dead_markers(kept.path.parent / "crash_markers", (*KEY, "rms_norm"))
        code, data = lz_cli("quarantine", "list")
        assert code == 0 and [row["kernel_id"] for row in data["entries"]] == [KEY[0]] * count
    dead_markers(kept.path.parent / "crash_markers", ("bad.rope.y", "2", "sig", "rope"))
    assert lz_cli("quarantine", "clear", KEY[0])[1]["lifted"] == {KEY[0]: 1} and not kept.entries()


def test_an_isolated_process_that_crashed_twice_puts_its_kernel_away(lab: Any, kept: Quarantine) -> None:
    from layerzero.isolation.wire import fault

    name = "apart.rms_norm.crashes"
    lab.use(lab.kernel(name, priority=90), breaker={"cooldown_s": 0.0, "probe": False})
    lab.faults[name] = fault("ISOLATION_CRASHED", "signal SIGSEGV; its last words")
    for count in (0, 1):
        lz.rms_norm(X, W)
        assert len(kept.entries()) == count
        state.health.tick()
    (entry,) = kept.entries()
    assert (entry.kernel_id, entry.code) == (name, "ISOLATION_CRASHED") and "SIGSEGV" in entry.detail
    state.health.reset()
    assert lab.run(lz.rms_norm, X, W)[1] == ["torch.rms_norm.native"]


def test_off_means_no_file_and_no_crash_markers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAYERZERO_QUARANTINE", "off")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lz.reset()
    assert place() is None
    lz.rms_norm(X, W)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("layerzero/crash_markers/*"))
    assert CliRunner().invoke(cli, ["quarantine", "list"]).exit_code == 1
    lz.reset()


def test_a_corrupt_quarantine_blocks_nothing_and_is_kept_aside(kept: Quarantine, caplog: Any) -> None:
    kept.path.write_text('{"schema_version": "1.0", "entries": [{')
    lz.reset()
    with caplog.at_level(logging.WARNING, logger="layerzero.health"):
        assert lz.which("rms_norm", X, W) == "torch.rms_norm.native"
    assert "CACHE_CORRUPT" in caplog.text and list(kept.path.parent.glob("*.corrupt-*"))

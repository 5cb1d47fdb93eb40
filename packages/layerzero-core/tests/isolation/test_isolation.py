"""Backends in a process of their own: real children, a real small backend in two folders, on the CPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.errors import KernelExecutionError
from layerzero.isolation.process import Settings, uncollected
from layerzero.isolation.wire import ChildError, IsolationFault
from layerzero.isolation.worker import Worker, close_all, delay_s, workers
from layerzero.runtime.state import state
from tools.threads import wait_until

Q = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
EXPECTED = F.scaled_dot_product_attention(Q, Q, Q)

# Each costs the start of some more processes.
PROVE = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=isolation")


def toy_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("isolated_backend", Path(__file__).with_name("isolated_backend.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the plugin's folder, with a neighbour its vendor cannot live beside; the vendor's folder)"""
    root = tmp_path_factory.mktemp("toy")
    toy_module().install(root / "site", root / "vendor", quarrel=True)
    return root / "site", root / "vendor"


@pytest.fixture(scope="module")
def worker(folders: tuple[Path, Path]) -> Iterator[Worker]:
    """One child of the vendor for the whole file."""
    site, vendor = folders
    surroundings = {"path": (str(vendor), str(site)), "hide": ("quarrel",), "env": (("TOY", "set"),)}
    made = Worker(Settings("toy", **surroundings, deadline_s=60.0, memory_mb=256.0))
    yield made
    made.close()


@pytest.fixture
def toy(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The plugin installed; what is yielded is the entry that isolates it."""
    site, vendor = folders
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "toy")
    monkeypatch.setenv("LAYERZERO_ON_FIRST_USE", "off")  # the fixture vouches for its kernels
    lz.reset()
    yield {"mode": "subprocess", "path": [str(vendor)], "deadline_s": 60.0}
    lz.reset()


@pytest.fixture(scope="module", autouse=True)
def no_child_stays() -> Iterator[None]:
    """Tests of this file share children with equal settings; at the end none is left."""
    close_all()
    yield
    known = workers()
    pids = [item.pid for item in known]
    for item in known:
        item.close()  # a call under way (a self test of the breaker's timer) is waited for
    close_all()
    assert all(pid is None or gone(pid) for pid in pids)


def reasons(kernel: str = "toy.attention.plain", *args: Any) -> list[str]:
    given = args or (Q, Q, Q)
    return [why.code.value for why in lz.explain("attention", *given).decision.candidate(kernel).reasons]


# -- the channel ----------------------------------------------------------------------------------
@pytest.mark.req("R-ISO-01")
@pytest.mark.req("R-ISO-04")
def test_tensors_and_values_come_back_as_they_were(worker: Worker) -> None:
    given = (
        Q.transpose(1, 2), Q.half()[..., ::2], Q[0, 0, 0, :1].expand(5, 7, 1), torch.zeros(0, 3), torch.tensor(True),
        torch.arange(6).reshape(2, 3).t(), None, True, "bottom_right", (8, -1), 3, -0.0, float("inf"), torch.bfloat16,
        [1, (Q[0], None)],
    )  # fmt: skip
    back, pid = worker.call("toyvendor:echo", given, {})
    assert pid == worker.pid != os.getpid()
    for mine, its in zip(given, back, strict=True):
        if isinstance(mine, torch.Tensor):
            assert (its.shape, its.dtype, its.requires_grad) == (mine.shape, mine.dtype, False)
            assert torch.equal(its, mine)
        elif isinstance(mine, list):
            assert torch.equal(its[1][0], Q[0]) and its[1][1] is None
        else:
            assert its == mine and type(its) is type(mine)
    assert worker.call("toyvendor:echo", (), {"layout": "BSHD"}) == ([], ["layout"])


@pytest.mark.req("R-ISO-04")
def test_dense_strides_are_kept_on_the_way_there_and_back(worker: Worker) -> None:
    for x in (Q.transpose(1, 2), Q.permute(3, 1, 0, 2), torch.ones(4, 4).t()):
        (back,), _ = worker.call("toyvendor:echo", (x,), {})
        assert back.stride() == x.stride() and torch.equal(back, x)


def test_a_result_is_not_touched_by_the_next_call(worker: Worker) -> None:
    (first,), _ = worker.call("toyvendor:echo", (Q,), {})
    kept = first.clone()
    worker.call("toyvendor:echo", (Q + 1,), {})
    assert torch.equal(first, kept)


def test_inputs_are_never_written_to(worker: Worker) -> None:
    x = torch.ones(8)
    worker.call("torch:relu_", (x.neg_(),), {})
    assert torch.equal(x, -torch.ones(8))


def test_results_larger_than_the_memory_laid_out_get_more(worker: Worker) -> None:
    out = worker.call("toyvendor:grows", (torch.arange(1 << 20, dtype=torch.float32), 24), {})
    assert out.numel() == 24 << 20 and float(out[-1]) == (1 << 20) - 1


def test_more_than_the_allowed_memory_is_refused_and_nothing_is_broken(worker: Worker) -> None:
    pid = worker.pid
    for function, args in (("echo", (torch.ones(1 << 26),)), ("grows", (torch.ones(1 << 20), 80))):
        with pytest.raises(IsolationFault) as caught:
            worker.call(f"toyvendor:{function}", args, {})
        assert caught.value.reason.code == "ISOLATION_NO_ROOM" and caught.value.reason.limit == 256 << 20
    with pytest.raises(IsolationFault, match="meta") as caught:
        worker.call("toyvendor:echo", (torch.empty(4, device="meta"),), {})
    assert caught.value.reason.code == "ISOLATION_UNSUPPORTED"
    assert worker.ping() < 5 and worker.pid == pid


@pytest.mark.parametrize("value", [torch.Generator(), {"a": 1}, object()], ids=["generator", "dict", "object"])
def test_what_cannot_be_sent_is_named(worker: Worker, value: Any) -> None:
    with pytest.raises(IsolationFault) as caught:
        worker.call("toyvendor:echo", (value,), {})
    assert caught.value.reason.code == "ISOLATION_UNSUPPORTED"
    assert type(value).__name__ in str(caught.value)


@pytest.mark.req("R-ISO-04")
def test_the_vendors_own_words_arrive_and_the_child_lives_on(worker: Worker) -> None:
    pid = worker.pid
    for function, words in (("raises", "ValueError: the vendor does not like this"), ("quits", "SystemExit")):
        with pytest.raises(ChildError, match=words) as caught:
            worker.call(f"toyvendor:{function}", (), {})
        assert caught.value.reason.code == "KERNEL_RAISED"
    with pytest.raises(ChildError) as caught:
        worker.call("toyvendor:out_of_memory", (), {})
    assert caught.value.reason.code == "OUT_OF_MEMORY" and isinstance(caught.value, MemoryError)
    assert worker.call("toyvendor:echo", (), {})[1] == pid


def test_the_child_has_its_own_surroundings(worker: Worker, folders: tuple[Path, Path]) -> None:
    assert worker.call("toyvendor:environ", ("TOY",), {}) == "set"
    assert worker.call("toyvendor:path", (), {})[0] == str(folders[1])
    assert not worker.call("toyvendor:sees", ("quarrel",), {})
    assert "" not in worker.call("toyvendor:path", (), {}) and os.environ.get("TOY") is None


def test_threads_take_turns(worker: Worker) -> None:
    results: list[bool] = []

    def use(seed: int) -> None:
        for _ in range(10):
            x = torch.full((64,), float(seed))
            (back,), _ = worker.call("toyvendor:echo", (x,), {})
            results.append(torch.equal(back, x))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 60


@pytest.mark.req("R-ISO-04")
def test_two_versions_of_a_library_are_in_the_middle_of_their_work_at_once(worker: Worker, tmp_path: Path) -> None:
    """One process could hold only one of them; the older one answers while the newer one is busy."""
    toy_module().install(tmp_path / "site", tmp_path / "vendor", version="2.0")
    waits = "def waits(ready, gate):\n    open(ready, 'w').close()\n    return open(gate).read() + ' from 2.0'\n"
    module, ready, gate = tmp_path / "vendor" / "toyvendor.py", tmp_path / "ready", tmp_path / "gate"
    module.write_text(module.read_text() + waits)
    os.mkfifo(gate)
    newer = Worker(Settings("toy", path=(str(module.parent),), deadline_s=60.0))
    said: list[str] = []
    ask = (str(ready), str(gate))
    busy = threading.Thread(target=lambda: said.append(newer.call("toyvendor:waits", ask, {})))
    try:
        busy.start()
        wait_until(ready.exists)
        (back,), pid = worker.call("toyvendor:echo", (Q,), {})
        assert torch.equal(back, Q) and pid == worker.pid != newer.pid and not said
        with pytest.raises(ChildError, match="waits"):
            worker.call("toyvendor:waits", ask, {})  # the older one has no such function
        gate.write_text("done")
        busy.join(60)
        assert said == ["done from 2.0"]
    finally:
        newer.close()


def test_the_wait_between_starts_doubles_and_has_an_end() -> None:
    assert [delay_s(n) for n in (0, 1, 2, 3, 4, 5)] == [0.0, 0.0, 0.25, 0.5, 1.0, 2.0]
    assert delay_s(40) == 30.0


# -- faults: each costs the start of a child -----------------------------------------------------------
DEADLY = {
    "hangs": ("ISOLATION_TIMEOUT", "no answer"),
    "garbage": ("ISOLATION_GARBAGE", "begins with"),
    "half": ("ISOLATION_TRUNCATED", "bytes"),
    "silent": ("ISOLATION_CRASHED", "closed the channel"),
}
if os.environ.get("LAYERZERO_PROVE") != "1":  # what a child writes is tested by itself in test_isolation_wire.py
    DEADLY = {"hangs": DEADLY["hangs"]}


def gone(pid: int, seconds: float = 90.0) -> bool:
    """No such process, not even a zombie. One that was killed on a busy machine is waited for, and then collected."""
    end = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        uncollected()
        time.sleep(0.01)
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.req("R-ISO-06", "R-FAIL-10")
def test_every_deadly_fault_is_an_answer_in_time_with_a_code_of_its_own(folders: tuple[Path, Path]) -> None:
    site, vendor = folders
    made = Worker(Settings("toy", path=(str(vendor), str(site)), deadline_s=60.0))
    memory_before = set(os.listdir("/dev/shm"))
    try:
        for function, (code, words) in DEADLY.items():
            made._not_before = 0.0
            made.load("toyvendor:echo")
            made.load(f"toyvendor:{function}")
            pid = made.pid
            assert pid is not None
            # Only what never answers has to wait for its deadline; the others are known before theirs.
            made.settings = replace(made.settings, deadline_s=1.5 if code == "ISOLATION_TIMEOUT" else 60.0)
            with pytest.raises(IsolationFault, match=words) as caught:
                made.call(f"toyvendor:{function}", (), {})
            assert caught.value.reason.code == code
            if code == "ISOLATION_TIMEOUT":
                assert caught.value.reason.limit == 1.5
            assert gone(pid), function
        assert made._failures == len(DEADLY)
        made._not_before = time.monotonic() + 3600
        with pytest.raises(IsolationFault) as caught:
            made.call("toyvendor:echo", (), {})
        assert caught.value.reason.code == "ISOLATION_BACKOFF"
        assert not [
            name
            for name in set(os.listdir("/dev/shm")) - memory_before
            if re.fullmatch(r"layerzero-[0-9a-f]{16}", name)
        ]
    finally:
        made.close()


@PROVE
def test_a_child_does_not_outlive_its_parent(folders: tuple[Path, Path]) -> None:
    import subprocess
    import sys

    code = (
        "import sys, os, threading, time\n"
        "from layerzero.isolation.worker import Worker\n"
        "from layerzero.isolation.process import Settings\n"
        f"w = Worker(Settings('toy', path=({str(folders[1])!r},)))\n"
        "w.ping(); print(w.pid, flush=True)\n"
        "threading.Thread(target=lambda: w.call('toyvendor:sleeps', (120,), {}), daemon=True).start()\n"
        "time.sleep(0.3); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    pid = int(done.stdout.strip())
    gone(pid)
    # Its new parent may take a moment to collect it; what matters is that it no longer runs.
    with_state = Path(f"/proc/{pid}/stat")
    assert not with_state.exists() or with_state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


# -- through the ordinary call ----------------------------------------------------------------------
@pytest.mark.req("R-CONC-03")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_leaves_the_process_of_its_parent_alone(toy: dict[str, Any]) -> None:
    lz.configure(isolation={"toy": toy})
    torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
    made = workers()[-1]
    pid, calls = made.pid, made.calls
    assert pid is not None and calls > 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(100)  # a child that hangs is ended
            assert made.pid is None and workers() == ()
            if os.environ.get("LAYERZERO_PROVE") == "1":  # the start of one more process
                torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
                assert lz.explain("attention", Q, Q, Q).ran == "toy.attention.plain" and made.pid not in (None, pid)
                made.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made.pid == pid
    torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
    assert (made.pid, made.calls) == (pid, calls + 1)


@pytest.mark.req("R-ISO-01")
@pytest.mark.req("R-ISO-06")
@pytest.mark.req("R-ENV-10")
def test_an_isolated_kernel_is_selected_runs_and_says_so(toy: dict[str, Any]) -> None:
    assert reasons() == ["BACKEND_NOT_INSTALLED"]  # this process does not search the vendor's folder
    lz.configure(isolation={"toy": toy}, on_first_use="check")
    for ran in ("sdpa.attention.flash_cpu", "toy.attention.plain"):  # nothing vouches for it: checked, then used
        torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
        report = lz.explain("attention", Q, Q, Q)
        assert (report.chosen, report.ran) == ("toy.attention.plain", ran)
    lz.configure(isolation={"toy": toy}, on_first_use="off")
    assert "isolated" in str(report) and reasons() == ["ISOLATED"]
    (made,) = workers()
    calls, pid = made.calls, made.pid
    assert pid is not None
    causal = F.scaled_dot_product_attention(Q, Q, Q, is_causal=True)
    torch.testing.assert_close(lz.attention(Q, Q, Q, is_causal=True), causal)
    x, w = torch.randn(3, 8), torch.ones(8)
    torch.testing.assert_close(lz.rms_norm(x, w), F.rms_norm(x, (8,), w, 1e-6))
    assert made.calls > calls and made.pid == pid and workers() == (made,)  # one child for the backend

    # never part of a graph, no backward; the reference of torch takes such calls in process
    grad = Q.clone().requires_grad_()
    assert reasons("toy.attention.plain", grad, grad, grad) == ["BACKWARD_UNSUPPORTED"]
    lz.attention(grad, grad, grad).sum().backward()
    assert grad.grad is not None

    # a locked kernel that crashes raises, with the code of its fault (the vendor kills itself with SIGSEGV)
    with lz.scoped(locks={"attention": "toy.attention.plain"}), pytest.raises(KernelExecutionError) as caught:
        lz.attention(Q, Q, Q, scale=100.0)
    assert caught.value.code == "ISOLATION_CRASHED" and "SIGSEGV" in caught.value.reasons[0].message
    assert gone(pid)

    # otherwise it costs one call a detour
    with lz.prefer("toy"):
        out = lz.attention(Q, Q, Q, scale=102.0)  # it leaves with exit code 7; torch's own kernel takes over
    torch.testing.assert_close(out, F.scaled_dot_product_attention(Q, Q, Q, scale=102.0))
    assert reasons() == ["CIRCUIT_OPEN"]
    lz.configure(isolation={"toy": "in_process"})
    assert reasons()[0] == "BACKEND_NOT_INSTALLED"


@pytest.mark.req("R-ENV-10")
def test_a_kernel_computes_the_same_in_both_modes_and_only_one_has_a_process_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, vendor = tmp_path / "site", tmp_path / "vendor"
    toy_module().install(site, vendor)
    monkeypatch.setenv("LAYERZERO_PLUGINS", "toy")
    monkeypatch.setenv("LAYERZERO_ON_FIRST_USE", "off")
    known = set(sys.modules)
    for folder in (site, vendor):
        monkeypatch.syspath_prepend(str(folder))
    before = set(workers())
    try:
        for mode, entry in (("in_process", "in_process"), ("subprocess", {"path": [str(vendor)], "deadline_s": 60.0})):
            lz.reset()
            lz.configure(isolation={"toy": entry})
            torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
            assert lz.explain("attention", Q, Q, Q).ran == "toy.attention.plain"
            assert (reasons() == ["ISOLATED"]) is (mode == "subprocess")
            called = [item.calls > 0 and item.pid != os.getpid() for item in set(workers()) - before]
            assert called == ([True] if mode == "subprocess" else [])
            assert mode == "subprocess" or "toyvendor" in sys.modules
    finally:
        for name in set(sys.modules) - known:
            if name.startswith(("toyvendor", "layerzero_toy")):
                del sys.modules[name]
        lz.reset()


@pytest.mark.req("R-ISO-02", "R-DEV-10")
def test_a_clash_found_in_metadata_starts_a_process_of_its_own(toy: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(toy["path"][0])  # installed here after all, beside what it cannot live with
    lz.reset()
    found = lz.explain("attention", Q, Q, Q).decision.candidate("toy.attention.plain").reasons
    assert [why.code.value for why in found] == ["BACKEND_CONFLICT"]
    assert "quarrel 4.0" in found[0].message and "isolation: {toy: subprocess}" in found[0].hint
    assert next(item for item in state.records if item.name == "toy").fix == found[0].hint
    lz.configure(isolation="auto")
    assert reasons() == ["ISOLATED"]
    torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
    last = workers()[-1].settings
    assert (last.path, last.hide) == ((), ("quarrel",))  # by the backend's own declaration


@pytest.mark.req("R-ISO-06")
def test_a_vendor_of_a_wrong_version_is_said_where_it_was_looked_for(
    toy: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy_module().install(tmp_path / "unused", tmp_path / "old", version="0.3")
    lz.configure(isolation={"toy": {**toy, "path": [str(tmp_path / "old")]}})
    with caplog.at_level(logging.INFO, logger="layerzero.selection"):
        torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
    (line,) = [item for item in caplog.records if item.name == "layerzero.selection"]
    assert vars(line)["layerzero"]["reasons"]["toy.attention.plain"] == ["BACKEND_VERSION_MISMATCH"]
    (why,) = lz.explain("attention", Q, Q, Q).decision.candidate("toy.attention.plain").reasons
    assert why.code == "BACKEND_VERSION_MISMATCH" and why.value == "toyvendor 0.3"
    assert "isolation.toy.path" in why.hint
    assert all(str(tmp_path / "old") not in item.settings.path for item in workers())


def test_an_adapter_that_cannot_be_imported_there_is_set_aside_with_its_own_code(toy: dict[str, Any]) -> None:
    broken = {**toy, "path": [*toy["path"], str(Path(toy["path"][0]) / "absent")]}
    lz.configure(isolation={"toy": broken})
    vendor = Path(toy["path"][0]) / "toyvendor.py"
    text = vendor.read_text()
    try:
        vendor.write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
        torch.testing.assert_close(lz.attention(Q, Q, Q), EXPECTED)
        assert reasons() == ["ISOLATION_IMPORT_FAILED"]
    finally:
        vendor.write_text(text)


@PROVE
def test_doctor_asks_an_isolated_backend_in_its_own_surroundings(toy: dict[str, Any]) -> None:
    lz.configure(isolation={"toy": toy})
    found = lz.doctor("toy", timeout=60.0)
    check = found.check("toy", "backends")
    assert check.status == "ok", check
    assert check.message.startswith("isolated in its own process: 1.5, 2 of 2 kernels")
    plugin = found.check("toy", "plugins")
    assert plugin.status == "ok" and plugin.message.endswith(", in a process of their own"), plugin

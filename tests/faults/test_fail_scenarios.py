"""The failures of the checklist, each injected for real, most in their own processes: fallback, reason code, no loss.

R-FAIL-02 (an illegal access on a GPU) and its kin are in test_gpu_faults.py; the long ones run with LAYERZERO_PROVE=1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.errors import CudaGraphUnsafeError, InvalidInputError, LayerZeroError
from layerzero.health.quarantine import Quarantine
from layerzero.model.config import Policy
from layerzero.runtime.state import state
from layerzero.selection.engine import refuse, select
from tools import faulty_plugins as faults
from tools.kernel_process import run_with_kernel

PROVE = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=faults")
X, W = torch.linspace(-1, 1, 24).reshape(3, 8), torch.ones(8)
Q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))

SIGNALLED = """
    import os, signal
    def rms_norm(x, weight, eps):
        os.kill(os.getpid(), signal.{name})
"""
NEXT = """
    out = lz.rms_norm(X, W)
    print(json.dumps({"why": why(), "which": lz.which("rms_norm", X, W), "right": right(X, out)}))
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process as it starts, with only the built-in backends."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(tmp_path / "quarantine.json"))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "")
    lz.reset()
    yield tmp_path
    lz.reset()


# -- a kernel takes its process down ------------------------------------------------------------------
@pytest.mark.req("R-HLTH-03")
def test_a_segmentation_fault_in_a_first_run_is_avoided_at_the_next_start(tmp_path: Path) -> None:
    first = run_with_kernel(tmp_path, SIGNALLED.format(name="SIGSEGV"), NEXT)
    assert first.code == -signal.SIGSEGV and first.said is None
    second = run_with_kernel(tmp_path, SIGNALLED.format(name="SIGSEGV"), NEXT)
    assert second.code == 0, second.err
    assert second.said == {"why": ["QUARANTINED"], "which": "torch.rms_norm.native", "right": True}
    (entry,) = Quarantine(tmp_path / "quarantine.json").entries()
    assert (entry.kernel_id, entry.code) == ("bad.rms_norm.kernel", "KERNEL_CRASHED")
    assert "Segmentation fault" in entry.detail and not list((tmp_path / "crash_markers").iterdir())


@PROVE
@pytest.mark.req("R-HLTH-03")
@pytest.mark.parametrize("name", ["SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"])
def test_every_fatal_signal_convicts_at_once(tmp_path: Path, name: str) -> None:
    assert run_with_kernel(tmp_path, SIGNALLED.format(name=name), NEXT).code == -getattr(signal, name)
    assert run_with_kernel(tmp_path, SIGNALLED.format(name=name), NEXT).said["why"] == ["QUARANTINED"]


@PROVE
@pytest.mark.req("R-HLTH-03")
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"], ids=["kill_9", "exit"])
def test_a_kill_from_outside_makes_a_suspect_and_the_second_a_convict(tmp_path: Path, how: str) -> None:
    kernel = f"""
    import os, signal
    def rms_norm(x, weight, eps):
        {how}
    """
    ends = [run_with_kernel(tmp_path, kernel, NEXT) for _ in range(3)]
    assert [item.said is None for item in ends] == [True, True, False]
    assert ends[2].said["why"] == ["QUARANTINED"] and ends[2].said["right"]


@PROVE
@pytest.mark.req("R-FAIL-01")
def test_a_vendor_that_crashes_at_import_is_avoided_at_the_next_start(tmp_path: Path) -> None:
    kernel = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\ndef rms_norm(x, weight, eps): return x\n"
    assert run_with_kernel(tmp_path, kernel, NEXT).code == -signal.SIGSEGV
    assert run_with_kernel(tmp_path, kernel, NEXT).said["why"] == ["QUARANTINED"]


@PROVE
def test_exceptions_interrupts_and_good_ends_leave_no_crash_marker(tmp_path: Path) -> None:
    kernel = """
    import torch
    def rms_norm(x, weight, eps):
        if x.shape[0] == 3: raise RuntimeError("no")
        if x.shape[0] == 4: raise KeyboardInterrupt
        if x.shape[0] == 5: raise SystemExit(4)
        return torch.rms_norm(x, (8,), weight, eps)
    """
    script = """
    lz.rms_norm(X, W)
    for rows in (2, 4, 5):
        try:
            lz.rms_norm(torch.ones(rows, 8), W)
        except (KeyboardInterrupt, SystemExit):
            pass
    pid = os.fork()
    if pid == 0:
        lz.rms_norm(torch.ones(6, 8), W)
        os._exit(0)
    os.waitpid(pid, 0)
    print(json.dumps(lz.which("rms_norm", torch.ones(9, 8), W)))
    raise SystemExit(0)
    """
    ended = run_with_kernel(tmp_path, kernel, script)
    assert ended.code == 0, ended.err
    again = run_with_kernel(tmp_path, kernel, NEXT)
    assert again.said["why"] != ["QUARANTINED"] and not (tmp_path / "quarantine.json").exists()


# -- 01: the backend cannot be imported ---------------------------------------------------------------
@pytest.mark.req("R-FAIL-01", "R-HLTH-03")
@pytest.mark.parametrize("kind", ["raises_at_import", "exits_at_import", "missing_dependency", "syntax_error"])
def test_a_plugin_that_cannot_be_imported_costs_only_itself(
    alone: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name = faults.install(alone / "site", kind)
    monkeypatch.syspath_prepend(str(alone / "site"))
    monkeypatch.setenv("LAYERZERO_PLUGINS", name)
    lz.reset()
    torch.testing.assert_close(lz.rms_norm(X, W), torch.rms_norm(X, (8,), W, 1e-6))
    record = next(item for item in state.records if item.name == name)
    assert record.reasons[0].code == "PLUGIN_IMPORT_FAILED" and record.fix
    assert any(check.code == "PLUGIN_IMPORT_FAILED" for check in lz.doctor(name, probe=False).checks)


# -- 03: files that are wrong -------------------------------------------------------------------------
@pytest.mark.req("R-FAIL-03")
@pytest.mark.parametrize("harm", ["truncated", "flipped", "foreign_key", "empty"])
def test_a_capabilities_file_that_is_wrong_fails_readiness_and_nothing_else(
    alone: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    name = faults.install(alone / "site", "healthy")
    file = alone / "site" / f"faulty_{name}" / "capabilities.json"
    text = file.read_text()
    wrong = {
        "truncated": text[: len(text) // 2],
        "flipped": text.replace('"schema_version"', '"schema_versioo"'),
        "foreign_key": text.replace("{", '{"platfroms": 1, ', 1),
        "empty": "",
    }[harm]
    file.write_text(wrong)
    monkeypatch.syspath_prepend(str(alone / "site"))
    monkeypatch.setenv("LAYERZERO_PLUGINS", name)
    lz.reset()
    torch.testing.assert_close(lz.rms_norm(X, W), torch.rms_norm(X, (8,), W, 1e-6))  # the rest goes on
    report = lz.readiness_check()
    failed = [check for check in report.failed if check.group == "capabilities"]
    assert not report.ok and [check.name for check in failed] == [name]
    assert failed[0].code is not None and failed[0].code.value.startswith("SCHEMA_") and failed[0].fix
    with pytest.raises(LayerZeroError):
        report.require()


@pytest.mark.req("R-FAIL-03", "R-FAIL-06")
def test_a_dispatch_table_that_is_wrong_fails_readiness_and_a_good_one_says_what_it_does_not_cover(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = alone / "table.json"
    table = solved(made)
    monkeypatch.setenv("LAYERZERO_DISPATCH_TABLE", str(made))
    lz.reset()
    inside, outside = torch.ones(4, 8), torch.ones(4, 24)
    lz.rms_norm(inside, W)
    assert lz.explain("rms_norm", inside, W).decision.notes[0].code == "PLAN_FOLLOWED"
    out = lz.rms_norm(outside, torch.ones(24))  # a shape the table has never seen is selected for, and says so
    torch.testing.assert_close(out, torch.rms_norm(outside, (24,), None, 1e-6))
    notes = lz.explain("rms_norm", outside, torch.ones(24)).decision.notes
    assert [note.code.value for note in notes] == ["PLAN_BUCKET_MISS"]
    for harm in (table[: len(table) // 2], table.replace(b"rms_norm", b"rms_nrom"), b"\x00" * 64):
        made.write_bytes(harm)
        lz.reset()
        torch.testing.assert_close(lz.rms_norm(inside, W), torch.rms_norm(inside, (8,), W, 1e-6))
        report = lz.readiness_check()
        check = report.check("dispatch table")
        assert check.status == "fail" and check.code is not None and check.code.value.startswith(("PLAN_", "SCHEMA_"))
        assert not report.ok and check in report.failed
        with pytest.raises(LayerZeroError, match="dispatch table"):
            report.require()


def solved(path: Path) -> bytes:
    """A real table for one rms_norm call."""
    from layerzero.tables.file import save_table
    from layerzero_tune.tables.solver import solve_table

    ctx = lz.explain("rms_norm", torch.ones(4, 8), W).decision.context
    save_table(solve_table([ctx], state.world, ctx.device), path)
    return path.read_bytes()


# -- 04, 05, 07: calls that must be refused -----------------------------------------------------------
@pytest.mark.req("R-FAIL-04")
def test_a_mask_beside_is_causal_is_refused_before_any_kernel_runs(alone: Path) -> None:
    mask = torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(InvalidInputError) as caught:
        lz.attention(Q, Q, Q, attn_mask=mask, is_causal=True)
    assert caught.value.code == "MASK_WITH_CAUSAL" and caught.value.hint
    assert not state.health.snapshot().kernels


@pytest.mark.req("R-FAIL-05")
def test_a_graph_unsafe_kernel_is_out_under_graph_strict_mode(alone: Path) -> None:
    from dataclasses import replace

    world = state.world
    ctx = replace(lz.explain("attention", Q, Q, Q).decision.context, capturing=True)
    safe = {name for name, kernel in world.registry.kernels.items() if kernel.op == "attention" and kernel.graph_safe}
    strict = select(ctx, world.changed(policy=Policy(graph_strict_mode=True)))
    assert strict.chosen in safe
    for item in strict.candidates:
        if item.kernel_id not in safe:
            assert {why.code.value for why in item.reasons} & {"GRAPH_NOT_WHITELISTED", "CUDA_GRAPH_UNSAFE"}
    none = select(ctx, world.changed(policy=Policy(graph_strict_mode=True, deny=tuple(sorted(safe)))))
    assert not none.chosen and isinstance(refuse(none), CudaGraphUnsafeError)


# -- 09: the database of measured times ---------------------------------------------------------------
@pytest.mark.req("R-FAIL-09")
@pytest.mark.parametrize("harm", ["zeros", "truncated", "text", "missing"])
def test_a_broken_perfdb_is_set_aside_and_calls_go_on(alone: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    from layerzero.perfdb.store import PerfDB
    from layerzero_tune.perfdb.exchange import put_tactics, verify

    path = alone / "times.db"
    if harm != "missing":
        db = PerfDB(path)
        verify(db)
        put_tactics(db, [])
        db.close()
        raw = path.read_bytes() if path.exists() else b"SQLite format 3" * 300
        harmed = {"zeros": b"\0" * len(raw), "truncated": raw[:700], "text": b"not a database at all" * 99}
        path.write_bytes(harmed[harm])
    monkeypatch.setenv("LAYERZERO_PERFDB", str(path))
    lz.reset()
    torch.testing.assert_close(lz.rms_norm(X, W), torch.rms_norm(X, (8,), W, 1e-6))
    assert lz.which("rms_norm", X, W) == "torch.rms_norm.native"


# -- a full disk --------------------------------------------------------------------------------------
FILLS = """
    import logging
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    from layerzero.health.quarantine import Quarantine
    from layerzero.reasons import reason
    from layerzero.runtime.crashes import put
    out = lz.rms_norm(X, W)
    device = lz.explain("rms_norm", X, W).decision.context.device
    wrote = put(SPEC, device, reason("DEVICE_POISONED", "boom", "cuda:0"))
    print(json.dumps({"right": right(X, out), "wrote": wrote, "why": why(), "next": right(X, lz.rms_norm(X, W))}))
"""
FINE = "import torch\ndef rms_norm(x, weight, eps): return torch.rms_norm(x, (8,), weight, eps)\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB that is full; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=64k") != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        handle = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(handle, b"x" * 1024):
                pass
        os.close(handle)
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


@pytest.mark.req("R-HLTH-03")
def test_on_a_full_disk_calls_go_on_and_no_half_file_is_left(tmp_path: Path, small_disk: Path) -> None:
    env = {"LAYERZERO_QUARANTINE": str(small_disk / "state" / "quarantine.json")}
    ended = run_with_kernel(tmp_path, FINE, FILLS, env=env)
    assert ended.code == 0, ended.err
    assert ended.said["right"] and ended.said["next"] and ended.said["wrote"] is False
    assert ended.said["why"] == ["QUARANTINED"], "what could not be written down still holds in this process"
    assert "could not be written into the quarantine" in ended.err
    left = [path for path in small_disk.rglob("*") if path.is_file() and "ballast" not in path.name]
    assert not [path for path in left if path.suffix in (".tmp", ".json", ".marker")], left


@PROVE
def test_a_file_size_limit_is_a_full_disk_too(tmp_path: Path) -> None:
    """The same without root: RLIMIT_FSIZE, in a process of its own."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from layerzero.health.quarantine import Quarantine\n"
        "from layerzero.health.crash_markers import CrashMarkers; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
        "quarantine = Quarantine(sys.argv[1])\n"
        "print(CrashMarkers(Path(sys.argv[1]).parent / 'crash_markers').enter('a.b.c', '1', 's'))\n"
        "try:\n    quarantine.add('a.b.c', '1', 's', 'DEVICE_LOST', 'x' * 1900)\n"
        "except OSError as error: print(error.errno)\n"
        "print(len(quarantine.entries()))\n"
    )
    places = os.pathsep.join(place for place in sys.path if place)
    env = {"PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}  # Python itself writes half files under such a limit
    quarantine = Quarantine(tmp_path / "quarantine.json")
    quarantine.add("kept.b.c", "1", "s", "DEVICE_LOST")
    done = subprocess.run(
        [sys.executable, "-c", code, str(quarantine.path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["None", "27", "1"], done.stderr
    assert [entry.kernel_id for entry in quarantine.entries()] == ["kept.b.c"] and not list(tmp_path.glob(".*.tmp"))


# -- 10, 11 and memory: real limits, in processes of their own -----------------------------------------
GREEDY = """
    import torch
    def rms_norm(x, weight, eps):
        torch.empty(1 << 36, dtype=torch.uint8)[::4096].fill_(1)
        return x
"""
LIMITED = """
    import resource
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), resource.RLIM_INFINITY))
    outs = [right(X, lz.rms_norm(X, W)) for _ in range(4)]
    print(json.dumps({"right": outs, "ran": lz.which("rms_norm", X, W), "why": why(),
                      "failovers": state.counters.failovers, "phase": state.health.snapshot().state(KERNEL).phase}))
"""


@pytest.mark.req("R-MEM-04", "R-MEM-05")
def test_a_kernel_that_hits_the_memory_limit_hands_over_and_is_set_aside_after_three(tmp_path: Path) -> None:
    ended = run_with_kernel(tmp_path, GREEDY, LIMITED)
    assert ended.code == 0, ended.err
    assert ended.said["right"] == [True] * 4 and ended.said["failovers"] == 3
    assert ended.said["phase"] == "open" and ended.said["why"] == ["CIRCUIT_OPEN"]
    assert ended.said["ran"] == "torch.rms_norm.native" and "OUT_OF_MEMORY" in ended.err


ROOMY = """
    import torch
    rows = []
    def rms_norm(x, weight, eps):
        rows.append(x.shape[0])
        torch.empty(x.shape[0] << 20, dtype=torch.uint8)
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)
"""
CHANGING = """
    import bad_kernel, random, resource
    from dataclasses import replace
    from layerzero.model.formula import Formula
    from layerzero.runtime import pressure

    def taken(field=0):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[field]) * resource.getpagesize()

    q, x = torch.randn(1, 4, 300, 32), torch.randn(1400, 64)
    lz.attention(q, q, q), lz.rms_norm(x, torch.ones(64), backend="torch")
    most = taken() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    pressure.free_bytes = lambda device: most - taken()  # a machine as small as that
    state.use(load_plugins(entry_points=()).registry.add([replace(SPEC, workspace=Formula("rows * 1048576"))]))
    lz.configure(memory_headroom_mb=256, on_first_use="off", jit="off")
    draw, good, held = random.Random(0), [], []
    for step in range(120):
        rows, seq = draw.randrange(1, 1400), draw.randrange(1, 300)
        good.append(right(x[:rows], lz.rms_norm(x[:rows], torch.ones(64))))
        part = q[:, :, :seq]
        good.append(lz.attention(part, part, part).shape == part.shape)
        held.append(taken(1))  # what is really there
    print(json.dumps({"good": all(good), "failovers": state.counters.failovers, "most": max(bad_kernel.rows),
                      "calls": len(bad_kernel.rows), "grown": max(held[80:]) - max(held[:40])}))
"""


@pytest.mark.req("R-MEM-06")
def test_changing_sizes_in_little_memory_never_run_out_since_large_workspaces_are_avoided(tmp_path: Path) -> None:
    """A gigabyte, a quarter of it kept free; a kernel that takes a mebibyte a row serves the short calls alone."""
    ended = run_with_kernel(tmp_path, ROOMY, CHANGING)
    assert ended.code == 0, ended.err
    assert ended.said["good"] and ended.said["failovers"] == 0 and "OUT_OF_MEMORY" not in ended.err
    assert 256 <= ended.said["most"] <= 768 and 10 < ended.said["calls"] < 110
    assert ended.said["grown"] <= 16 << 20, "the process holds ever more"

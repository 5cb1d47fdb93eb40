"""The library itself: wrong arguments, instruction sets, threads, forks; never a crash, never a changed result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

from layerzero.errors import InvalidInputError
from layerzero_cpu import library, norm, rotary, sampling
from layerzero_cpu.library import native, torchs_team


def test_wrong_arguments_are_refused_before_a_kernel_runs():
    x = torch.randn(2, 8)
    out = torch.empty_like(x)
    with pytest.raises(TypeError, match="argument 0 must be a tensor"):
        native.rms_norm(3, None, 0.0, 1e-6, out)
    with pytest.raises(TypeError, match="expected 5 arguments, got 2"):
        native.rms_norm(x, None)
    with pytest.raises(TypeError):
        native.rms_norm(x, None, "no number", 1e-6, out)
    with pytest.raises(TypeError, match="dtype that no kernel knows"):
        native.rms_norm(torch.randn(2, 8, dtype=torch.complex64), None, 0.0, 1e-6, out)
    with pytest.raises(ValueError, match="tensors must be alike"):
        native.rms_norm(x, None, 0.0, 1e-6, torch.empty(2, 7))
    with pytest.raises(ValueError, match="one number a column"):
        native.rms_norm(x, torch.randn(7), 0.0, 1e-6, out)
    with pytest.raises(ValueError, match="dtype must be"):
        native.rms_norm(x.double(), None, 0.0, 1e-6, x.double())
    with pytest.raises(ValueError, match="no such activation"):
        native.gated(x, torch.empty(2, 4), 9)
    with pytest.raises(ValueError, match="half its width"):
        native.gated(x, torch.empty(2, 3), 0)
    with pytest.raises(ValueError, match="no such format"):
        native.quantize(x, torch.empty(2, 8, dtype=torch.int8), torch.empty(2, 1), None, 8, 7)
    with pytest.raises(ValueError, match="one float32 scale a group"):
        native.quantize(x, torch.empty(2, 8, dtype=torch.int8), torch.empty(3, 1), None, 8, 0)
    with pytest.raises(ValueError, match=r"ids must be int64 \[B\]"):
        native.sample(x, torch.empty(3, dtype=torch.int64), None, None, -1, None, -1.0, None, -1.0, None, 1.0)


@pytest.mark.parametrize("position", [5, -6, 2**40])
def test_a_position_outside_the_tables_never_reads_past_them(position):
    q, table = torch.randn(1, 1, 2, 8), torch.randn(5, 4)
    ids = torch.tensor([0, position])
    with pytest.raises(ValueError, match="outside the tables"):
        rotary.rope(q, None, table, table, False, "BHSD", ids, False)
    kept = q.clone()
    with pytest.raises(ValueError, match="outside the tables"):
        rotary.rope(q, None, table, table, False, "BHSD", ids, True)
    assert torch.equal(q, kept), "nothing is written before everything is checked"


def test_instruction_sets_are_listed_and_forced():
    here = native.isas_here()
    assert here[0] == "portable" and set(here) <= set(native.isas())
    before = native.isa()
    try:
        for name in here:
            native.set_isa(name)
            assert native.isa() == name
            assert native.isas().index(native.isa_of("rms_norm")) <= native.isas().index(name)
    finally:
        native.set_isa(before)
    with pytest.raises(ValueError, match="no instruction set is called quantum"):
        native.set_isa("quantum")


# What each of ours asks of a processor, in the words of /proc/cpuinfo; each set holds those before it.
FLAGS = {
    "x86_64": {
        "portable": (),
        "avx2": ("avx2", "fma", "f16c"),
        "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl"),
        "avx512_vnni": ("avx512_vnni",),
        "avx512_bf16": ("avx512_bf16",),
        "amx": ("amx_bf16", "amx_tile", "amx_int8"),
    },
    "aarch64": {"portable": (), "neon": ("asimd",), "dotprod": ("asimddp", "asimdhp", "fphp")},
}[platform.machine()]


@pytest.mark.req("R-BK-CPU-04")
def test_the_instruction_sets_of_this_processor_are_found_and_the_best_of_them_is_used():
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    (found,) = {line for line in lines if line.startswith(("flags", "Features"))}
    here = [name for name, flags in FLAGS.items() if set(flags) <= set(found.split())]
    assert list(native.isas()) == list(FLAGS) and list(native.isas_here()) == here == list(FLAGS)[: len(here)]
    best = os.environ.get("LAYERZERO_CPU_ISA") or here[-1]
    assert native.isa() == best, "tests that change it put it back"
    assert native.isa_of("rms_norm") != "portable" or best == "portable", "a kernel of the best set it was built for"


@pytest.mark.req("R-BK-CPU-04")
def test_the_environment_forces_an_instruction_set(monkeypatch):
    before = native.isa()
    try:
        monkeypatch.setenv("LAYERZERO_CPU_ISA", "portable")
        assert (library._load().isa(), native.isa_of("rms_norm")) == ("portable", "portable")
        monkeypatch.setenv("LAYERZERO_CPU_ISA", "quantum")
        with pytest.raises(InvalidInputError) as refused:
            library._load()
    finally:
        native.set_isa(before)
    assert refused.value.code == "CPU_FEATURE_MISSING"
    assert "quantum" in str(refused.value) and "portable" in str(refused.value.reasons[0].limit)


def work():
    x, w = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)), torch.ones(4096)
    return lambda: norm.rms_norm(x, w, 1e-6)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_results_do_not_depend_on_threads(threads):
    x = torch.randn(37, 5000, requires_grad=True)
    w = torch.randn(5000, requires_grad=True)
    grad = torch.randn(37, 5000)
    seen = []
    for count in (1, 2, 3, 8):
        threads(count)
        out = norm.rms_norm(x, w, 1e-6)
        seen.append((out.detach(), *torch.autograd.grad(out, (x, w), grad)))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_many_python_threads_share_one_pool_and_get_right_answers(threads):
    """Callers beyond the first work alone, so no more threads run than callers and torch's setting allow."""
    threads(3)
    call = work()
    right = call()
    wrong = []

    def run():
        for _ in range(20):
            if not torch.equal(call(), right):
                wrong.append(1)

    runners = [threading.Thread(target=run) for _ in range(8)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert not wrong
    ours = [name for name in os.listdir("/proc/self/task")] if os.path.isdir("/proc/self/task") else []
    call()
    assert not ours or len(os.listdir("/proc/self/task")) <= len(ours) + 2


def test_torchs_setting_is_respected():
    code = """
import os, torch
from layerzero_cpu import norm
x = torch.randn(512, 4096)
torch.set_num_threads(1)
before = len(os.listdir("/proc/self/task"))
for count in (1, 4, 2):
    torch.set_num_threads(count)
    for _ in range(5): norm.rms_norm(x, None, 1e-6)
    print(len(os.listdir("/proc/self/task")) - before)
"""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads are counted in /proc")
    for whose, least in (("own", 3), ("", 1)):  # OpenMP ends threads that it has no use for, by and by
        given = {**os.environ, "LAYERZERO_CPU_THREADS": whose}
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=given)
        assert found.stdout.split()[:2] == ["0", "3"] and least <= int(found.stdout.split()[2]) <= 3, found.stderr


_TEAM = """
import os, threading, time, torch
from layerzero_cpu import norm
from layerzero_cpu.library import torchs_team
torch.set_num_threads(3)
x = torch.randn(512, 4096)
tasks = lambda: len(os.listdir("/proc/self/task"))
x.add(1.0)  # torch's own threads are there now
before = tasks()
right = norm.rms_norm(x, None, 1e-6)
print("mine", tasks() - before)
results = []
def elsewhere():
    out = norm.rms_norm(x, None, 1e-6)
    results.append(tasks() - before)  # this thread and two workers
    late.append(time.monotonic() - asked > 0.1)  # by then the team is anybody's
    time.sleep(0.2)
    again = norm.rms_norm(x, None, 1e-6)
    results.append(tasks() - before)  # and a team of its own
    results.append(torch.equal(out, right) and torch.equal(again, right))
late = []
runner = threading.Thread(target=elsewhere)
asked = time.monotonic()
norm.rms_norm(x, None, 1e-6)
runner.start(); runner.join()
print("late" if late[0] else f"another's {results} {bool(torchs_team())}")
"""


def test_torchs_own_threads_do_the_work_for_one_caller_at_a_time():
    """No thread more than torch has; another caller, meanwhile, gets workers of ours, and later the team."""
    if not os.path.isdir("/proc/self/task") or not torchs_team():
        pytest.skip("torch does not run on OpenMP here, or threads cannot be counted")
    given = {name: value for name, value in os.environ.items() if name != "LAYERZERO_CPU_THREADS"}
    for _ in range(30):  # on a busy machine the other caller may come too late to find the team taken
        found = subprocess.run([sys.executable, "-c", _TEAM], capture_output=True, text=True, timeout=100, env=given)
        if "late" not in found.stdout:
            break
    assert found.stdout.splitlines() == ["mine 0", "another's [3, 5, True] True"], found.stdout + found.stderr
    given["LAYERZERO_CPU_THREADS"] = "own"
    found = subprocess.run([sys.executable, "-c", _TEAM], capture_output=True, text=True, timeout=100, env=given)
    assert found.stdout.splitlines()[0] == "mine 2", found.stdout + found.stderr


def test_whose_threads_is_a_word_we_know(monkeypatch):
    try:
        for whose in ("own", "torch", ""):
            monkeypatch.setenv("LAYERZERO_CPU_THREADS", whose)
            assert library._load() is native
        monkeypatch.setenv("LAYERZERO_CPU_THREADS", "mine")
        with pytest.raises(InvalidInputError, match="mine") as caught:
            library._load()
        assert caught.value.reasons[0].code == "VALUE_INVALID" and "own or torch" in str(caught.value)
    finally:
        native.set_team(torchs_team())


def test_the_team_makes_the_results_of_the_workers(threads):
    threads(2)
    call = work()
    try:
        native.set_team(0)
        own = call()
        native.set_team(torchs_team())
        assert torch.equal(call(), own)
        with pytest.raises(TypeError):
            native.set_team("gomp")
    finally:
        native.set_team(torchs_team())


@pytest.mark.req("R-CONC-03")
def test_a_forked_child_starts_its_own_workers(threads):
    """The parent's workers do not exist in the child; it must neither wait for them nor crash."""
    threads(2)
    call = work()
    right = call()
    child = os.fork()
    if child == 0:
        try:
            # by numpy: torch's own threads do not survive a fork
            good = all(numpy.array_equal(call().numpy(), right.numpy()) for _ in range(5))
            os._exit(0 if good else 3)
        except BaseException:
            os._exit(4)
    for _ in range(2400):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(call(), right)


def test_inputs_are_left_alone(isa):
    x, w, r = torch.randn(5, 33), torch.randn(33), torch.randn(5, 33)
    kept = [t.clone() for t in (x, w, r)]
    norm.add_rms_norm(x, r, w, 1e-6)
    sampling.sample(x, 3, 0.5, None, 1.0, None)
    rotary.rope(x[None, None, :, :32], None, r[:, :16], r[:, :16], True, "BHSD", None, False)
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, w, r), strict=True))


def test_a_parameter_and_a_tensor_on_another_device():
    x = torch.randn(2, 8)
    weight = torch.nn.Parameter(torch.ones(8))
    with torch.no_grad():
        assert torch.equal(norm.rms_norm(x, weight, 1e-6), norm.rms_norm(x, None, 1e-6))
    with pytest.raises((BufferError, RuntimeError), match="meta"):  # torch's own refusal, before any memory is read
        native.rms_norm(x.to("meta"), None, 0.0, 1e-6, torch.empty_like(x))


def test_a_view_that_stands_for_its_negative_is_read_as_such():
    """torch marks the imaginary part of a conjugate instead of computing it; its memory holds the other sign."""
    z = torch.randn(3, 8, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    assert torch.equal(norm.rms_norm(x, None, 1e-6), norm.rms_norm(-z.imag, None, 1e-6))


def test_writing_in_place_is_seen_by_autograd():
    q = torch.randn(1, 2, 3, 8)
    weight = torch.randn(1, 2, 3, 8, requires_grad=True)
    product = (q * weight).sum()
    with torch.no_grad():
        rotary.rope(q, None, torch.ones(3, 4), torch.ones(3, 4), False, "BHSD", None, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()

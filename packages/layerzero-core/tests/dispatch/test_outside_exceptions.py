"""What handlers of signals and hooks of torch raise inside a kernel passes through: nobody's fault, and no retry."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.errors import from_outside
from layerzero.runtime.state import state

_spec = importlib.util.spec_from_file_location("torch_calls", Path(__file__).with_name("torch_calls.py"))
torch_calls = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(torch_calls)
rand, results = torch_calls.rand, torch_calls.results

CALLS = torch_calls.calls()
X, W = torch.linspace(-1, 1, 24).reshape(3, 8), torch.ones(8)
FIRST, OTHER = "bad.rms_norm.first", "bad.rms_norm.second"


class Late(Exception):
    """What a handler of a caller raises."""


class Handlers:
    """A handler in each form that Python takes."""

    def method(self, number, frame):
        del frame
        raise Late

    def __call__(self, number, frame):
        raise Late


def function(number, frame):
    raise Late


def with_a_word(word, number, frame):
    raise Late(word)


def deep(*given):
    function(*given)


FORMS = {
    "function": function,
    "any arguments": deep,
    "lambda": lambda *_: function(0, None),
    "method": Handlers().method,
    "partial": functools.partial(with_a_word, "late"),
    "object": Handlers(),
}


@pytest.fixture
def alarm():
    """Install a handler of SIGALRM for the test."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def strike(*args):
    """A kernel in the middle of which the alarm goes off."""
    os.kill(os.getpid(), signal.SIGALRM)
    return torch.rms_norm(args[0], (8,), args[1], args[2])


def blamed():
    return dict(state.health.snapshot().kernels), state.counters.failovers


# -- handlers of signals -------------------------------------------------------------------------------------------
@pytest.mark.fault(2)
@pytest.mark.parametrize("form", FORMS)
def test_what_a_handler_raises_reaches_the_caller(lab, alarm, form):
    alarm(FORMS[form])
    lab.use(lab.kernel(FIRST, strike, priority=90), lab.kernel(OTHER, priority=80))
    for _ in range(3):
        with pytest.raises(Late):
            lz.rms_norm(X, W)
    assert set(lab.tries) == {FIRST}
    assert blamed() == ({}, 0)
    assert lz.which("rms_norm", X, W) == FIRST


@pytest.mark.fault(2)
def test_every_way_to_a_kernel_lets_it_through(lab, alarm):
    alarm(function)
    lab.use(lab.kernel(FIRST, strike, priority=90), lab.kernel(OTHER, priority=80))
    planned = lz.plan("rms_norm", X, W)
    ways = (
        lambda: lz.rms_norm(X, W), lambda: PUBLIC["rms_norm"].function(X, W), lambda: planned(X, W),
        lambda: torch.ops.layerzero.rms_norm(X, W, 1e-6),
    )  # fmt: skip
    for way in ways:
        with pytest.raises(Late):
            way()
    with lz.scoped(locks={"rms_norm": FIRST}), pytest.raises(Late):
        lz.rms_norm(X, W)
    assert OTHER not in lab.tries
    assert blamed() == ({}, 0)


@pytest.mark.fault(2)
def test_a_candidate_that_is_interrupted_ends_the_failover(lab, alarm):
    alarm(function)
    lab.use(lab.kernel(FIRST, priority=90), lab.kernel(OTHER, strike, priority=80))
    lab.faults[FIRST] = RuntimeError("its own fault")
    with pytest.raises(Late):
        lz.rms_norm(X, W)
    assert lab.tries == [FIRST, OTHER]
    assert blamed() == ({}, 0)


@pytest.mark.fault(2)
def test_a_kernels_own_error_is_its_fault_even_while_a_handler_is_installed(lab, alarm):
    alarm(function)
    lab.use(lab.kernel(FIRST, priority=90), lab.kernel(OTHER, priority=80))
    lab.faults[FIRST] = Late("raised by the kernel itself")
    try:
        function(0, None)
    except Late:  # nor does it matter what the caller is just handling
        _, ran = lab.run(lz.rms_norm, X, W)
    assert ran == [OTHER]
    assert FIRST in blamed()[0]


@pytest.mark.fault(2)
def test_an_import_that_is_interrupted_may_be_tried_again(lab, alarm, site):
    alarm(function)
    (site / "slow_vendor.py").write_text(
        "import os, signal, torch\n"
        "from slow_vendor_count import times\n"
        "times.append(1)\n"
        "if len(times) == 1: os.kill(os.getpid(), signal.SIGALRM)\n"
        "def rms_norm(x, weight, eps): return torch.rms_norm(x, (8,), weight, eps)\n"
    )
    (site / "slow_vendor_count.py").write_text("times = []\n")
    from dataclasses import replace

    lab.use(replace(lab.kernel(FIRST, priority=90), function="slow_vendor:rms_norm"))
    with pytest.raises(Late):
        lz.rms_norm(X, W)
    assert lz.which("rms_norm", X, W) == FIRST
    torch.testing.assert_close(lz.rms_norm(X, W), torch.rms_norm(X, (8,), W, 1e-6))


class Waiting:
    """Alarms that go off within milliseconds, at whatever is running then."""

    def __init__(self):
        self.given = 0

    def __call__(self, number, frame):
        self.given += 1
        raise TimeoutError(f"alarm {self.given}")


def until_the_alarm(call, seconds):
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        call()


QUERY = rand(1, 4, 96, 32)


def attend_and_derive():
    query = QUERY.detach().requires_grad_()
    lz.attention(query, query, query).sum().backward()
    lz.rms_norm(query, None).sum().backward()


@pytest.mark.fault(2)
@pytest.mark.parametrize("way", ["hot", "in Python", "planned", "backward"])
def test_six_alarms_reach_the_caller_six_times(alarm, way):
    """Real alarms over real kernels, the native ones among them: each loop ends only when its alarm arrives."""
    lz.reset()
    planned = lz.plan("attention", QUERY, QUERY, QUERY)
    call = {
        "hot": lambda: lz.attention(QUERY, QUERY, QUERY),
        "in Python": lambda: PUBLIC["attention"].function(QUERY, QUERY, QUERY),
        "planned": lambda: planned(QUERY, QUERY, QUERY),
        "backward": attend_and_derive,
    }[way]
    for _ in range(3):
        call()
    waiting = Waiting()
    alarm(waiting)
    for turn in range(6):
        with pytest.raises(TimeoutError) as raised:
            until_the_alarm(call, 0.004 + 0.001 * turn)
        assert str(raised.value) == f"alarm {turn + 1}"
    assert blamed() == ({}, 0)
    call()


# -- hooks on saved tensors ----------------------------------------------------------------------------------------
@pytest.mark.fault(2)
@pytest.mark.parametrize(("call", "inputs"), [item[1:] for item in CALLS], ids=[item[0] for item in CALLS])
def test_checkpoint_gives_the_same_gradients(call, inputs):
    lz.reset()
    leaves = [x.clone().requires_grad_() for x in inputs]

    def step(*given):
        return tuple(item * 2 for item in results(call(*(x * 1.25 for x in given))))

    weights = [rand(*item.shape, seed=3, dtype=item.dtype) for item in step(*leaves)]
    expected = torch.autograd.grad(step(*leaves), leaves, weights)
    found = torch.autograd.grad(checkpoint(step, *leaves, use_reentrant=False), leaves, weights)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert blamed() == ({}, 0)


@pytest.mark.fault(2)
@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul", "rope", "linear", "attention", "cross_entropy"])
def test_what_a_hook_raises_reaches_the_caller(name):
    lz.reset()
    call, inputs = next(item[1:] for item in CALLS if item[0] == name)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def refuse(tensor):
        raise Late(name)

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda kept: kept), pytest.raises(Late, match=name):
        call(*leaves)
    assert blamed() == ({}, 0)


@pytest.mark.fault(2)
def test_a_kernel_that_breaks_inside_a_checkpoint_still_fails_over(lab):
    lab.use(lab.kernel(FIRST, priority=90), lab.kernel(OTHER, priority=80))
    lab.faults[FIRST] = RuntimeError("its own fault")
    x = X.clone().requires_grad_()
    out = checkpoint(lambda x: lz.rms_norm(x, W) * 2, x, use_reentrant=False)
    out.sum().backward()
    assert OTHER in lab.ran()
    assert FIRST in blamed()[0]


def test_an_ordinary_exception_is_from_nowhere_else():
    with pytest.raises(Late) as raised:
        function(0, None)
    assert not from_outside(raised.value)

"""Fixtures that the tests of several packages share; above all a laboratory for dispatch tests: every kernel records
that it ran, and raises when told to."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.dispatch.bind import resolve
from layerzero.model.enums import Layout, Platform
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.plugin.manager import load_plugins
from layerzero.plugin.registrar import Registrar
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.state import state

_numbers = itertools.count()
_module = sys.modules.setdefault("layerzero_lab_kernels", ModuleType("layerzero_lab_kernels"))

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
ALL_FEATURES = frozenset(
    "gqa mask_bool mask_float mask_grad dropout window softcap alibi lse backward causal_top_left "
    "causal_bottom_right head_dim_v no_weight mixed_weight bias interleaved rotate_half position_ids inplace "
    "partial_rotary batched_tables no_key mixed_tables gelu_none gelu_tanh tensor_params generator padding_idx "
    "activation_gelu activation_gelu_tanh activation_silu activation_relu".split()
)


@lru_cache(maxsize=1)
def builtin_registry() -> KernelRegistry:
    """What is always there, loaded once for all tests; nothing else that may be installed."""
    return load_plugins(entry_points=()).registry


def function_path(function: Callable[..., Any]) -> str:
    """A "module:name" under which a function of a test can be imported."""
    name = f"kernel_{next(_numbers)}"
    setattr(_module, name, function)
    return f"{_module.__name__}:{name}"


@pytest.fixture(scope="session", autouse=True)
def a_quiet_tuner() -> Iterator[None]:
    """Tuning as most tests want it, where layerzero-tune is installed.

    A host that serves others would lengthen every test that tunes and mark its times as disturbed; test_steal_time.py
    brings clocks of its own and shows what is done about it. Kernels of tests are slow on purpose, and their times are
    kept all the same; `held_against_torch` undoes it.
    """
    if importlib.util.find_spec("layerzero_tune") is None:
        yield
        return
    from layerzero_tune.timing import baselines, host_load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_load, "ticks", lambda path="": None)
        patch.setattr(host_load, "_PAUSES", ())
        patch.setattr(baselines, "CALLING_US", 1e12)
        yield


@pytest.fixture
def held_against_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for users: a choice that is slower than torch's own code is not stored."""
    monkeypatch.setattr("layerzero_tune.timing.baselines.CALLING_US", 1.0)


class Lab:
    """Registers recording kernels and remembers who ran: by the instrument, not by any report."""

    def __init__(self) -> None:
        self.builtin = builtin_registry()
        self.registry = self.builtin
        self.ops: dict[str, OperationSpec] = {}
        self.calls: list[tuple[str, int]] = []
        self.tries: list[str] = []
        self.faults: dict[str, BaseException] = {}
        self.specs: dict[str, KernelSpec] = {}

    # -- kernels ---------------------------------------------------------------------------------
    def recording(self, spec: KernelSpec, function: Callable[..., Any]) -> KernelSpec:
        """The kernel with an adapter that records, raises the fault laid on it, or computes."""
        kernel_id = spec.kernel_id

        def run(*args: Any, **kwargs: Any) -> Any:
            self.tries.append(kernel_id)
            fault = self.faults.get(kernel_id)
            if fault is not None:
                raise fault
            out = function(*args, **kwargs)
            self.calls.append((kernel_id, threading.get_ident()))
            return out

        # What records cannot be traced: a compiled graph holds it as an opaque op.
        return replace(spec, function=function_path(run), traceable="")

    def kernel(self, kernel_id: str, function: Callable[..., Any] | None = None, **fields: Any) -> KernelSpec:
        """A CPU kernel of this id; without a function it computes as the op's reference does."""
        backend, op, _ = kernel_id.split(".")
        given: dict[str, Any] = {
            "platforms": frozenset({Platform.CPU}),
            "dtypes": FLOATS,
            "features": ALL_FEATURES,
            "priority": 50.0,
            "deterministic": True,
        }
        if op == "attention":
            given["layouts"] = frozenset({Layout.BHSD})
        spec = KernelSpec(kernel_id=kernel_id, op=op, backend=backend, function="none:none", **{**given, **fields})
        if function is None:
            function = self.reference(op, spec)
        made = self.recording(spec, function)
        self.specs[kernel_id] = made
        return made

    @staticmethod
    def reference(op: str, spec: KernelSpec | None = None) -> Callable[..., Any]:
        """The op's own fallback; for an attention kernel of another layout with the axes exchanged around it."""
        plain = public_op(op).fallback_impl
        assert plain is not None
        if op != "attention" or spec is None or spec.layouts == {Layout.BHSD}:
            return plain

        def swapped(*args: Any, layout: str = "BSHD") -> Any:
            if layout == "BHSD":
                return plain(*args)
            q, k, v = (t.transpose(1, 2) for t in args[:3])
            out = plain(q, k, v, *args[3:])
            return (out[0].transpose(1, 2), out[1]) if isinstance(out, tuple) else out.transpose(1, 2)

        return swapped

    def use(self, *kernels: KernelSpec, only: bool = False, **settings: Any) -> None:
        """Make a World of these kernels and the recorded built-ins (`only`: just the recorded references)."""
        kept = [k for k in self.builtin.kernels.values() if not only or k.backend == "reference"]
        gone = [k.kernel_id for k in self.builtin.kernels.values() if only and k.backend != "reference"]
        registry = self.builtin.without(kernels=gone).replace([self.recording(k, resolve(k)) for k in kept])
        self.registry = registry.add(kernels)
        lz.reset()
        if settings:
            lz.configure(**settings)
        state.use(self.registry, self.ops)

    def bring(self, plugin: Any) -> None:
        """Add the ops and kernels of a plugin module to the built-ins."""
        registrar = Registrar(plugin.__name__)
        plugin.layerzero_register(registrar)
        self.builtin = self.builtin.add(registrar.all_kernels())
        self.ops |= registrar.ops
        self.use()

    # -- what happened ---------------------------------------------------------------------------
    def ran(self, thread: int | None = None) -> list[str]:
        """Kernels that gave a result, in order."""
        return [kernel_id for kernel_id, ident in list(self.calls) if thread in (None, ident)]

    def clear(self) -> None:
        """Forget what ran."""
        self.calls.clear()
        self.tries.clear()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        """The result of a call, and which kernels gave one on the way (in this thread)."""
        before = len(self.calls)
        out = function(*args, **kwargs)
        me = threading.get_ident()
        return out, [kernel_id for kernel_id, ident in self.calls[before:] if ident == me]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A fresh laboratory; LayerZero is reset before and after."""
    lz.reset()
    made = Lab()
    made.use()
    yield made
    lz.reset()


class HandClock:
    """Time that passes only when a test says so. Timers that were armed fire, in order, as it is moved past them."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._armed: dict[str, tuple[float, Callable[[], None]]] = {}

    def monotonic(self) -> float:
        """What the modules under test take for the time."""
        return self.now

    def monotonic_ns(self) -> int:
        """The same in whole numbers, never twice the same one."""
        return int(self.now * 1e9) + next(_numbers)

    def sleep(self, seconds: float) -> None:
        """For threads that an earlier test has left to end by themselves: they wait in real time."""
        time.sleep(seconds)

    def after(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Arm a timer, as `Timers.after` does."""
        self._armed[name] = (self.now + max(0.0, seconds), callback)

    def cancel(self, name: str) -> None:
        """Forget a timer, as `Timers.cancel` does."""
        self._armed.pop(name, None)

    def move(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while due := [(when, name) for name, (when, _) in self._armed.items() if when <= end]:
            self.now, name = min(due)
            self._armed.pop(name)[1]()
        self.now = end


@pytest.fixture
def hand_clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """The clock of time boxes and breakers, moved by hand: a slow machine cannot make them end too soon or too late."""
    from layerzero.public import control
    from layerzero.runtime import policies, timers

    clock = HandClock(time.monotonic())
    for module in (control, policies, timers):
        monkeypatch.setattr(module, "time", clock)
    for name in ("after", "cancel"):
        monkeypatch.setattr(timers.timers, name, getattr(clock, name))
    monkeypatch.setattr(state.health, "_clock", clock.monotonic)
    return clock


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process as it starts: no settings of the machine, no plugin besides the built-in ones."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.chdir(home)
    monkeypatch.setenv("LAYERZERO_PLUGINS", "")
    lz.reset()
    yield
    lz.reset()


@pytest.fixture
def built_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel but the core's own, whatever backend is installed: for tests that name who is chosen among them."""
    monkeypatch.setenv("LAYERZERO_PLUGINS", "")
    lz.reset()
    yield
    lz.reset()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path of this process and of its children, for backends to be installed into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def module_beside(file: str | Path, name: str) -> ModuleType:
    """The module of this name beside a test file, made once: folders of tests are no packages."""
    path = Path(file).with_name(f"{name}.py")
    known = f"layerzero_tests_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """Attention in float64, written apart from the reference (`attention_oracle.py`)."""
    return module_beside(
        Path(__file__).parents[1] / "packages/layerzero-core/tests/ops/test_attention.py", "attention_oracle"
    )

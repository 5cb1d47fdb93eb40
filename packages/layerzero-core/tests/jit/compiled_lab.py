"""What the tests of compiling share: a cache of their own, a compiler that is counted, a kernel that needs it."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from layerzero.dispatch import compiling as jit
from layerzero.jit import cache as jit_cache
from layerzero.model.kernel import KernelSpec
from layerzero.runtime.state import state

HERE = Path(__file__).parent
X = torch.linspace(-1, 1, 24).reshape(3, 8)
W = torch.linspace(0.5, 1.5, 8)
KERNEL = "cc.rms_norm.plain"
EXPECTED = torch.nn.functional.rms_norm(X, (8,), W, 1e-6)


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def load_kernel() -> ModuleType:
    if "layerzero_compiled_kernel" not in sys.modules:
        spec = importlib.util.spec_from_file_location("layerzero_compiled_kernel", HERE / "compiled_kernel.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["layerzero_compiled_kernel"] = module
        spec.loader.exec_module(module)
    return sys.modules["layerzero_compiled_kernel"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of compiled kernels, and a queue of its own."""
    folder = tmp_path / "jit"
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(folder))
    for name in {**jit_cache.VENDOR_FOLDERS, **jit_cache.DEEP_FOLDERS}:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(jit, "_queue", None)
    yield folder
    assert not jit.queue().wait(timeout_s=90)


class Compiler:
    """The compiler named by CXX: counts its runs, and can be told to wait or to fail."""

    def __init__(self, folder: Path) -> None:
        self.log, self.gate, self.fault = folder / "runs", folder / "gate", folder / "fault"
        self.script = folder / "cxx"
        self.script.write_text(
            f"#!/bin/sh\necho run >> {self.log}\nwhile [ -e {self.gate} ]; do sleep 0.01; done\n"
            f"if [ -e {self.fault} ]; then echo 'no such instruction' >&2; exit 1; fi\nexec g++ \"$@\"\n"
        )
        self.script.chmod(0o700)

    @property
    def runs(self) -> int:
        return self.log.read_text().count("run") if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.script))
    load_kernel().forget()
    return made


def spec_of(**fields: Any) -> KernelSpec:
    from layerzero.model.enums import Platform

    given: dict[str, Any] = {
        "jit": True, "jit_key": ("dtype", "hidden"), "priority": 90.0, "dtypes": frozenset({"float32"}),
        "platforms": frozenset({Platform.CPU}), "deterministic": True,
    }  # fmt: skip
    return KernelSpec(
        kernel_id=KERNEL, op="rms_norm", backend="cc", function="layerzero_compiled_kernel:rms_norm",
        **{**given, **fields},
    )  # fmt: skip


def use(lab: Any, **fields: Any) -> None:
    load_kernel()
    lab.use(spec_of(**fields))


def ready() -> bool:
    return any(kernel_id == KERNEL for kernel_id, _ in state.world.ready)

"""The CuTe compiler has one caller at a time: two compilations at once end the process."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from layerzero_flashattn.compiler import library


class Compiler:
    """Its entry, as CuTe has it: an object that is called and that makes more of its kind. Notes who is inside."""

    inside = 0
    most = 0

    def __getitem__(self, options: str) -> Compiler:
        return type(self)()

    def __call__(self, depth: int = 0) -> str:
        kind = type(self)
        kind.inside += 1
        kind.most = max(kind.most, kind.inside - depth)
        threading.Event().wait(0.01)
        if depth == 0:
            self(1)  # a compilation that asks for another
        kind.inside -= 1
        return "compiled"


@pytest.fixture
def cute(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("cutlass.cute")
    made.compile = type("Compiler", (Compiler,), dict(Compiler.__dict__))()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cutlass.cute", made)
    monkeypatch.setitem(sys.modules, "quack.stand_in", ModuleType("quack.stand_in"))
    return made


@pytest.mark.req("R-WARM-01")
def test_compilations_wait_for_one_another(cute: Any) -> None:
    library("quack.stand_in")
    first = type(cute.compile).__call__
    library("quack.stand_in")
    assert type(cute.compile).__call__ is first  # once
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(cute.compile["-O3"]())) for _ in range(2)]
    threads += [threading.Thread(target=lambda: found.append(cute.compile())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["compiled"] * 4 and type(cute.compile).most == 1


@pytest.mark.req("R-WARM-01")
def test_reading_and_writing_compiled_kernels_waits_too(cute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation, a kernel written to disk and one read from there: never two of them at once."""
    compiler = type(cute.compile)

    def load_module(path: str) -> str:
        return str(compiler.__dict__["__call__"].__wrapped__(cute.compile, 0))

    class Executor:
        def export_to_c(self, path: str) -> str:
            return str(compiler.__dict__["__call__"].__wrapped__(cute.compile, 0))

    runtime, dsl = ModuleType("cutlass.cute.runtime"), ModuleType("cutlass.cutlass_dsl")
    runtime.load_module = load_module  # type: ignore[attr-defined]
    dsl.JitCompiledFunction = type("JitCompiledFunction", (Executor,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", runtime)
    monkeypatch.setitem(sys.modules, "cutlass.cutlass_dsl", dsl)
    library("quack.stand_in")
    library("quack.stand_in")
    work = [cute.compile, lambda: runtime.load_module("a.o"), lambda: dsl.JitCompiledFunction().export_to_c("b.o")]
    found: list[str] = []
    threads = [threading.Thread(target=lambda one=one: found.append(one())) for one in work * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["compiled"] * 6 and compiler.most == 1


def test_without_the_compiler_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cutlass.cute", raising=False)
    monkeypatch.setitem(sys.modules, "quack.stand_in", ModuleType("quack.stand_in"))
    assert library("quack.stand_in") is sys.modules["quack.stand_in"]


@pytest.mark.gpu
@pytest.mark.req("R-WARM-01")
def test_four_threads_compile_and_compute_what_one_does() -> None:
    """Before this the process was aborted here, not each time."""
    from layerzero_flashattn.fa4 import kernels
    from layerzero_flashattn.quack import norm

    def attend(width: int) -> torch.Tensor:
        draw = torch.Generator("cuda").manual_seed(width)
        q, k, v = (torch.randn(1, 80, 2, width, generator=draw, device="cuda", dtype=torch.float16) for _ in range(3))
        found = kernels.attention(q, k, v, None, 0.0, False, None, None, None, None, False)
        want = torch.nn.functional.scaled_dot_product_attention(*(t.double().transpose(1, 2) for t in (q, k, v)))
        return (found.double() - want.transpose(1, 2)).abs().max()

    def normed(width: int) -> torch.Tensor:
        x = torch.randn(3, width, device="cuda", dtype=torch.float16)
        weight = torch.ones(width, device="cuda", dtype=torch.float16)
        want = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-6)
        return (norm.rms_norm(x, weight, 1e-6).double() - want).abs().max()

    work = [(attend, 40), (attend, 48), (normed, 3072), (normed, 5120)]
    off: list[float] = []
    threads = [threading.Thread(target=lambda one=one, at=at: off.append(float(one(at)))) for one, at in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(off) == 4 and max(off) < 4e-3

"""Kernels compiled for a device that is not here, by a process without one, under the keys Triton will look for."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import layerzero as lz
from layerzero.dispatch.beside import order_for
from layerzero.dispatch.run import describe
from layerzero.isolation.compilers import compilers, order_text
from layerzero.jit.cache import variables
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.runtime.state import state
from layerzero_triton.kernels.launch import Launch, collecting
from layerzero_triton.kernels.offline import compile_for, target

H200 = DeviceSpec.for_sm(90, name="NVIDIA H200", multiprocessors=132, torch_version=str(torch.__version__))


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (_empty(4, 512), _empty(512), 1e-6),
    "add_rms_norm": (_empty(4, 512), _empty(4, 512), _empty(512), 1e-6),
    "gemma_rms_norm": (_empty(4, 512), _empty(512), 1e-6),
    "gemma_add_rms_norm": (_empty(4, 512), _empty(4, 512), _empty(512), 1e-6),
    "layer_norm": (_empty(4, 512), _empty(512), _empty(512), 1e-5),
    "silu_and_mul": (_empty(4, 1024),),
    "gelu_and_mul": (_empty(4, 1024), "none"),
    "relu_and_mul": (_empty(4, 1024),),
    "rope": (_empty(1, 4, 8, 64), _empty(1, 4, 2, 64), _empty(4, 32), _empty(4, 32), False, "BSHD", None, False),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def _declared(op: str) -> list[KernelSpec]:
    found = state.world.registry.by_op(op)
    return [kernel for kernel in found if kernel.backend in ("triton", "liger") and kernel.compiler is not None]


def _text(op: str, kernel: KernelSpec) -> str | None:
    world = state.world
    backends = {name: replace(item, available=True, reasons=()) for name, item in world.registry.backends.items()}
    world = world.changed(registry=replace(world.registry, backends=backends))
    ctx = describe(world.ops[op], CALLS[op], None, None, world, H200)
    return order_for(world.ops[op], ctx, kernel, CALLS[op], world)


_QUICK = ("rms_norm", "rope")  # each kernel takes a process of its own: the other ops are compiled in the long lanes


@pytest.mark.parametrize("op", [pytest.param(op, marks=() if op in _QUICK else pytest.mark.slow) for op in CALLS])
def test_every_kernel_that_declares_a_compiler_compiles_for_an_h200_here(op: str, cache: Path) -> None:
    lz.reset()
    made = 0
    for kernel in _declared(op):
        text = _text(op, kernel)
        if text is None:
            continue
        before = set(cache.rglob("*.cubin")) if cache.exists() else set()
        assert compilers.ask(text, 300.0, variables())["seconds"] > 0, kernel.kernel_id
        fresh = set(cache.rglob("*.cubin")) - before
        assert fresh, kernel.kernel_id
        described = [json.loads(path.with_suffix(".json").read_text()) for path in fresh]
        assert all(item["target"] == {"backend": "cuda", "arch": 90, "warp_size": 32} for item in described)
        made += 1
    assert made


def test_the_keys_are_those_of_the_launches_that_will_look_for_them(cache: Path) -> None:
    """What was compiled through Triton's own launcher is what a launch on the device asks its cache for."""
    from layerzero_triton.norm import rms_norm

    lz.reset()
    (kernel,) = [item for item in _declared("rms_norm") if item.backend == "triton"]
    text = _text("rms_norm", kernel)
    assert text is not None
    compilers.ask(text, 300.0, variables())
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
    with collecting() as launches:
        rms_norm(*CALLS["rms_norm"])
    launch: Launch
    (launch,) = launches
    compile_for(launch, target("sm_90"))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")} == files and len(files) == 1


@pytest.mark.needs_tool("gcc")
def test_what_launches_a_kernel_is_built_with_it_and_found_without_a_compiler(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's first launch takes the helpers of its driver and a launcher of the signature, which gcc builds."""
    from triton.backends.nvidia import driver
    from triton.runtime import build

    from layerzero_triton.norm import rms_norm

    nothing = tmp_path / "nothing.c"
    nothing.touch()
    subprocess.run(["gcc", "-shared", "-o", str(tmp_path / "libcuda.so.1"), str(nothing)], check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))  # no driver is here, and none is loaded
    lz.reset()
    (kernel,) = [item for item in _declared("rms_norm") if item.backend == "triton"]
    text = _text("rms_norm", kernel)
    assert text is not None
    compilers.end_idle(-1.0)
    said = compilers.ask(text, 300.0, {**variables(), "TRITON_LIBCUDA_PATH": str(tmp_path)})
    assert sorted(Path(path).name.partition(".")[0] for path in said["libraries"]) == [
        "__triton_launcher",
        "cuda_utils",
    ]
    with collecting() as launches:
        rms_norm(*CALLS["rms_norm"])
    compiled = compile_for(launches[0], target("sm_90"))
    loaded: list[str] = []

    def load(name: str, path: str) -> Any:
        loaded.append(path)
        return MagicMock()

    monkeypatch.setattr(build, "_load_module_from_path", load)
    monkeypatch.setenv("CC", "false")
    driver.CudaUtils()
    driver.CudaLauncher(compiled.src, compiled.metadata)
    assert loaded == said["libraries"]


PLAIN = """
import torch, triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def tuned(x):
    out = torch.empty_like(x)
    double[(4,)](x, out, x.numel())
    return out

def reading(x):
    return x if x.sum().item() > 0 else -x
"""


@pytest.mark.parametrize(("name", "why"), [("tuned", "double is autotuned over 2"), ("reading", "reads what its")])
def test_what_only_the_device_can_decide_is_left_to_it(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (tmp_path / "plain_triton.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    compilers.end_idle(-1.0)  # the next one has the folder on its path
    kernel = KernelSpec(
        "mine.double.plain", "double", "mine", f"plain_triton:{name}", platforms=frozenset({Platform.CUDA}),
        dtypes=frozenset({"float32"}), grid_layout="library", jit=True,
        compiler="layerzero.plugin.triton_compiler:compile_order",
    )  # fmt: skip
    text = order_text(kernel, (_empty(256, dtype=torch.float32),), {}, {"device": H200.to_json()}, False)
    assert why in compilers.ask(text, 300.0, variables())["needs_device"]


@pytest.mark.gpu
def test_this_process_loads_what_another_compiled_and_compiles_nothing(cache: Path) -> None:
    """On the device: the launch finds its artifact, and Triton writes nothing."""
    from layerzero.dispatch.run import current_world
    from layerzero_triton.norm import rms_norm

    lz.reset()
    x, w = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16), torch.ones(512, device="cuda").bfloat16()
    world = current_world()
    (kernel,) = [item for item in _declared("rms_norm") if item.backend == "triton"]
    ctx = describe(world.ops["rms_norm"], (x, w, 1e-6), None, None, world, DeviceSpec.detect("cuda"))
    text = order_for(world.ops["rms_norm"], ctx, kernel, (x, w, 1e-6), world)
    assert text is not None
    compilers.ask(text, 300.0, variables())
    files = set(cache.rglob("*"))
    torch.testing.assert_close(rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (512,), w, 1e-6))
    assert {path for path in cache.rglob("*") if path.suffix in (".cubin", ".so")} <= files

"""Which modules an order builds, for which device, and what is said where the build fails."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.model.device import DeviceSpec
from layerzero.plugin import CompileOrder, NeedsDevice
from layerzero.registry.capabilities import load_capabilities
from layerzero_flashinfer import elsewhere, modules, plugin

H200 = DeviceSpec.for_sm(90, name="NVIDIA H200", multiprocessors=132)
KERNELS = {spec.kernel_id: spec for spec in load_capabilities(plugin.CAPABILITIES).kernels}
CALL: dict[str, Any] = {"dtype": "bfloat16", "dims": {"batch": 1, "seq_len_q": 1, "head_dim": 128}, "needs": []}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the generators whose modules were built, with the template."""
    found: list[str] = []

    def generator(module: str, name: str) -> Any:
        def make(*given: Any) -> Any:
            word = f"{name}:{given[0]}" if given and isinstance(given[0], str) else name
            return SimpleNamespace(
                name=word, is_compiled=False, build=lambda verbose: found.append(word), get_library_path=lambda: word
            )

        return make

    monkeypatch.setattr(modules, "_generator", generator)
    monkeypatch.setattr(modules, "lib", lambda: None)
    monkeypatch.setattr(os, "environ", {})
    return found


def order(kernel_id: str, device: DeviceSpec = H200) -> CompileOrder:
    spec = KERNELS[kernel_id]
    return CompileOrder(kernel_id, spec.function, (), {}, {**CALL, "op": spec.op}, device)


@pytest.mark.parametrize("kernel_id", KERNELS)
def test_an_order_builds_the_one_module_that_its_kernel_loads(kernel_id: str, built: list[str]) -> None:
    libraries = elsewhere.compile_order(order(kernel_id))
    (module,) = built
    assert libraries == (module,)
    if KERNELS[kernel_id].op.endswith("attention"):
        assert ("decode_module" in module) is kernel_id.endswith("decode")
        hopper = kernel_id.endswith("fa3") or ".grouped_" in kernel_id
        assert "decode_module" in module or module.endswith("fa3" if hopper else "fa2")


@pytest.mark.parametrize(("sm", "words"), [(80, "8.0"), (90, "9.0a"), (120, "12.0a")])
def test_the_device_is_named_as_flashinfer_names_it(sm: int, words: str, built: list[str]) -> None:
    elsewhere.compile_order(order("flashinfer.rms_norm.rows", DeviceSpec.for_sm(sm)))
    assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == words


def test_another_kind_of_device_is_left_alone(built: list[str]) -> None:
    with pytest.raises(NeedsDevice, match="builds nothing"):
        elsewhere.compile_order(order("flashinfer.rms_norm.rows", DeviceSpec.detect("cpu")))


def test_a_failed_build_says_what_the_compiler_said(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def build(verbose: bool) -> None:
        raise RuntimeError(
            "Ninja build failed. Ninja output:\n[1/3] nvcc " + "-I/x " * 200 + "\n"
            "FAILED: norm.cuda.o\nnorm.cu:25:10: fatal error: cublasLt.h: No such file or directory\n"
        )

    spec = SimpleNamespace(name="norm", is_compiled=False, build=build)
    monkeypatch.setattr(modules, "specs_of", lambda function, shape: [spec])
    with pytest.raises(RuntimeError, match=r"norm: .*cublasLt\.h") as raised:
        elsewhere.compile_order(order("flashinfer.rms_norm.rows"))
    assert len(str(raised.value)) < 300

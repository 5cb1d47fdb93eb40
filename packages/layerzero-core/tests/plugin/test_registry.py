from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.spec import DEFAULT_GENERATIONS
from layerzero.errors import PluginError, UnknownNameError
from layerzero.model.context import Context
from layerzero.model.enums import GPUGeneration, Platform
from layerzero.model.kernel import BackendSpec, KernelSpec
from layerzero.reasons import reason
from layerzero.registry.capabilities import load_capabilities
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.state import state
from layerzero_verify.testing.fakes import capabilities, gpu


def kernel(kernel_id: str, platform: Platform = Platform.CPU, **given: object) -> KernelSpec:
    backend, op, _ = kernel_id.split(".")
    fields = {
        "platforms": frozenset({platform}), "dtypes": frozenset({"float32"}), "grid_layout": "library",
    } | given  # fmt: skip
    return KernelSpec(kernel_id=kernel_id, op=op, backend=backend, function="a:b", **fields)  # type: ignore[arg-type]


def backend(name: str, **given: object) -> BackendSpec:
    return BackendSpec(name, platforms=frozenset({Platform.CPU}), capabilities_hash="1", **given)  # type: ignore[arg-type]


A, B = kernel("a.rms_norm.x"), kernel("b.rms_norm.y")
GPU = kernel("b.attention.z", Platform.CUDA)
REGISTRY = KernelRegistry().add([A], backend("a")).add([B, GPU], backend("b"))


def with_backend(registry: KernelRegistry, spec: BackendSpec) -> KernelRegistry:
    return dataclasses.replace(registry, backends={**registry.backends, spec.name: spec})


@pytest.mark.req("R-REG-01")
def test_kernels_are_found_by_id_op_platform_backend_and_context() -> None:
    assert REGISTRY.get("a.rms_norm.x") is A
    assert REGISTRY.by_op("rms_norm") == (A, B)
    assert REGISTRY.by_op("nothing") == ()
    assert REGISTRY.by_platform("cuda") == (GPU,)
    assert REGISTRY.by_backend("b") == (GPU, B)
    assert REGISTRY.ops == ("attention", "rms_norm")
    ctx = Context(op="rms_norm", dims=(("hidden", 8),))
    assert REGISTRY.by_context(ctx) == (A, B)
    assert REGISTRY.by_context(dataclasses.replace(ctx, dtype="float16")) == ()


def test_an_unknown_id_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        REGISTRY.get("a.rms_norm.xx")
    assert caught.value.code == "KERNEL_UNKNOWN" and "a.rms_norm.x" in str(caught.value)


@pytest.mark.req("R-REG-01")
def test_every_change_is_a_new_snapshot_with_the_next_version() -> None:
    added = REGISTRY.add([kernel("c.rms_norm.x")])
    assert (REGISTRY.version, added.version) == (2, 3)
    assert "c.rms_norm.x" in added and "c.rms_norm.x" not in REGISTRY
    with pytest.raises(TypeError):
        REGISTRY.kernels["new"] = A  # type: ignore[index]


def test_a_taken_id_or_backend_name_costs_only_the_newcomer() -> None:
    with pytest.raises(PluginError) as caught:
        REGISTRY.add([kernel("c.rms_norm.x"), kernel("a.rms_norm.x")])
    assert caught.value.code == "KERNEL_DUPLICATE" and caught.value.reasons[0].value == "a.rms_norm.x"
    with pytest.raises(PluginError) as caught:
        REGISTRY.add([], backend("b"))
    assert caught.value.code == "PLUGIN_DUPLICATE"
    assert len(REGISTRY) == 3


def test_replace_and_without_leave_the_rest_alone() -> None:
    faster = dataclasses.replace(A, priority=9.0)
    assert REGISTRY.replace([faster]).get("a.rms_norm.x").priority == 9.0
    assert REGISTRY.get("a.rms_norm.x").priority == 0.0
    assert REGISTRY.without(backends=["b"]).by_op("rms_norm") == (A,)
    assert REGISTRY.without(kernels=["a.rms_norm.x"]).by_op("rms_norm") == (B,)
    with pytest.raises(UnknownNameError):
        REGISTRY.replace([kernel("c.rms_norm.x")])


@pytest.mark.req("R-REG-02")
def test_backends_carry_availability_version_and_platform() -> None:
    off = backend(
        "c", version="2.0", vendor="lib", vendor_version="7", available=False, reasons=(reason("BACKEND_STUB"),)
    )
    registry = REGISTRY.add([kernel("c.rms_norm.x")], off)
    assert {name: Platform.CPU in item.platforms for name, item in registry.backends.items()} == dict.fromkeys(
        "abc", True
    )
    assert [name for name, item in registry.backends.items() if not item.available] == ["c"]
    assert registry.backends["c"].to_json()["vendor_version"] == "7"
    assert not registry.available("c") and registry.available("a") and registry.available("made in code")
    ctx = Context(op="rms_norm", dims=(("hidden", 8),))
    assert registry.by_context(ctx) == (A, B), "an unavailable backend is not offered"
    assert with_backend(registry, dataclasses.replace(off, available=True)).by_context(ctx) == (
        A,
        B,
        registry.get("c.rms_norm.x"),
    )


@pytest.mark.req("R-REG-02")
def test_backends_are_told_apart_by_platform_and_each_has_its_version() -> None:
    cuda = dataclasses.replace(backend("g", version="2.0"), platforms=frozenset({Platform.CUDA}))
    registry = REGISTRY.add([kernel("g.rms_norm.k", Platform.CUDA)], cuda)
    serving = {word: [item.backend for item in registry.by_platform(word)] for word in ("cpu", "cuda", "rocm")}
    assert serving == {"cpu": ["a", "b"], "cuda": ["b", "g"], "rocm": []}
    assert registry.by_platform(Platform.CUDA) == registry.by_platform("cuda")
    ctx = Context(op="rms_norm", dims=(("hidden", 8),))
    assert [item.backend for item in registry.by_context(ctx)] == ["a", "b"]
    assert [item.backend for item in registry.by_context(dataclasses.replace(ctx, device=gpu(90)))] == ["g"]
    assert {name: item.version for name, item in registry.backends.items()} == {"a": "0", "b": "0", "g": "2.0"}
    assert {name: item.platforms for name, item in registry.backends.items()}["g"] == {Platform.CUDA}


@pytest.mark.req("R-CAP-02")
def test_the_overall_hash_follows_descriptors_versions_and_code() -> None:
    base = REGISTRY.capabilities_hash
    assert KernelRegistry().add([B, GPU], backend("b")).add([A], backend("a")).capabilities_hash == base, "order"
    assert REGISTRY.replace([dataclasses.replace(A, priority=1.0)]).capabilities_hash != base
    assert with_backend(REGISTRY, dataclasses.replace(backend("a"), capabilities_hash="2")).capabilities_hash != base
    assert with_backend(REGISTRY, dataclasses.replace(backend("a"), available=False)).capabilities_hash != base
    loose = REGISTRY.add([kernel("c.rms_norm.x")])
    assert loose.capabilities_hash != REGISTRY.add([kernel("c.rms_norm.x", priority=2.0)]).capabilities_hash


@pytest.mark.req("R-CAP-02", "R-CAP-03")
def test_another_descriptor_is_another_cache_key_and_an_equal_one_is_found_again(lab: Any) -> None:
    """The same kernel id twice; only the descriptor of its backend differs, so only its hash tells them apart."""
    x, w = torch.randn(3, 8), torch.ones(8)
    function = lab.builtin.get("reference.rms_norm.plain").function

    def chosen(priority: float) -> tuple[str, int]:
        described = load_capabilities(capabilities("own", {"function": function, "priority": priority}))
        spec = BackendSpec("own", platforms=described.platforms, capabilities_hash=described.hash)
        state.use(lab.builtin.add(described.kernels, spec))
        before = state.counters.selections
        return lz.select("rms_norm", x, w).chosen, state.counters.selections - before

    assert chosen(99.0) == ("own.rms_norm.plain", 1)
    assert chosen(99.0) == ("own.rms_norm.plain", 0)
    assert chosen(-99.0) == ("torch.rms_norm.native", 1)
    assert chosen(99.0) == ("own.rms_norm.plain", 0)


@pytest.mark.req("R-CORE-19", "R-DEV-03")
def test_a_backend_spec_keeps_what_it_is_told_and_the_registry_obeys_it() -> None:
    why = reason("BACKEND_NOT_INSTALLED", "libb", "libb")
    told: dict[str, Any] = {
        "name": "b", "dist": "layerzero-b", "version": "1.2", "vendor": "libb", "vendor_version": "3.4",
        "available": False, "capabilities_hash": "h", "builtin": False, "vendor_range": ">=3,<4",
        "vendor_module": "libb.ops",
    }  # fmt: skip
    spec = BackendSpec(**told, platforms=frozenset({Platform.CPU, Platform.CUDA}), reasons=(why,))
    shown = spec.to_json()
    assert {name: shown[name] for name in told} == told
    assert shown["platforms"] == ["cpu", "cuda"] and shown["reasons"] == [why.to_json()]
    assert BackendSpec("b").available and BackendSpec("b").vendor_version is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.available = True  # type: ignore[misc]

    ctx = Context(op="rms_norm", dims=(("hidden", 8),))
    for given, kernels in ((spec, ()), (dataclasses.replace(spec, available=True, reasons=()), (B,))):
        registry = KernelRegistry().add([B], given)
        assert registry.backends == {"b": given} and registry.by_backend("b") == (B,)
        assert registry.available("b") is given.available and registry.by_context(ctx) == kernels

    mine = dataclasses.replace(spec, generations=DEFAULT_GENERATIONS.override({"90": {"generation": "ada_lovelace"}}))
    assert mine.sees(gpu(90)).gpu_generation is GPUGeneration.ADA_LOVELACE and mine.sees(gpu(80)) == gpu(80)
    assert spec.sees(gpu(90)) == gpu(90) and gpu(90).gpu_generation is GPUGeneration.HOPPER
    told = DEFAULT_GENERATIONS.override({"90": {"tensor_core_generation": 3}})
    seen = dataclasses.replace(spec, generations=told).sees(gpu(90))
    assert (seen.tensor_core_generation, gpu(90).tensor_core_generation) == (3, 4)

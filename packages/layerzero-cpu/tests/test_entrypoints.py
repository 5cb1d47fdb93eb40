"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.plugin.manager import load_plugins
from layerzero_cpu import plugin
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="cpu")
    assert found.value == "layerzero_cpu.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-cpu"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_cpu.plugin", raising=False)
    with pretend(
        {"zentorch": "2.13.0.2"}, dict.fromkeys(("zentorch", "intel_extension_for_pytorch"), ImportError("too early"))
    ) as imported:
        kit = Kit.open("cpu")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert tuple(kit.capabilities) == ("cpu",)
    assert imported == []


def test_registration_loads_no_kernels(monkeypatch):
    """The library is opened when a kernel is bound, not when it is registered."""
    for name in [n for n in sys.modules if n.startswith("layerzero_cpu")]:
        monkeypatch.delitem(sys.modules, name)
    assert Kit.open("cpu").register_error is None
    assert "layerzero_cpu.library" not in sys.modules


def test_discovery_finds_it_and_its_kernels():
    record = load_plugins(env={}).record("cpu")
    assert record.backends == ("cpu",)
    assert record.state != "failed"
    assert {"cpu.rms_norm.rows", "cpu.rope.tokens", "cpu.sample.select"} <= set(record.kernels)


@pytest.mark.req("R-OP-15")
def test_without_its_library_it_registers_no_kernel_and_calls_fall_back(monkeypatch):
    monkeypatch.setattr(plugin, "LIBRARY", Path("/nonexistent/_native.abi3.so"))
    kit = Kit.open("layerzero_cpu.plugin")
    assert (kit.register_error, kit.kernels) == (None, ())
    lz.reset()
    try:
        x, weight = torch.randn(3, 64), torch.randn(64)
        torch.testing.assert_close(lz.rms_norm(x, weight), torch.rms_norm(x, (64,), weight, 1e-6))
        ran = lz.explain("rms_norm", x, weight).ran
        assert ran is not None and not ran.startswith("cpu.")
    finally:
        monkeypatch.undo()
        lz.reset()
    assert lz.explain("rms_norm", x, weight).chosen == "cpu.rms_norm.rows", "with its library it is taken again"

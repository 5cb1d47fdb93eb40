"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero.testing.kit import Kit
from layerzero.testing.vendors import pretend


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
    assert (tuple(kit.capabilities), kit.kernels) == (("cpu",), ())
    assert imported == []


def test_discovery_finds_it_and_no_kernel():
    record = load_plugins(env={}).record("cpu")
    assert (record.backends, record.kernels) == (("cpu",), ())
    assert record.state != "failed"

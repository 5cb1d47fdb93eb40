"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="accel")
    assert found.value == "layerzero_accel.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-accel"


def test_it_keeps_the_contract_and_registers_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_accel.plugin", raising=False)
    kit = Kit.open("accel")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert (tuple(kit.capabilities), kit.kernels) == ((), ())


def test_discovery_finds_it_and_no_kernel():
    record = load_plugins(env={}).record("accel")
    assert (record.state, record.backends, record.kernels) == ("ok", (), ())

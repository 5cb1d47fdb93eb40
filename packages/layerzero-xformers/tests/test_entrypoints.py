"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="xformers")
    assert found.value == "layerzero_xformers.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-xformers"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_xformers.plugin", raising=False)
    with pretend({"xformers": "0.0.35"}, dict.fromkeys(("xformers",), ImportError("too early"))) as imported:
        kit = Kit.open("xformers")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert tuple(kit.capabilities) == ("xformers",)
    assert sorted(kernel.kernel_id for kernel in kit.kernels) == [
        f"xformers.attention.{name}" for name in ("cutlass", "flash", "splitk")
    ]
    assert imported == []


def test_discovery_says_what_is_missing_and_how_to_get_it():
    with pretend({"xformers": None}):
        record = load_plugins(env={}).record("xformers")
    assert (record.state, len(record.kernels), record.backends) == ("unavailable", 3, ("xformers",))
    assert {item.code.value for item in record.reasons} == {"BACKEND_NOT_INSTALLED"}
    assert "pip install 'layerzero-xformers[xformers]'" in record.fix

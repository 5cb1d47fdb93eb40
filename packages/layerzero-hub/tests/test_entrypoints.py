"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="hub")
    assert found.value == "layerzero_hub.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-hub"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_hub.plugin", raising=False)
    with pretend(
        {"kernels": "0.17.2"}, dict.fromkeys(("kernels", "huggingface_hub"), ImportError("too early"))
    ) as imported:
        kit = Kit.open("hub")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert (tuple(kit.capabilities), kit.kernels) == (("hub",), ())
    assert imported == []


def test_discovery_says_what_is_missing_and_how_to_get_it():
    with pretend({"kernels": None}):
        record = load_plugins(env={}).record("hub")
    assert (record.state, record.kernels, record.backends) == ("unavailable", (), ("hub",))
    assert {item.code.value for item in record.reasons} == {"BACKEND_NOT_INSTALLED"}
    assert "pip install 'layerzero-hub[kernels]'" in record.fix

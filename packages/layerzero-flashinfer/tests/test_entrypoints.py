"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="flashinfer")
    assert found.value == "layerzero_flashinfer.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-flashinfer"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_flashinfer.plugin", raising=False)
    with pretend({"flashinfer-python": "0.7.2"}, dict.fromkeys(("flashinfer",), ImportError("too early"))) as imported:
        kit = Kit.open("flashinfer")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert tuple(kit.capabilities) == ("flashinfer",)
    assert len(kit.kernels) >= 26
    assert imported == []


def test_discovery_says_what_is_missing_and_how_to_get_it():
    with pretend({"flashinfer-python": None}):
        record = load_plugins(env={}).record("flashinfer")
    assert (record.state, record.backends) == ("unavailable", ("flashinfer",))
    assert {item.code.value for item in record.reasons} == {"BACKEND_NOT_INSTALLED"}
    assert "pip install 'layerzero-flashinfer[flashinfer]'" in record.fix

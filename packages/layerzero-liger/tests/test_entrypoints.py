"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="liger")
    assert found.value == "layerzero_liger.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-liger"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_liger.plugin", raising=False)
    with pretend(
        {"liger-kernel": "0.8.5"}, dict.fromkeys(("liger_kernel", "triton"), ImportError("too early"))
    ) as imported:
        kit = Kit.open("liger")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert (tuple(kit.capabilities), len(kit.kernels)) == (("liger",), 11)
    assert imported == []


def test_discovery_says_what_is_missing_and_how_to_get_it():
    with pretend({"liger-kernel": None}):
        record = load_plugins(env={}).record("liger")
    assert (record.state, record.backends) == ("unavailable", ("liger",))
    assert {item.code.value for item in record.reasons} == {"BACKEND_NOT_INSTALLED"}
    assert "pip install 'layerzero-liger[liger]'" in record.fix

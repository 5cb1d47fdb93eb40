"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="triton")
    assert found.value == "layerzero_triton.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-triton"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_triton.plugin", raising=False)
    with pretend({"triton": "3.9.0"}, dict.fromkeys(("triton",), ImportError("too early"))) as imported:
        kit = Kit.open("triton")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert tuple(kit.capabilities) == ("triton",)
    assert "triton.rms_norm.rows" in {spec.kernel_id for spec in kit.kernels}
    assert imported == []


def test_discovery_says_what_is_missing_and_how_to_get_it():
    with pretend({"triton": None}):
        record = load_plugins(env={}).record("triton")
    assert (record.state, record.backends) == ("unavailable", ("triton",))
    assert "triton.rms_norm.rows" in record.kernels
    assert {item.code.value for item in record.reasons} == {"BACKEND_NOT_INSTALLED"}
    assert "pip install 'layerzero-triton[triton]'" in record.fix

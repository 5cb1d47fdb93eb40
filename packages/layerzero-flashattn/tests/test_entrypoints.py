"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend

BACKENDS = ("flashattn2", "flashattn3", "flashattn4", "quack")


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="flashattn")
    assert found.value == "layerzero_flashattn.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-flashattn"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_flashattn.plugin", raising=False)
    with pretend(
        {"flash-attn": "2.8.3", "flash_attn_3": "3.0.0", "flash-attn-4": "4.0.0", "quack-kernels": "0.6.5"},
        dict.fromkeys(("flash_attn", "flash_attn_interface", "quack", "cutlass"), ImportError("too early")),
    ) as imported:
        kit = Kit.open("flashattn")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert tuple(kit.capabilities) == BACKENDS
    assert {spec.backend for spec in kit.kernels} == set(BACKENDS)
    assert imported == []


def test_discovery_says_what_is_missing_and_how_to_get_it():
    with pretend(dict.fromkeys(("flash-attn", "flash_attn_3", "flash-attn-4", "quack-kernels"))):
        record = load_plugins(env={}).record("flashattn")
    assert (record.state, record.backends) == ("unavailable", BACKENDS)
    assert {item.code.value for item in record.reasons} == {"BACKEND_NOT_INSTALLED"}
    assert "pip install 'layerzero-flashattn[fa4]'" in record.fix

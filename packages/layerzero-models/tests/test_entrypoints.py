"""The package's public names come by entry point, and its import path of 0.1 still leads to it."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points

import pytest

import layerzero as lz
from layerzero.errors import PackageMissingError

NAMES = {
    "column_linear", "enable_transformers", "kv_cache", "pack_weight", "patch", "patched", "relative_bias",
    "rope_tables", "row_linear", "sample_speculative", "sample_tree", "shard_weight", "tree_mask",
    "tree_positions", "unpatch",
}  # fmt: skip


def test_the_installed_metadata_names_what_lz_shows():
    found = {
        entry.name: entry
        for entry in entry_points(group="layerzero.names")
        if entry.dist is not None and entry.dist.name == "layerzero-models"
    }
    assert set(found) == NAMES
    assert all(getattr(lz, name) is entry.load() for name, entry in found.items())


@pytest.fixture
def unloaded(monkeypatch):
    """`layerzero.integrations` as it is before its first import."""
    for name in [name for name in sys.modules if name.startswith("layerzero.integrations")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("unloaded")
def test_the_import_path_of_0_1_leads_to_the_same_modules():
    import layerzero_models.speculative
    import layerzero_models.zigzag
    from layerzero.integrations.speculative import SpeculativeDecoder
    from layerzero.integrations.zigzag import zigzag_plan

    assert SpeculativeDecoder is layerzero_models.speculative.SpeculativeDecoder
    assert zigzag_plan is layerzero_models.zigzag.zigzag_plan


@pytest.mark.usefixtures("unloaded")
def test_the_import_path_of_0_1_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "layerzero_models"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without(), *sys.meta_path])
    with pytest.raises(PackageMissingError, match=r"layerzero.integrations needs layerzero-models.*pip install"):
        importlib.import_module("layerzero.integrations.zigzag")


class _Without:
    """An environment without the package."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "layerzero_models":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

"""Names and verbs of packages beside the core: found by entry point, loaded at first use, and named where missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types

import click
import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero import companions
from layerzero.errors import PackageMissingError
from layerzero_cli.root import COMMANDS, cli


@pytest.fixture
def installed(monkeypatch):
    """A package `beside` that brings lz.shout and `lz shout`, as an installed distribution would."""
    module = types.ModuleType("beside")

    def add(group: click.Group) -> None:
        @group.command("shout")
        def shout() -> None:
            """Say it."""
            click.echo("HO")

    module.shout, module.add = lambda: "ho", add
    monkeypatch.setitem(sys.modules, "beside", module)
    entries = [
        importlib.metadata.EntryPoint("shout", "beside:shout", companions.NAMES),
        importlib.metadata.EntryPoint("shout", "beside:add", COMMANDS),
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [item for item in entries if item.group == group]
    )
    monkeypatch.setattr(
        "layerzero_cli.root.entries",
        lambda group: {item.name: (item.value, "beside-1.0.dist-info") for item in entries if item.group == group},
    )
    yield
    vars(lz).pop("shout", None)


@pytest.mark.usefixtures("installed")
def test_a_package_beside_the_core_brings_names_and_verbs():
    assert lz.shout() == "ho"
    assert CliRunner().invoke(cli, ["shout"]).stdout == "HO\n"
    assert "shout" in CliRunner().invoke(cli, ["--help"]).stdout


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "dist"),
    [("tune", "layerzero-tune"), ("patch", "layerzero-models"), ("verify", "layerzero-verify")],
)
def test_a_name_whose_package_is_missing_says_what_to_install(name, dist):
    found = companions.public(name)
    assert not found and f"pip install {dist}" in repr(found)
    with pytest.raises(PackageMissingError, match=rf"lz.{name} needs {dist} \[PACKAGE_MISSING\]; pip install {dist}"):
        found(1, a=2)


@pytest.mark.usefixtures("installed")
def test_a_name_that_nobody_brings_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        lz.no_such_name  # noqa: B018


def test_a_verb_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr("layerzero_cli.root.entries", lambda group: {})
    answer = CliRunner().invoke(cli, ["tune"])
    assert answer.exit_code == 1 and "lz tune needs layerzero-tune" in answer.output
    assert "pip install layerzero-tune" in answer.output


@pytest.mark.usefixtures("installed")
def test_the_kit_says_what_to_install_where_it_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero.testing", raising=False)
    with pytest.raises(PackageMissingError, match=r"layerzero.testing needs layerzero-verify \[.*pip install"):
        importlib.import_module("layerzero.testing")
    for words in (["plugin", "prove", "sdpa"], ["plugin", "check", "sdpa", "--kit"]):
        answer = CliRunner().invoke(cli, words)
        assert answer.exit_code == 1 and "pip install layerzero-verify" in answer.output


@pytest.mark.usefixtures("installed")
def test_parts_of_the_tuner_say_what_to_install_where_they_are_asked_for(monkeypatch, tmp_path, caplog):
    with pytest.raises(PackageMissingError, match=r"grid-files needs layerzero-tune \[.*pip install"):
        lz.warmup(tmp_path / "grid.toml")
    with pytest.raises(PackageMissingError, match=r"model-calls needs layerzero-tune \[.*pip install"):
        lz.warmup({"hidden_size": 64})
    with pytest.raises(PackageMissingError, match=r"telemetry.metrics needs layerzero-tune \[.*pip install"):
        lz.observe(metrics=0)
    with lz.observe() as seen:
        assert seen.where is None
    lz.reset()
    monkeypatch.setenv("LAYERZERO_PERFDB", str(tmp_path / "perf.db"))
    monkeypatch.setattr("layerzero.measurements.database._watcher", [])
    lz.configure(perfdb={"drift_s": 60.0})
    lz.which("rms_norm", torch.ones(4))
    assert "perfdb.drift_s needs layerzero-tune" in caplog.text
    lz.reset()

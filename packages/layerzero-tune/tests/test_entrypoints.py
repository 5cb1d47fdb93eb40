"""What the package brings by entry point, and what it says where layerzero-verify is missing."""

from __future__ import annotations

import importlib.metadata

from click.testing import CliRunner

import layerzero as lz
from layerzero import companions
from layerzero_cli.root import COMMANDS, VERBS, cli


def test_the_names_the_verbs_and_the_parts_are_found():
    for name in ("compare", "compile", "plan_block", "solve", "tune"):
        assert companions.names()[name].load() is getattr(lz, name)
    verbs = {name for verbs in VERBS.values() for name, (home, _) in verbs.items() if home == "layerzero-tune"}
    dist = importlib.metadata.distribution("layerzero-tune")
    assert verbs == {entry.name for entry in dist.entry_points if entry.group == COMMANDS}
    assert verbs <= set(CliRunner().invoke(cli, ["--help"]).output.split())
    assert all(callable(companions.part(name)) for name in companions._OURS["layerzero-tune"][companions.PARTS])


def test_trace_import_says_what_to_install_where_it_is_missing(monkeypatch, tmp_path):
    found = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [
        item for item in found(group=group) if not item.value.startswith("layerzero_verify")
    ])  # fmt: skip
    traces = tmp_path / "traces.jsonl"
    answer = CliRunner().invoke(cli, ["perfdb", "import", str(traces), "--database", str(tmp_path / "perf.db")])
    assert answer.exit_code == 1 and "flashinfer-bench.traces needs layerzero-verify" in answer.output

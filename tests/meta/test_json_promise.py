"""What docs/production.md promises of `--json`: of every verb one object, nothing beside it, one `schema_version`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero_cli.root import cli

pytestmark = pytest.mark.usefixtures("clean")

CALL = ["rms_norm", "--shape", "4,64", "--dtype", "float32"]
# In this order: each may read what those before it wrote. What cannot do its work here ends with an error in the form.
WORK = [
    (["doctor", "--no-probe"], None), (["readiness"], 0), (["list"], 0), (["quarantine", "list"], 0),
    (["quarantine", "clear", "acme.rms_norm.fast"], None), (["completion", "bash"], 0),
    (["explain", *CALL], 0), (["which", *CALL], 0), (["validate", "torch.rms_norm.native", *CALL[1:]], 0),
    (["policy", "init", "policy.yaml"], 0), (["policy", "check", "policy.yaml"], 0), (["policy", "show"], 0),
    (["tune", "calls.json", "--no-compile", "--seconds", "0.05"], 0), (["perfdb", "show"], 0),
    (["perfdb", "verify"], 0),
    (["perfdb", "export", "times.json"], 0), (["perfdb", "import", "times.json"], 0),
    (["perfdb", "merge", "absent.db"], None), (["perfdb", "prune"], 0),
    (["solve", "calls.json", "-o", "table.json"], 0), (["export-priorities", "table.json", "--for", "vllm"], None),
    (["report", "--no-torch"], 0), (["warmup", "calls.json"], 0),
    (["bench", *CALL, "--kernel", "torch", "--seconds", "0.05"], 0),
    (["plan", "config.json", "--tokens", "8"], 0), (["compare", "absent.py:f"], None),
    (["top", "--once", "absent"], None),
    (["trace", "absent.py"], None), (["verify", "--kernel", "torch.rms_norm.native", "--level", "1"], 0),
    (["definitions", "list", "--root", "."], None), (["definitions", "show", "none", "--root", "."], None),
    (["definitions", "check", "--all", "--root", "."], None), (["plugin", "new", "mine"], 0), (["plugin", "list"], 0),
    (["plugin", "check", "absent"], 1), (["vllm", "explain", "absent"], None), (["hub", "list"], None),
    *((["hub", word], None) for word in ("audit", "install", "prune", "quarantine", "verify", "diff")),
    *((["hub", *words], None) for words in (["lock"], ["sign"], ["remove", "a/b"], ["versions", "not a name"])),
]  # fmt: skip
# Schemas are printed as they are; the others are a tour of a minute and the conformance kit in a process of its own.
LEFT = {("policy", "schema"), ("plugin", "schema"), ("demo",), ("plugin", "prove")}


def verbs(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if isinstance(command, click.Group):
            yield from verbs(command, *above, name)
        else:
            yield (*above, name)


def test_every_verb_answers_in_one_object_with_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_PERFDB", str(tmp_path / "times.db"))
    lz.reset()
    with lz.record("calls.json"):
        lz.rms_norm(torch.randn(4, 64), torch.ones(64))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    Path("config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 96, **sizes})
    )
    asked = set()
    for words, code in WORK:
        verb = words[: 2 if isinstance(cli.get_command(click.Context(cli), words[0]), click.Group) else 1]
        done = CliRunner().invoke(cli, [*verb, "--json", *words[len(verb) :]])
        told = f"lz {' '.join(words)} --json: exit {done.exit_code}\n{done.output}"
        assert done.exit_code in ((0, 1, 2) if code is None else (code,)), told
        found = json.loads(done.stdout)
        assert isinstance(found, dict) and found["schema_version"] == 1, told
        assert done.exit_code != 2 or set(found["error"]) >= {"code", "message", "hint"}, told
        asked.add(tuple(verb))
    assert asked | LEFT == set(verbs(cli)), "every verb is asked"

"""A run leaves what is needed to look into it later."""

from __future__ import annotations

import hashlib
import json

import jsonschema
import pytest

import layerzero as lz
from tools.artifacts import emit


@pytest.mark.req("R-GATE-09", "R-GATE-04")
def test_every_artifact_is_emitted_and_says_what_it_should(tmp_path):
    lz.reset()
    files = {path.name: path for path in emit(tmp_path / "artifacts")}
    lz.reset()
    assert set(files) == {item.name for item in (tmp_path / "artifacts").iterdir()}
    text = files["capabilities.json"].read_bytes()
    assert files["capabilities.sha256"].read_text().startswith(hashlib.sha256(text).hexdigest())
    assert "reference.attention.plain" in json.loads(text)
    table, report = (json.loads(files[name].read_text()) for name in ("dispatch_table.json", "schema.json"))
    assert report["valid"] and report["content_hash"] == table["content_hash"]
    fits = jsonschema.Draft202012Validator(report["schema"])
    fits.validate(table)
    for wrong in ({**table, "plans": {}}, {**table, "schema_version": "0.1"}, {**table, "unknown": 1}):
        assert list(fits.iter_errors(wrong)), sorted(wrong)
    measured = {item["kernel_id"] for item in json.loads(files["perfdb.json"].read_text())["measurements"]}
    assert {plan["ops"][0]["kernel_id"] for plan in table["plans"]} <= measured
    assert "attention ->" in files["selections.log"].read_text()
    traces = [json.loads(line) for line in files["traces.jsonl"].read_text().splitlines()]
    assert {trace["op"] for trace in traces} == {"attention", "rms_norm"} and all(t["candidates"] for t in traces)

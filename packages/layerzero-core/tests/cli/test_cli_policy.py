"""`lz policy`, and what other verbs say of a policy file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.model.config import Policy
from layerzero.policy.layers import merge
from layerzero.policy.load import load_file
from layerzero.settings import SETTINGS
from tools.lz_program import data, run

pytestmark = pytest.mark.usefixtures("clean")


def test_policy_check_points_at_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("prefer: [sdpa]\nstrict_mode: maybe\n", encoding="utf-8")
    found = data("policy", "check", str(file), code=1)
    assert found["valid"] is False and (found["line"], found["key"]) == (2, "strict_mode")
    text = run("policy", "check", str(file), code=1).stdout
    assert f"{file}:2" in text and "strict_mode" in text


def test_policy_check_reports_all_mistakes_at_once_with_what_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("cache: {ttl: 3}\non_fault: fallbak\nlokcs: {}\nstrict_mode: maybe\n", encoding="utf-8")
    found = data("policy", "check", str(file), code=1)["mistakes"]
    assert [(item["line"], item["key"]) for item in found] == [
        (1, "cache.ttl"), (2, "on_fault"), (3, "lokcs"), (4, "strict_mode"),
    ]  # fmt: skip
    assert [item["hint"] for item in found][:3] == [f"did you mean {word}?" for word in ("ttl_s", "fallback", "locks")]
    text = run("policy", "check", str(file), code=1).stdout
    assert "4 mistakes" in text and all(item["message"] in text and item["hint"] in text for item in found[:3])


def test_policy_init_writes_a_file_that_says_nothing_and_names_its_schema(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    made = data("policy", "init", str(file))
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# yaml-language-server: $schema=layerzero.schema.json"
    assert json.loads(Path(made["schema"]).read_bytes()) == data("policy", "schema")
    assert data("policy", "check", str(file)) == {"file": str(file), "valid": True, "warnings": [], "mistakes": []}
    assert merge((load_file(file),)).to_json() == Policy().to_json()
    keys = [line.removeprefix("#") for line in lines if re.match(r"#(?! \S)", line)]
    file.write_text("\n".join(keys), encoding="utf-8")
    assert data("policy", "check", str(file))["valid"] and len(load_file(file).rules) == 1
    names = {item.key.rpartition(".")[2] for item in SETTINGS if item.key}
    assert names <= {key.strip().partition(":")[0] for key in keys}
    assert "exists already" in run("policy", "init", str(file), code=2).stderr
    assert "not a YAML file" in run("policy", "init", str(tmp_path / "layerzero.toml"), code=2).stderr


def test_policy_show_names_the_source_of_every_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("deny: [a]\ncache: {ttl_s: 60}\nrules:\n  - {match: {op: rope}, avoid: [b]}\n", encoding="utf-8")
    for name, value in {"CONFIG": str(file), "DENY": "c", "LOCK_ROPE": "torch.rope.x", "PERFDB": "off"}.items():
        monkeypatch.setenv(f"LAYERZERO_{name}", value)
    lz.reset()
    values = data("policy", "show")["values"]
    assert set(values) == {*(item.key for item in SETTINGS if item.key), "rules"}
    assert values["deny"] == {"value": ["c", "a"], "from": [str(file), "LAYERZERO_DENY"]}
    assert values["cache.ttl_s"] == {"value": 60.0, "from": [str(file)]}
    assert values["cache.max_entries"] == {"value": 10_000, "from": []}
    assert values["locks"] == {"value": {"rope": "torch.rope.x"}, "from": ["LAYERZERO_LOCK_<NAME>"]}
    assert values["perfdb.enabled"] == {"value": False, "from": ["environment"]}
    assert values["rules"] == {"value": 1, "from": [f"{file}:4"]}


def test_policy_check_warns_of_what_reaches_nothing(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text(
        "locks: {attention: sdpa.attention.flsh}\n"
        "deny: [flashh*]\n"
        "rules:\n  - match: {op: attention, when: {hed_dim: '>=64'}}\n    prefer: [sdpa]\n",
        encoding="utf-8",
    )
    found = data("policy", "check", str(file))
    assert found["valid"] is True
    told = " ".join(item["message"] for item in found["warnings"])
    assert "sdpa.attention.flsh" in told and "flashh*" in told and "hed_dim" in told
    text = run("policy", "check", str(file)).stdout
    assert "did you mean head_dim?" in text and "did you mean sdpa.attention.flash?" in text
    file.write_text("prefer: [sdpa]\n", encoding="utf-8")
    assert data("policy", "check", str(file))["warnings"] == []


def test_policy_check_warns_of_ops_that_there_are_not(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text(
        "locks: {rms_nrm: torch.rms_norm.native, '*_norm': null}\n"
        "rules:\n  - match: {op: attenton}\n    prefer: [sdpa]\n",
        encoding="utf-8",
    )
    found = data("policy", "check", str(file))
    assert found["valid"] is True
    assert [(item["name"], item["code"], item["fix"]) for item in found["warnings"]] == [
        ("rms_nrm", "OP_UNKNOWN", "did you mean rms_norm?"),
        ("attenton", "OP_UNKNOWN", "did you mean attention?"),
    ]


def test_policy_check_warns_of_a_lock_on_a_kernel_of_another_op(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("locks: {layer_norm: torch.rms_norm.native, '*_norm': torch.rms_norm.native}\n", encoding="utf-8")
    (found,) = data("policy", "check", str(file))["warnings"]
    assert found["message"] == "torch.rms_norm.native does not compute layer_norm"
    assert found["fix"] == "lock rms_norm instead"


def test_doctor_and_readiness_name_every_mistake_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("cache: {ttl: 3}\non_fault: fallbak\nlokcs: {}\n", encoding="utf-8")
    ready = data("readiness", "--config", str(file), code=1)["checks"]
    monkeypatch.setenv("LAYERZERO_CONFIG", str(file))
    lz.reset()
    seen = data("doctor", "--no-probe", code=1)["checks"]
    for checks in (ready, seen):
        wrong = [check["fix"] for check in checks if check["status"] == "fail" and check["name"].startswith("policy")]
        assert wrong == [f"did you mean {word}?" for word in ("ttl_s", "fallback", "locks")]


def test_policy_check_of_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    assert "no such file" in run("policy", "check", str(tmp_path / "none.yaml"), code=1).stdout


def test_policy_show_tells_what_holds_and_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("deny: [torch.rms_norm.*]\n", encoding="utf-8")
    assert data("policy", "show")["policy"]["deny"] == []
    monkeypatch.setenv("LAYERZERO_CONFIG", str(file))
    lz.reset()
    shown = data("policy", "show")
    assert shown["policy"]["deny"] == ["torch.rms_norm.*"] and shown["files"][0]["path"] == str(file)
    text = run("policy", "show").stdout
    assert "torch.rms_norm.*" in text and str(file) in text

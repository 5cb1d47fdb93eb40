"""Planted faults: `lz verify` fails for each of them and names op, kernel, stage and the first element that differs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

import layerzero as lz
from layerzero_cli.root import cli
from tools import planted_faults as planted

NAMES = sorted(planted.FAULTS)

pytestmark = pytest.mark.needs_package("transformers")


@pytest.fixture(scope="module", autouse=True)
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every faulty backend, and each with its fault put right, installed side by side as plugins."""
    folder = tmp_path_factory.mktemp("site")
    names = [planted.install(folder, name, right=right) for name in NAMES for right in (False, True)]
    names += [planted.install_standing_in(folder, right=right) for right in (False, True)]
    before = {key: os.environ.get(key) for key in ("LAYERZERO_PLUGINS", "HOME")}
    os.environ["LAYERZERO_PLUGINS"] = ",".join(names)
    os.environ["HOME"] = str(folder)
    sys.path.insert(0, str(folder))
    lz.reset()
    yield
    sys.path.remove(str(folder))
    for key, value in before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    lz.reset()


def verify(*args: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["verify", *args, "--device", "cpu", "--json"])
    return result.exit_code, json.loads(result.stdout)


def failures(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [check for level in report["levels"] for check in level["checks"] if check["status"] == "fail"]


def levels(report: dict[str, Any]) -> dict[int, str]:
    return {level["level"]: level["status"] for level in report["levels"]}


def expect_named(name: str, code: int, report: dict[str, Any]) -> None:
    """The run failed loudly and names the fault: op, kernel, stage, first differing element, level."""
    fault = planted.FAULTS[name]
    kernel = f"{name}.{fault.op}.fast"
    assert code == 1
    verdict = report["verdict"]
    assert (verdict["ok"], verdict["kind"], verdict["level"]) == (False, "kernel", 1)
    assert (verdict["op"], verdict["kernel"]) == (fault.op, kernel)
    assert fault.op in verdict["text"] and kernel in verdict["text"]
    for check in failures(report):
        assert (check["op"], check["kernel"]) == (fault.op, kernel), "somebody else was accused"
    found = [
        check
        for check in failures(report)
        if check["name"] == fault.check and fault.stage in check["stage"] and "first_difference" in check
    ]
    assert found, f"none of {[(c['name'], c['stage']) for c in failures(report)]} shows it"
    first = found[0]["first_difference"]
    assert first["actual"] != first["expected"] and isinstance(first["index"], list)


def test_there_are_more_than_ten_faults() -> None:
    assert len(NAMES) + 1 >= 11


@pytest.mark.req("R-PAR-01", "R-PAR-13")
@pytest.mark.parametrize("name", NAMES)
def test_the_quick_lane_finds_and_names_a_fault(name: str) -> None:
    code, report = verify("--lane", "quick", "--backend", name)
    expect_named(name, code, report)


@pytest.mark.req("R-PAR-16", "R-PAR-06", "R-PAR-07")
def test_a_convention_that_is_right_by_its_own_measure_is_found_at_level_4() -> None:
    """The case study of the parity ladder: kernel and layer tests pass, the model diverges, and RoPE is named."""
    code, report = verify("--lane", "quick", "--backend", planted.STANDING_IN)
    found = levels(report)
    assert code == 1
    assert (found[1], found[2], found[3], found[4]) == ("ok", "ok", "ok", "fail")
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["level"], verdict["component"]) == ("integration", 4, "RoPE")
    assert verdict["kernel"] == "twisted.twisted_rope.fast" and verdict["stage"].endswith("q_rope")
    assert "integration fault" in verdict["text"] and "1, 2, 3 pass" in verdict["text"]
    llama = next(check for check in failures(report) if check["subject"].startswith("llama"))
    assert llama["first_difference"]["index"][2] == 1, "position 0 is not rotated, position 1 is the first to differ"
    assert llama["max_abs"] > 0.1 and "top-1 differs" in llama["detail"]
    # Models without a rotary embedding never meet the op.
    touched = {check["subject"].split()[0] for check in failures(report)}
    assert touched == {"llama", "mistral", "qwen", "gemma"}


def test_the_same_stand_in_in_the_right_convention_passes() -> None:
    code, report = verify("--lane", "quick", "--backend", f"{planted.STANDING_IN}_right")
    assert (code, report["verdict"]["kind"]) == (0, "pass")
    assert levels(report)[4] == "ok"


# Two here; all of them in the slow lane.
@pytest.mark.parametrize("name", ["swapped_cache", "unseeded"])
def test_with_the_fault_put_right_the_lane_is_green(name: str) -> None:
    code, report = verify("--lane", "quick", "--backend", f"{name}_right")
    assert failures(report) == []
    assert code == 0


@pytest.mark.req("R-PAR-06")
@pytest.mark.parametrize(
    ("name", "component", "stage"),
    [
        ("rope_pairs", "RoPE", "q_rope"),
        ("missing_scale", "attention", "attn_out"),
        ("wrong_gradient", "backward of silu_and_mul", "fc1_out"),
    ],
)
def test_without_level_1_the_layer_finds_it_and_points_at_the_component(name: str, component: str, stage: str) -> None:
    code, report = verify("--level", "2", "--config", "gqa", "--backend", name)
    first = failures(report)[0]
    assert code == 1 and report["verdict"]["kind"] == "unplaced"
    assert first["component"] == component and first["stage"].endswith(stage)
    assert first["kernel"].startswith(f"{name}.") and "first_difference" in first


@pytest.mark.req("R-OP-10")
@pytest.mark.parametrize("lane", ["quick", pytest.param("full", marks=pytest.mark.slow)])
def test_the_sliding_window_contract_is_kept_in_every_lane(lane: str) -> None:
    code, report = verify("--lane", lane, "--level", "1", "--backend", "ignored_window")
    found = [check for check in failures(report) if check["name"] == "sliding window"]
    assert code == 1 and found
    assert found[0]["detail"] == "keys outside the window changed the result"
    assert found[0]["first_difference"]["actual"] != found[0]["first_difference"]["expected"]
    code, report = verify("--lane", lane, "--level", "1", "--backend", "ignored_window_right")
    kept = [check for check in report["levels"][1]["checks"] if check["name"] == "sliding window"]
    assert code == 0 and len(kept) >= 3


def test_the_text_for_people_says_the_same() -> None:
    result = CliRunner().invoke(cli, ["verify", "--lane", "quick", "--backend", "rope_pairs", "--device", "cpu"])
    assert result.exit_code == 1
    text = result.stdout
    assert "rope rope_pairs.rope.fast result: rotate_half_BHSD" in text
    assert "first at [0, 0, 1, 0]: got " in text and "kernel fault at level 1" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_full_lane_finds_and_names_a_fault(name: str) -> None:
    code, report = verify("--lane", "full", "--backend", name)
    expect_named(name, code, report)


@pytest.mark.slow
def test_the_full_lane_finds_the_convention_at_level_4() -> None:
    code, report = verify("--lane", "full", "--backend", planted.STANDING_IN)
    assert code == 1
    assert (report["verdict"]["level"], report["verdict"]["component"]) == (4, "RoPE")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_fault_put_right_passes_the_quick_lane(name: str) -> None:
    code, report = verify("--lane", "quick", "--backend", f"{name}_right")
    assert (code, failures(report)) == (0, [])

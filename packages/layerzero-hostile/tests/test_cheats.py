"""Planted cheats: the gate refuses each by its name, and refuses nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero import companions
from layerzero.companions import part
from layerzero_cli.root import cli
from layerzero_hostile.gate import find_cheats, refusals
from layerzero_tune.trial import trial
from tools.planted_cheats import CHEATS, install

SEED = 20261118
# One of every mechanism that is quick; all of them in the long lane.
QUICK = ("cached_by_pointer", "code_of_our_comparison", "right_under_pytest", "memory_of_the_last_result")


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Put backends on the path of this process and of all it starts."""
    found = [install(folder, name) for name in names]
    monkeypatch.setenv("LAYERZERO_PLUGINS", ",".join(found))
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(folder / "quarantine.json"))
    monkeypatch.syspath_prepend(str(folder))


def by_backend(found: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, str | None]:
    return {item["kernel"].split(".")[0]: item["code"] for item in found if item["kernel"].split(".")[0] in names}


def test_a_sample_of_cheats_is_refused_by_name_and_an_honest_kernel_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, *QUICK, "honest")
    kernels = [f"{name}.rms_norm.fast" for name in (*QUICK, "honest")]
    found = find_cheats(kernels=kernels, device="cpu", seed=SEED)
    wanted = {name: CHEATS[name][0] for name in QUICK} | {"honest": None}
    assert by_backend(found, (*QUICK, "honest")) == wanted
    assert next(item for item in found if item["code"] is None)["calls"] > 100


@pytest.mark.parametrize(
    "source",
    [
        "main.compare = lambda *given: types.SimpleNamespace(ok=True)",
        "main.Examination._trial = lambda *given: None",
        "threading.Timer(2.0, lambda: setattr(main, 'compare', lambda *given: types.SimpleNamespace(ok=True))).start()",
    ],
    ids=("function", "method", "later"),
)
@pytest.mark.slow
def test_a_plugin_that_patches_the_judge_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """It is loaded there too: only it knows what its op means."""
    installed(tmp_path, monkeypatch, "leaves_out_the_last_row")
    plugin = tmp_path / "faulty_leaves_out_the_last_row" / "plugin.py"
    head = "import sys, threading, types\nmain = sys.modules['__main__']\nif hasattr(main, 'Examination'):\n    "
    plugin.write_text(f"{head}{source}\n{plugin.read_text(encoding='utf-8')}", encoding="utf-8")
    found = refusals(["leaves_out_the_last_row.rms_norm.fast"], "cpu")
    assert "HOSTILE_" in found["leaves_out_the_last_row.rms_norm.fast"]


def test_a_plugin_that_prints_more_than_a_pipe_holds_does_not_stop_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "raises_elsewhere")
    plugin = tmp_path / "faulty_raises_elsewhere" / "plugin.py"
    plugin.write_text("print('x' * 300_000)\n" + plugin.read_text(encoding="utf-8"), encoding="utf-8")
    assert refusals(["raises_elsewhere.rms_norm.fast"], "cpu")


def test_a_packed_weight_that_the_gate_writes_anew_is_not_stale() -> None:
    found = find_cheats(kernel="torch.linear.int4_tiles", device="cpu", seed=SEED)
    assert [(item["code"], item["message"]) for item in found if item["code"]] == []
    assert found[0]["skipped"] or found[0]["calls"] > 20


@pytest.mark.slow
def test_every_planted_cheat_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(CHEATS) >= 40
    names = (*CHEATS, "honest", "computed_once")
    installed(tmp_path, monkeypatch, *names)
    kernels = [f"{name}.rms_norm.fast" for name in names] + ["computed_once.linear.fast"]
    found = find_cheats(kernels=kernels, device="cpu", seed=SEED)
    wanted: dict[str, str | None] = {name: code for name, (code, _) in CHEATS.items()}
    assert by_backend(found, names) == wanted | {"honest": None, "computed_once": "HOSTILE_ROOFLINE"}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some 110 kernels: ten minutes on two busy cores
def test_no_kernel_of_ours_is_refused() -> None:
    found = find_cheats(device="cpu", compiles=False, seed=SEED)
    looked = [item for item in found if not item["skipped"]]
    assert len(looked) > 80
    assert {item["kernel"]: item["message"] for item in looked if item["code"]} == {}
    assert min(item["calls"] for item in looked) > 20


@pytest.mark.slow
def test_the_command_fails_and_names_the_cheat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "leaves_the_seed")
    words = ["verify", "--hostile", "--kernel", "leaves_the_seed.rms_norm.fast", "--device", "cpu", "--json"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 1
    said = json.loads(result.stdout)["kernels"][0]
    assert said["code"] == "HOSTILE_STATE" and "random numbers" in said["message"]


@pytest.mark.slow
def test_a_plugin_that_patches_when_it_is_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "honest")
    plugin = tmp_path / "faulty_honest" / "plugin.py"
    plugin.write_text("import time\ntime.monotonic = lambda: 0.0\n" + plugin.read_text(encoding="utf-8"))
    found = refusals(["honest.rms_norm.fast"], "cpu")
    assert "HOSTILE_PATCHED" in found["honest.rms_norm.fast"] and "time.monotonic" in found["honest.rms_norm.fast"]


@pytest.mark.slow
def test_an_unknown_kernel_is_said_so() -> None:
    result = CliRunner().invoke(cli, ["verify", "--hostile", "--kernel", "nobody.rms_norm.fast", "--device", "cpu"])
    assert result.exit_code != 0
    assert "nobody.rms_norm.fast" in result.output


@pytest.mark.slow
def test_a_kernel_from_outside_that_cheats_is_not_raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers pass the parity gate of tuning: it is right for the tensors that it meets there."""
    installed(tmp_path, monkeypatch, "cached_by_pointer", "honest")
    lz.reset()
    try:
        ctx = lz.explain("rms_norm", torch.randn(5, 96), torch.randn(96)).decision.context
        honest, cheat = "honest.rms_norm.fast", "cached_by_pointer.rms_norm.fast"
        found = trial(ctx, seconds=0.1, only=frozenset({honest, cheat}))
    finally:
        monkeypatch.undo()
        lz.reset()
    assert honest in found.times and cheat not in found.times
    assert "HOSTILE_STALE" in found.refused[cheat]


def test_the_gate_is_found_by_its_parts() -> None:
    assert part("hostile.refusals") is refusals
    assert callable(part("verify.hostile"))


def test_without_the_package_the_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "names", lambda kind=companions.NAMES: {})
    result = CliRunner().invoke(cli, ["verify", "--hostile"])
    assert result.exit_code != 0
    assert "pip install layerzero-hostile" in result.output

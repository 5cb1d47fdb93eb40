"""The package has no code; what it asks for brings every public name and verb of ours."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

import pytest

from layerzero import companions
from layerzero_cli.root import VERBS

FOLDER = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# text in and out, and the gate against kernels of strangers, are choices like a backend
CHOSEN_APART = {"layerzero-hostile", "layerzero-tokenizers"}


def asked() -> set[str]:
    return {line.partition(">=")[0] for line in PROJECT["dependencies"]}


def test_it_asks_for_the_core_and_for_every_package_that_brings_names_or_verbs():
    bringing = {companions.package_of(companions.NAMES, name) for name in ("tune", "verify", "patch")}
    assert asked() == {"layerzero-core", *bringing}
    verbs = {home for verbs in VERBS.values() for home, _ in verbs.values() if home.startswith("layerzero-")}
    ours = verbs | {dist for dist, brings in companions._OURS.items() if any(brings.values())}
    assert ours - asked() == CHOSEN_APART


def test_all_of_it_is_of_one_release():
    limits = {line.partition("layerzero-")[2].lstrip("abcdefghijklmnopqrstuvwxyz") for line in PROJECT["dependencies"]}
    major, minor = map(int, PROJECT["version"].split(".")[:2])
    assert limits == {f">={major}.{minor},<{major}.{minor + 1}"}


def test_its_wheel_holds_metadata_alone(tmp_path):
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="missing tool: hatchling")
    (wheel,) = hatchling.WheelBuilder(str(FOLDER)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as opened:
        assert {name.partition("/")[0] for name in opened.namelist()} == {
            f"layerzero_kernels-{PROJECT['version']}.dist-info"
        }

"""The always-there backends pass the same kit as third parties, by the same door."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.plugin.discovery import BUILTINS

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
# The backends that need no compiler, and the ops that layerzero-models brings with their references.
PLUGINS = {name: module for name, module in BUILTINS.items() if name != "inductor"}
PLUGINS["models"] = "layerzero_models.plugin"


# Runs the kit once for each module named, in one process: loading torch takes longer than most of the kit.
_DRIVER = """
import json, sys, pytest

codes = {}
for name, module in json.loads(sys.argv[1]).items():
    print(f"--- {name}", flush=True)
    codes[name] = int(pytest.main([*sys.argv[2:], "--lz-plugin", module]))
print("RESULT " + json.dumps(codes))
"""
# Without log capture: it visits each of torch's loggers before and after each step of each test, a third of the time.
_OPTIONS = (
    "-q",
    "-rf",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:logging",
    "-p",
    "layerzero_verify.testing.pytest_plugin",
)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], str]:
    """How the kit ended for each of these plugins, and what it said."""
    folder = _suite(tmp_path_factory.mktemp("kit"))
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, json.dumps(PLUGINS), *_OPTIONS, str(folder)],
        cwd=folder, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answers, done.stdout[-4000:] + done.stderr[-1000:]
    return json.loads(answers[-1].removeprefix("RESULT ")), done.stdout


@pytest.mark.timeout(520)
@pytest.mark.parametrize("name", sorted(PLUGINS))
def test_a_built_in_backend_passes_the_kit(name: str, kit: tuple[dict[str, int], str]) -> None:
    codes, said = kit
    assert codes[name] == 0, said.partition(f"--- {name}\n")[2].partition("\n--- ")[0][-4000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not PROVE, reason="each of the kit's shapes is half a minute of TorchInductor: make prove NAME=warmup"
)
def test_the_compiled_backend_passes_the_kit(tmp_path: Path) -> None:
    _passes("inductor", tmp_path, 3500)


def _suite(folder: Path) -> Path:
    """A backend author's whole test folder."""
    (folder / "test_kit.py").write_text("from layerzero_verify.testing.suite import *\n", encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    return folder


def _passes(name: str, tmp_path: Path, limit_s: float) -> None:
    command = [sys.executable, "-m", "pytest", *_OPTIONS, "--lz-plugin", BUILTINS[name], str(_suite(tmp_path))]
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_kit_is_never_loaded_by_itself() -> None:
    import importlib_metadata

    loaded = [entry.value for entry in importlib_metadata.entry_points(group="pytest11")]
    assert not any(value.startswith("layerzero") for value in loaded)


def test_a_run_without_a_plugin_named_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "test_kit.py").write_text("from layerzero_verify.testing.suite import *\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "layerzero_verify.testing.pytest_plugin",
    ]
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0 and "layerzero_plugin" in done.stdout + done.stderr

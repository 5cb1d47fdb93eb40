"""The always-there backends pass the same kit as third parties, by the same door."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.plugin.discovery import BUILTINS

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(set(BUILTINS) - {"inductor"}))
def test_a_built_in_backend_passes_the_kit(name: str, tmp_path: Path) -> None:
    _passes(name, tmp_path, 170)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not PROVE, reason="each of the kit's shapes is half a minute of TorchInductor: make prove-warmup")
def test_the_compiled_backend_passes_the_kit(tmp_path: Path) -> None:
    _passes("inductor", tmp_path, 3500)


def _passes(name: str, tmp_path: Path, limit_s: float) -> None:
    (tmp_path / "test_kit.py").write_text("from layerzero.testing.suite import *\n", encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider",
        "-p", "layerzero.testing.pytest_plugin", "--lz-plugin", BUILTINS[name], str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_kit_is_never_loaded_by_itself() -> None:
    import importlib_metadata

    loaded = [entry.value for entry in importlib_metadata.entry_points(group="pytest11")]
    assert not any(value.startswith("layerzero") for value in loaded)


def test_a_run_without_a_plugin_named_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "test_kit.py").write_text("from layerzero.testing.suite import *\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "layerzero.testing.pytest_plugin"]
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0 and "layerzero_plugin" in done.stdout + done.stderr

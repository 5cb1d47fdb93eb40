"""Fixtures of the tests of health."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.health.quarantine import Quarantine


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quarantine]:
    """A quarantine of the test's own."""
    monkeypatch.setenv("LAYERZERO_QUARANTINE", str(tmp_path / "quarantine.json"))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "")
    lz.reset()
    yield Quarantine(tmp_path / "quarantine.json")
    lz.reset()

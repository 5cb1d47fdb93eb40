"""What the accelerator says about itself, compiled and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.dispatch.accel as seam
from layerzero.plugin.probing import probe
from layerzero.reasons import reason
from layerzero.version import __version__
from layerzero_accel.plugin import layerzero_capabilities, layerzero_health
from layerzero_verify.testing import fakes


@pytest.mark.parametrize("device", [fakes.cpu(), fakes.gpu(90)], ids=["cpu", "cuda"])
def test_compiled_it_is_available_on_any_device(native: Any, device: Any) -> None:
    status = layerzero_capabilities(device)
    assert (status.available, status.version, status.kernels) == (True, __version__, ())


def test_uncompiled_it_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "accelerator", seam.Accelerator(None, reason("ACCEL_NOT_BUILT")))
    status = layerzero_capabilities(fakes.cpu())
    assert not status.available
    assert [item.code.value for item in status.reasons] == ["ACCEL_NOT_BUILT"]
    assert "python -m layerzero_accel.build" in status.fix
    assert not layerzero_health("accel").ok


def test_the_self_test_runs_the_c_path(fresh: Any) -> None:
    before = fresh.counts()["exact"]
    report = layerzero_health("accel")
    assert (report.ok, report.max_error) == (True, 0.0)
    assert fresh.counts()["exact"] > before


def test_a_table_that_finds_nothing_fails_the_self_test(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lz, "silu_and_mul", lambda x, **options: torch.nn.functional.silu(x[:, :16]) * x[:, 16:])
    assert not layerzero_health("accel").ok


def test_the_probe_answers_within_its_time_limit(native: Any) -> None:
    result = probe("accel", timeout=60.0)
    assert result.status.available
    assert result.health is not None and result.health.ok

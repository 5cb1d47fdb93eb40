"""Shipped measurements that are wrong: a slow kernel said to be fast. Tuning overrules them, and drift notices."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.device.probe import probe_device
from layerzero.device.signature import family_of
from layerzero.measurements.believed import measurements_from
from layerzero.measurements.shipped import shipped_by
from layerzero.model.decision import MEASURED, SHIPPED
from layerzero.model.kernel import BackendSpec
from layerzero.perfdb.store import PerfDB
from layerzero.registry.proofs import sealed
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements
from layerzero_tune.drift import drifted
from tests import own_time

SLOW, FAST = "lab.rms_norm.slow", "lab.rms_norm.fast"


def normed(x, weight, eps):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def call():
    torch.manual_seed(0)
    return torch.randn(16, 64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)


@pytest.fixture(autouse=True)
def shipped_times_rank(monkeypatch):
    monkeypatch.delenv("LAYERZERO_PERFDB_SHIPPED")


@pytest.fixture
def wrong(lab, tmp_path, monkeypatch):
    """A kernel of half a millisecond, of which its package says that it takes a tenth of torch's time."""
    own_time.use_own_time(monkeypatch)
    group = {"op": "rms_norm", "kind": "float64", "axes": ["rows", "hidden"], "kernels": [FAST, SLOW],
             "errors": [None, None], "points": [[16, 64, 16896, 4096, 20.0, 0.9, 0.1]]}  # fmt: skip
    entry = {"device": "Abacus", "commit": "0123abc", "version": "1.0", "vendor": "", "torch": "2.11.0", "threads": 1,
             "capped": "", "busy": 0.0, "groups": [group]}  # fmt: skip
    file = tmp_path / "measurements.json"
    families = {family_of(probe_device("cpu")): entry}
    file.write_text(json.dumps(sealed({"schema_version": "1.0", "backend": "lab", "families": families})))
    kernels = [lab.kernel(SLOW, own_time.taking(600e-6, normed)), lab.kernel(FAST, own_time.taking(1e-6, normed))]
    registry = lab.registry.add(kernels, BackendSpec(name="lab", version="1.0", measurements=str(file)))
    state.use(registry)
    state.publish(measurements=Measurements(expected=shipped_by(registry, state.world.ops)))
    return PerfDB(tmp_path / "p.db")


def measured_here(db):
    """What a process is told that finds this database beside the package's file."""
    state.publish(measurements=replace(measurements_from(db, state.world), expected=state.world.measurements.expected))


def test_local_tuning_overrules_shipped_measurements(wrong):
    with torch.no_grad():
        report = lz.explain("rms_norm", *call())
        assert report.chosen == SLOW and report.decision.winner.source == SHIPPED and "0123abc" in str(report)
        lz.tune([report.decision.context], database=wrong.path, seconds=0.1, compile=False)
        measured_here(wrong)
        report = lz.explain("rms_norm", *call())
    assert (
        report.chosen != SLOW
        and report.decision.winner.source == MEASURED
        and report.to_dict()["ranked_by"] == MEASURED
    )


def test_drift_notices_a_kernel_that_is_slower_than_torch_and_than_was_said(wrong):
    with torch.no_grad():
        ctx = lz.select("rms_norm", *call()).context
        (found,) = drifted([ctx], wrong, seconds=0.05, jit="off")
        assert found.kernel_id == SLOW and found.now_us > 5 * found.before_us and "PERF_DRIFTED" in str(found.reason)
        measured_here(wrong)
        assert lz.which("rms_norm", *call()) != SLOW  # it was tuned on the spot
        assert list(drifted([ctx], wrong, seconds=0.05, jit="off", slower=50.0)) == []

"""What selection believes of a database: this machine's own times, weighed; a relative's ranking; nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.device.probe import probe_device
from layerzero.dispatch.run import current_world
from layerzero.measurements.believed import measurements_from, mode_of, platform_of, versions_of
from layerzero.perfdb.measurement import Measurement, bucket_of
from layerzero.perfdb.store import PerfDB
from layerzero.runtime.state import state
from layerzero_tune.timing.launches import with_launches
from layerzero_tune.timing.race import Times
from layerzero_verify.testing import fakes

pytestmark = pytest.mark.usefixtures("built_in")

DEFAULT = "sdpa.attention.default"
FLASH, MATH, PLAIN = "sdpa.attention.flash_cpu", "sdpa.attention.math", "reference.attention.plain"


def call(length=8):
    torch.manual_seed(0)
    return tuple(torch.randn(1, 2, length, 16) for _ in range(3))


def timed(kernel_id, us, *, spread=0.01, **changes):
    ctx = lz.select("attention", *call()).context
    kernel_version, backend_version = versions_of(current_world().registry, kernel_id)
    given = {
        "op": "attention", "bucket": bucket_of(ctx), "kernel_id": kernel_id, "kernel_version": kernel_version,
        "backend_version": backend_version, "platform": platform_of(probe_device("cpu")), "median_us": us,
        "p95_us": us, "p99_us": us, "variance": (spread * us) ** 2, "samples": 30, "max_error": 1e-7,
        "measured_at": 1.0,
    }  # fmt: skip
    return Measurement(**{**given, **changes})


@pytest.fixture
def db(tmp_path):
    found = PerfDB(tmp_path / "perf.db")
    yield found
    found.close()


def chosen(db):
    state.publish(measurements=measurements_from(db, current_world()))
    return lz.select("attention", *call())


@pytest.mark.req("R-SEL-03", "R-TUNE-04")
def test_the_measured_kernel_wins_over_the_expected_one(db):
    assert lz.which("attention", *call()) == FLASH
    db.put([timed(FLASH, 50.0), timed(MATH, 20.0)])
    decision = chosen(db)
    assert decision.chosen == MATH
    assert decision.winner.measured_us == pytest.approx(20.0, rel=0.01)
    # another bucket was never measured
    assert lz.which("attention", *call(1000)) == FLASH


@pytest.mark.req("R-PDB-02")
def test_times_are_found_by_the_call_they_were_taken_for_and_newer_ones_replace_them(db):
    """Whatever a time depends on keeps it from another call; calls of one bucket of lengths share it."""
    db.put([timed(MATH, 20.0), timed(FLASH, 50.0)])

    def told(*tensors, **options):
        state.publish(measurements=measurements_from(db, current_world()))
        return lz.select("attention", *(tensors or call()), **options).candidate(MATH).measured_us

    q, k, v = call()
    assert told() == told(*call(7)) == pytest.approx(20.0, rel=0.01)
    others = {
        "length": call(9),
        "dtype": [t.double() for t in (q, k, v)],
        "heads": [t.repeat(1, 2, 1, 1) for t in (q, k, v)],
        "shared heads": [q.repeat(1, 2, 1, 1), k, v],
        "head_dim": [t.repeat(1, 1, 1, 2) for t in (q, k, v)],
        "strides": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
        "gradients": [q.clone().requires_grad_(), k, v],
    }
    assert {name: told(*tensors) for name, tensors in others.items()} == dict.fromkeys(others)
    assert told(is_causal=True) is None
    db.put([timed(MATH, 80.0, measured_at=2.0)])
    assert told() == pytest.approx(80.0, rel=0.01) and chosen(db).chosen == FLASH


@pytest.mark.req("R-TUNE-03")
def test_what_the_device_decided_is_still_decided_when_selection_has_weighed_it(db):
    """Two launches as long as each other; one kernel is done later, and was the steadier one that day."""
    clock = {FLASH: 5.2, MATH: 5.0}
    told = with_launches(
        {name: Times(us, us, us, 0.0, 144, (0.017 * us) ** 2) for name, us in clock.items()},
        {name: (lambda: None) for name in clock},
        lambda call, count: 8.0,
        lambda: 1.0,
        same=0.06,
    )
    spreads = {FLASH: 0.027, MATH: 0.033}
    rows = [timed(name, item.median_us, spread=spreads[name], samples=144) for name, item in told.items()]
    db.put([*rows, timed(PLAIN, 73.0)])
    assert chosen(db).chosen == MATH


@pytest.mark.req("R-PDB-05", "R-TUNE-04")
@pytest.mark.parametrize("field", ["device", "driver", "runtime", "torch"])
def test_times_of_another_machine_or_version_are_not_believed(db, field):
    elsewhere = platform_of(probe_device("cpu"))._replace(**{field: "x", "family": "other"})
    db.put([timed(FLASH, 50.0, platform=elsewhere), timed(MATH, 20.0, platform=elsewhere)])
    assert chosen(db).chosen == FLASH and chosen(db).winner.measured_us is None


@pytest.mark.req("R-PDB-05", "R-TUNE-04")
@pytest.mark.parametrize("field", ["driver", "runtime", "torch"])
def test_one_new_version_under_the_kernels_ends_the_times_of_before(db, field):
    """On the same silicon they rank, as a relative's do, until anything was measured with what is installed now."""
    here = platform_of(probe_device("cpu"))
    older = here._replace(**{field: "an older one"})
    db.put([timed(FLASH, 500.0, platform=older), timed(MATH, 200.0, platform=older)])
    notes = chosen(db).notes
    assert [note.code for note in notes] == ["PERF_NOT_BELIEVED", "PERF_RANKED_BY"]
    assert f"{field} an older one, here {getattr(here, field) or 'unknown'}" in str(notes[0])
    db.put([timed(FLASH, 20.0)])
    decision = chosen(db)
    assert decision.chosen == FLASH and decision.winner.measured_us == pytest.approx(20.0, rel=0.01)
    assert decision.candidate(MATH).measured_us is None
    assert [note.code for note in decision.notes] == ["PERF_NOT_BELIEVED"]


@pytest.fixture
def threads(monkeypatch):
    """Set torch's number of threads, on a machine that would use `usual` by itself."""
    before = torch.get_num_threads()

    def use(count, usual=4):
        monkeypatch.setattr("layerzero.measurements.believed.usual_threads", lambda: frozenset({usual}))
        torch.set_num_threads(count)

    yield use
    torch.set_num_threads(before)


@pytest.mark.fault(26)
def test_times_count_for_the_number_of_threads_they_were_taken_with(db, threads):
    def rows(count, flash, plain):
        here = platform_of(probe_device("cpu"))._replace(threads=count)
        return [timed(FLASH, flash, platform=here), timed(MATH, plain, platform=here)]

    threads(4)
    db.put([*rows(4, 20.0, 50.0), *rows(1, 90.0, 60.0)])
    assert chosen(db).chosen == FLASH and chosen(db).winner.measured_us == pytest.approx(20.0, rel=0.01)
    threads(1)
    assert chosen(db).chosen == MATH and chosen(db).winner.measured_us == pytest.approx(60.0, rel=0.01)
    threads(2)
    decision = chosen(db)
    assert decision.chosen == FLASH and decision.winner.measured_us is None  # neither a time nor a ranking
    assert {str(note.limit) for note in decision.notes} == {"threads 4, here 2", "threads 1, here 2"}


@pytest.mark.fault(26)
def test_times_of_before_threads_were_written_down_count_for_the_usual_number(db, threads):
    before = platform_of(probe_device("cpu"))._replace(threads=0)
    db.put([timed(FLASH, 50.0, platform=before), timed(MATH, 20.0, platform=before)])
    threads(4)
    assert chosen(db).chosen == MATH and chosen(db).winner.measured_us == pytest.approx(20.0, rel=0.01)
    threads(1)
    assert chosen(db).chosen == FLASH and chosen(db).winner.measured_us is None
    threads(4)
    db.put([timed(MATH, 70.0)])  # one with its number replaces the other in what is believed
    assert chosen(db).chosen == FLASH and len(db) == 3


@pytest.mark.req("R-PDB-05", "R-CACHE-10", "R-TUNE-04")
@pytest.mark.parametrize("field", ["kernel_version", "backend_version"])
def test_times_of_another_build_of_the_kernel_are_not_believed(db, field):
    db.put([timed(FLASH, 50.0), timed(MATH, 20.0, **{field: "other"})])
    assert chosen(db).chosen == FLASH


def test_a_time_that_was_never_compared_with_the_reference_is_not_believed(db):
    db.put([timed(FLASH, 50.0), timed(MATH, 20.0, max_error=None)])
    assert chosen(db).chosen == FLASH


@pytest.mark.req("R-PDB-06")
def test_a_relative_of_the_family_ranks_where_nothing_was_measured_here(db):
    relative = platform_of(probe_device("cpu"))._replace(device="an older one")
    db.put([timed(FLASH, 500.0, platform=relative), timed(MATH, 200.0, platform=relative)])
    assert chosen(db).chosen == MATH
    db.put([timed(FLASH, 20.0), timed(MATH, 50.0)])  # this machine's own word is stronger
    assert chosen(db).chosen == FLASH


@pytest.mark.req("R-PDB-06")
def test_one_database_holds_the_times_of_several_devices_and_each_call_hears_its_own(db):
    """A CPU and two GPUs in one process: who is fastest on one says nothing of another family."""
    here = lz.select("attention", *call()).context
    halves = {"dtype": "float16", "dtypes": ("float16",) * 3}
    calls = [here, *(replace(here, device=fakes.gpu(sm), **halves) for sm in (80, 90))]
    took = [(30.0, 60.0), (8.0, 4.0), (2.0, 6.0)]
    for ctx, pair in zip(calls, took, strict=True):
        mode, platform = mode_of(ctx.device.device_type), platform_of(ctx.device)
        for name, us in zip((MATH, DEFAULT), pair, strict=True):
            db.put([timed(name, us, platform=platform, bucket=bucket_of(ctx), mode=mode)])
    found = measurements_from(db, current_world())
    for ctx, pair in zip(calls, took, strict=True):
        told = [found.lookup(name, ctx) for name in (MATH, DEFAULT)]
        assert told == [pytest.approx(us, rel=0.01) for us in pair], ctx.device.name
        assert all(note.code == "PERF_NOT_BELIEVED" for note in found.notes(ctx))


@pytest.mark.req("R-PDB-08")
def test_influence_falls_as_the_spread_rises(db):
    gaps = []
    for spread in (0.01, 0.2, 0.6):
        db.put([timed(FLASH, 50.0), timed(MATH, 20.0, spread=spread)])
        decision = chosen(db)
        scores = {item.kernel_id: item.score for item in decision.candidates if item.accepted}
        gaps.append(scores[MATH] - scores[FLASH])
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 2 * gaps[2] > 0
    db.put([timed(MATH, 20.0, spread=2.0, p95_us=120.0)])
    assert chosen(db).candidate(MATH).measured_us is None
    db.put([timed(MATH, 10.0, spread=2.0, p95_us=40.0)])  # its slowest is ahead of everybody
    assert chosen(db).chosen == MATH and chosen(db).winner.measured_us == pytest.approx(40.0)


@pytest.mark.req("R-PDB-08")
def test_an_unsteady_time_far_below_the_others_still_wins(db):
    """Three times as fast even when it is slow: what the others take must not be held against it."""
    db.put([timed(FLASH, 36.0), timed(MATH, 10.0, spread=0.75), timed(PLAIN, 400.0)])
    assert chosen(db).chosen == MATH and 10.0 < chosen(db).winner.measured_us <= 25.0
    db.put([timed(FLASH, 20.0), timed(MATH, 10.0, spread=0.75)])  # at times it would be the slower one
    assert chosen(db).chosen == FLASH


def test_a_new_measurement_is_a_new_world(db):
    db.put([timed(FLASH, 20.0), timed(MATH, 50.0)])
    assert chosen(db).chosen == FLASH
    db.put([timed(FLASH, 50.0, measured_at=2.0), timed(MATH, 20.0, measured_at=2.0)])
    assert chosen(db).chosen == MATH


def test_a_damaged_database_only_costs_its_measurements(db):
    db.put([timed(MATH, 1.0)])
    db.close()
    db.path.write_bytes(b"\0" * 4096)
    assert chosen(db).chosen == FLASH


@pytest.mark.req("R-TUNE-04")
def test_times_that_cannot_be_told_apart_count_as_equal(db):
    """The name decides then, at every run alike; steady times decide themselves."""
    db.put([timed(FLASH, 104.0, spread=0.1), timed(MATH, 100.0, spread=0.1)])
    decision = chosen(db)
    assert decision.chosen == min(FLASH, MATH) == FLASH and decision.winner.measured_us == pytest.approx(100.0)
    db.put([timed(FLASH, 104.0, spread=0.2), timed(MATH, 100.0, spread=0.1), timed(PLAIN, 900.0)])
    assert chosen(db).chosen == FLASH  # though the other one was steadier
    db.put([timed(FLASH, 104.0, spread=0.005), timed(MATH, 100.0, spread=0.005)])
    assert chosen(db).chosen == MATH
    db.put([timed(PLAIN, 99.0, spread=0.005)])  # equally fast: what others are held against does not go before them
    assert chosen(db).chosen == MATH
    db.put([timed(PLAIN, 900.0)])
    db.put([timed(FLASH, 107.0, spread=0.1), timed(MATH, 100.0, spread=0.1)])  # no spread excuses seven percent
    assert chosen(db).chosen == MATH

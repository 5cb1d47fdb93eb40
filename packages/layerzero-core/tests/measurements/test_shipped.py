"""Measurements that came with a package: what they rank, between which sizes, and when they are refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.device.probe import probe_device
from layerzero.device.signature import family_of
from layerzero.measurements.between import FARTHEST, Estimate, Kind, Point
from layerzero.measurements.shipped import FEW, SHORT_US, free_first, load, shipped_by, standing, together
from layerzero.model.decision import MEASURED, PRIORITY, ROOFLINE, SHIPPED
from layerzero.model.kernel import BackendSpec
from layerzero.public.check_machine import shipped as doctor_looks
from layerzero.public.checks import look
from layerzero.reasons import Reason, ReasonCode
from layerzero.registry.proofs import sealed
from layerzero.runtime.state import state
from layerzero.selection.score import Expected, by_expectation
from layerzero.selection.world import Measurements

FAMILY = family_of(probe_device("cpu"))
FAST, SLOW, OWN = "acme.rms_norm.fast", "acme.rms_norm.slow", "acme.rms_norm.own"
OTHER = "bolt.rms_norm.other"
TORCH = "torch.rms_norm.native"


def document(ratios, *, family=FAMILY, sizes=((64, 256), (16, 512), (256, 128), (128, 64)), **changes):
    """A file that says of each kernel, at some sizes, how long it took beside torch; in float64, as none of ours."""
    points = [[*size, 16 * size[0] * size[1], 4 * size[0] * size[1], 10.0, *ratios.values()] for size in sizes]
    group = {"op": "rms_norm", "kind": "float64", "axes": ["rows", "hidden"], "kernels": list(ratios), "points": points}
    entry = {
        "device": "Abacus", "commit": "0123abc", "version": "1.0", "vendor": "", "torch": "2.11.0", "threads": 1,
        "capped": "", "busy": 0.0, "groups": [{**group, "errors": [0.0] * len(ratios)}], **changes,
    }  # fmt: skip
    return sealed({"schema_version": "1.0", "backend": "acme", "families": {family: entry}})


@pytest.fixture(autouse=True)
def shipped_times_rank(monkeypatch):
    monkeypatch.delenv("LAYERZERO_PERFDB_SHIPPED")


@pytest.fixture
def plant(lab, tmp_path):
    """Kernels that all compute the same, with a file that says how fast they are."""

    def made(said, priorities=((FAST, 10.0), (SLOW, 90.0)), lookup=None, **settings):
        path = tmp_path / "measurements.json"
        path.write_text(said if isinstance(said, str) else json.dumps(said), encoding="utf-8")
        lab.use(**settings)
        kernels = [lab.kernel(name, priority=points) for name, points in priorities]
        registry = lab.registry.add(kernels, BackendSpec(name="acme", version="1.0", measurements=str(path)))
        state.use(registry)
        expected = shipped_by(registry, state.world.ops)
        state.publish(measurements=Measurements(lookup or (lambda name, ctx: None), "planted", expected=expected))
        return registry

    return made


def call(rows=64, hidden=256):
    return torch.ones(rows, hidden, dtype=torch.float64), torch.ones(hidden, dtype=torch.float64)


def explained(*sizes):
    return lz.explain("rms_norm", *call(*sizes))


# -- what they rank --------------------------------------------------------------------------------------
def test_shipped_measurements_rank_before_anything_was_measured_here(plant):
    plant(document({FAST: 0.4, SLOW: 3.0}))
    report = explained()
    assert report.chosen == FAST  # though its priority is the lowest
    winner = report.decision.winner
    assert winner.source == SHIPPED and winner.expected.ratio == pytest.approx(0.4, rel=0.1)
    assert winner.measured_us is None and (winner.expected.machine, winner.expected.commit) == ("Abacus", "0123abc")
    assert "shipped measurements" in str(report) and "Abacus, commit 0123abc" in str(report)
    data = report.to_dict()
    assert data["ranked_by"] == SHIPPED and data["candidates"][0]["expected"]["nearest"] == {"rows": 64, "hidden": 256}
    assert data["candidates"][0]["expected"]["octaves"] < 0.6  # from the middle of the bucket that ends here
    parts = dict(report.decision.candidate(SLOW).score_parts)
    assert parts["expected"] < 0 and report.decision.candidate(SLOW).score == pytest.approx(sum(parts.values()))


def test_of_many_commits_the_first_is_printed_and_all_are_in_the_data(plant):
    others = ["862ec292 (attention, and calls 800 to 2100)", "61767903 (seed 1439182440)"]
    whole = ", ".join(["cdd0bf72b3fc74d85e52e0559aa31c45d16ac672", *others])
    plant(document({FAST: 0.4, SLOW: 3.0}, commit=whole))
    report = explained()
    assert "Abacus, commit cdd0bf7 and 2 more, torch" in str(report) and "862ec292" not in str(report)
    assert report.to_dict()["candidates"][0]["expected"]["commit"] == whole


def test_a_captured_call_is_ranked_by_what_short_calls_took_in_graphs_and_long_ones_anywhere(plant):
    said, graphs = document({FAST: 0.4, SLOW: 3.0}), document({FAST: 3.0, SLOW: 0.4})
    (entry,) = said["families"].values()
    entry["graphs"] = graphs["families"][FAMILY]["groups"]
    registry = plant(sealed(said))
    eager = explained().decision.context
    ask = shipped_by(registry, state.world.ops)

    def ratios(capturing):
        return {name: found.ratio for name, found in ask(replace(eager, capturing=capturing), (FAST, SLOW))[0].items()}

    assert ratios(False) == pytest.approx({FAST: 0.4, SLOW: 3.0}, rel=0.1)
    assert ratios(True) == pytest.approx({FAST: 3.0, SLOW: 0.4}, rel=0.1)
    for group in entry["groups"]:  # long calls now, and none of them in a graph: they take there what they take here
        group["points"] = [[*row[:4], SHORT_US, *row[5:]] for row in group["points"]]
    entry["graphs"] = document({FAST: 3.0, SLOW: 0.4}, sizes=((1, 8), (2, 8)))["families"][FAMILY]["groups"]
    ask = shipped_by(plant(sealed(said)), state.world.ops)
    assert ratios(True) == pytest.approx({FAST: 0.4, SLOW: 3.0}, rel=0.1)


def test_what_is_expected_to_be_slower_than_torch_is_not_chosen(plant):
    plant(document({SLOW: 2.0, FAST: 1.5}))
    assert explained().chosen == TORCH


def test_one_answer_does_for_all_sizes_of_a_bucket_and_is_that_of_its_middle(plant):
    plant(document({FAST: 0.4, SLOW: 3.0}))
    for rows, middle in ((33, 45), (45, 45), (64, 45), (65, 91), (128, 91)):
        found = explained(rows, 256).decision.winner.expected
        assert found.octaves == pytest.approx(math.log2(middle / 64) if middle > 64 else math.log2(64 / middle))


def test_a_kernel_without_data_keeps_its_place_but_not_above_one_that_is_faster_than_torch(plant):
    three = ((FAST, 10.0), (SLOW, 30.0), (OTHER, 95.0))
    plant(document({FAST: 0.5, SLOW: 2.0}), three)
    ranking = explained().decision.ranking
    assert ranking[:2] == (FAST, OTHER) and ranking.index(TORCH) < ranking.index(SLOW)
    plant(document({FAST: 1.5, SLOW: 2.0}), three)
    assert explained().decision.ranking[:2] == (OTHER, TORCH)  # nobody is faster than torch: its author's word counts
    own = ((FAST, 10.0), (SLOW, 30.0), (OWN, 95.0))  # its backend ships times of other kernels and none of this one
    plant(document({FAST: 1.5, SLOW: 2.0}), own)
    assert explained().decision.ranking[:2] == (TORCH, OWN) and explained().decision.candidate(OWN).source == PRIORITY
    plant(document({FAST: 1.5}), ((FAST, 99.0), (OTHER, 5.0)))
    assert explained().decision.ranking[0] == TORCH and explained().decision.candidate(OTHER).source == PRIORITY


def test_a_kernel_of_one_schedule_is_expected_behind_the_free_ones_of_its_backend(lab):
    """It may run any batch only in one way, so where it seems faster the two were not measured near enough."""
    point = Point((64, 256), "float32", 1.0, 1.0, 100.0, {})
    told = {
        "acme.rms_norm.fixed": 0.6,
        "acme.rms_norm.free": 0.8,
        "acme.rms_norm.other": 0.9,
        "alone.rms_norm.fixed": 0.5,
    }
    found = {name: Estimate(ratio, 100.0, point, 0.5, True) for name, ratio in told.items()}
    kernels = {name: replace(lab.kernel(name), batch_invariant=name.endswith("fixed")) for name in told}
    kernels["alone.rms_norm.fixed"] = replace(kernels["alone.rms_norm.fixed"], backend="alone")
    ratios = {name: item.ratio for name, item in free_first(found, kernels).items()}
    assert ratios == {**told, "acme.rms_norm.fixed": pytest.approx(0.84)}
    found["acme.rms_norm.fixed"] = found["acme.rms_norm.fixed"]._replace(ratio=2.0)
    assert free_first(found, kernels)["acme.rms_norm.fixed"].ratio == 2.0


def test_priorities_decide_between_kernels_that_are_expected_to_be_equally_fast():
    two = [Expected("a.op.x", "a", 10.0, 0.50), Expected("b.op.x", "b", 20.0, 0.51)]
    found = by_expectation(two, 0.03)
    assert sum(found["b.op.x"]) > sum(found["a.op.x"])
    found = by_expectation(two, 0.01)
    assert sum(found["b.op.x"]) < sum(found["a.op.x"])
    assert by_expectation([Expected("a.op.x", "a", 10.0, None)], 0.0) == {}


def test_a_copy_that_a_kernel_needs_comes_on_top_of_what_was_measured(plant, lab):
    plant(document({FAST: 0.9}), ((FAST, 10.0),))
    here = state.world
    kernel = replace(here.registry.kernels[FAST], contiguous=True, adapt=frozenset({"contiguous"}))
    registry = here.registry.replace([kernel])
    state.use(registry)
    state.publish(measurements=Measurements(expected=shipped_by(registry, here.ops)))
    assert explained().chosen == FAST
    x, weight = call()
    assert lz.which("rms_norm", x.t().contiguous().t(), weight) == TORCH


def test_a_copy_that_its_kind_of_call_needs_was_measured_with_the_kernel(plant):
    """As on the H200: heads that are copied for GQA were counted twice, and a kernel twice as slow was taken."""
    many = [("float64 gqa", length, (0.7, 0.4)) for length in (32, 48, 60, 64, 70, 90, 120, 200)]
    plant(attention_file(*many), (("acme.attention.slow", 90.0), ("acme.attention.fast", 10.0)))
    here = state.world
    kernel = here.registry.kernels["acme.attention.fast"]
    kernel = replace(kernel, features=kernel.features - {"gqa"}, adapt=frozenset({"gqa"}))
    registry = here.registry.replace([kernel])
    state.use(registry)
    state.publish(measurements=Measurements(expected=shipped_by(registry, here.ops)))
    q, k = torch.ones(1, 8, 64, 64, dtype=torch.float64), torch.ones(1, 2, 64, 64, dtype=torch.float64)
    report = lz.explain("attention", q, k, k)
    steps = [step for step in report.decision.winner.transforms if step.name == "expand_kv"]
    assert report.chosen == "acme.attention.fast" and steps
    assert 0.4 + steps[0].cost_us / report.decision.winner.expected.base_us > 0.7, "counted twice, the other would win"


def test_local_measurements_always_win(plant):
    times = {FAST: 500.0, SLOW: 20.0, TORCH: 30.0}
    plant(document({FAST: 0.1, SLOW: 9.0}), lookup=lambda name, ctx: times.get(name))
    report = explained()
    assert report.chosen == SLOW and report.decision.winner.source == MEASURED
    assert report.decision.candidate(FAST).expected is None and "ranked by measured here" in str(report)


def test_policy_lock_and_table_decide_first(plant, lab):
    said = document({FAST: 0.1, SLOW: 0.9})
    plant(said, locks={"rms_norm": SLOW})
    assert explained().chosen == SLOW and explained().decision.locked
    plant(said, prefer=[SLOW])
    assert explained().chosen == SLOW
    plant(said, deny=[FAST])
    assert explained().chosen == SLOW
    plant(said)
    with lz.scoped(prefer=[TORCH]):
        assert explained().chosen == TORCH
    assert explained().chosen == FAST


def test_equal_files_decide_equally_whatever_the_order(plant):
    said = document({FAST: 0.5, SLOW: 0.52, OWN: 0.51})
    kernels = ((FAST, 10.0), (SLOW, 10.0), (OWN, 10.0))
    told = []
    for order in (kernels, kernels[::-1], kernels):
        plant(said, order)
        told.append([item.to_json() for item in explained(100, 300).candidates])
    assert told[0] == told[1] == told[2]


def test_measurements_of_a_busy_machine_decide_only_where_they_are_far_apart(plant):
    plant(document({FAST: 0.4, SLOW: 0.55}, busy=0.8))
    assert explained().chosen == SLOW  # its priority is higher
    plant(document({FAST: 0.4, SLOW: 0.65}, busy=0.8))
    assert explained().chosen == FAST and explained().decision.winner.expected.noise == 0.5


# -- between measured sizes ------------------------------------------------------------------------------
def test_between_measured_sizes_the_ratio_lies_between_and_far_away_the_roofline_speaks():
    points = [Point((rows, 1024), "float16", 4e3 * rows, 4e3 * rows, 0.01 * rows, {"k": ratio})
              for rows, ratio in ((512, 0.4), (1024, 0.4), (4096, 0.8), (8192, 0.8))]  # fmt: skip
    kind = Kind(points, ("rows", "hidden"))
    found = kind.estimates(["k", "unknown"], (2048, 1024), "float16", (4e3 * 2048, 4e3 * 2048))
    assert set(found) == {"k"} and 0.4 < found["k"].ratio < 0.8
    assert found["k"].near and found["k"].octaves == pytest.approx(1.0)
    there = kind.estimates(["k"], (1024, 1024), "float16", (4e3 * 1024, 4e3 * 1024))["k"]
    assert there.ratio == pytest.approx(0.4, rel=0.1) and there.octaves == 0.0
    assert kind.estimates(["k"], (1024, 1024), "bfloat16", (1.0, 1.0))["k"].octaves == 1.0
    rows = 8192 * 2 ** int(FARTHEST + 1)
    far = kind.estimates(["k"], (rows, 1024), "float16", (4e3 * rows, 4e3 * rows))["k"]
    assert not far.near and far.octaves > FARTHEST


def test_the_ratio_of_a_kernel_that_was_measured_once_counts_as_it_is_and_nearby_alone():
    """Its one time is no shortest time: as on the H200, where one row times a weight was measured at 118 MB alone and
    was slower there, while lz tune takes the same kernel for weights of 8 MB."""
    points = [Point((1, n, 2048), "float16", 4e3 * n, 4e3 * n, 0.005 * n, {"all": 1.0}) for n in (512, 2048, 8192)]
    points.append(Point((1, 9000, 8192), "float16", 1.5e8, 1.5e8, 45.0, {"all": 1.0, "once": 1.2}))
    kind = Kind(points, ("rows", "n", "k"))
    for n in (6000, 9000, 16000):
        found = kind.estimates(["all", "once"], (1, n, 8192), "float16", (16e3 * n, 16e3 * n))
        assert found["once"].ratio == pytest.approx(1.2) and found["once"].near
    for n, k in ((2048, 2048), (2048, 8192), (9000 << 8, 8192)):
        assert kind.estimates(["all", "once"], (1, n, k), "float16", (2 * n * k, 2 * n * k)).keys() == {"all"}
    assert kind.estimates(["once"], (1, 9000, 8192), "float16", (1.0, 1.0), near=False)["once"].near is False


def test_tokens_of_rope_count_together_and_unused_pages_not_at_all():
    axes = ("batch", "num_heads", "num_kv_heads", "seq_len_q", "head_dim", "rotary_dim")
    points = [Point(sizes, "float16", 1e6, 1e6, 20.0, {"k": ratio})
              for sizes, ratio in (((1, 16, 4, 4096, 64, 64), 0.5), ((8, 1, 1, 64, 128, 128), 3.0))]  # fmt: skip
    (found,) = Kind(points, axes).estimates(["k"], (32, 16, 8, 128, 64, 64), "float16", (1e6, 1e6)).values()
    assert found.octaves == 0.0 and found.nearest is points[0]
    (found,) = Kind(points, axes).estimates(["k"], (32, 8, 8, 128, 128, 128), "float16", (1e6, 1e6)).values()
    assert found.octaves == pytest.approx(1.0)  # as many bytes a token, in heads twice as wide
    axes = ("batch", "num_heads", "num_kv_heads", "head_dim", "seq_len_q", "seq_len_k", "page_size", "num_blocks")
    paged = Point((2, 8, 2, 64, 1, 512, 16, 64), "float16", 1e6, 1e6, 20.0, {"k": 0.5})
    (found,) = Kind([paged], axes).estimates(["k"], (2, 8, 2, 64, 1, 512, 16, 65536), "float16", (1e6, 1e6)).values()
    assert found.octaves == 0.0


def test_heads_wider_than_128_are_told_from_each_other_first():
    """As on the H200: torch takes other code for them, and a split kernel in float32 was twenty times slower at 256
    than at 128, one octave away."""
    axes = ("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_k", "head_dim", "head_dim_v")

    def point(keys, width, ratio):
        return Point((4, 8, 2, 1, keys, width, width), "float32", 1e6, 1e6, 20.0, {"k": ratio})

    narrow = [point(keys, width, 0.1) for keys in (1024, 4096) for width in (64, 96, 128)]
    kind = Kind([*narrow, *(point(keys, 256, 2.0) for keys in (256, 1024, 8192, 16384))], axes)
    for width, slow in ((128, False), (192, True), (256, True)):
        (found,) = kind.estimates(["k"], (4, 8, 2, 1, 2048, width, width), "float32", (1e6, 1e6)).values()
        assert (found.nearest.sizes[5] == 256) is slow, width
    assert found.ratio > 1.0


def test_between_measured_calls_ratios_follow_the_rooflines_half_the_way():
    """Torch's code moves bytes, the kernel waits for its launch: at eight times the bytes, two rooflines say an eighth
    of the ratio; the square root of it is what counts for calls in between."""
    points = [Point((rows, 1024), "float16", 1e3 * rows, 0.0, 0.01 * rows, {"k": 1000.0 / rows})
              for rows in (1000, 1010, 1020, 1030, 64000)]  # fmt: skip
    kind = Kind(points, ("rows", "hidden"))
    near, further = (
        kind.estimates(["k"], (rows, 1024), "float16", (1e3 * rows, 0.0))["k"].ratio for rows in (1000, 2000)
    )
    measured = kind.estimates(["k"], (2000, 1024), "float16", (1e3 * 1000, 0.0))["k"].ratio
    assert near == pytest.approx(1.0, rel=0.05)
    assert further / measured == pytest.approx(0.5**0.5, rel=0.02)


def attention_file(*groups):
    """Times of two kernels of attention: (kind, rows = keys, times over torch's) each."""
    axes = ["batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_k", "head_dim", "head_dim_v"]
    made: dict[str, list[list[float]]] = {}
    for kind, length, ratios in groups:
        heads = 8 if "gqa" in kind else 2
        made.setdefault(kind, []).append([1, heads, 2, length, length, 64, 64, 4e5, 4e6, 50.0, *ratios])
    groups_ = [
        {"op": "attention", "kind": kind, "axes": axes, "kernels": ["acme.attention.slow", "acme.attention.fast"],
         "errors": [0.0, 0.0], "points": points} for kind, points in made.items()
    ]  # fmt: skip
    return document({}, sizes=(), groups=groups_)


def test_a_kind_of_attention_that_was_hardly_measured_is_told_from_kinds_like_it(plant):
    """As on the H200: of causal float32 the file knew two calls without GQA, where torch's kernels tie; one with GQA,
    which torch copies the heads for, was told by those alone, and a tie went to the slow one by its priority."""
    few = [("float64 causal_top_left", length, (1.0, 0.99)) for length in (500, 900)]
    many = [("float64 gqa", length, (1.0, 0.4)) for length in (60, 70, 90, 120, 300, 450)]
    q, k = torch.ones(1, 8, 64, 64, dtype=torch.float64), torch.ones(1, 2, 64, 64, dtype=torch.float64)
    chosen = {}
    for told, groups in (("alone", few), ("with others", [*few, *many])):
        plant(attention_file(*groups), (("acme.attention.slow", 90.0), ("acme.attention.fast", 10.0)))
        report = lz.explain("attention", q, k, k, is_causal=True)
        chosen[told] = report.chosen, report.to_dict()["ranked_by"]
    assert chosen == {
        "alone": ("acme.attention.slow", SHIPPED), "with others": ("acme.attention.fast", SHIPPED)
    }  # fmt: skip


def test_attention_is_near_where_as_many_heads_run_side_by_side_and_far_from_a_decode_step():
    axes = ("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_k", "head_dim", "head_dim_v")
    near, step = (1, 32, 8, 64, 64, 128, 128), (8, 4, 1, 1, 64, 128, 128)
    points = [Point(sizes, "float16", 1e6, 1e6, 20.0, {"k": ratio}) for sizes, ratio in ((near, 0.5), (step, 3.0))]
    kind = Kind(points, axes)
    for sizes, ratio in (((8, 4, 1, 64, 64, 128, 128), 0.5), ((1, 32, 8, 1, 64, 128, 128), 3.0)):
        (found,) = kind.estimates(["k"], sizes, "float16", (1e6, 1e6)).values()
        assert found.octaves == 0.0 and found.ratio == pytest.approx(ratio, rel=0.05)
    (found,) = kind.estimates(["k"], (8, 4, 1, 2, 64, 128, 128), "float16", (1e6, 1e6)).values()
    assert found.octaves == pytest.approx(math.hypot(1.0, 4.0)) and found.nearest.sizes == step


def test_enough_calls_of_a_kind_speak_for_themselves():
    gqa, causal = frozenset({"gqa"}), frozenset({"gqa", "causal_top_left"})
    for device, own in (("cpu", {"float32 gqa": 0.0}), ("cuda", {"float32 gqa": 0.0, "float32": 4.0})):
        assert together("attention", "float32", gqa, device, {"float32 gqa": FEW}) == own
    halves = together("attention", "float16", gqa, "cuda", {"float16 gqa": FEW})
    assert halves == dict.fromkeys(("float16", "bfloat16", "float16 gqa", "bfloat16 gqa"), 0.0)
    few = together("attention", "float32", causal, "cuda", {"float32 causal_top_left": 2})
    assert min(few, key=lambda kind: few[kind]) == "float32 causal_top_left gqa" and len(few) == 4
    assert few["float32 gqa"] < few["float32 causal_top_left"] < few["float32"], "who differs in more is farther away"
    assert together("rms_norm", "bfloat16", frozenset(), "cuda", {}).keys() == {"bfloat16", "float16"}


def test_beyond_the_limit_and_on_another_device_of_the_platform_the_roofline_estimate_ranks(plant):
    plant(document({FAST: 0.4, SLOW: 3.0}))
    report = explained(64 * 2 ** int(FARTHEST + 3), 256)
    assert report.chosen == FAST and report.decision.winner.source == ROOFLINE
    plant(document({FAST: 0.4, SLOW: 3.0}, family="cpu-elsewhere"))
    report = explained()
    assert report.chosen == FAST and report.decision.winner.source == ROOFLINE and "roofline estimate" in str(report)
    assert ReasonCode.PERF_SHIPPED_DEVICE in {note.code for note in report.decision.notes}


# -- refusals --------------------------------------------------------------------------------------------
GOOD = document({FAST: 0.1})


def broken(**changes):
    return {**GOOD, **changes}


@pytest.mark.parametrize(
    ("said", "code", "word"),
    [
        (broken(hash="0" * 64), "PERF_SHIPPED_INVALID", "hash"),
        (sealed(broken(schema_version="9.9")), "PERF_SHIPPED_INVALID", "9.9"),
        ("{", "PERF_SHIPPED_INVALID", "JSON"),
        (sealed(broken(families={FAMILY: {}})), "PERF_SHIPPED_INVALID", "groups"),
        (sealed(broken(families=[])), "PERF_SHIPPED_INVALID", "items"),
        (sealed(broken(backend="somebody")), "PERF_SHIPPED_INVALID", "no kernel of somebody"),
        (document({FAST: -1.0}), "PERF_SHIPPED_INVALID", "not a time"),
        (document({FAST: "quick"}), "PERF_SHIPPED_INVALID", "quick"),
        (document({FAST: 0.1}, version="2.0"), "PERF_SHIPPED_VERSION", "2.0, here 1.0"),
        (document({FAST: 0.1}, vendor="7.7"), "PERF_SHIPPED_VERSION", "7.7"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_right_is_refused_with_the_reason_and_never_raises(plant, said, code, word):
    plant(said)
    x, weight = call()
    assert torch.allclose(lz.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (256,), weight), atol=1e-5)
    report = explained()
    assert report.chosen == SLOW and report.decision.winner.source == PRIORITY  # as if there were no file
    (note,) = (note for note in report.decision.notes if note.code is ReasonCode(code))
    assert word in note.message and note.message in str(report)
    (check,) = doctor_looks(look(), "acme")
    assert check.code is ReasonCode(code) and check.status == "warn" and word in check.message


def test_a_device_of_another_kind_gets_nothing_and_hears_nothing(plant):
    plant(document({FAST: 0.1}, family="sm90"))
    report = explained()
    assert report.decision.winner.source == PRIORITY
    notes = [note for note in report.decision.notes if note.code.startswith("PERF_SHIPPED")]
    assert not [note for note in notes if "acme" in str(note.value)], "other packages may be of another family, too"


def test_a_run_with_a_capped_instruction_set_ranks_only_where_the_same_cap_is_set(plant, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    said = document({FAST: 0.4, SLOW: 3.0}, capped="ATEN_CPU_CAPABILITY=avx2")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    plant(said)
    assert explained().decision.winner.source == ROOFLINE
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    plant(said)
    assert explained().decision.winner.source == SHIPPED


def test_doctor_names_the_machine_of_measurements_that_count(plant):
    plant(document({FAST: 0.4}))
    (check,) = doctor_looks(look(), "acme")
    assert check.status == "ok" and "4 calls" in check.message and "Abacus, commit 0123abc" in check.message


def test_a_file_that_vanishes_is_refused_like_one_that_is_wrong(plant, tmp_path):
    registry = plant(document({FAST: 0.4}))
    (tmp_path / "measurements.json").unlink()
    found, why = standing(registry.backends["acme"], FAMILY)
    assert found is None and why is not None and why.code is ReasonCode.PERF_SHIPPED_INVALID


# -- ours ------------------------------------------------------------------------------------------------
def test_they_can_be_turned_off_and_are_read_only_when_a_selection_needs_them():
    code = (
        "import sys, layerzero as lz\n"
        "from layerzero.runtime.state import state\n"
        "state.world\n"
        "assert 'layerzero.measurements.shipped' not in sys.modules\n"
        "from layerzero_cli.calls import context\n"
        "ctx = context('rms_norm', {'shape': (300, 4096), 'device': 'h200'})\n"
        "lz.configure(perfdb={'shipped': False})\n"
        "off = lz.explain('rms_norm', ctx).decision\n"
        "assert 'layerzero.measurements.shipped' not in sys.modules\n"
        "lz.configure(perfdb={'shipped': True})\n"
        "print(off.winner.source, '/', lz.explain('rms_norm', ctx).decision.winner.source)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"{PRIORITY} / {SHIPPED}"


def test_every_shipped_file_is_whole_and_names_kernels_that_exist_and_no_place_of_a_machine():
    files = sorted(Path(__file__).parents[3].glob("*/src/**/measurements.json"))
    assert len(files) >= 7
    lz.reset()
    kernels = state.world.registry.kernels
    for file in files:
        families = load(str(file))
        assert not isinstance(families, Reason), families
        names = {
            name for item in families.values() for _, points in item.kinds.values() for p in points for name in p.ratios
        }
        assert names and names <= kernels.keys()
        text = file.read_text(encoding="utf-8")
        assert "://" not in text and "/home" not in text and "/root" not in text and "/work" not in text

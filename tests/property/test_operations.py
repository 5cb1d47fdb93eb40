"""Properties of what ranks and observers exchange: order does not matter, nothing is lost, nothing raises."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero import env
from layerzero.distributed import Facts, judge
from layerzero.telemetry.events import Event, Histogram
from layerzero.telemetry.logs import Redactor
from layerzero.telemetry.metrics import Family, Sample, text
from layerzero_tune.telemetry.chrome import chrome_trace
from layerzero_tune.telemetry.reading import parse_text

EXAMPLES = settings(max_examples=2_000 if env.read().prove else 60, deadline=None)
BASE = Facts(0, "1", "2", "hw", "cpu", "", "p", "", "", 1)
NAMES = st.sampled_from(["a.x.y", "b.x.y", "c.x.y"])
RANK = st.builds(
    lambda hw, kernels, table, policy, free: replace(
        BASE, hardware=hw, kernels=kernels, kernels_hash=json.dumps(kernels, sort_keys=True), table=table,
        policy=policy, free_memory=free,
    ),
    st.sampled_from(["h100", "a100"]), st.dictionaries(NAMES, st.sampled_from(["1", "2"]), min_size=1),
    st.sampled_from(["", "t"]), st.sampled_from(["p", "q"]), st.none() | st.integers(0, 100),
)  # fmt: skip


@pytest.mark.req("R-DIST-07")
@EXAMPLES
@given(st.lists(RANK, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_what_ranks_find_does_not_depend_on_the_order_in_which_they_speak(
    drawn: list[Facts], chance: random.Random
) -> None:
    facts = {rank: replace(item, rank=rank) for rank, item in enumerate(drawn)}
    found = judge(facts)
    mixed = list(facts.items())
    chance.shuffle(mixed)
    assert judge(dict(mixed)) == found
    # Every rank is in one group, led by its lowest member, and the members of a group are alike.
    assert sorted(rank for group in found.groups for rank in group) == sorted(facts)
    for group in found.groups:
        assert group == tuple(sorted(group)) and len({facts[rank].hardware for rank in group}) == 1
        usable = [set(facts[rank].kernels) - set(found.excluded) for rank in group]
        assert all(item == usable[0] for item in usable)
        known = [facts[rank].free_memory for rank in group]
        assert found.free_memory[group[0]] == (None if None in known else min(known))
    # A kernel is left out exactly when two ranks have it in different versions.
    for name in {name for item in drawn for name in item.kernels}:
        versions = {item.kernels[name] for item in drawn if name in item.kernels}
        assert (name in found.excluded) is (len(versions) > 1)
    assert found.policies is (len({item.policy for item in drawn}) > 1)


@EXAMPLES
@given(RANK)
def test_facts_survive_the_way_through_json(facts: Facts) -> None:
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


LABEL = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)


@EXAMPLES
@given(st.lists(st.tuples(LABEL, st.floats(allow_nan=False)), max_size=5, unique_by=lambda row: row[0]))
def test_metrics_read_back_are_the_metrics_written(rows: list[tuple[str, float]]) -> None:
    family = Family("m", "gauge", "h", tuple(Sample("m", (("l", label),), value) for label, value in rows))
    body = text([family])
    assert parse_text(body).get("m", {}) == {(("l", label),): value for label, value in rows}


@EXAMPLES
@given(st.text(max_size=200))
def test_redacting_never_raises_and_twice_is_once(line: str) -> None:
    redactor = Redactor()
    once = redactor(line)
    assert redactor(once) == once
    json.dumps(redactor.value({line: [line, {"x": line}]}))


@EXAMPLES
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_bounds_its_share_of_the_durations(values: list[float], share: float) -> None:
    made = Histogram()
    for value in values:
        made.add(value)
    bound = made.quantile(share)
    assert bound is not None
    assert sum(value <= bound for value in values) >= share * len(values)
    assert made.read()[0][-1] == len(values)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 2**60), st.integers(0, 2**40), st.text(max_size=5)), max_size=8))
def test_any_events_make_a_trace_that_is_json(rows: list[tuple[int, int, str]]) -> None:
    data = chrome_trace(
        Event("select", start, took, {"op": word, "x": {word: float("inf")}}) for start, took, word in rows
    )
    assert len(json.loads(json.dumps(data, allow_nan=False))["traceEvents"]) >= len(rows)

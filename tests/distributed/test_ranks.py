"""`lz.agree` under torchrun: real processes, real differences between them. Two ranks here; four and eight in
`make prove NAME=ranks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from layerzero import env

SIZES = (2, 4, 8) if env.read().prove else (2,)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]


@pytest.fixture(scope="module", params=SIZES, ids=lambda n: f"{n} ranks")
def ranks(request: pytest.FixtureRequest, torchrun: Callable[[int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return torchrun(request.param)


def told(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    return [found[name] for found in ranks]


@pytest.mark.req("R-DIST-01", "R-DIST-07", "R-DIST-09")
def test_equal_ranks_agree_and_form_one_group_led_by_the_first(ranks: list[dict[str, Any]]) -> None:
    everyone = list(range(len(ranks)))
    for found in told(ranks, "agree"):
        assert found["ranks"] == everyone and found["groups"] == [everyone]
        assert found["leader"] == 0 and found["alike"] and found["free"] > 0
    assert all("layerzero_ranks" in found for found in told(ranks, "metrics"))
    assert all("layerzero_rank_disagreements_total" in found for found in told(ranks, "metrics"))
    print(f"ranks: {len(ranks)} agree in {max(f['seconds'] for f in told(ranks, 'agree')):.3f} s")


def test_a_hot_call_asks_nobody(ranks: list[dict[str, Any]]) -> None:
    for found in told(ranks, "hot"):
        assert found["first"] == found["after"] == 1


@pytest.mark.req("R-DIST-02", "R-DIST-07")
def test_a_rank_that_would_choose_otherwise_runs_the_first_ranks_choice(ranks: list[dict[str, Any]]) -> None:
    first, last = ranks[0]["follows"], ranks[-1]["follows"]
    assert last["own"] == "reference.rms_norm.plain" != first["own"], "no difference, nothing shown"
    for found in told(ranks, "follows"):
        assert found["chosen"] == found["ran"] == first["chosen"] == "torch.rms_norm.native"
    assert "RANK_CHOICE" in last["text"] and "RANK_CHOICE" not in first["text"]


@pytest.mark.req("R-DIST-02")
def test_a_rank_that_cannot_follow_goes_on_alone_and_is_counted(ranks: list[dict[str, Any]]) -> None:
    *others, last = told(ranks, "cannot")
    assert last == {"chosen": "reference.rms_norm.plain", "more": 1}
    assert all(found == {"chosen": "torch.rms_norm.native", "more": 0} for found in others)


@pytest.mark.req("R-DIST-02", "R-DIST-03")
def test_compared_on_purpose_all_run_a_kernel_that_all_can_run(ranks: list[dict[str, Any]]) -> None:
    assert set(told(ranks, "confirmed")) == set(told(ranks, "then")) == {"reference.rms_norm.plain"}


@pytest.mark.req("R-DIST-02", "R-DIST-03")
def test_different_calls_are_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert {found["code"] for found in told(ranks, "other call")} == {"RANK_DISAGREEMENT"}


@pytest.mark.req("R-DIST-01")
def test_another_version_fails_in_training_and_is_left_out_in_inference(ranks: list[dict[str, Any]]) -> None:
    for found in told(ranks, "training"):
        assert found["code"] == "VERSION_DISAGREEMENT" and "torch.rms_norm.native" in found["text"]
        assert f"9.9 on rank {len(ranks) - 1}" in found["text"]
    for found in told(ranks, "inference"):
        assert found["chosen"] == "reference.rms_norm.plain" and len(found["warnings"]) == 1
        assert found["why"][0].startswith("VERSION_DISAGREEMENT") and found["groups"] == [list(range(len(ranks)))]


def test_another_table_fails_in_training_and_the_first_ranks_is_used_in_inference(ranks: list[dict[str, Any]]) -> None:
    assert {found["code"] for found in told(ranks, "table training")} == {"TABLE_DISAGREEMENT"}
    for found in told(ranks, "table"):
        assert found["hash"] == found["first"] is not None and "TABLE_DISAGREEMENT" in found["said"][0]


@pytest.mark.req("R-DIST-05")
def test_memory_counts_by_the_poorest_rank(ranks: list[dict[str, Any]]) -> None:
    least = (64 + len(ranks) - 1) << 20
    for found in told(ranks, "memory"):
        assert found["world"] == least == min(found["said"]) < max(found["said"])
    assert all(found == [least, least] for found in told(ranks, "memory again"))


@pytest.mark.req("R-DIST-04", "R-DIST-08", "R-CTX-12")
def test_tensor_parallel_attention_with_uneven_heads_runs_one_invariant_kernel(ranks: list[dict[str, Any]]) -> None:
    found = told(ranks, "tp")  # that the parts are the whole was checked there, against float64
    assert len({item["heads"] for item in found}) == 2 and sum(item["heads"] for item in found) == 2 * len(ranks) + 1
    assert {item["before"] for item in found} == {"other.attention.fast"}
    assert len({item["chosen"] for item in found}) == 1 and found[0]["chosen"] != "other.attention.fast"
    assert all(item["codes"] == ["TP_INVARIANCE_REQUIRED"] and item["tp_size"] == len(ranks) for item in found)
    assert [item["tp_rank"] for item in found] == list(range(len(ranks)))
    assert len({tuple(item["situation"]) for item in found}) == 1, "what one rank measures holds for all of them"


def test_a_rank_that_does_not_come_is_named_and_the_others_go_on(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    assert "2 s" in ranks[0]["late"]["text"], "the deadline it waited for"
    for found in told(ranks, "late"):
        assert found["code"] == "RANK_LOST" and found["ranks"] == [last]
    for found in ranks[:-1]:
        assert found["left"]["ranks"] == list(range(last)) and found["left"]["chosen"] == "torch.rms_norm.native"

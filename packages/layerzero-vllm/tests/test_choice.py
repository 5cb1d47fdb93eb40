"""Who serves a layer kind: what our ops cannot is vLLM's, the rest goes by time."""

from __future__ import annotations

import dataclasses

import pytest

from layerzero_vllm.choice import (
    OURS,
    THEIRS,
    TRITON,
    LayerKind,
    by_count,
    cannot_run,
    choose_one,
    left_alone,
    lost,
    phases,
    refusals,
    together,
)

KIND = LayerKind("cpu", "float32", 8, 2, 64, 128)


def timed(**ratios):
    """Times in which ours is `ratio` times as quick as vLLM's."""
    return {phase: {OURS: 100.0, THEIRS: 100.0 * ratio} for phase, ratio in ratios.items()}


def chosen(**ratios):
    kernels = dict.fromkeys(ratios, "cpu.paged_attention.flash")
    return {choice.phase: choice for choice in choose_one(KIND, timed(**ratios), kernels)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"non_causal": True}, "causal"),
        ({"kv_transfer": True}, "packed"),
    ],
)
def test_what_our_ops_cannot_serve_is_left_to_vllm_with_the_reason(changes, words):
    kind = dataclasses.replace(KIND, **changes)
    (why,) = refusals(kind)
    assert words in why
    (choice,) = left_alone(kind, ["decode B1"], why)
    assert (choice.winner, choice.reason) == (THEIRS, why)


def test_window_soft_cap_alibi_and_sinks_are_served():
    assert refusals(dataclasses.replace(KIND, window=64, softcap=50.0, alibi=True, sinks=True)) == ()


def test_one_packing_takes_the_side_that_wins_on_the_whole_and_loses_nowhere():
    found = chosen(decode=1.4, prefill=1.0)
    assert {choice.winner for choice in found.values()} == {OURS}
    assert found["decode"].kernel == "cpu.paged_attention.flash" and "1.40x" in found["decode"].reason


def test_one_phase_that_is_clearly_slower_leaves_all_phases_to_vllm():
    found = chosen(decode=1.9, prefill=0.9)
    assert {choice.winner for choice in found.values()} == {THEIRS}
    assert "another phase" in found["decode"].reason and "another phase" not in found["prefill"].reason


def test_a_phase_is_lost_where_ours_is_clearly_slower():
    assert [lost(one) for one in timed(decode=0.9, prefill=0.99, chunk=1.5).values()] == [True, False, False]


def test_equal_times_leave_vllm_as_it_is():
    assert {choice.winner for choice in chosen(decode=1.01, prefill=1.0).values()} == {THEIRS}


def test_a_pinned_side_is_taken_whatever_the_times_are():
    kernels = dict.fromkeys(("decode", "prefill"), "cpu.paged_attention.flash")
    found = choose_one(KIND, timed(decode=0.5, prefill=2.0), kernels, OURS)
    assert {choice.winner for choice in found} == {OURS} and "pinned" in found[0].reason


@pytest.mark.parametrize(
    ("machine", "dtype", "has", "runs"),
    [
        ("aarch64", "bfloat16", {}, False),
        ("aarch64", "bfloat16", {"bf16": True}, True),
        ("aarch64", "float32", {}, True),
        ("x86_64", "bfloat16", {}, True),
    ],
)
def test_vllms_attention_is_not_tried_where_its_instructions_would_end_the_process(machine, dtype, has, runs):
    assert (cannot_run(machine, dtype, has) is None) is runs


def test_phases_fit_the_limits_of_the_engine():
    for phase in phases(4, 64, 96):
        assert phase.batch <= 4 and phase.query <= 64 and phase.query <= phase.context <= 96
    assert {str(phase) for phase in phases(256, 8192, 4096)} == {
        "decode B1",
        "decode B16",
        "prefill B1x256",
        "chunked prefill B1x128",
    }


def test_the_phases_of_a_gpu_have_long_contexts_and_batches_that_fit():
    found = phases(32, 8192, 2048, (1, 16, 64), 4096)
    assert [(str(phase), phase.context) for phase in found] == [
        ("decode B1", 512),
        ("long decode B1", 2048),
        ("decode B16", 512),
        ("long decode B16", 2048),
        ("decode B32", 512),
        ("prefill B1x256", 256),
        ("chunked prefill B1x128", 512),
    ]
    assert not [phase for phase in phases(32, 8192, 512, (1, 16), 4096) if phase.name.startswith("long")]


KERNELS = {"decode B1": "triton.paged_attention.split", "long decode B1": "triton.paged_attention.split"}


def raced(**sides):
    """The winner of two phases of single tokens, by times of vLLM's own first."""
    times = {
        phase: {side: took[place] for side, took in sides.items() if took[place]} for place, phase in enumerate(KERNELS)
    }
    found = choose_one(KIND, times, KERNELS)
    assert [choice.phase for choice in found] == list(KERNELS)
    (winner,) = {choice.winner for choice in found}
    return winner, found[0]


def test_the_quickest_of_all_sides_serves_the_phases_of_one_batch():
    winner, choice = raced(vllm=(10.0, 20.0), layerzero=(8.0, 18.0), TRITON_ATTN=(9.0, 19.0))
    assert (winner, choice.kernel) == (OURS, "triton.paged_attention.split")
    assert choice.reason == "layerzero 1.25x as quick; TRITON_ATTN 1.11x as quick"
    winner, choice = raced(vllm=(10.0, 20.0), layerzero=(9.0, 19.0), TRITON_ATTN=(8.0, 18.0))
    assert (winner, choice.kernel) == (TRITON, "vLLM's TRITON_ATTN")


def test_another_side_has_to_be_clearly_quicker_and_clearly_slower_nowhere():
    assert raced(vllm=(10.0, 10.0), layerzero=(9.9, 9.9))[0] == THEIRS
    assert raced(vllm=(10.0, 20.0), layerzero=(5.0, 21.0))[0] == THEIRS
    assert raced(vllm=(10.0, 20.0), layerzero=(5.0, 21.0), TRITON_ATTN=(9.0, 19.0))[0] == TRITON
    assert raced(vllm=(10.0, 20.0), layerzero=(5.0, None))[0] == THEIRS  # gave another result in one of them


def test_a_pinned_side_of_a_gpu_is_taken_where_it_can_serve_and_why_it_cannot_is_said():
    times = {"decode B1": {THEIRS: 10.0, OURS: 30.0}}
    (choice,) = choose_one(KIND, times, KERNELS, OURS)
    assert choice.winner == OURS and choice.reason.endswith("layerzero is pinned")
    (choice,) = choose_one(KIND, {"decode B1": {THEIRS: 10.0}}, KERNELS, OURS, {OURS: "layerzero cannot: no Triton"})
    assert choice.winner == THEIRS and "layerzero cannot: no Triton" in choice.reason


def test_kinds_of_one_group_that_differ_in_a_phase_are_vllms_in_it():
    other = dataclasses.replace(KIND, window=64)
    ours = {"decode B1": {THEIRS: 10.0, OURS: 5.0}}
    theirs = {"decode B1": {THEIRS: 10.0, OURS: 20.0}}
    alike = [*choose_one(KIND, ours, KERNELS), *choose_one(other, ours, KERNELS)]
    assert together(alike) == alike
    differing = [*choose_one(KIND, ours, KERNELS), *choose_one(other, theirs, KERNELS)]
    found = together(differing)
    assert [choice.winner for choice in found] == [THEIRS, THEIRS]
    assert "chose otherwise" in found[0].reason and found[1] == differing[1]


def test_a_number_of_sequences_has_the_side_of_the_graph_it_is_padded_to():
    timed = {1: TRITON, 16: OURS, 64: THEIRS}
    assert by_count(timed, [], 3) == [TRITON, TRITON, OURS, OURS]
    found = by_count(timed, [1, 2, 24], 100)
    assert len(found) == 101 and found[:3] == [TRITON, TRITON, OURS]
    assert found[3] == found[24] == THEIRS  # all in the graph of 24, which goes as 64
    assert found[65] == found[100] == THEIRS
    assert by_count(timed, [256], 4) == [THEIRS] * 257

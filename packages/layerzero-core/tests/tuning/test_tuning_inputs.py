"""Inputs built from a context are that context again, run in every op, and lie as they were recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.dispatch.run import current_world, describe
from layerzero.errors import InvalidInputError
from layerzero.model.dispatch_table import situation
from layerzero.recording.tally import strides_of
from layerzero.runtime.state import state
from layerzero.selection.world import bucketed
from layerzero.tuning.inputs import build, buildable, conditions
from layerzero_verify.testing.cases import cases_of, load_cases

OPS = sorted({group.op for groups in load_cases().values() for group in groups} - {"tokenize", "detokenize"})


def calls_of(op):
    """The conformance kit's calls of an op, one label each, with their contexts."""
    world = current_world()
    spec = world.registry.kernels[world.ops[op].fallback_id]
    for groups in load_cases().values():
        for group in groups:
            if group.op == op and group.requires <= spec.features:
                for case in cases_of(group, spec):
                    args = case.arguments(torch.device("cpu"))
                    layout = "BHSD" if op == "attention" else None
                    yield case, args, describe(world.ops[op], args, layout, None, world)


@pytest.mark.parametrize("op", OPS)
def test_a_built_call_is_described_by_the_context_it_was_built_from(op):
    world, seen = current_world(), 0
    for case, _, ctx in calls_of(op):
        with conditions(ctx):
            call = build(ctx, seed=3)
            again = describe(world.ops[op], call.args, call.layout, None, world)
        assert (again.dims, situation(again)) == (ctx.dims, situation(ctx)), case.id
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("op", OPS)
def test_a_built_call_runs_through_the_public_function(op):
    for number, (_, _, ctx) in enumerate(calls_of(op)):
        if number % 7 == 0:
            with conditions(ctx):
                assert getattr(lz, op)(**build(ctx).kwargs) is not None


def test_equal_seeds_give_equal_numbers_and_others_do_not():
    ctx = lz.select("attention", *(torch.randn(1, 2, 8, 16) for _ in range(3))).context
    one, same, other = (build(ctx, seed=seed).args[0] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(
    "lying",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.zeros(2, 4, 40, 16)[:, :, :32],
        lambda t: torch.zeros(2, 4, 32, 32)[..., ::2],
        lambda t: torch.zeros(2, 4, 32, 17)[..., :16],
    ],
    ids=["swapped", "cache slice", "stride 2", "unaligned"],
)
def test_strides_are_of_the_recorded_class_and_exact_where_they_are_given(lying):
    q, k = torch.randn(2, 4, 32, 16), lying(torch.randn(2, 4, 32, 16))
    ctx = lz.select("attention", q, k, k).context
    made = build(ctx)
    assert describe(state.world.ops["attention"], made.args, "BHSD", None, state.world).strides == ctx.strides
    exact = build(ctx, strides=strides_of((q, k, k, *(None,) * 8)))
    assert [t.stride() for t in exact.args[:3]] == [q.stride(), k.stride(), k.stride()]
    assert exact.kwargs["key"] is exact.args[1]


def test_sizes_at_the_end_of_their_buckets_can_be_built():
    """Rounding both lengths up may make them equal; the relation between them is kept."""
    q, k = torch.randn(1, 2, 33, 16), torch.randn(1, 2, 60, 16)
    world = current_world()
    ctx = describe(
        world.ops["attention"], (q, k, k, None, 0.0, False, None, None, None, None, False), "BHSD", None, world
    )
    rounded, _ = bucketed(world, ctx, ("seq_len_q", "seq_len_k"))
    assert rounded.seq_len_q == rounded.seq_len_k == 64
    made = build(rounded)
    assert made.args[0].shape[2] < made.args[1].shape[2] == 64


def test_gradients_autocast_and_determinism_are_as_described():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ctx = lz.select("attention", q, q, q).context
    assert ctx.autocast == "bfloat16" and ctx.needs_grad
    with conditions(replace(ctx, deterministic=True)):
        call = build(ctx)
        assert torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        assert torch.are_deterministic_algorithms_enabled()
        again = describe(state.world.ops["attention"], call.args, "BHSD", None, state.world)
    assert not torch.are_deterministic_algorithms_enabled() and not torch.is_autocast_enabled("cpu")
    assert again.autocast == "bfloat16" and again.dtype == ctx.dtype and call.args[0].dtype is torch.float32
    assert call.args[0].requires_grad


def test_what_cannot_be_made_up_is_one_clear_error():
    assert not buildable("tokenize")
    with pytest.raises(InvalidInputError, match="no inputs can be made for tokenize"):
        build(replace(lz.select("rms_norm", torch.randn(2, 8), torch.randn(8)).context, op="tokenize"))

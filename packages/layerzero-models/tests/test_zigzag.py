"""Zigzag context parallelism: simulated worlds in this process, real ones over gloo, grouped against two calls.

Also runs under torchrun: `torchrun --nproc_per_node=8 packages/layerzero-models/tests/test_zigzag.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from layerzero.errors import InvalidInputError
from layerzero.numerics import Tolerance, assert_close, tolerance
from layerzero_models import zigzag
from layerzero_models.zigzag import zigzag_attention, zigzag_attention_gathered, zigzag_plan

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
WORLDS = (1, 2, 4, 8)
HALVES = [torch.float16, torch.bfloat16]


def packed(lengths, *, heads=4, kv_heads=2, dim=8, dtype=torch.float32, device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(lengths), h, dim, generator=gen).to(dtype).to(device) for h in (heads, kv_heads, kv_heads)]


def offsets(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def whole(q, k, v, lengths, scale=None):
    """Causal attention of every sequence by itself, on one rank: torch's own, in float64."""
    outs = []
    for parts in zip(*(t.double().cpu().split(list(lengths)) for t in (q, k, v)), strict=True):
        parts = [t.transpose(0, 1) for t in parts]
        outs.append(
            F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outs)


def simulate(tensors, lengths, world, *, device="cpu", **options):
    """Every rank's part, one after the other in this process, put together again."""
    plans = [zigzag_plan(offsets(lengths), rank=rank, world=world, device=device) for rank in range(world)]
    shards = [[plan.shard(t) for t in tensors] for plan in plans]
    keys, values = (torch.cat([shard[i] for shard in shards]) for i in (1, 2))
    outs = [zigzag_attention_gathered(shard[0], keys, values, plan, **options)
            for shard, plan in zip(shards, plans, strict=True)]  # fmt: skip
    return plans[0].restore(torch.cat(outs))


def gradients(function, tensors, weight):
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad((function(*leaves) * weight).sum(), leaves)


# -- who owns what ---------------------------------------------------------------------------------
@pytest.mark.req("R-GRP-09")
@pytest.mark.parametrize("world", WORLDS)
def test_every_token_has_one_owner_with_an_early_and_a_late_chunk(world):
    lengths = (4 * world, 0, 2 * world)
    tokens = torch.arange(sum(lengths))
    plans = [zigzag_plan(offsets(lengths), rank=rank, world=world) for rank in range(world)]
    for rank, plan in enumerate(plans):
        early, late = plan.shard(tokens).chunk(2)
        # Chunks of 2 in the first sequence and of 1 in the last.
        start = lengths[0]
        assert early.tolist() == [2 * rank, 2 * rank + 1, start + rank]
        mirror = 2 * world - 1 - rank
        assert late.tolist() == [2 * mirror, 2 * mirror + 1, start + mirror]
        assert plan.positions.tolist() == [t if t < start else t - start for t in plan.tokens.tolist()]
        traffic = plan.batch.kv_traffic(1, 1, 1)
        assert traffic.share == pytest.approx((rank + 1) / (2 * world + 1))
    assert torch.equal(plans[-1].restore(torch.cat([plan.shard(tokens) for plan in plans])), tokens)


BAD = {
    "a length that does not divide": (lambda: zigzag_plan([0, 6], rank=0, world=2), "DIM_NOT_MULTIPLE"),
    "a rank outside the world": (lambda: zigzag_plan([0, 8], rank=2, world=2), "VALUE_INVALID"),
    "no offsets": (lambda: zigzag_plan([0, 8, 4], rank=0, world=2), "VALUE_INVALID"),
    "a plan of another world": (
        lambda: zigzag_attention(*packed([8]), zigzag_plan([0, 16], rank=1, world=2)),
        "VALUE_INVALID",
    ),
    "heads that do not divide": (
        lambda: zigzag_attention(*packed([8], heads=3), zigzag_plan([0, 8])),
        "GQA_RATIO_INVALID",
    ),
    "no heads at once": (
        lambda: zigzag_attention(*packed([8]), zigzag_plan([0, 8]), kv_heads_at_once=0),
        "VALUE_INVALID",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code


# -- simulated worlds ------------------------------------------------------------------------------
@pytest.mark.req("R-GRP-09")
@pytest.mark.parametrize("use_grouped_attention", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_the_ranks_together_compute_plain_causal_attention(world, dtype, use_grouped_attention):
    lengths = (32, 16, 48)
    tensors = packed(lengths, dtype=dtype)
    out = simulate(tensors, lengths, world, use_grouped_attention=use_grouped_attention, scale=0.3)
    assert_close(out, whole(*tensors, lengths, scale=0.3), tolerance("grouped_attention", dtype))


@pytest.mark.req("R-GRP-09")
@pytest.mark.parametrize("use_grouped_attention", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_the_ranks_together_have_the_gradients_of_plain_causal_attention(world, dtype, use_grouped_attention):
    lengths = (32, 16)
    tensors = packed(lengths, dtype=dtype)
    weight = torch.linspace(-1, 1, tensors[0].numel()).reshape(tensors[0].shape).to(dtype)
    got = gradients(
        lambda *t: simulate(t, lengths, world, use_grouped_attention=use_grouped_attention), tensors, weight
    )
    want = gradients(lambda *t: whole(*t, lengths), [t.double() for t in tensors], weight.double())
    limit = Tolerance(1e-4, 1e-5) if dtype is torch.float32 else Tolerance(1e-2, 1e-2)
    assert_close(list(got), list(want), limit)


@pytest.mark.req("R-GRP-09")
def test_the_flag_decides_between_one_grouped_call_and_one_call_for_each_chunk(lab):
    """By the kernels that ran: equal results could come from the same call under both values of the flag."""
    lab.use()
    plan = zigzag_plan([0, 64], rank=1, world=2)
    q, k, v = packed([64])

    def ops(**options):
        lab.clear()
        zigzag_attention_gathered(plan.shard(q), k, v, plan, **options)
        return [kernel.split(".")[1] for kernel in lab.ran()]

    assert ops() == ops(use_grouped_attention=True) == ["grouped_attention"]
    assert ops(use_grouped_attention=False) == ["varlen_attention"] * 2


@pytest.mark.req("R-GRP-09")
@pytest.mark.parametrize(("tokens", "rank"), [(4096, 0), (8192, 3), (16384, 7)])
def test_grouped_equals_two_calls_at_4k_8k_and_16k_tokens(tokens, rank):
    """One rank of eight, whose late chunk attends up to all of the keys; forward and backward."""
    world, chunk = 8, tokens // 16
    plan = zigzag_plan([0, tokens], rank=rank, world=world)
    q, k, v = packed([tokens], heads=1, kv_heads=1)
    q = plan.shard(q)
    assert q.shape[0] == 2 * chunk
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)) / 16
    results = []
    for grouped in (True, False):

        def attend(*t, grouped=grouped):
            return zigzag_attention_gathered(*t, plan, use_grouped_attention=grouped)

        results.append((attend(q, k, v), *gradients(attend, (q, k, v), weight)))
    assert_close(list(results[0]), list(results[1]), tolerance("grouped_attention", torch.float32))


@pytest.mark.parametrize("at_once", [1, 2, 3, 8])
def test_gathering_some_heads_at_a_time_changes_nothing(at_once):
    lengths = (16, 8)
    plan = zigzag_plan(offsets(lengths))
    tensors = [plan.shard(t) for t in packed(lengths, heads=8, kv_heads=4)]
    want = zigzag_attention(*tensors, plan)
    assert_close(
        zigzag_attention(*tensors, plan, kv_heads_at_once=at_once), want, tolerance("attention", torch.float32)
    )


# -- real worlds -----------------------------------------------------------------------------------
def check_rank(device="cpu"):
    """What every rank of a real world checks: forward and backward, both ways, against plain attention."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = (8 * world, 4 * world)
    for dtype in (torch.float32, torch.bfloat16) if device == "cpu" else HALVES:
        q, k, v = packed(lengths, heads=8, kv_heads=2, dtype=dtype, device=device)  # the same on every rank
        plan = zigzag_plan(offsets(lengths), device=device)
        assert (plan.rank, plan.world) == (rank, world)
        weight = torch.linspace(-1, 1, q.numel(), device=device).reshape(q.shape).to(dtype)
        want_out = plan.shard(whole(q, k, v, lengths).to(device))
        want = gradients(lambda *t: whole(*t, lengths), [t.double().cpu() for t in (q, k, v)], weight.double().cpu())
        limit = Tolerance(1e-4, 1e-5) if dtype is torch.float32 else Tolerance(1e-2, 1e-2)
        for options in ({}, {"use_grouped_attention": False}, {"kv_heads_at_once": 1}):
            attend = partial(zigzag_attention, plan=plan, **options)
            local = [plan.shard(t) for t in (q, k, v)]
            assert_close(attend(*local), want_out, tolerance("grouped_attention", dtype))
            got = gradients(attend, local, plan.shard(weight))
            assert_close(list(got), [plan.shard(g.to(device)) for g in want], limit)
    check_sum_over_ranks(rank, world, device)


def check_sum_over_ranks(rank, world, device):
    """One rank gives 512 and the others 1, which a sum in bfloat16 loses."""
    local = torch.ones(world, 1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    whole = zigzag._gathered(local, world, None)
    whole.backward(torch.full_like(whole, 512.0 if rank == world // 2 else 1.0))
    assert torch.equal(local.grad, torch.full_like(local, 512.0 + world - 1))


@pytest.mark.req("R-GRP-09")
def test_a_world_of_one_over_gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        check_rank()
    finally:
        dist.destroy_process_group()


@pytest.mark.req("R-GRP-09")
@pytest.mark.distributed
@pytest.mark.parametrize(
    "worlds",
    [(2,), pytest.param((4, 8), marks=pytest.mark.skipif(not PROVE, reason="twelve processes: LAYERZERO_PROVE=1"))],
)
def test_worlds_of_processes_over_gloo(worlds, tmp_path):
    launch("gloo", worlds, tmp_path)


@pytest.mark.multigpu
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_world_of_gpus_over_nccl(world, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    launch("nccl", (world,), tmp_path)


def launch(backend, worlds, folder):
    """One process for each rank, meeting over a file; the rank that fails says why."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ZIGZAG_STORES": str(folder)}
    command = [sys.executable, "-W", "ignore", __file__, backend, *map(str, worlds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for world in worlds:
        assert done.stdout.count(f"of {world}: forward and backward agree") == world


def be_rank(rank, world, backend):
    folder = os.environ.get("ZIGZAG_STORES")
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(device)
    method = f"file://{folder}/world{world}" if folder else "env://"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world)
    check_rank(device)
    dist.destroy_process_group()
    print(f"rank {rank} of {world}: forward and backward agree with plain attention", flush=True)


def fork_ranks(world, backend):
    """torch is imported once; each rank is a copy of this process, which has not computed anything yet."""
    ranks = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                be_rank(rank, world, backend)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        ranks.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in ranks)


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started this rank
        be_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *(sys.argv[1:] or ["gloo"]))
    else:
        sys.exit(max(fork_ranks(int(world), sys.argv[1]) for world in sys.argv[2:]))

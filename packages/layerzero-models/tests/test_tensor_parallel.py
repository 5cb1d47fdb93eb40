"""`lz.column_linear` and `lz.row_linear` over real processes (gloo) against one unsharded layer in float64."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
RANKS = Path(__file__).with_name("tensor_parallel_ranks.py")
DTYPES = ("float32", "bfloat16", "float16")
K, WIDE, N = 24, 29, 12
WORLDS = [2, pytest.param(4, marks=pytest.mark.skipif(not PROVE, reason="four processes; set LAYERZERO_PROVE=1"))]


def inputs(dtype):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(getattr(torch, dtype))

    return {
        "x": normal(2, 3, K), "wide x": normal(2, 3, WIDE), "slope": normal(2, 3, N, scale=0.2),
        "even": normal(N, K, scale=0.2), "even bias": normal(N), "uneven": normal(11, K, scale=0.2),
        "uneven bias": normal(11), "row": normal(N, K, scale=0.2), "row uneven": normal(N, WIDE, scale=0.2),
        "row bias": normal(N), "gate_up": normal(32, K, scale=0.2), "down": normal(N, 16, scale=0.2),
        "slope of 12": normal(2, 3, 12, scale=0.2), "slope of 11": normal(2, 3, 11, scale=0.2),
    }  # fmt: skip


def start(rank, world, folder, log):
    command = [sys.executable, "-W", "error", str(RANKS), str(rank), str(world), str(folder)]
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def ranks(request, tmp_path_factory):
    """Inputs by dtype, and what each rank found."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    given = {dtype: inputs(dtype) for dtype in DTYPES}
    torch.save(given, folder / "inputs.pt")
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    running = [start(rank, world, folder, log) for rank, log in enumerate(logs)]
    try:
        end = time.monotonic() + 240
        # one rank that fails leaves the others waiting
        while any(p.poll() is None for p in running) and not any(p.poll() for p in running):
            assert time.monotonic() < end, "the ranks do not come to an end"
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert not any(p.returncode for p in running), "\n".join(log.read_text() for log in logs)
    return given, [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def gelu(v):
    return 0.5 * v * (1 + torch.erf(v / 2**0.5))


def whole(given, name):
    """The unsharded layer in float64: result and gradients by name."""
    at = {key: value.double().requires_grad_() for key, value in given.items()}
    if name.startswith("column"):
        kind = "uneven" if "uneven" in name else "even"
        leaves = {"x": at["x"], "weight": at[kind], "bias": at[f"{kind} bias"]}
        out = gelu(at["x"] @ at[kind].mT + at[f"{kind} bias"])
        slope = at[f"slope of {out.shape[-1]}"]
    elif name == "block":
        leaves = {"x": at["x"], "gate_up": at["gate_up"], "down": at["down"]}
        gate, up = (at["x"] @ at["gate_up"].mT).chunk(2, dim=-1)
        out, slope = (gate / (1 + torch.exp(-gate)) * up) @ at["down"].mT, at["slope"]
    else:
        x, weight = ("wide x", "row uneven") if "uneven" in name else ("x", "row")
        leaves = {"x": at[x], "weight": at[weight], "bias": at["row bias"]}
        out, slope = at[x] @ at[weight].mT + at["row bias"], at["slope"]
    return {
        "out": out.detach(),
        **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), slope), strict=True)),
    }


# which axis each result is split along; what is not named is whole on every rank
SPLIT = {
    "column": {"out": -1, "weight": 0, "bias": 0},
    "column gathered": {"weight": 0, "bias": 0},
    "column uneven gathered": {"weight": 0, "bias": 0},
    "row": {"x": -1, "weight": 1},
    "row from the whole": {"weight": 1},
    "row uneven": {"weight": 1},
    "row uneven parts": {"x": -1, "weight": 1},
    "row summed in its dtype": {"x": -1, "weight": 1},
    "block": {"down": 1},
}


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.req("R-MLP-02")
def test_the_ranks_together_are_the_unsharded_layer(ranks, name, dtype):
    given, found = ranks
    want, world = whole(given[dtype], name), len(found)
    for rank, results in enumerate(found):
        for part, value in results[dtype][name].items():
            mine = want[part]
            if part == "gate_up":  # packed: gate and up are cut each for itself
                mine = torch.cat([torch.tensor_split(half, world)[rank] for half in mine.chunk(2)])
            elif part in SPLIT[name]:
                mine = torch.tensor_split(mine, world, SPLIT[name][part])[rank]
            kind = "linear" if part == "out" else "gradient"
            assert value.dtype == getattr(torch, dtype)
            assert_close(value, mine, tolerance(kind, dtype, k=K), path=f"rank {rank}, {part}")


@pytest.mark.distributed
@pytest.mark.req("R-MLP-02")
def test_what_is_whole_is_the_same_on_every_rank(ranks):
    _, found = ranks
    for dtype in DTYPES:
        for name, split in SPLIT.items():
            for part in {"out", "x"} - set(split):
                first, *others = (results[dtype][name][part] for results in found)
                assert all(torch.equal(first, other) for other in others), (dtype, name, part)


@pytest.mark.distributed
def test_a_group_is_asked_for_its_own_ranks(ranks):
    given, found = ranks
    alone = found[0]["group of one"]["out"]
    assert torch.equal(alone, lz.linear(given["float32"]["x"], given["float32"]["even"]))
    for rank, results in enumerate(found[1:], 1):
        code, text = results["group of one"]["refused"]
        assert code == "VALUE_INVALID" and f"rank {rank} is not in the group" in text


@pytest.mark.distributed
def test_a_shard_of_another_size_is_refused_before_anybody_waits(ranks):
    for results in ranks[1]:
        code, text = results["wrong shard"]["refused"]
        assert code == "SHAPE_INVALID" and "11 output features" in text


# -- one process ---------------------------------------------------------------------------------------------
@pytest.mark.req("R-MLP-02")
def test_without_a_process_group_the_world_is_one():
    given = inputs("float32")
    x, weight, bias = given["x"].requires_grad_(), given["even"], given["even bias"]
    want = lz.linear(x, weight, bias)
    assert torch.equal(lz.column_linear(x, weight, bias, gather_output=True, out_features=N), want)
    assert torch.equal(lz.row_linear(x, weight, bias, split_input=True), want)
    assert lz.column_linear(x, weight, bias, "relu").min() >= 0
    with pytest.raises(InvalidInputError, match="not initialised"):
        lz.column_linear(x, weight, group=object())


@pytest.mark.req("R-MLP-02")
def test_shards_make_up_the_weight_and_own_their_memory():
    weight = torch.arange(66.0).view(11, 6)
    for dim in (0, 1, -1):
        for world in (1, 2, 3, 5):
            shards = [lz.shard_weight(weight, dim, rank, world) for rank in range(world)]
            assert torch.equal(torch.cat(shards, dim), weight)
            sizes = [shard.shape[dim] for shard in shards]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
            assert all(s.is_contiguous() and s.untyped_storage().nbytes() == s.nbytes for s in shards)
    # packed weights: each part is cut for itself
    assert lz.shard_weight(torch.arange(8), 0, 1, 2, parts=2).tolist() == [2, 3, 6, 7]
    assert lz.shard_weight(torch.arange(8), 0, 1, 2, parts=(4, 2, 2)).tolist() == [2, 3, 5, 7]


W = torch.zeros(4, 6)
BAD = {
    "more ranks than rows": (lambda: lz.shard_weight(W, 0, 0, 5), "SHAPE_INVALID"),
    "rank outside": (lambda: lz.shard_weight(W, 0, 2, 2), "VALUE_INVALID"),
    "no ranks": (lambda: lz.shard_weight(W, 0, 0, 0), "VALUE_INVALID"),
    "axis": (lambda: lz.shard_weight(W, 2, 0, 2), "VALUE_INVALID"),
    "rank as text": (lambda: lz.shard_weight(W, 0, "0", 2), "TYPE_INVALID"),
    "weight as list": (lambda: lz.shard_weight([1.0], 0, 0, 1), "TYPE_INVALID"),
    "parts that do not divide": (lambda: lz.shard_weight(W, 0, 0, 1, parts=3), "SHAPE_INVALID"),
    "parts of other lengths": (lambda: lz.shard_weight(W, 0, 0, 1, parts=(1, 2)), "SHAPE_INVALID"),
    "no parts": (lambda: lz.shard_weight(W, 0, 0, 1, parts=0), "VALUE_INVALID"),
    "out_features of another world": (lambda: lz.column_linear(torch.zeros(2, 6), W, out_features=8), "SHAPE_INVALID"),
    "row bias": (lambda: lz.row_linear(torch.zeros(2, 6), W, torch.zeros(6)), "SHAPE_INVALID"),
    "row widths": (lambda: lz.row_linear(torch.zeros(2, 5), W), "SHAPE_INVALID"),
    "weight": (lambda: lz.column_linear(torch.zeros(2, 6), "W"), "TYPE_INVALID"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_split_is_refused(name):
    call, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code

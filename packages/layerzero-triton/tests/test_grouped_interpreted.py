"""Grouped attention's Triton kernels, run by Triton's interpreter against a formula in float64; no GPU is needed.

The interpreter has to be chosen before Triton is imported, so the kernels run in one child process, which is this file
as a script: it prints the largest error of every case.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

CASES = {
    "two_sequences": dict(q=((3, 5), (4, 2)), seq=(9, 13), kv=((5, 6), (9, 13))),
    "full": dict(q=((3, 5), (4, 2)), seq=(9, 13), kv=((5, 6), (9, 13)), causal=False),
    "same_keys": dict(q=((3,), (4,)), seq=(20,), kv=((20,), (20,))),
    "more_queries": dict(q=((8, 5), (4, 15)), seq=(9, 13), kv=((5, 6), (9, 13))),
    "empty_parts": dict(q=((0, 5), (4, 2)), seq=(0, 13), kv=((0, 6), (0, 13))),
    "three_heads_each": dict(q=((9,), (20,)), seq=(70,), kv=((30,), (70,)), heads=6),
    "pieces": dict(q=((5,), (7,)), seq=(150,), kv=((70,), (150,)), heads=2, kv_heads=1),
    "single_token": dict(q=((1,), (1,)), seq=(33,), kv=((17,), (33,))),
    "strided": dict(q=((5,), (6,)), seq=(40,), kv=((20,), (40,)), strided=True),
    "float16": dict(q=((5,), (6,)), seq=(40,), kv=((20,), (40,)), dtype="float16"),
}
DIM = 32


@pytest.fixture(scope="module")
def errors():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["apart", "together"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.req("R-GRP-01", "R-GRP-03", "R-GRP-04", "R-GRP-05")
def test_the_forward_is_the_formula(errors, case, way):
    limit = 2e-3 if CASES[case].get("dtype") else 1e-5
    assert errors[case][way]["out"] < limit
    assert errors[case][way]["lse"] < limit


@pytest.mark.parametrize("case", CASES)
@pytest.mark.req("R-GRP-06")
def test_the_gradients_are_those_of_the_formula(errors, case):
    limit = 1e-2 if CASES[case].get("dtype") else 1e-4
    assert all(errors[case]["grad"][name] < limit for name in ("q", "k", "v")), errors[case]["grad"]


def test_keys_of_neighbours_never_reach_a_result(errors):
    assert errors["neighbours"] < 1e-5


def test_a_scale_may_be_negative_or_zero(errors):
    assert errors["negative"] < 1e-5
    assert errors["zero"] < 1e-5


def formula(query, key, value, batch, causal, scale):
    """Output and log-sum-exp in float64, row by row of the definition."""
    outs, logs = [], []
    for s in batch.segments():
        q = query[s.q_start : s.q_start + s.q_len].double().transpose(0, 1)
        ratio = query.shape[1] // key.shape[1]
        k, v = (
            t[s.k_start : s.k_start + s.kv_len].double().transpose(0, 1).repeat_interleave(ratio, 0)
            for t in (key, value)
        )
        scores = q @ k.transpose(1, 2) * scale
        if causal:
            rows, columns = torch.arange(s.q_len)[:, None], torch.arange(s.kv_len)[None, :]
            scores = scores.masked_fill(columns > rows + s.kv_len - s.q_len, -math.inf)
        blind = torch.isneginf(scores).all(-1, keepdim=True) if s.kv_len else torch.ones(*scores.shape[:2], 1).bool()
        weights = torch.where(blind, 0.0, torch.softmax(torch.where(blind, 0.0, scores), -1))
        outs.append((weights @ v).transpose(0, 1))
        log = torch.logsumexp(scores, -1) if s.kv_len else scores.new_full(scores.shape[:2], -math.inf)
        logs.append(log.transpose(0, 1))
    return torch.cat(outs), torch.cat(logs)


def largest(got, want):
    """The largest difference; infinities have to stand in the same places."""
    got, want = got.double(), want.double()
    if not torch.equal(torch.isinf(got), torch.isinf(want)):
        return math.inf
    found = torch.where(torch.isinf(want), 0.0, got - want).abs().max().item() if want.numel() else 0.0
    return math.inf if math.isnan(found) else found


def scene(q, seq, kv, heads=4, kv_heads=2, dtype="float32", strided=False, causal=True, **_):
    from layerzero.model.grouped import make_grouped_batch

    host = [0, *itertools.accumulate(itertools.chain(*q))], [0, *itertools.accumulate(seq)], kv
    batch = make_grouped_batch(*(torch.tensor(item, dtype=torch.int32) for item in host), host_lens=host)
    gen = torch.Generator().manual_seed(0)

    def draw(count, number):
        wide = torch.randn(count, number, DIM * (2 if strided else 1), generator=gen).to(getattr(torch, dtype))
        return wide[..., :DIM]

    return draw(batch.total_q, heads), draw(batch.total_k, kv_heads), draw(batch.total_k, kv_heads), batch, causal


def run(case):
    from layerzero_triton.grouped import launch

    query, key, value, batch, causal = scene(**case)
    small = launch.Config(16, 16, 4, 2)
    scale = DIM**-0.5
    leaves = [t.detach().double().requires_grad_() for t in (query, key, value)]
    want, logs = formula(*leaves, batch, causal, scale)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(query.dtype)
    grads = torch.autograd.grad(want, leaves, grad.double())
    found = {}
    for way in ("apart", "together"):
        out, lse = launch.forward(query, key, value, batch, causal, scale, way == "together", small)
        found[way] = {"out": largest(out, want), "lse": largest(lse, logs)}
    got = launch.gradients(grad, query, key, value, out, lse, batch, causal, scale, small, small)
    found["grad"] = {name: largest(a, b) for name, a, b in zip("qkv", got, grads, strict=True)}
    return found


def neighbours():
    """Infinities and NaN in keys that a group does not attend; every result has to stay what it was."""
    from layerzero_triton.grouped import launch

    query, key, value, batch, _ = scene(((5,), (6,)), (40,), ((17,), (17,)))
    small = launch.Config(16, 16, 4, 2)
    want, _ = formula(query, key, value, batch, True, 0.2)
    key[17:], value[17:] = math.inf, math.nan
    worst = 0.0
    for together in (False, True):
        out, lse = launch.forward(query, key, value, batch, True, 0.2, together, small)
        worst = max(worst, largest(out, want))
    for part in launch.gradients(torch.ones_like(out), query, key, value, out, lse, batch, True, 0.2, small, small)[:1]:
        worst = worst if part.isfinite().all() else math.inf
    return worst


def signs(scale):
    from layerzero_triton.grouped import launch

    query, key, value, batch, _ = scene(((5,), (6,)), (40,), ((20,), (40,)))
    launch.FORWARD[DIM] = launch.Config(16, 16, 4, 2)
    launch.SHARED[DIM] = launch.Config(16, 16, 4, 2)
    want, _ = formula(query, key, value, batch, True, scale)
    ways = (launch.work_list, launch.shared_tiles)
    return max(largest(way(query, key, value, batch, True, scale, False), want) for way in ways)


if __name__ == "__main__":
    from layerzero_triton.interpret import mend

    mend()
    results = {name: run(case) for name, case in CASES.items()}
    results |= {"neighbours": neighbours(), "negative": signs(-0.3), "zero": signs(0.0)}
    print(json.dumps(results))

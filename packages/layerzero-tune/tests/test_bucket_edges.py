"""The edges of a bucket: where close kernels are raced again, and what decides there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.perfdb.measurement import bucket_of
from layerzero_tune import candidates as bench_module
from layerzero_tune.timing.bucket_edges import confirmed, far_apart, other_end, tied, weighed, within
from layerzero_tune.timing.clock import cpu_clock, cuda_clock
from layerzero_tune.timing.race import Times

FAST, SLOW = 60e-6, 600e-6


def call():
    torch.manual_seed(0)
    return torch.randn(16, 64), torch.randn(64)


def context():
    with torch.no_grad():
        return lz.select("rms_norm", *call()).context


@pytest.mark.parametrize(("size", "far"), [(1, 1), (2, 2), (3, 4), (16, 9), (9, 16), (2048, 1025), (1100, 2048)])
def test_the_other_end_is_the_one_further_away(size, far):
    ctx = replace(context(), dims=(("rows", size), ("hidden", 64)))
    found = other_end(ctx)
    assert (size if found is None else dict(found.dims)["rows"]) == far
    assert found is None or bucket_of(found) == bucket_of(ctx)


@pytest.mark.parametrize(
    ("size", "odd"), [(1, []), (2, []), (16, [13, 15]), (13, [15]), (64, [45, 61]), (2048, [1449, 1921])]
)
def test_between_the_ends_of_a_bucket_lie_odd_sizes(size, odd):
    ctx = replace(context(), dims=(("rows", size), ("hidden", 64)))
    found = within(ctx)
    assert [dict(item.dims)["rows"] for item in found] == odd
    assert {bucket_of(item) for item in found} <= {bucket_of(ctx)}


def test_a_kernel_is_as_far_behind_as_on_the_average_of_the_places():
    def at(**us):
        return {name: Times(item, item, item, 0.0, 12) for name, item in us.items()}

    here = at(a=100.0, b=104.0, c=900.0)
    found = weighed(here, at(a=80.0, b=50.0), at(a=40.0, b=20.0))
    assert found["a"].median_us == pytest.approx(100.0 * (1.6 * 2.0) ** (1 / 3)) and found["b"] == here["b"]
    assert found["c"] is here["c"] and weighed(here) == here
    assert weighed(here, at(a=80.0, b=50.0))["a"].median_us == pytest.approx(100.0 * 1.6**0.5)
    # Torch's own code is held against the fastest kernel, and is nobody's measure itself.
    plain = {"torch.default": Times(96.0, 96.0, 96.0, 0.0, 12)}
    found = weighed(here | plain, at(a=80.0, b=50.0) | plain)
    assert found["b"] == here["b"] and found["torch.default"].median_us == pytest.approx(96.0 * (96 / 50) ** 0.5)


def test_who_is_far_behind_elsewhere_is_believed_when_seen_twice():
    """A third behind in both races stays; once by bad luck does not. The pace of a race is not its kernels'."""

    def at(**us):
        return {name: Times(item, item, item, 0.0, 12) for name, item in us.items()}

    first, second = at(a=100.0, luck=164.0, slow=140.0), at(a=120.0, luck=121.2, slow=171.6)
    assert far_apart(first) and not far_apart(at(a=100.0, b=104.0)) and not far_apart({})
    found = {name: item.median_us for name, item in confirmed(first, second).items()}
    assert found == {"a": 100.0, "luck": pytest.approx(101.0), "slow": 140.0}
    assert confirmed(first, at(a=1.0)) is first and confirmed(first, {}) is first


def test_a_second_look_on_a_gpu_decides(monkeypatch):
    """Of two races at the other end, the first of which went badly for one kernel, the better one counts for it."""
    looks = iter([{"a": 10.0, "b": 20.0}, {"a": 10.0, "b": 10.1}])
    asked = []

    def elsewhere(self, ctx, near, clock):
        asked.append(clock)
        return {name: Times(us, us, us, 0.0, 12) for name, us in next(looks).items()}

    monkeypatch.setattr(bench_module.Bench, "_elsewhere", elsewhere)
    bench = object.__new__(bench_module.Bench)
    found = bench._surely(context(), ["a", "b"], cuda_clock)
    assert (found["b"].median_us, len(asked)) == (pytest.approx(10.1), 2)
    looks = iter([{"a": 10.0, "b": 20.0}])
    assert bench._surely(context(), ["a", "b"], cpu_clock)["b"].median_us == 20.0
    looks, bench.thorough = iter([{"a": 10.0, "b": 20.0}]), False  # nobody asked for more than one
    assert bench._surely(context(), ["a", "b"], cuda_clock)["b"].median_us == 20.0


def test_short_calls_are_close_that_are_further_apart():
    """One may be all launch, as long at any size, and the other all work."""

    def near(*us):
        return tied({str(item): Times(item, item, item, 0.0, 12) for item in us})

    assert near(35.0, 38.0, 39.0) == ["35.0", "38.0"] and near(350.0, 380.0) == ["350.0"]


def test_decode_over_pages_has_another_end_too():
    """Sequences and their tokens, one each, shrink together with the context; the cache stays."""
    dims = {"batch": 16, "tokens": 16, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "head_dim_v": 64}
    dims |= {"seq_len_q": 1, "seq_len_k": 1024, "page_size": 16, "num_blocks": 8192}
    ctx = replace(context(), op="paged_attention", dims=tuple(dims.items()))
    found = other_end(ctx)
    assert found is not None and bucket_of(found) == bucket_of(ctx)
    assert dict(found.dims) == {**dims, "batch": 9, "tokens": 9, "seq_len_k": 513}
    assert other_end(replace(ctx, needs=frozenset({"paged_prefill"}))) is None

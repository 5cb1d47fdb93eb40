"""Sampling on a GPU: the same distribution as on the CPU, and as FlashInfer's where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.numerics import assert_close, tolerance
from layerzero.tuning.truth import UNLIKELY, chi_square
from layerzero_verify.testing.run import counts_of

pytestmark = pytest.mark.gpu

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.fixture
def flashinfer() -> Any:
    """FlashInfer's sampling, which compiles at its first call; the tests are skipped by name without it."""
    return pytest.importorskip("flashinfer.sampling", reason="flashinfer is not installed")


@pytest.mark.req("R-SAMP-01")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", FILTERS)
def test_probabilities_are_those_of_the_cpu(name: str, backend: str, dtype: torch.dtype) -> None:
    logits = randn(4, 5000).to(dtype)
    found = lz.sampling_probs(logits.cuda(), **FILTERS[name], backend=backend)
    expected = lz.sampling_probs(logits, **FILTERS[name], backend="reference")
    assert_close(found.cpu(), expected, tolerance("sampling_probs", torch.float32))


@pytest.mark.req("R-SAMP-02", "R-TOL-05")
@pytest.mark.parametrize("name", FILTERS)
def test_draws_are_seeded_and_follow_the_probabilities(name: str) -> None:
    logits = randn(1, 60, seed=3).cuda()
    rows = logits.expand(40_000, -1)
    tokens = lz.sample(rows, **FILTERS[name], generator=seeded(5))
    assert torch.equal(tokens, lz.sample(rows, **FILTERS[name], generator=seeded(5)))
    assert chi_square(counts_of(tokens, 60), lz.sampling_probs(logits, **FILTERS[name])) > UNLIKELY


def test_of_equal_logits_the_lower_ids_stay() -> None:
    logits = torch.zeros(2000, 6000, device="cuda", dtype=torch.bfloat16)
    for backend in ("reference", "torch"):
        tokens = lz.sample_topk(logits, 5, generator=seeded(), backend=backend)
        assert tokens.unique().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.req("R-SPEC-04")
@pytest.mark.parametrize("tree", [False, True])
def test_verified_tokens_follow_the_target(tree: bool) -> None:
    rows, vocab = 40_000, 9
    target = torch.softmax(randn(3, vocab) / 3, dim=-1).cuda()
    draft = torch.softmax(randn(2, vocab, seed=1) / 3, dim=-1).cuda()
    numbers = seeded(7)  # one stream for all: siblings that share their numbers were not drawn from these rows
    ids = torch.stack([torch.multinomial(row.expand(rows, -1), 1, generator=numbers)[:, 0] for row in draft], dim=1)
    given = (ids, draft.expand(rows, -1, -1), target.expand(rows, -1, -1))
    if tree:  # two candidates for the first place
        tokens = lz.sample_tree(*given, [-1, -1], generator=seeded(2))[0]
    else:
        tokens = lz.sample_speculative(*given, generator=seeded(2))[0]
    assert chi_square(counts_of(tokens[:, 0], vocab), target[0]) > UNLIKELY


def test_what_draws_nothing_can_be_captured() -> None:
    logits, ids = randn(4, 3, 500).cuda(), torch.randint(500, (4, 2), device="cuda")

    def work() -> tuple[torch.Tensor, ...]:
        probs = lz.sampling_probs(logits, top_k=20, top_p=0.9, backend="reference")
        return probs, *lz.sample_speculative(ids, None, logits, greedy=True, backend="reference")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    logits.copy_(randn(4, 3, 500, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    for left, right in zip(captured, work(), strict=True):
        torch.testing.assert_close(left, right)


# -- FlashInfer --------------------------------------------------------------------------------------
@pytest.mark.req("R-SAMP-03")
@pytest.mark.parametrize("vocab", [1000, 32_000])
def test_filters_are_flashinfers(flashinfer: Any, vocab: int) -> None:
    logits = randn(8, vocab).cuda()
    probs = torch.softmax(logits, dim=-1)
    bound = tolerance("sampling_probs", torch.float32)
    assert_close(lz.sampling_probs(logits, top_k=50), flashinfer.top_k_renorm_probs(probs, 50), bound)
    assert_close(lz.sampling_probs(logits, top_p=0.9), flashinfer.top_p_renorm_probs(probs, 0.9), bound)
    both = flashinfer.top_p_renorm_probs(flashinfer.top_k_renorm_probs(probs, 50), 0.8)
    assert_close(lz.sampling_probs(logits, top_k=50, top_p=0.8), both, bound)


@pytest.mark.req("R-SAMP-03")
@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "top_k and top_p"])
def test_draws_of_flashinfer_have_our_distribution_and_ours_its(flashinfer: Any, name: str) -> None:
    logits = randn(1, 200, seed=4).cuda()
    probs = torch.softmax(logits, dim=-1).expand(40_000, -1).contiguous()
    torch.manual_seed(0)
    calls = {
        "top_k": (lambda: flashinfer.top_k_sampling_from_probs(probs, 20), {"top_k": 20}),
        "top_p": (lambda: flashinfer.top_p_sampling_from_probs(probs, 0.8), {"top_p": 0.8}),
        "min_p": (lambda: flashinfer.min_p_sampling_from_probs(probs, 0.1), {"min_p": 0.1}),
        "top_k and top_p": (
            lambda: flashinfer.top_k_top_p_sampling_from_probs(probs, 20, 0.8, filter_apply_order="top_k_first"),
            {"top_k": 20, "top_p": 0.8},
        ),
    }
    theirs, options = calls[name]
    expected = lz.sampling_probs(logits, **options)
    assert chi_square(counts_of(theirs().long(), 200), expected) > UNLIKELY
    ours = lz.sample(logits.expand(40_000, -1), **options, generator=seeded(1))
    assert chi_square(counts_of(ours, 200), expected) > UNLIKELY


@pytest.mark.req("R-SAMP-03")
def test_chain_verification_of_flashinfer_has_our_distribution(flashinfer: Any) -> None:
    rows, vocab = 40_000, 9
    target = torch.softmax(randn(2, vocab) / 3, dim=-1).cuda()
    draft = torch.softmax(randn(1, vocab, seed=1) / 3, dim=-1).cuda()
    ids = torch.multinomial(draft[0].expand(rows, -1), 1, generator=seeded(7))
    given = (draft.expand(rows, -1, -1).contiguous(), ids.int(), target.expand(rows, -1, -1).contiguous())
    torch.manual_seed(0)
    theirs = flashinfer.chain_speculative_sampling(*given)
    tokens, kept = lz.sample_speculative(ids, given[0], given[2], generator=seeded(2))
    found = theirs[0] if isinstance(theirs, tuple) else theirs
    for first in (found[:, 0].long(), tokens[:, 0]):
        assert chi_square(counts_of(first, vocab), target[0]) > UNLIKELY
    share = (found[:, 1] >= 0).double().mean().item()
    assert share == pytest.approx((kept == 1).double().mean().item(), abs=0.02)

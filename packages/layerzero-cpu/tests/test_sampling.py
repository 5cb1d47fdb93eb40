"""The reference's tokens without its sort, whatever the filters, ties and values; and its codes when quantizing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from layerzero.backends.reference import quantize as reference_quantize
from layerzero.backends.reference import sampling as reference
from layerzero.model.quant import QuantScheme
from layerzero_cpu import quantizing, sampling

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KS = (None, 1, 5, 50, 10_000, torch.tensor([0, 3, 100, 2]))
PS = (None, 0.0, 0.5, 0.9, 1.0, torch.tensor([0.1, 0.5, 1.0, 0.999]))
LEASTS = (None, 0.05, torch.tensor([0.5, 0.1, 0.0, 1.0]))
WARMTHS = (1.0, 0.3, 3.0, 1e-3, torch.tensor([1.0, 0.0, 0.7, 2.0]))


def rows(vocab, kind, dtype):
    logits = torch.randn(4, vocab) * {"flat": 0.1, "usual": 3.0, "sharp": 30.0}.get(kind, 1.0)
    if kind == "ties":
        logits = logits.round()
    if kind == "equal":
        logits = torch.zeros(4, vocab)
    logits = logits.to(dtype)
    if kind == "special":
        logits[0, vocab // 2] = torch.nan
        logits[1] = -torch.inf
        logits[2, [0, -1]] = torch.inf
        logits[3, ::2] = -torch.inf
    return logits


@pytest.mark.parametrize("kind", ["flat", "usual", "sharp", "ties", "equal", "special"])
def test_the_references_tokens(isa, kind):
    draws = torch.Generator()
    settings = list(itertools.product(KS, PS, LEASTS, WARMTHS))
    for number in range(90):
        top_k, top_p, min_p, warmth = settings[(number * 67) % len(settings)]
        logits = rows((3, 64, 65, 700, 4100)[number % 5], kind, FLOATS[number % 3])
        mine = sampling.sample(logits, top_k, top_p, min_p, warmth, draws.manual_seed(number))
        right = reference.sample(logits, top_k, top_p, min_p, warmth, draws.manual_seed(number))
        assert mine.dtype is torch.int64
        assert torch.equal(mine, right), (number, top_k, top_p, min_p, warmth, logits.shape, logits.dtype)


def test_the_generator_ends_where_the_references_does(isa):
    logits = torch.randn(3, 100)
    one, two = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    sampling.sample(logits, 7, 0.9, None, 1.0, one)
    reference.sample(logits, 7, 0.9, None, 1.0, two)
    assert torch.equal(one.get_state(), two.get_state())
    before = one.get_state()
    assert torch.equal(sampling.sample(logits, None, None, None, 0.0, one), logits.argmax(-1))
    assert torch.equal(one.get_state(), before), "temperature 0 draws nothing"


def test_a_large_vocabulary_cut_by_top_p_alone(isa):
    """Nuclei of thousands of tokens, where halving replaces a sort."""
    draws = torch.Generator()
    for number, spread in enumerate((0.01, 1.0, 4.0)):
        logits = torch.randn(2, 50_000) * spread
        for p in (0.2, 0.9, 0.99999):
            mine = sampling.sample_topp(logits, p, 1.0, draws.manual_seed(number))
            assert torch.equal(mine, reference.sample_topp(logits, p, 1.0, draws.manual_seed(number)))


def test_one_row_is_the_same_alone_and_in_a_batch(isa):
    logits = torch.randn(5, 3000).repeat_interleave(2, dim=1)[:, ::2]  # rows with gaps, too
    uniform = torch.Generator()
    together = sampling.sample(logits, 40, 0.8, 0.01, 0.9, uniform.manual_seed(1))
    uniform.manual_seed(1)
    alone = torch.cat([sampling.sample(logits[i : i + 1], 40, 0.8, 0.01, 0.9, uniform) for i in range(5)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_the_references_codes(isa, fmt, dtype):
    x = (torch.randn(9, 256) * torch.logspace(-30 if dtype is not torch.float16 else -3, 3, 9)[:, None]).to(dtype)
    x[2] = 0.0
    x[3, 5], x[4, 1], x[5, 200] = torch.nan, torch.inf, -torch.inf
    x[6, :4] = torch.tensor([0.5, 1.5, 2.5, -0.5]).to(dtype)  # ties
    x[6, 4] = 127.0
    for granularity, symmetric in itertools.product(("tensor", "channel", "block"), (True, False)):
        if not symmetric and not fmt.startswith("int"):
            continue
        scheme = QuantScheme(fmt, granularity, 32 if granularity == "block" else None, symmetric)
        for given in (x, x[6:7], x[:2, ::2], x[:0], x.abs()[6:]):
            mine, right = quantizing.quantize(given, scheme), reference_quantize.quantize(given, scheme)
            assert torch.equal(mine.data.view(torch.uint8), right.data.view(torch.uint8))
            assert torch.equal(mine.scale.nan_to_num(-1.0), right.scale.nan_to_num(-1.0))
            if not symmetric:
                assert torch.equal(mine.zero_point, right.zero_point)
            for target in (None, *FLOATS):
                back, truth = quantizing.dequantize(right, target), reference_quantize.dequantize(right, target)
                assert torch.equal(back.nan_to_num(7.0), truth.nan_to_num(7.0))
                assert torch.equal(back.isnan(), truth.isnan())


def test_one_long_group_is_shared_by_threads():
    x = torch.randn(300, 1000)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            scheme = QuantScheme("int8", "tensor")
            mine, right = quantizing.quantize(x, scheme), reference_quantize.quantize(x, scheme)
            assert torch.equal(mine.data, right.data) and torch.equal(mine.scale, right.scale)
    finally:
        torch.set_num_threads(before)


def test_scales_that_want_a_gradient_get_one():
    x = torch.randn(4, 8)
    made = reference_quantize.quantize(x, QuantScheme("int8", "channel"))
    scale = made.scale.clone().requires_grad_()
    out = quantizing.dequantize(replace(made, scale=scale), None)
    assert torch.equal(out, reference_quantize.dequantize(made, None))
    out.sum().backward()
    assert torch.equal(scale.grad, made.data.float().sum(-1, keepdim=True))

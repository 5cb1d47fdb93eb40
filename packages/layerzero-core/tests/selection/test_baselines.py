"""What a torch user would write is a candidate on every device: the reference is never what runs on an accelerator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerzero.backends.reference import norm as reference_norm
from layerzero.backends.reference import sampling
from layerzero.backends.reference import varlen as reference_mla
from layerzero.backends.reference import varlen as reference_paged
from layerzero.backends.reference.attention import attention as reference_attention
from layerzero.backends.reference.varlen import grouped_attention, varlen_attention
from layerzero.backends.sdpa import default
from layerzero.backends.torch_native import kernels as native
from layerzero.backends.torch_native.sampling import sample_sorted
from layerzero.model.grouped import make_grouped_batch
from layerzero.model.kv_cache import make_paged_batch
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero_cli.calls import context

DEVICES = ["a100", "h100", "rtx4090", "t4", "mi300x"]
FLOATS = ["float16", "bfloat16", "float32"]
# Calls a torch user can write, in the words of `lz explain`, with what each adds.
HEADS = {"q": (2, 8, 64, 64), "k": (2, 2, 64, 64)}
LONGER = {"q": (2, 8, 16, 64), "k": (2, 2, 64, 64)}
PACKED = {"q": (96, 8, 64), "k": (96, 2, 64), "context": 32}
PAGES = {"q": (4, 8, 64), "k": (32, 16, 2, 64)}
CALLS = {
    "attention": [
        HEADS, {**HEADS, "causal": "top_left"}, {**LONGER, "causal": "top_left"}, {**LONGER, "causal": "bottom_right"},
        {**HEADS, "mask": "bool"}, {**HEADS, "mask": "float"}, {**HEADS, "window": (16, 0)}, {**HEADS, "alibi": True},
        {**HEADS, "dropout": 0.1}, {**HEADS, "v": (2, 2, 64, 48)}, {"shape": (2, 8, 64, 80)}, {"shape": (2, 8, 64, 7)},
        {**HEADS, "grad": True}, {**HEADS, "layout": "BSHD"},
    ],
    "varlen_attention": [PACKED, {**PACKED, "causal": "top_left"}, {**PACKED, "causal": "bottom_right"},
                         {**PACKED, "window": (8, 0)}, {**PACKED, "alibi": True}, {**PACKED, "grad": True}],
    "paged_attention": [PAGES, {**PAGES, "window": (8, 0)}, {**PAGES, "alibi": True},
                        {**PAGES, "k": (32, 2, 16, 64), "layout": "HND"}],
    "rope": [{**HEADS, "interleaved": how, **more} for how in (False, True)
             for more in ({}, {"rotary_dim": 32}, {"grad": True}, {"layout": "BSHD", "k": (2, 8, 2, 64)})],
    "sample": [{"shape": (3, 1000)}, {"shape": (3, 1000), "top_k": 50}, {"shape": (3, 1000), "top_p": 0.9},
               {"shape": (3, 1000), "top_k": 50, "top_p": 0.9}],
    "sample_topk": [{"shape": (3, 99)}], "sample_topp": [{"shape": (3, 99)}], "sampling_probs": [{"shape": (3, 99)}],
    **{op: [{"shape": (7, 64)}, {"shape": (7, 64), "grad": True}, {"shape": (7, 64), "no_weight": True}]
       for op in ("rms_norm", "add_rms_norm", "layer_norm")},
    **{op: [{"shape": (7, 64)}, {"shape": (7, 64), "grad": True}] for op in ("gemma_rms_norm", "gemma_add_rms_norm")},
    **{op: [{"shape": (7, 64)}, {"shape": (7, 64), "grad": True}]
       for op in ("silu_and_mul", "gelu_and_mul", "relu_and_mul")},
    "linear": [{"shape": (7, 64), "weight": (32, 64)}, {"shape": (7, 64), "weight": (32, 64), "bias": True,
               "activation": "gelu"}, {"shape": (7, 64), "weight": (32, 64), "format": "int8"}],
    "cross_entropy": [{"shape": (7, 64)}, {"shape": (7, 64), "grad": True}, {"shape": (7, 64), "lse": True}],
    "embedding": [{"shape": (2, 7), "weight": (99, 64)}],
    "cast": [{"shape": (7, 64), "format": "float8_e4m3fn"}, {"shape": (7, 64), "format": "float32"}],
    "quantize": [{"shape": (7, 64), "format": word} for word in ("int8", "fp8_e4m3", "nf4")],
    "dequantize": [{"shape": (7, 64), "format": word} for word in ("int8", "fp8_e4m3", "nf4")],
}  # fmt: skip
# Their inputs have no single shape: sizes as `lz explain` spells them.
MORE = {
    "mlp": {"shape": (7, 64), "weight": (128, 64)},
    "topk_gate": {"shape": (7, 8)},
    "grouped_gemm": {"shape": (32, 64), "weight": (4, 32, 64)},
    "moe": {"shape": (7, 64), "weight": (4, 128, 64)},
    "mla_paged_attention": {"q": (4, 8, 512), "k": (32, 16, 512)},
}
# Torch has no function for these; their plain code is what its users write.
NO_FUNCTION = {"xpos", "sample_speculative", "sample_tree", "grouped_attention", "tokenize", "detokenize"}


@pytest.mark.parametrize("device", DEVICES)
def test_the_reference_is_not_what_runs_on_an_accelerator(lab, device):
    """With torch alone, and nothing measured, compiled or installed beside it."""
    ended = []
    calls = {**CALLS, **{op: [words] for op, words in MORE.items()}}
    for op, words in ((op, words) for op, found in calls.items() for words in found):
        for dtype in FLOATS:
            if dtype == "bfloat16" and device == "t4":
                continue
            chosen = select(context(op, {**words, "dtype": dtype, "device": device}), state.world).chosen
            if chosen.startswith("reference."):
                ended.append((op, dtype, words))
    assert not ended


def test_every_op_is_among_those_calls_or_says_why_not(lab):
    assert set(state.world.ops) - NO_FUNCTION == set(CALLS) | set(MORE)


@pytest.mark.parametrize("device", ["h100", "mi300x"])
def test_a_captured_draw_has_the_torch_code_too(lab, device):
    for op in ("sample", "sample_topk", "sample_topp"):
        ctx = context(op, {"shape": (3, 1000), "device": device})
        chosen = select(replace(ctx, capturing=True), state.world).chosen
        assert chosen == f"torch.{op}.sorted"


# -- what they compute ---------------------------------------------------------------------------------
def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


FILTERS = [
    (None, None, None, 1.0), (5, None, None, 1.0), (None, 0.8, None, 0.7), (9, 0.6, 0.05, 1.3), (None, None, 0.2, 1.0),
    (None, 0.0, None, 1.0),
    (torch.tensor([3, 0, 9]), torch.tensor([0.5, 1.0, 0.9]), None, torch.tensor([1.0, 0.0, 0.5])),
    (4, torch.tensor([0.5, 1.0, 0.9]), torch.tensor([0.1, 0.2, 0.0]), 1.0),
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=range(len(FILTERS)))
def test_sorted_draws_have_the_distribution_of_the_reference(filters):
    vocab, count = 40, 20_000
    logits = (2 * draw(3, vocab)).to(torch.bfloat16)  # many equals
    logits[1, 7] = -torch.inf
    want = sampling.sampling_probs(logits.double(), *filters)
    for row in range(3):
        own = [item[row : row + 1].expand(count) if isinstance(item, torch.Tensor) else item for item in filters]
        got = sample_sorted(logits[row].expand(count, vocab), *own, torch.Generator().manual_seed(row))
        share = torch.bincount(got, minlength=vocab) / count
        assert not share[want[row] == 0].any()  # nothing that was filtered is ever drawn
        spread = (want[row] * (1 - want[row]) / count).sqrt()
        assert bool(((share - want[row]).abs() <= 5 * spread + 1e-9).all())


def test_rows_without_a_distribution_draw_nothing():
    logits = torch.zeros(4, 30)
    logits[0], logits[1], logits[3, 1] = torch.nan, -torch.inf, torch.nan
    logits[2, 3] = logits[2, 9] = torch.inf
    drawn = {tuple(sample_sorted(logits, None, 0.9, None, 1.0, None).tolist()) for _ in range(60)}
    assert drawn == {(-1, -1, 3, -1), (-1, -1, 9, -1)}


@pytest.mark.parametrize("temperature", [1.0, 1e-300, 1e30])
def test_the_largest_number_there_is_has_no_share_beside_infinity(temperature):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.full((1, 9), torch.finfo(dtype).max, dtype=dtype)
        logits[0, 4] = torch.inf
        assert {int(sample_sorted(logits, 5, None, None, temperature, None)) for _ in range(40)} == {4}


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("more", [{}, {"window": (3, 0)}, {"window": (3, 2)}, {"alibi": True}, {"mask": "bool"}])
def test_sdpa_as_torch_chooses_equals_the_reference(causal, more):
    q, k, v = draw(2, 4, 6, 16), draw(2, 2, 9, 16, seed=1), draw(2, 2, 9, 16, seed=2)
    if "mask" in more and causal:
        pytest.skip("a mask comes without causal")
    mask = draw(6, 9, seed=3) > -1 if "mask" in more else None
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0]) if "alibi" in more else None
    given = (q, k, v, mask, 0.0, causal, 0.3, more.get("window"), None, slopes, False)
    assert_close(default.attention(*given), reference_attention(*given).double(), tolerance("attention", "float32"))


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_packed_sequences_as_torch_attends_them_equal_the_reference(causal):
    ends_q, ends_k = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    q, k, v = draw(10, 4, 16), draw(12, 2, 16, seed=1), draw(12, 2, 16, seed=2)
    slopes = draw(3, 4, seed=3).abs()
    for window, alibi in ((None, None), ((2, 0), None), (None, slopes)):
        given = (q, k, v, ends_q, ends_k, 7, 7, causal, None, window, None, alibi, False)
        assert_close(default.varlen(*given), varlen_attention(*given).double(), tolerance("attention", "float32"))


class Unread:
    """Offsets of which only the number is known: to look at one of them is an error."""

    shape = (4,)


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_of_packed_sequences_that_are_equally_long_no_offset_is_read(causal):
    q, k, v = draw(9, 4, 16), draw(15, 2, 16, seed=1), draw(15, 2, 16, seed=2)
    for window, slopes in ((None, None), ((2, 0), None), (None, draw(3, 4, seed=3).abs()), (None, draw(4).abs())):
        rest = (3, 5, causal, None, window, None, slopes, False)
        want = varlen_attention(q, k, v, torch.arange(4) * 3, torch.arange(4) * 5, *rest).double()
        assert_close(default.varlen(q, k, v, Unread, Unread, *rest), want, tolerance("attention", "float32"))


@pytest.mark.parametrize("causal", [False, True])
def test_groups_as_torch_attends_them_equal_the_reference_and_its_gradients(causal):
    offsets = (torch.tensor([0, 2, 3, 5, 9]), torch.tensor([0, 6, 10]), torch.tensor([[2, 0], [6, 3]]))
    batch = make_grouped_batch(*offsets)  # the second sequence has a group without keys, and one of more queries
    found = []
    for attend in (default.grouped, grouped_attention):
        given = [
            draw(*shape, seed=n).requires_grad_() for n, shape in enumerate([(9, 4, 16), (10, 2, 16), (10, 2, 16)])
        ]
        out = attend(*given, batch, causal, 0.3, False)
        found.append((out.detach(), *torch.autograd.grad(out, given, draw(9, 4, 16, seed=4))))
    assert_close(found[0], [item.double() for item in found[1]], tolerance("attention", "float32"))


@pytest.mark.parametrize("contexts", [(20, 20), (20, 7), (3, 33)])
@pytest.mark.parametrize("queries", [None, (2, 3)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_gathered_pages_equal_the_reference(contexts, queries, layout):
    page, tables = 16, torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    counts = None if queries is None else torch.tensor(queries, dtype=torch.int32)
    batch = make_paged_batch(tables, lengths, counts, list(contexts) if queries is None else (contexts, queries))
    shape = (6, page, 2, 16) if layout == "NHD" else (6, 2, page, 16)
    keys, values = draw(*shape, seed=1), draw(*shape, seed=2)
    q = draw(sum(queries or (1, 1)), 4, 16)
    for window, slopes in ((None, None), ((4, 0), None), (None, torch.tensor([0.5, 0.2, 0.1, 0.0]))):
        given = (q, keys, values, batch, None, window, None, slopes, False, layout)
        want = reference_paged.paged_attention(*given).double()
        assert_close(default.pages(*given), want, tolerance("attention", "float32"))
    latent, rotated = draw(6, page, 32, seed=3), draw(6, page, 8, seed=4)
    given = (draw(len(q), 4, 32), draw(len(q), 4, 8, seed=5), latent, rotated, batch, 0.2, False)
    want = reference_mla.mla_paged_attention(*given).double()
    assert_close(default.latent_pages(*given), want, tolerance("attention", "float32"))


def test_what_is_found_out_about_pages_serves_every_layer_until_the_tables_change():
    tables = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)
    batch = make_paged_batch(tables, torch.tensor([7, 5], dtype=torch.int32))
    query, keys, values = draw(2, 4, 16), draw(6, 4, 2, 16, seed=1), draw(6, 4, 2, 16, seed=2)

    def agrees(**grad):
        given = (query, keys.clone().requires_grad_(bool(grad)), values, batch, None, None, None, None, False, "NHD")
        found = default.pages(*given)
        assert_close(found, reference_paged.paged_attention(*given).double(), tolerance("attention", "float32"))
        return found

    with torch.inference_mode():
        agrees()
    agrees(grad=True).sum().backward()  # nothing that was made in inference mode is saved for it
    made = {key: plan.found for key, plan in batch.plans.items()}
    agrees(grad=True)
    assert {key: plan.found for key, plan in batch.plans.items()} == made and len(made) == 2
    tables[0, 0], tables[1, 1] = 5, 3
    agrees(grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_a_weight_of_another_dtype_equal_the_reference(dtype):
    x, residual, weight, bias = (draw(*shape, seed=n) for n, shape in enumerate([(5, 32), (5, 32), (32,), (32,)]))
    x = x.to(dtype)
    limit = tolerance("rms_norm", dtype)
    assert_close(native.wide_rms_norm(x, weight, 1e-6), reference_norm.rms_norm(x, weight, 1e-6).double(), limit)
    for stream in (residual, residual.to(torch.bfloat16)):  # the result is rounded to the dtype of x alone
        want = [t.double() for t in reference_norm.add_rms_norm(x, stream, weight, 1e-6)]
        got = native.wide_add_rms_norm(x, stream, weight, 1e-6)
        assert [t.dtype for t in got] == [dtype, stream.dtype]
        assert_close(got, want, limit)
    want = reference_norm.layer_norm(x, weight, bias, 1e-5).double()
    assert_close(native.wide_layer_norm(x, weight, bias, 1e-5), want, limit)

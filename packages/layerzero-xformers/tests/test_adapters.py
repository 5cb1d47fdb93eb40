"""The adapters say in xFormers' words what a call means; see conftest.py for the stand-in and its rules."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import layerzero as lz
from layerzero.backends.reference.attention import attention as reference
from layerzero_xformers.biases import additive, objects, written_out
from layerzero_xformers.predicates import cutlass_masks, single_query

CALLS = Path(__file__).with_name("signatures").joinpath("calls.txt").read_text(encoding="utf-8").split()
OPTIONS = {
    "plain": (False, None, None),
    "causal": ("bottom_right", None, None),
    "top_left": (True, None, None),
    "window": (False, 0.3, (2, 1)),
    "window_left": (False, None, (2, -1)),
    "window_right": (False, None, (-1, 1)),
    "causal_window": ("bottom_right", None, (3, 0)),
    "causal_wide_window": ("bottom_right", None, (3, 2)),
    "causal_window_unlimited": ("bottom_right", None, (-1, 0)),
    "negative_scale": ("bottom_right", -0.5, None),
    "zero_scale": ("bottom_right", 0.0, None),
}
TAKES = {
    "flash": {name for name in OPTIONS if name != "top_left"},
    "cutlass": {name for name in OPTIONS if name not in ("window", "window_left", "window_right")},
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(q_len: int, k_len: int, heads: int, kv_heads: int) -> Any:
    return randn(2, q_len, heads, 8), randn(2, k_len, kv_heads, 8, seed=1), randn(2, k_len, kv_heads, 8, seed=2)


def truth(q: Any, k: Any, v: Any, mask: Any, causal: Any, scale: Any, window: Any) -> Any:
    wide = (t.transpose(1, 2).double() for t in (q, k, v))
    out, lse = reference(*wide, mask, 0.0, causal, scale, window, None, None, True)
    return out.transpose(1, 2), lse


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.req("R-BK-XF-02")
@pytest.mark.req("R-BK-XF-04")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4)])
@pytest.mark.parametrize(("kernel", "name"), [(k, name) for k in TAKES for name in OPTIONS if name in TAKES[k]])
def test_a_call_means_the_same_there(vendor, kernel, name, lengths, heads):
    causal, scale, window = OPTIONS[name]
    if kernel == "cutlass" and causal == "bottom_right" and lengths[0] > lengths[1]:
        pytest.skip("its predicate refuses such a call")
    q, k, v = qkv(*lengths, *heads)
    run = getattr(vendor.kernels, f"{kernel}_attention")
    expected, expected_lse = truth(q, k, v, None, causal, scale, window)
    out, lse = run(q, k, v, None, 0.0, causal, scale, window, None, None, True)
    close(out, expected)
    close(lse, expected_lse)
    close(run(q, k, v, None, 0.0, causal, scale, window, None, None, False), expected)
    called, given = vendor.calls[-1]
    assert called == "memory_efficient_attention_forward" and given["op"] is vendor.ops[f"{kernel}.FwOp"]
    assert given["key"].data_ptr() == k.data_ptr(), "the keys were copied"
    assert given["query"].ndim == (4 if heads[0] == heads[1] else 5)


@pytest.mark.req("R-BK-XF-03")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize(("causal", "window"), [(False, None), ("bottom_right", None), (True, None), (False, (2, 1))])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 8), torch.float32), ((1, 1, 5, 8), torch.bool), ((2, 1, 5, 7), torch.bool), ((2, 4, 1, 7), torch.float32),
        ((4, 5, 7), torch.float32), ((2, 4, 5, 1), torch.float64), ((1, 4, 5, 9), torch.float16),
    ],
)  # fmt: skip
def test_masks_span_batch_and_heads_and_keep_their_rows_aligned(vendor, shape, dtype, causal, window, heads):
    cols = shape[-1] if shape[-1] > 1 else 7
    q, k, v = qkv(5, cols, *heads)
    drawn = randn(*shape, seed=5)
    mask = drawn > -0.3 if dtype is torch.bool else drawn.to(dtype)
    exact = mask if dtype is torch.bool else mask.double()
    expected, expected_lse = truth(q, k, v, exact, causal, None, window)
    out, lse = vendor.kernels.cutlass_attention(q, k, v, mask, 0.0, causal, None, window, None, None, True)
    close(out, expected)
    close(lse, expected_lse)


@pytest.mark.parametrize("rows", [1, 33, 65])
@pytest.mark.parametrize(("causal", "masked"), [(False, True), ("bottom_right", True), (True, False), (False, False)])
@pytest.mark.parametrize("shared", ["gqa", "expanded"])
def test_a_last_row_alone_in_its_block_gets_keys_of_its_own(vendor, rows, causal, masked, shared):
    q, k, v = qkv(rows, 70, 4, 2 if shared == "gqa" else 1)
    if shared == "expanded":
        k, v = k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1)
    mask = randn(rows, 70, seed=7) if masked else None
    expected, _ = truth(q, k, v, None if mask is None else mask.double(), causal, None, None)
    close(vendor.kernels.cutlass_attention(q, k, v, mask, 0.0, causal, None, None, None, None, False), expected)
    alone = (masked and rows > 1) or causal is True
    assert (vendor.calls[-1][1]["key"].stride(-2) != 0) is alone, "copied without need" if not alone else "not copied"


def test_a_mask_that_is_the_same_for_all_heads_is_stored_once():
    query = torch.empty(2, 5, 4, 8)
    bias = additive(torch.zeros(5, 7), None, query, 7)
    assert bias.shape == (2, 4, 5, 7) and bias.stride() == (0, 0, 8, 1)
    fitting = torch.zeros(2, 4, 5, 8)
    assert additive(fitting, None, query, 8).data_ptr() == fitting.data_ptr()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("kernel", ["flash", "cutlass"])
def test_gradients_go_through_the_librarys_own_backward(vendor, kernel, heads):
    q, k, v = (t.requires_grad_() for t in qkv(5, 6, *heads))
    run = getattr(vendor.kernels, f"{kernel}_attention")
    run(q, k, v, None, 0.0, "bottom_right", None, None, None, None, False).sum().backward()
    called, given = vendor.calls[-1]
    assert called == "memory_efficient_attention"
    assert given["op"] == (vendor.ops[f"{kernel}.FwOp"], vendor.ops[f"{kernel}.BwOp"])
    wide = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    swapped = (t.transpose(1, 2) for t in wide)
    reference(*swapped, None, 0.0, "bottom_right", None, None, None, None, False).sum().backward()
    for mine, true in zip((q, k, v), wide, strict=True):
        close(mine.grad, true.grad)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "mqa"])
def test_split_k_takes_one_query_over_many_keys(vendor, heads):
    q, k, v = qkv(1, 33, *heads)
    expected, expected_lse = truth(q, k, v, None, "bottom_right", None, None)
    out, lse = vendor.kernels.splitk_attention(q, k, v, None, 0.0, "bottom_right", None, None, None, None, True)
    close(out, expected)
    close(lse, expected_lse)
    assert vendor.calls[-1][1]["op"] is vendor.ops["triton_splitk.FwOp"]


def test_every_name_the_adapters_use_is_on_the_list_that_is_recorded(vendor):
    q, k, v = qkv(5, 5, 4, 2)
    for name, (causal, scale, window) in OPTIONS.items():
        if name in TAKES["flash"]:
            vendor.kernels.flash_attention(q, k, v, None, 0.0, causal, scale, window, None, None, True)
    vendor.kernels.cutlass_attention(q[:, :3], k, v, None, 0.0, True, None, None, None, None, False)
    assert {f"xformers.ops.fmha.{name}" for name, _ in vendor.calls} <= set(CALLS)


@pytest.mark.parametrize(
    ("shapes", "options", "codes"),
    [
        (((1, 4, 8, 16), (1, 4, 8, 16)), {"is_causal": True}, []),
        (((1, 4, 9, 16), (1, 4, 8, 16)), {"attn_mask": "lower_right"}, ["SEQ_LEN_MISMATCH"]),
        (((1, 4, 8, 16), (1, 4, 9, 16)), {"attn_mask": "lower_right"}, []),
        (((1, 4, 8, 16), (1, 4, 9, 16)), {"window": (3, 1)}, ["WINDOW_UNSUPPORTED"]),
        (((1, 4, 8, 16), (1, 4, 9, 16)), {"attn_mask": "lower_right", "window": (3, 0)}, []),
    ],
)
@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # torch's kernels; LayerZero defines such rows
def test_what_the_cutlass_kernel_cannot_mask_is_refused(shapes, options, codes):
    q, k = (torch.empty(shape) for shape in shapes)
    if options.get("attn_mask") == "lower_right":
        options = {**options, "attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
    found = lz.explain("attention", q, k, k, **options).context
    assert [why.code.value for why in cutlass_masks(found)] == codes


def test_split_k_refuses_a_diagonal_over_several_queries():
    q, k = torch.empty(1, 2, 3, 16), torch.empty(1, 2, 9, 16)
    for rows, codes in ((1, []), (3, ["CAUSAL_ALIGNMENT_UNSUPPORTED"])):
        found = lz.explain("attention", q[:, :, :rows], k, k, causal_lower_right(rows, 9)).context
        assert [why.code.value for why in single_query(found)] == codes


# -- the real library, where it can be imported (it can on a CPU; its kernels then do not run) --------
@pytest.fixture(scope="module")
def real() -> Any:
    os.environ.setdefault("XFORMERS_IGNORE_FLASH_VERSION_CHECK", "1")
    pytest.importorskip("xformers.ops", reason="xformers is not installed", exc_type=ImportError)
    return importlib.import_module("xformers.ops.fmha.attn_bias")


@pytest.mark.parametrize("lengths", [(5, 5), (4, 9), (9, 4)])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_real_bias_objects_hide_what_is_meant(real, name, lengths):
    causal, _, window = OPTIONS[name]
    if causal is True and window is not None:
        pytest.skip("not asked of it")
    rows, cols = lengths
    bias = objects(real, causal, window, rows, cols)
    wanted = written_out(causal, window, rows, cols, torch.empty(0))
    if wanted is None:
        assert bias is None
        return
    assert torch.equal(bias.materialize((rows, cols)) == 0, wanted == 0)

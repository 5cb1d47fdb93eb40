"""Bad input: one clear error of ours with its code, or a defined result; never a bare KeyError from inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError, LayerZeroError, UnknownNameError
from layerzero.model.context import Context
from layerzero.runtime.state import state

NAN = float("nan")


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype) if device == "cpu" else torch.empty(shape, device=device)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


Q, K = t(2, 4, 5, 8), t(2, 2, 7, 8)
X, W = t(3, 8), torch.ones(8)
COS = torch.ones(5, 4)
CACHE, TABLES, LENS = t(4, 4, 2, 8), torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
PQ = t(2, 4, 8)


def attention(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: lz.attention(*(args or (Q, K, K)), **kwargs)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([t(2, 8), t(3, 8)])


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    # the issue's own list
    "mixed devices": (attention(Q, t(2, 2, 7, 8, device="meta"), K), "DEVICE_MIXED"),
    "mask on another device": (attention(attn_mask=t(5, 7, device="meta")), "DEVICE_MIXED"),
    "mask with is_causal": (attention(attn_mask=t(5, 7), is_causal=True), "MASK_WITH_CAUSAL"),
    "mask with bottom_right": (attention(attn_mask=t(5, 7), is_causal="bottom_right"), "MASK_WITH_CAUSAL"),
    "mask that does not broadcast": (attention(attn_mask=t(5, 6)), "MASK_NOT_BROADCASTABLE"),
    "mask of rank 5": (attention(attn_mask=t(1, 1, 1, 5, 7)), "MASK_NOT_BROADCASTABLE"),
    "mask of rank 1": (attention(attn_mask=t(7)), "MASK_NOT_BROADCASTABLE"),
    "wrong rank": (attention(t(8), t(8), t(8)), "RANK_INVALID"),
    "wrong rank for BSHD": (attention(t(5, 8), t(7, 8), t(7, 8), layout="BSHD"), "RANK_INVALID"),
    "ranks that differ for BSHD": (attention(Q, t(2, 7, 8), t(2, 7, 8), layout="BSHD"), "RANK_INVALID"),
    "ranks that do not broadcast": (attention(Q, t(3, 7, 8), t(3, 7, 8)), "GQA_RATIO_INVALID"),
    "Hq not a multiple of Hkv": (attention(t(2, 3, 5, 8), K, K), "GQA_RATIO_INVALID"),
    "NaN scale": (attention(scale=NAN), "SCALE_INVALID"),
    "infinite scale": (attention(scale=math.inf), "SCALE_INVALID"),
    "negative window": (attention(window=-1), "WINDOW_INVALID"),
    "negative window pair": (attention(window=(-2, 0)), "WINDOW_INVALID"),
    "window below 64 bits": (attention(window=(0, -(2**63) - 1)), "WINDOW_INVALID"),
    "window beyond 64 bits": (attention(window=2**63), "VALUE_INVALID"),
    "window pair beyond 64 bits": (attention(window=(-1, 2**200)), "VALUE_INVALID"),
    "int dtype": (attention(ints(2, 4, 5, 8), ints(2, 2, 7, 8), ints(2, 2, 7, 8)), "DTYPE_UNSUPPORTED"),
    "bool dtype": (lambda: lz.rms_norm(X > 0, W), "DTYPE_UNSUPPORTED"),
    "unknown op": (lambda: lz.explain("attenton", Q, K, K), "OP_UNKNOWN"),
    "unknown kernel id": (lambda: lz.validate("sdpa.attention.flush", Q, K, K), "KERNEL_UNKNOWN"),
    "unknown backend": (attention(backend="flsh"), "BACKEND_UNKNOWN"),
    "unknown backend of another op": (lambda: lz.rms_norm(X, W, backend="nobody.rms_norm.x"), "BACKEND_UNKNOWN"),
    "backend that is no text": (attention(backend=3), "TYPE_INVALID"),
    "backend that cannot be hashed": (attention(backend=["sdpa"]), "TYPE_INVALID"),
    "backend list of another op": (lambda: lz.silu_and_mul(X, backend=["torch"]), "TYPE_INVALID"),
    # attention, more
    "text for a tensor": (attention("q", K, K), "TYPE_INVALID"),
    "None for a tensor": (attention(Q, None, K), "TYPE_INVALID"),
    "list for a tensor": (attention(Q, [[1.0]], K), "TYPE_INVALID"),
    "array for a mask": (attention(attn_mask=[[True]]), "TYPE_INVALID"),
    "number for slopes": (attention(alibi_slopes=0.5), "TYPE_INVALID"),
    "nested tensor": (lambda: lz.attention(nested(), nested(), nested()), "RAGGED_UNSUPPORTED"),
    "sparse tensor": (attention(Q.to_sparse(), K, K), "TYPE_INVALID"),
    "batch sizes": (attention(t(3, 4, 5, 8), K, K), "BATCH_MISMATCH"),
    "head dims": (attention(t(2, 4, 5, 16), K, K), "HEAD_DIM_MISMATCH"),
    "key and value lengths": (attention(Q, K, t(2, 2, 6, 8)), "SHAPE_INVALID"),
    "no KV heads": (attention(Q, t(2, 0, 5, 8), t(2, 0, 5, 8)), "GQA_RATIO_INVALID"),
    "mask dtype": (attention(attn_mask=ints(5, 7)), "MASK_DTYPE_INVALID"),
    "wider mask dtype": (attention(attn_mask=t(5, 7).double()), "MASK_DTYPE_INVALID"),
    "NaN dropout": (attention(dropout_p=NAN), "VALUE_INVALID"),
    "dropout above one": (attention(dropout_p=1.5), "VALUE_INVALID"),
    "negative dropout": (attention(dropout_p=-0.1), "VALUE_INVALID"),
    "text for dropout": (attention(dropout_p="half"), "VALUE_INVALID"),
    "None for dropout": (attention(dropout_p=None), "VALUE_INVALID"),
    "text for scale": (attention(scale="1/8"), "TYPE_INVALID"),
    "window of three": (attention(window=(1, 2, 3)), "TYPE_INVALID"),
    "window of floats": (attention(window=(1.0, 2)), "TYPE_INVALID"),
    "window as text": (attention(window="4"), "TYPE_INVALID"),
    "window as flag": (attention(window=True), "TYPE_INVALID"),
    "causal as number": (attention(is_causal=1), "VALUE_INVALID"),
    "causal as text": (attention(is_causal="lower"), "VALUE_INVALID"),
    "causal top_left as text": (attention(is_causal="top_left"), "VALUE_INVALID"),
    "unknown layout": (attention(layout="SBHD"), "LAYOUT_UNKNOWN"),
    "cache layout": (attention(layout="NHD"), "LAYOUT_UNKNOWN"),
    "zero softcap": (attention(softcap=0.0), "VALUE_INVALID"),
    "NaN softcap": (attention(softcap=NAN), "VALUE_INVALID"),
    "slopes of another length": (attention(alibi_slopes=torch.ones(3)), "SHAPE_INVALID"),
    "too many arguments": (lambda: lz.explain("attention", Q, K, K, None, 0.0, False, None, 1), "TYPE_INVALID"),
    "argument nobody knows": (lambda: lz.explain("attention", Q, K, K, causal=True), "TYPE_INVALID"),
    # norms, mlp, linear, embedding
    "weight of another width": (lambda: lz.rms_norm(X, torch.ones(7)), "SHAPE_INVALID"),
    "weight that is a list": (lambda: lz.rms_norm(X, [1.0] * 8), "TYPE_INVALID"),
    "x that is a number": (lambda: lz.rms_norm(1.0, W), "TYPE_INVALID"),
    "scalar x": (lambda: lz.rms_norm(torch.tensor(1.0)), "RANK_INVALID"),
    "eps that is text": (lambda: lz.rms_norm(X, W, "1e-6"), "TYPE_INVALID"),
    "eps of layer_norm": (lambda: lz.layer_norm(X, W, None, None), "TYPE_INVALID"),
    "nested x": (lambda: lz.rms_norm(nested(), W), "RAGGED_UNSUPPORTED"),
    "sparse x": (lambda: lz.rms_norm(X.to_sparse(), W), "TYPE_INVALID"),
    "weight elsewhere": (lambda: lz.rms_norm(X, W.to("meta")), "DEVICE_MIXED"),
    "residual shape": (lambda: lz.add_rms_norm(X, t(4, 8), W), "SHAPE_INVALID"),
    "residual missing": (lambda: lz.add_rms_norm(X, None, W), "TYPE_INVALID"),
    "odd width": (lambda: lz.silu_and_mul(t(3, 7)), "SHAPE_INVALID"),
    "gelu kind": (lambda: lz.gelu_and_mul(X, "quick"), "VALUE_INVALID"),
    "linear widths": (lambda: lz.linear(X, t(4, 9)), "SHAPE_INVALID"),
    "linear bias": (lambda: lz.linear(X, t(4, 8), t(5)), "SHAPE_INVALID"),
    "linear bias list": (lambda: lz.linear(X, t(4, 8), [0.0] * 4), "TYPE_INVALID"),
    "linear activation": (lambda: lz.linear(X, t(4, 8), None, "swish"), "VALUE_INVALID"),
    "float ids": (lambda: lz.embedding(t(3), t(4, 8)), "DTYPE_UNSUPPORTED"),
    "padding outside": (lambda: lz.embedding(ints(3), t(4, 8), 4), "VALUE_INVALID"),
    "padding as text": (lambda: lz.embedding(ints(3), t(4, 8), "0"), "VALUE_INVALID"),
    # rope
    "rope k list": (lambda: lz.rope(Q, [1], COS, COS), "TYPE_INVALID"),
    "rope tables": (lambda: lz.rope(Q, None, COS, t(5, 3)), "SHAPE_INVALID"),
    "rope tables too wide": (lambda: lz.rope(Q, None, t(5, 8), t(5, 8)), "SHAPE_INVALID"),
    "rope tables too short": (lambda: lz.rope(Q, None, COS[:3], COS[:3]), "SEQ_LEN_TOO_LONG"),
    "rope positions float": (lambda: lz.rope(Q, None, COS, COS, position_ids=t(2, 5)), "DTYPE_UNSUPPORTED"),
    "rope layout": (lambda: lz.rope(Q, None, COS, COS, layout="HND"), "LAYOUT_UNKNOWN"),
    "slopes for no head": (lambda: lz.alibi_slopes(0), "VALUE_INVALID"),
    # sampling, quantization, paged attention
    "k of zero": (lambda: lz.sample_topk(t(2, 9), 0), "VALUE_INVALID"),
    "k of two and a half": (lambda: lz.sample_topk(t(2, 9), 2.5), "VALUE_INVALID"),
    "p above one": (lambda: lz.sample_topp(t(2, 9), 1.5), "VALUE_INVALID"),
    "NaN p": (lambda: lz.sample_topp(t(2, 9), NAN), "VALUE_INVALID"),
    "negative temperature": (lambda: lz.sample_topk(t(2, 9), 3, temperature=-1.0), "VALUE_INVALID"),
    "k per row of another batch": (lambda: lz.sample_topk(t(2, 9), torch.tensor([1, 2, 3])), "SHAPE_INVALID"),
    "no vocabulary": (lambda: lz.sample_topk(t(2, 0), 1), "SHAPE_INVALID"),
    "logits of rank 1": (lambda: lz.sample_topp(t(9), 0.5), "RANK_INVALID"),
    "unknown format": (lambda: lz.quantize(X, "int3"), "QUANT_FORMAT_UNSUPPORTED"),
    "unknown granularity": (lambda: lz.quantize(X, "int8", granularity="row"), "QUANT_GRANULARITY_UNSUPPORTED"),
    "dequantize a tensor": (lambda: lz.dequantize(X), "TYPE_INVALID"),
    "pages without lengths": (lambda: lz.paged_attention(PQ, CACHE, CACHE, TABLES), "TYPE_INVALID"),
    "context beyond its pages": (
        lambda: lz.paged_attention(PQ, CACHE, CACHE, TABLES, torch.tensor([3, 9], dtype=torch.int32)),
        "BLOCK_TABLE_INVALID",
    ),
    "cache dtypes differ": (
        lambda: lz.paged_attention(PQ, CACHE, CACHE.half(), TABLES, LENS),
        "KV_CACHE_DTYPE_MISMATCH",
    ),
    "paged softcap": (lambda: lz.paged_attention(PQ, CACHE, CACHE, TABLES, LENS, softcap=-1.0), "VALUE_INVALID"),
    "paged slopes": (
        lambda: lz.paged_attention(PQ, CACHE, CACHE, TABLES, LENS, alibi_slopes=torch.ones(3)),
        "SHAPE_INVALID",
    ),
    "paged layout": (lambda: lz.paged_attention(PQ, CACHE, CACHE, TABLES, LENS, layout="BHSD"), "LAYOUT_UNKNOWN"),
    "paged text": (lambda: lz.paged_attention("q", CACHE, CACHE, TABLES, LENS), "TYPE_INVALID"),
}


@pytest.mark.req("R-CTX-08", "R-CTX-14", "R-FAIL-04")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_clear_error(lab: Any, name: str) -> None:
    call, code = BAD[name]
    for _ in range(2):  # the second time as well
        with pytest.raises(LayerZeroError) as caught:
            call()
        assert caught.value.code == code, str(caught.value)
        assert caught.value.reasons[0].code == code
        assert caught.value.hint
    assert not state.health.snapshot().kernels
    assert lab.ran() == []


HOT_THEN_BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "scale": ({"scale": 0.5}, {"scale": NAN}, "SCALE_INVALID"),
    "dropout": ({"dropout_p": 0.5}, {"dropout_p": NAN}, "VALUE_INVALID"),
    "dropout above one": ({"dropout_p": 0.5}, {"dropout_p": 1.5}, "VALUE_INVALID"),
    "softcap": ({"softcap": 5.0}, {"softcap": -5.0}, "VALUE_INVALID"),
    "window that equals": ({"window": (1, 0)}, {"window": (True, False)}, "TYPE_INVALID"),
    "window 4.0": ({"window": 4}, {"window": 4.0}, "TYPE_INVALID"),
    "causal 1": ({"is_causal": True}, {"is_causal": 1}, "VALUE_INVALID"),
}


@pytest.mark.parametrize("name", HOT_THEN_BAD)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_bad_value_is_seen_although_its_key_is_hot(lab: Any, name: str, backend: str | None) -> None:
    good, bad, code = HOT_THEN_BAD[name]
    for _ in range(2):
        lz.attention(Q, K, K, backend=backend, **good)
    with pytest.raises(InvalidInputError) as caught:
        lz.attention(Q, K, K, backend=backend, **bad)
    assert caught.value.code == code
    near = t(2, 2, 8, 8)  # the same bucket of another length
    with pytest.raises(InvalidInputError) as caught:
        lz.attention(Q, near, near, backend=backend, **bad)
    assert caught.value.code == code
    assert not state.health.snapshot().kernels


def test_a_short_block_table_is_seen_although_its_key_is_hot(lab: Any) -> None:
    lz.paged_attention(PQ, CACHE, CACHE, TABLES, LENS)
    longer = torch.tensor([3, 6], dtype=torch.int32)
    lz.paged_attention(PQ, CACHE, CACHE, TABLES, longer)
    with pytest.raises(InvalidInputError) as caught:
        lz.paged_attention(PQ, CACHE, CACHE, TABLES[:, :1], longer)
    assert caught.value.code == "BLOCK_TABLE_INVALID"


def test_the_message_carries_value_limit_and_next_step() -> None:
    with pytest.raises(InvalidInputError) as caught:
        lz.attention(t(2, 3, 5, 8), K, K)
    (why,) = caught.value.reasons
    assert (why.value, why.limit) == (3, 2)
    assert "GQA_RATIO_INVALID" in str(caught.value)
    assert "correct the head counts" in str(caught.value)
    assert isinstance(caught.value, ValueError)


EXPECTED: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: lz.rms_norm(X, torch.ones(9)), "weight has shape (9,), expected (8,)"),
    "widths": (lambda: lz.linear(X, t(4, 9)), "x and weight disagree: got (3, 8), expected [..., 9]"),
    "rank": (lambda: lz.sample(t(9)), "logits has rank 1, expected 2"),
    "number": (lambda: lz.sample(t(2, 9), top_p=1.5), "top_p is 1.5, expected a number in [0.0, 1.0]"),
    "width": (lambda: lz.silu_and_mul(t(3, 7)), "the last axis is 7, expected an even width"),
    "dtype": (lambda: lz.embedding(t(3), t(4, 8)), "ids float32, expected int32 or int64"),
    "range": (lambda: lz.embedding(ints(3) + 4, t(4, 8)), "ids hold 4, outside 0 to 3 ["),
    "tables": (lambda: lz.rope(Q, None, COS[:3], COS[:3]), "5 tokens, but cos and sin have 3 rows"),
    "plan": (lambda: lz.plan("rms_norm", X, W, check=True)(t(4, 8), W), "called with (torch.Size([4, 8])"),
    "setting": (lambda: lz.configure(deni=["cpu"]), "deni: expected the name of a setting; did you mean deny?"),
    "patterns": (lambda: lz.configure(deny=5), "deny: expected a valid string, got 5"),
    "op": (lambda: lz.ops.qqq, "use one of: add_rms_norm, "),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_words_of_an_error_say_what_is_expected(name: str) -> None:
    call, words = EXPECTED[name]
    with pytest.raises((LayerZeroError, AttributeError)) as caught:
        call()
    assert words in str(caught.value)


def test_a_call_with_backend_names_the_kernels_of_that_backend_and_the_next_step() -> None:
    with lz.scoped(deny=["torch"]), pytest.raises(LayerZeroError) as caught:
        lz.rms_norm(X, W, backend="torch")
    told = str(caught.value)
    assert "\n  torch.rms_norm.native: POLICY_DENIED" in told and "reference.rms_norm" not in told
    assert told.endswith("; remove the deny rule")


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        lz.which("atention", Q, K, K)
    assert "attention" in str(caught.value)
    with pytest.raises(UnknownNameError) as caught:
        lz.attention(Q, K, K, backend="spda")
    assert "sdpa" in str(caught.value)
    assert isinstance(caught.value, LookupError)


@pytest.mark.req("R-CTX-03")
def test_only_an_open_layout_can_be_ambiguous() -> None:
    square = t(1, 8, 8, 16)
    with pytest.raises(InvalidInputError) as caught:
        Context.from_tensors(square, square, square)
    assert caught.value.code == "LAYOUT_AMBIGUOUS"
    assert lz.attention(square, square, square).shape == square.shape


# -- defined results ------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", [{}, {"locks": {"attention": "sdpa.attention.math"}}, {"prefer": ["sdpa"]}])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("backend", [None, "sdpa"])
def test_empty_batches_and_queries_give_empty_results(
    lab: Any, settings: dict[str, Any], layout: str, backend: str | None
) -> None:
    with lz.scoped(**settings):
        for shape in ((0, 2, 5, 8), (2, 2, 0, 8)):
            q = t(*shape) if layout == "BHSD" else t(shape[0], shape[2], shape[1], shape[3])
            k = t(shape[0], 2, 7, 8) if layout == "BHSD" else t(shape[0], 7, 2, 8)
            for _ in range(2):
                (out, lse), ran = lab.run(lz.attention, q, k, k, layout=layout, return_lse=True, backend=backend)
                assert out.shape == q.shape
                assert lse.shape == (shape[0], 2, shape[2])
                assert ran == ["reference.attention.plain"]
                named = lz.explain("attention", q, k, k, layout=layout, return_lse=True, backend=backend)
                assert named.chosen == ran[0]


def test_empty_rows_give_empty_results(lab: Any) -> None:
    for x in (t(0, 8), t(2, 0, 8)):
        assert lz.rms_norm(x, W).shape == x.shape
        assert lz.layer_norm(x, W, W).shape == x.shape
        assert lz.silu_and_mul(x).shape == (*x.shape[:-1], 4)
        assert lz.linear(x, t(5, 8)).shape == (*x.shape[:-1], 5)
    assert lz.embedding(ints(0), t(4, 8)).shape == (0, 8)
    assert lz.sample_topk(t(0, 9), 3).shape == (0,)
    lz.lock("rms_norm", "torch.rms_norm.native")
    assert lz.rms_norm(t(0, 8), W).shape == (0, 8)


def test_a_row_that_may_attend_nothing_gives_zeros(lab: Any) -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1] = False
    dead = torch.zeros(5, 7).masked_fill(~mask, -math.inf)
    for backend in (None, "sdpa.attention.math", "reference"):
        for given in (mask, dead):
            out = lz.attention(Q, K, K, given, backend=backend)
            assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
            assert out.isfinite().all()
    out, lse = lz.attention(Q, K, K, mask, return_lse=True)
    assert (lse[:, :, 1] == -math.inf).all()
    assert lse[:, :, [0, 2, 3, 4]].isfinite().all()
    short = t(2, 2, 3, 8)  # bottom right with more queries than keys: the first rows see nothing
    out, lse = lz.attention(Q, short, short, is_causal="bottom_right", return_lse=True)
    assert not out[:, :, :2].any()
    assert (lse[:, :, :2] == -math.inf).all()


@pytest.mark.parametrize("window", [[3, 0], (3, 0), 3])
def test_a_window_may_be_an_int_a_tuple_or_a_list(lab: Any, window: Any) -> None:
    wanted = lz.attention(Q, K, K, window=(3, 0), backend="reference")
    for _ in range(2):
        torch.testing.assert_close(lz.attention(Q, K, K, window=window), wanted)


def test_an_unlimited_window_is_no_window(lab: Any) -> None:
    report = lz.explain("attention", Q, K, K, window=(-1, -1))
    assert "window" not in report.context.needs
    torch.testing.assert_close(lz.attention(Q, K, K, window=(-1, -1)), lz.attention(Q, K, K))

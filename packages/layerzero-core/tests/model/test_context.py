"""From tensors to a Context: what is captured, what is inferred, what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.errors import InvalidInputError, LayerZeroWarning
from layerzero.model.context import Context
from layerzero.model.enums import Causal, Layout, MaskKind


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def inferred(*tensors: torch.Tensor) -> Context:
    with pytest.warns(LayerZeroWarning, match="LAYOUT_INFERRED"):
        return Context.from_tensors(*tensors)


# -- layout ---------------------------------------------------------------------------------------
@pytest.mark.req("R-CTX-01")
def test_the_longer_axis_is_taken_for_the_sequence_with_a_warning() -> None:
    assert inferred(t(2, 64, 8, 16)).layout is Layout.BSHD
    assert inferred(t(2, 4, 8, 16)).layout is Layout.BHSD
    ctx = inferred(t(2, 64, 8, 16))
    assert (ctx.seq_len_q, ctx.num_heads) == (64, 8)
    assert ctx.notes[0].code == "LAYOUT_INFERRED"


@pytest.mark.req("R-CTX-01")
def test_no_layout_is_guessed_where_one_is_given_and_never_by_a_call() -> None:
    """Sixty-four by two: `from_tensors` alone takes the first for the length, and only where nobody says otherwise."""
    q = t(1, 64, 2, 16)
    assert inferred(q).layout is Layout.BSHD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout, heads, length in ((Layout.BHSD, 64, 2), (Layout.BSHD, 2, 64)):
            given = Context.from_tensors(q, layout=layout)
            assert (given.layout, given.num_heads, given.seq_len_q) == (layout, heads, length) and not given.notes
        asked = lz.explain("attention", q, q, q).context
        assert (asked.layout, asked.num_heads, asked.notes) == (Layout.BHSD, 64, ())
        assert lz.explain("attention", q, q, q, layout=None).context.layout is Layout.BHSD  # not said is the default
        out = lz.attention(q, q, q, layout=None)
        assert torch.equal(lz.attention(q, q, q), out)
    wide = q.double()
    want = torch.nn.functional.scaled_dot_product_attention(wide, wide, wide)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.req("R-CTX-02", "R-CTX-03")
def test_equal_axes_are_told_apart_by_strides_or_refused() -> None:
    square = t(2, 16, 16, 8)
    with pytest.raises(InvalidInputError) as caught:
        Context.from_tensors(square)
    assert caught.value.code == "LAYOUT_AMBIGUOUS"
    assert inferred(square.transpose(1, 2)).layout is Layout.BHSD
    for layout in ("BHSD", "BSHD"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Context.from_tensors(square, layout=layout).layout is Layout(layout)


@pytest.mark.req("R-CTX-03")
def test_a_decode_step_is_never_guessed_from_sizes() -> None:
    for shape in ((2, 1, 8, 16), (2, 8, 1, 16)):
        with pytest.raises(InvalidInputError) as caught:
            Context.from_tensors(t(*shape))
        assert caught.value.code == "LAYOUT_AMBIGUOUS"
        assert "layout=" in caught.value.hint
    assert inferred(t(2, 8, 1, 16), t(2, 8, 40, 16), t(2, 8, 40, 16)).layout is Layout.BHSD
    assert inferred(t(2, 1, 8, 16), t(2, 40, 8, 16), t(2, 40, 8, 16)).layout is Layout.BSHD


@pytest.mark.req("R-CTX-02")
def test_an_explicit_layout_overrides_every_guess() -> None:
    """Of the sizes, of the strides (equal axes or not), and of the axis in which query and key differ."""
    swapped, square = t(2, 8, 64, 16).transpose(1, 2), t(2, 16, 16, 8).transpose(1, 2)
    longer = t(2, 4, 16, 16), t(2, 4, 8, 16)
    for tensors, guess in (((t(2, 64, 8, 16),), "BSHD"), ((swapped,), "BHSD"), ((square,), "BHSD"), (longer, "BHSD")):
        assert inferred(*tensors).layout is Layout(guess)
        other = "BSHD" if guess == "BHSD" else "BHSD"
        ctx = Context.from_tensors(*tensors, layout=other)
        heads, length = (1, 2) if other == "BHSD" else (2, 1)
        size = tensors[0].shape
        assert (ctx.layout, ctx.num_heads, ctx.seq_len_q) == (Layout(other), size[heads], size[length])


# -- sizes, strides -------------------------------------------------------------------------------
@pytest.mark.req("R-CTX-05", "R-CTX-06", "R-CTX-10")
def test_sizes_and_groups_are_extracted() -> None:
    ctx = Context.from_tensors(t(2, 8, 5, 320), t(2, 2, 9, 320), t(2, 2, 9, 320), layout="BHSD")
    assert (ctx.batch, ctx.num_heads, ctx.num_kv_heads) == (2, 8, 2)
    assert (ctx.seq_len_q, ctx.seq_len_k, ctx.head_dim) == (5, 9, 320)
    assert ctx.enable_gqa
    assert ctx.gqa_ratio == 4
    assert "gqa" in ctx.needs
    plain = Context.from_tensors(t(2, 8, 5, 16), layout="BHSD")
    assert not plain.enable_gqa
    assert plain.gqa_ratio == 1


@pytest.mark.req("R-CTX-05", "R-CTX-06")
@pytest.mark.parametrize(("kv_heads", "ratio"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_sizes_are_those_of_the_layout_in_a_context_and_in_a_call(kv_heads: int, ratio: int) -> None:
    q, k, v = t(3, 8, 5, 16), t(3, kv_heads, 9, 16), t(3, kv_heads, 9, 24)
    for layout in ("BHSD", "BSHD"):
        given = (q, k, v) if layout == "BHSD" else tuple(item.transpose(1, 2).contiguous() for item in (q, k, v))
        for ctx in (
            Context.from_tensors(*given, layout=layout),
            lz.explain("attention", *given, layout=layout).context,
        ):
            assert (ctx.batch, ctx.num_heads, ctx.num_kv_heads) == (3, 8, kv_heads)
            assert (ctx.seq_len_q, ctx.seq_len_k, ctx.head_dim, ctx.dim("head_dim_v")) == (5, 9, 16, 24)
            assert (ctx.enable_gqa, ctx.gqa_ratio, "gqa" in ctx.needs) == (ratio > 1, ratio, ratio > 1)


@pytest.mark.req("R-CTX-10")
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_shared_heads_of_320_that_skip_every_other_number_give_what_torch_gives(lab: Any, layout: str) -> None:
    q, k, v = t(2, 8, 5, 640)[..., ::2], t(2, 2, 9, 640)[..., ::2], t(2, 2, 9, 640)[..., 1::2]
    dense = q.contiguous(), k.contiguous(), v.contiguous()
    wanted = torch.nn.functional.scaled_dot_product_attention(*dense, enable_gqa=True)
    given: Any = (q, k, v) if layout == "BHSD" else tuple(item.transpose(1, 2) for item in (q, k, v))
    ctx = lz.explain("attention", *given, layout=layout).context
    assert (ctx.gqa_ratio, ctx.stride_last_dim, ctx.head_dim) == (4, 2, 320)
    there = Context.from_tensors(*(item.half() for item in given), layout=layout, device=named_device("h100"))
    refused = lz.explain("attention", replace(there, strides=ctx.strides)).reasons
    for kernel in ("sdpa.attention.flash", "sdpa.attention.cudnn"):
        assert {"STRIDE_LAST_DIM", "HEAD_DIM_TOO_LARGE"} <= {why.code.value for why in refused[kernel]}
    found = lz.attention(*given, layout=layout)
    torch.testing.assert_close(found if layout == "BHSD" else found.transpose(1, 2), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.req("R-CTX-04", "R-CTX-10", "R-CTX-15")
def test_strides_are_captured() -> None:
    whole = Context.from_tensors(t(2, 4, 5, 16), layout="BHSD")
    assert whole.is_contiguous
    assert whole.stride_last_dim == 1
    skipping = Context.from_tensors(t(2, 4, 5, 32)[..., ::2], layout="BHSD")
    assert not skipping.is_contiguous
    assert skipping.stride_last_dim == 2
    turned = Context.from_tensors(t(2, 5, 4, 16).transpose(1, 2), layout="BHSD")
    assert turned.strides.order == "swapped"
    assert turned.stride_last_dim == 1
    expanded = Context.from_tensors(t(1, 1, 5, 16).expand(2, 4, 5, 16), layout="BHSD")
    assert expanded.strides.order == "other"
    uneven = Context.from_tensors(t(2, 4, 5, 17)[..., :16], layout="BHSD")
    assert not uneven.strides.aligned
    dense, skips = t(2, 4, 5, 16), t(2, 4, 5, 32)[..., ::2]
    for tensors in ((dense, skips, dense), (dense, dense, skips)):  # one of the three is enough
        ctx = Context.from_tensors(*tensors, layout="BHSD")
        assert (ctx.is_contiguous, ctx.stride_last_dim) == (False, 2)


@pytest.mark.req("R-CTX-15")
def test_views_give_the_result_of_their_dense_copies(lab: Any) -> None:
    base = t(2, 5, 3, 4, 32)
    views = [
        base[:, :, 1].transpose(1, 2),
        base[:, :, 0, :, ::2].transpose(1, 2),
        base[:, 0].expand(2, 3, 4, 32),
        base.permute(2, 0, 3, 1, 4)[1],
    ]
    for view in views:
        out = lz.attention(view, view, view, is_causal=True)
        dense = view.contiguous()
        wanted = lz.attention(dense, dense, dense, is_causal=True, backend="reference")
        torch.testing.assert_close(out, wanted)


# -- masks, flags, modes --------------------------------------------------------------------------
@pytest.mark.req("R-CTX-07")
@pytest.mark.parametrize(
    ("mask", "kind"),
    [(None, MaskKind.NONE), (torch.ones(5, 5, dtype=torch.bool), MaskKind.BOOL), (torch.zeros(5, 5), MaskKind.FLOAT)],
)
def test_mask_kinds(mask: torch.Tensor | None, kind: MaskKind) -> None:
    assert Context.from_tensors(t(2, 4, 5, 8), layout="BHSD", attn_mask=mask).attn_mask_type is kind


@pytest.mark.req("R-CTX-08", "R-FAIL-04", "R-BK-SDPA-02")
@pytest.mark.parametrize("causal", [True, "bottom_right"])
def test_a_mask_beside_is_causal_is_refused(causal: Any) -> None:
    for call in (lambda **kw: Context.from_tensors(t(2, 4, 5, 8), layout="BHSD", **kw), _attend):
        with pytest.raises(InvalidInputError) as caught:
            call(attn_mask=torch.zeros(5, 5), is_causal=causal)
        assert caught.value.code == "MASK_WITH_CAUSAL"


def _attend(**kwargs: Any) -> Any:
    q = t(2, 4, 5, 8)
    return lz.attention(q, q, q, **kwargs)


@pytest.mark.req("R-CTX-14")
def test_masks_broadcast_or_are_refused(lab: Any) -> None:
    q, k = t(2, 4, 5, 8), t(2, 2, 7, 8)
    for shape in ((5, 7), (1, 7), (5, 1), (1, 1), (4, 5, 7), (1, 5, 7), (2, 4, 5, 7), (2, 1, 1, 7), (1, 4, 5, 1)):
        for mask in (torch.rand(shape) > 0.4, torch.randn(shape)):
            out = lz.attention(q, k, k, mask)
            torch.testing.assert_close(out, lz.attention(q, k, k, mask, backend="reference"))
    for shape in ((7,), (5, 6), (4, 7), (3, 5, 7), (2, 5, 7), (2, 2, 5, 7), (1, 2, 4, 5, 7)):
        with pytest.raises(InvalidInputError) as caught:
            lz.attention(q, k, k, torch.zeros(shape))
        assert caught.value.code == "MASK_NOT_BROADCASTABLE"
        assert str(shape) in str(caught.value)


def test_three_axes_take_a_mask_per_batch_as_in_sdpa(lab: Any) -> None:
    q, k = t(3, 5, 8), t(3, 7, 8)
    for mask in (torch.rand(3, 5, 7) > 0.3, torch.randn(3, 5, 7), torch.rand(5, 7) > 0.3, torch.rand(3, 1, 7) > 0.3):
        for layout in ("BHSD", "BSHD"):
            out = lz.attention(q, k, k, mask, layout=layout)
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
            torch.testing.assert_close(out, wanted.nan_to_num(0.0))
    for layout in ("BHSD", "BSHD"):
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        torch.testing.assert_close(lz.attention(q, k, k, is_causal=True, layout=layout), wanted)


@pytest.mark.req("R-CTX-09")
def test_dropout_scale_and_gradient_are_captured() -> None:
    q = t(2, 4, 5, 8).requires_grad_()
    ctx = Context.from_tensors(q, layout="BHSD", dropout_p=0.25, scale=0.5)
    assert (ctx.dropout_p, ctx.scale, ctx.requires_grad) == (0.25, 0.5, True)
    assert {"dropout", "backward"} <= ctx.needs
    other = Context.from_tensors(q, layout="BHSD", dropout_p=0.5, scale=0.1)
    assert ctx == other, "values do not decide"
    assert ctx != Context.from_tensors(q, layout="BHSD")


@pytest.mark.req("R-CTX-11", "R-CTX-12", "R-CTX-13")
def test_cache_parallelism_and_quantization_are_fields() -> None:
    ctx = Context.from_tensors(
        t(2, 4, 5, 8),
        layout="BHSD",
        kv_cache_layout=Layout.HND,
        kv_cache_dtype="float8_e4m3fn",
        tp_size=4,
        tp_rank=3,
        quant_format="fp8_e4m3",
        granularity="channel",
    )
    assert (ctx.kv_cache_layout, ctx.kv_cache_dtype) == (Layout.HND, "float8_e4m3fn")
    assert (ctx.tp_size, ctx.tp_rank) == (4, 3)
    assert (ctx.quant_format, ctx.granularity) == ("fp8_e4m3", "channel")
    data = ctx.to_json()
    assert data["tp_size"] == 4
    assert data["kv_cache_layout"] == "HND"


def test_both_causal_alignments_are_explicit() -> None:
    q, k = t(2, 4, 5, 8), t(2, 4, 9, 8)
    for given, kind in ((False, Causal.NONE), (True, Causal.TOP_LEFT), ("bottom_right", Causal.BOTTOM_RIGHT)):
        ctx = Context.from_tensors(q, k, k, layout="BHSD", is_causal=given)
        assert ctx.causal is kind
    assert ctx.seq_relation != "equal"


def test_a_device_that_is_not_here_can_be_described() -> None:
    ctx = Context.from_tensors(t(2, 4, 5, 8), layout="BHSD", device=named_device("b200"))
    assert ctx.device.sm_version == 100
    assert ctx.get("sm_version") == 100


def test_torchs_causal_bias_objects_are_taken_at_their_word(lab: Any) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k = t(2, 4, 5, 8), t(2, 2, 9, 8)
    for _ in range(3):  # cold and hot, one after the other with equal shapes
        for make, kind in ((causal_lower_right, "bottom_right"), (causal_upper_left, True)):
            out = lz.attention(q, k, k, make(5, 9))
            torch.testing.assert_close(out, lz.attention(q, k, k, is_causal=kind, backend="reference"))
    with pytest.raises(InvalidInputError) as caught:
        lz.attention(q, k, k, causal_lower_right(5, 8))
    assert caught.value.code == "MASK_NOT_BROADCASTABLE"
    with pytest.raises(InvalidInputError) as caught:
        lz.attention(q, k, k, causal_lower_right(5, 9), is_causal=True)
    assert caught.value.code == "MASK_WITH_CAUSAL"

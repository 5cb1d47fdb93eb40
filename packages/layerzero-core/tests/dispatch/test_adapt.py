"""Adaptation: a kernel that takes only one form of a call still computes every other form it may be adapted to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.model.enums import Layout
from layerzero.numerics import assert_close, tolerance

EVERY = frozenset({"layout", "contiguous", "dtype", "gqa", "mask"})
BHSD, BSHD = frozenset({Layout.BHSD}), frozenset({Layout.BSHD})
BASE = frozenset({"backward", "mask_grad", "lse"})


def tensors(layout: str = "BHSD", seq_q: int = 5, seq_k: int = 7, heads: int = 4, kv_heads: int = 2) -> list[Any]:
    def one(count: int, seq: int) -> torch.Tensor:
        return torch.randn((2, count, seq, 8) if layout == "BHSD" else (2, seq, count, 8))

    return [one(heads, seq_q), one(kv_heads, seq_k), one(kv_heads, seq_k)]


def truth(args: list[Any], kwargs: dict[str, Any]) -> Any:
    return lz.attention(*args, **{**kwargs, "backend": "reference"})


def check(lab: Any, args: list[Any], kwargs: dict[str, Any], transforms: set[str] | None = None) -> Any:
    """The adapted kernel runs, hot and cold, and gives the reference's numbers."""
    report = lz.explain("attention", *args, **kwargs)
    assert report.chosen == "narrow.attention.k", str(report)
    steps = {step.name for step in report.decision.winner.transforms}
    if transforms is not None:
        assert steps == transforms
    wanted = truth(args, kwargs)
    main = wanted[0] if isinstance(wanted, tuple) else wanted
    for _ in range(2):
        out, ran = lab.run(lz.attention, *args, **kwargs)
        assert ran == ["narrow.attention.k"]
        assert_close(out, wanted, tolerance("attention", main.dtype), check_dtype=True)
    return report


def narrow(lab: Any, **fields: Any) -> None:
    given: dict[str, Any] = {"features": BASE | {"gqa"}, "adapt": EVERY, "priority": 99, "layouts": BHSD}
    lab.use(lab.kernel("narrow.attention.k", **{**given, **fields}), only=True)


@pytest.mark.parametrize(("own", "given"), [(BHSD, "BSHD"), (BSHD, "BHSD"), (BHSD, "BHSD"), (BSHD, "BSHD")])
@pytest.mark.parametrize("lse", [False, True])
def test_layout(lab: Any, own: frozenset[Layout], given: str, lse: bool) -> None:
    narrow(lab, layouts=own)
    (name,) = (item.value for item in own)
    steps = set() if name == given else {f"layout:{given}->{name}"}
    check(lab, tensors(given), {"layout": given, "return_lse": lse}, steps)


@pytest.mark.parametrize("own", [BHSD, BSHD])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_three_axes_are_one_head_whatever_the_layout_says(lab: Any, own: frozenset[Layout], layout: str) -> None:
    narrow(lab, layouts=own, features=BASE | {"mask_bool"})
    args = [torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)]
    check(lab, args, {"layout": layout, "return_lse": True})
    check(lab, args, {"layout": layout, "attn_mask": torch.rand(2, 5, 7) > 0.3})
    expected = torch.nn.functional.scaled_dot_product_attention(*args)
    torch.testing.assert_close(lz.attention(*args, layout=layout), expected)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gqa_by_expanding_the_kv_heads(lab: Any, layout: str, kv_heads: int) -> None:
    narrow(lab, features=BASE)
    args = tensors(layout, kv_heads=kv_heads)
    report = check(lab, args, {"layout": layout})
    assert "expand_kv" in {step.name for step in report.decision.winner.transforms}


MASKS = (frozenset({"mask_bool"}), frozenset({"mask_float"}), frozenset({"mask_bool", "mask_float"}))


@pytest.mark.parametrize("masks", MASKS, ids=["bool", "float", "both"])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("causal", [True, "bottom_right"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 7), (7, 5), (1, 9), (6, 6)])
def test_either_causal_alignment_through_a_mask(
    lab: Any, masks: frozenset[str], layout: str, causal: Any, seq_q: int, seq_k: int
) -> None:
    narrow(lab, features=BASE | {"gqa"} | masks)
    args = tensors(layout, seq_q, seq_k)
    report = check(lab, args, {"layout": layout, "is_causal": causal, "return_lse": True})
    assert "mask:causal" in {step.name for step in report.decision.winner.transforms}


@pytest.mark.parametrize("masks", MASKS, ids=["bool", "float", "both"])
@pytest.mark.parametrize("window", [0, 2, (3, -1), (-1, 1), (2, 2)])
@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_windows_through_a_mask(lab: Any, masks: frozenset[str], window: Any, causal: Any) -> None:
    narrow(lab, features=BASE | {"gqa", "causal_top_left"} | masks)
    for seq_q, seq_k in ((5, 7), (7, 5)):
        check(lab, tensors(seq_q=seq_q, seq_k=seq_k), {"window": window, "is_causal": causal, "return_lse": True})


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("masks", MASKS, ids=["bool", "float", "both"])
def test_a_given_mask_and_a_window_become_one_mask(lab: Any, kind: str, masks: frozenset[str]) -> None:
    narrow(lab, features=BASE | {"gqa"} | masks)
    mask = torch.rand(2, 1, 5, 7) > 0.3 if kind == "bool" else torch.randn(5, 7)
    args, kwargs = tensors(), {"attn_mask": mask, "window": (3, 2)}
    if kind == "float" and masks == {"mask_bool"}:
        assert lz.which("attention", *args, **kwargs) == "reference.attention.plain"
    else:
        check(lab, args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batched", [False, True])
def test_alibi_through_a_float_mask(lab: Any, dtype: torch.dtype, batched: bool) -> None:
    narrow(lab, features=BASE | {"gqa", "mask_float"})
    args = [t.to(dtype) for t in tensors()]
    slopes = torch.rand(2, 4) if batched else torch.rand(4)
    check(lab, args, {"alibi_slopes": slopes})
    check(lab, args, {"alibi_slopes": slopes, "is_causal": "bottom_right"})
    check(lab, args, {"alibi_slopes": slopes, "attn_mask": torch.rand(5, 7) > 0.2, "window": (4, 4)})
    halves = [t.half() for t in args]
    assert lz.which("attention", *halves, alibi_slopes=slopes) == "reference.attention.plain"


def test_a_bool_mask_becomes_a_float_one_for_kernels_that_add(lab: Any) -> None:
    narrow(lab, features=BASE | {"gqa", "mask_float"})
    for mask in (torch.rand(5, 7) > 0.3, torch.rand(2, 4, 5, 7) > 0.3, torch.zeros(5, 7, dtype=torch.bool)):
        check(lab, tensors(), {"attn_mask": mask, "return_lse": True}, {"mask:mask", "mask:float"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_and_comes_back(lab: Any, dtype: torch.dtype) -> None:
    narrow(lab, dtypes=frozenset({"float32"}))
    args = [t.to(dtype) for t in tensors()]
    name = str(dtype).removeprefix("torch.")
    check(lab, args, {"return_lse": True}, {f"cast:{name}->float32"})


def test_precision_is_never_lost_by_a_cast(lab: Any) -> None:
    narrow(lab, dtypes=frozenset({"float16", "bfloat16", "float32"}))
    args = [t.double() for t in tensors()]
    assert lz.which("attention", *args) == "reference.attention.plain"
    lab.use(lab.kernel("narrow.attention.k", adapt=EVERY, dtypes=frozenset({"float16"}), priority=99), only=True)
    assert lz.which("attention", *tensors()) == "reference.attention.plain"


def test_mixed_inputs_take_the_dtype_of_the_query(lab: Any) -> None:
    narrow(lab)
    q, k, v = tensors()
    check(lab, [q, k.half(), v.double()], {}, {"cast:mixed->float32"})


def test_strided_inputs_are_packed_for_kernels_that_ask(lab: Any) -> None:
    def dense(*args: Any) -> Any:
        assert all(t.is_contiguous() for t in args[:3])
        return lab.reference("attention")(*args)

    lab.use(lab.kernel("narrow.attention.k", dense, contiguous=True, adapt=EVERY, priority=99), only=True)
    strided = [torch.randn(2, n, s, 16)[..., ::2] for n, s in ((4, 5), (2, 7), (2, 7))]
    check(lab, strided, {}, {"contiguous"})
    check(lab, tensors(), {}, set())
    check(lab, tensors("BSHD"), {"layout": "BSHD"}, {"layout:BSHD->BHSD", "contiguous"})
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors("BSHD")]
    check(lab, views, {"layout": "BSHD"}, {"layout:BSHD->BHSD"})


def test_rows_that_packing_cannot_align_are_not_promised(lab: Any) -> None:
    def aligned(*args: Any) -> Any:
        assert all(s * t.element_size() % 16 == 0 for t in args[:3] for s in t.stride()[:-1])
        return lab.reference("attention")(*args)

    lab.use(lab.kernel("narrow.attention.k", aligned, aligned_strides=True, adapt=EVERY, priority=99), only=True)
    loose = [torch.randn(2, n, s, 9)[..., :8] for n, s in ((4, 5), (2, 7), (2, 7))]
    check(lab, loose, {}, {"contiguous"})
    odd = [torch.randn(2, n, s, 6) for n, s in ((4, 5), (2, 7), (2, 7))]
    assert lz.which("attention", *odd) == "reference.attention.plain"


def test_odd_pointers_are_copied_for_kernels_that_ask(lab: Any) -> None:
    def needs_16(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.data_ptr() % 16 == 0
        assert weight.data_ptr() % 16 == 0
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)

    lab.use(lab.kernel("narrow.rms_norm.k", needs_16, pointer_alignment=16, adapt=EVERY, priority=99))
    storage = torch.randn(26)
    for x in (storage[:24].view(3, 8), storage[1:25].view(3, 8), storage[2:26].view(3, 8), storage[:24].view(3, 8)):
        out, ran = lab.run(lz.rms_norm, x, torch.ones(8))
        assert ran == ["narrow.rms_norm.k"]
        torch.testing.assert_close(out, torch.rms_norm(x, (8,), torch.ones(8), 1e-6))


def test_several_adaptations_at_once(lab: Any) -> None:
    narrow(lab, features=BASE | {"mask_float"}, dtypes=frozenset({"float32"}), contiguous=True, layouts=BSHD)
    args = [t.bfloat16() for t in tensors("BHSD")]
    report = check(lab, args, {"is_causal": "bottom_right", "window": (3, -1), "return_lse": True})
    assert len(report.decision.winner.transforms) >= 6


def test_gradients_flow_through_adaptations(lab: Any) -> None:
    narrow(lab, features=BASE | {"mask_float"}, layouts=BSHD)
    for kwargs in ({"is_causal": "bottom_right"}, {"window": 2}, {"alibi_slopes": torch.rand(4, requires_grad=True)}):
        args = [t.requires_grad_() for t in tensors()]
        leaves = [*args, *(v for v in kwargs.values() if isinstance(v, torch.Tensor))]
        assert lz.which("attention", *args, **kwargs) == "narrow.attention.k"
        mine = torch.autograd.grad(lz.attention(*args, **kwargs).square().sum(), leaves)
        wanted = torch.autograd.grad(truth(args, kwargs).square().sum(), leaves)
        for left, right in zip(mine, wanted, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.req("R-PT-06")
def test_under_autocast_masks_and_slopes_keep_their_precision(lab: Any) -> None:
    seen: list[Any] = []

    def spy(*args: Any) -> Any:
        seen.append([a.dtype if isinstance(a, torch.Tensor) else None for a in args])
        assert not torch.is_autocast_enabled("cpu")
        return lab.reference("attention")(*args)

    lab.use(lab.kernel("narrow.attention.k", spy, priority=99), only=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lz.attention(*tensors(), torch.randn(5, 7))
        lz.attention(*tensors(), alibi_slopes=torch.rand(4))
        double = [t.double() for t in tensors()]
        assert lz.attention(*double).dtype is torch.float64
        assert lz.explain("attention", *double).context.dtype == "float64", "as in torch, autocast leaves it alone"
    brain = [torch.bfloat16] * 3
    assert seen[0][:4] == [*brain, torch.float32]
    assert seen[1][:3] == brain
    assert seen[1][9] is torch.float32
    assert seen[2][:3] == [torch.float64] * 3


# -- other ops ------------------------------------------------------------------------------------
def test_every_floating_result_comes_back_in_the_calls_dtype(lab: Any) -> None:
    wide = frozenset({"float32"})
    lab.use(
        lab.kernel("narrow.add_rms_norm.k", dtypes=wide, adapt=EVERY, priority=99),
        lab.kernel("narrow.sample_topk.k", dtypes=wide, adapt=EVERY, priority=99),
        lab.kernel("narrow.linear.k", dtypes=wide, adapt=EVERY, priority=99),
    )
    x, w = torch.randn(3, 8).bfloat16(), torch.ones(8).bfloat16()
    (y, stream), ran = lab.run(lz.add_rms_norm, x, x, w)
    assert ran == ["narrow.add_rms_norm.k"]
    assert y.dtype is stream.dtype is torch.bfloat16
    ids, ran = lab.run(lz.sample_topk, torch.randn(2, 300).half(), 1)
    assert ran == ["narrow.sample_topk.k"]
    assert ids.dtype is torch.int64
    out, ran = lab.run(lz.linear, x, torch.randn(4, 8).bfloat16())
    assert ran == ["narrow.linear.k"]
    assert out.dtype is torch.bfloat16


def test_adaptations_that_only_attention_has_are_not_promised_elsewhere(lab: Any) -> None:
    lab.use(lab.kernel("narrow.rope.k", layouts=BSHD, adapt=EVERY, priority=99))
    q, angles = torch.randn(1, 2, 5, 8), torch.rand(5, 4)
    out, ran = lab.run(lz.rope, q, None, angles.cos(), angles.sin())
    assert ran != ["narrow.rope.k"]
    turned = q.transpose(1, 2).contiguous()
    swapped, ran = lab.run(lz.rope, turned, None, angles.cos(), angles.sin(), layout="BSHD")
    assert ran == ["narrow.rope.k"]
    torch.testing.assert_close(swapped[0].transpose(1, 2), out[0])


def test_quantization_is_not_widened_behind_the_callers_back(lab: Any) -> None:
    fields = {"quant_formats": frozenset({"int8"}), "granularities": frozenset({"tensor"})}
    lab.use(lab.kernel("narrow.quantize.k", dtypes=frozenset({"float32"}), adapt=EVERY, priority=99, **fields))
    packed, ran = lab.run(lz.quantize, torch.randn(4, 8).bfloat16(), "int8")
    assert ran == ["torch.quantize.native"]
    assert packed.dtype is torch.bfloat16


@pytest.mark.parametrize("pair", list(itertools.product(["BHSD", "BSHD"], ["sdpa.attention.math", None])))
def test_the_built_in_kernels_compute_every_form(lab: Any, pair: tuple[str, str | None]) -> None:
    layout, backend = pair
    forms: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"is_causal": "bottom_right"},
        {"window": (2, 1)},
        {"window": 2, "is_causal": True},
        {"alibi_slopes": torch.rand(4)},
        {"attn_mask": torch.rand(5, 7) > 0.3},
        {"attn_mask": torch.rand(4, 5, 7) > 0.3},
        {"attn_mask": torch.randn(2, 1, 5, 7)},
        {"attn_mask": torch.rand(5, 7) > 0.3, "window": (2, 2)},
    ]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for form in forms:
            args = [t.to(dtype) for t in tensors(layout)]
            kwargs = {"layout": layout, **form}
            if backend and lz.validate(backend, *args, **kwargs):
                continue
            out = lz.attention(*args, backend=backend, **kwargs)
            assert_close(out, truth(args, kwargs), tolerance("attention", dtype), path=f"{dtype} {form}")


def as_it_lies(function: Any) -> Any:
    """A vendor's kernel: it is shown a tensor's memory, and nothing of what torch notes beside it."""

    def run(*args: Any) -> Any:
        return function(*(torch.from_dlpack(item) if isinstance(item, torch.Tensor) else item for item in args))

    return run


@pytest.mark.fault(6)
@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul", "attention"])
def test_a_vendor_meets_no_view_that_stands_for_its_negative(lab: Any, name: str) -> None:
    lab.use(lab.kernel(f"vendor.{name}.k", as_it_lies(lab.reference(name)), priority=99.0), only=True)
    x = torch.randn(1, 2, 3, 8)
    args = {"rms_norm": (x, x[0, 0, 0]), "silu_and_mul": (x,), "attention": (x, x + 1, x - 1)}[name]
    for place, item in enumerate(args):
        view = torch._neg_view(-item)
        for _ in range(2):  # cold and hot
            out, ran = lab.run(getattr(lz, name), *args[:place], view, *args[place + 1 :])
            assert ran == [f"vendor.{name}.k"]
            torch.testing.assert_close(out, getattr(lz, name)(*args, backend="reference"))


@pytest.mark.fault(6)
def test_what_a_vendor_writes_in_place_through_a_negated_view_arrives(lab: Any) -> None:
    def turned(q: Any, k: Any, cos: Any, sin: Any, *rest: Any) -> Any:
        raw = torch.from_dlpack(q)
        raw.copy_(lab.reference("rope")(raw, None, cos, sin, *rest[:-1], False)[0])
        return q, k

    lab.use(lab.kernel("vendor.rope.k", turned, priority=99.0), only=True)
    q, cos, sin = torch.randn(1, 2, 3, 8), torch.rand(3, 4), torch.rand(3, 4)
    right, _ = lz.rope(q, None, cos, sin, backend="reference")
    view = torch._neg_view(-q)
    (out, _), ran = lab.run(lz.rope, view, None, cos, sin, inplace=True)
    assert ran == ["vendor.rope.k"] and out is view
    torch.testing.assert_close(view, right)

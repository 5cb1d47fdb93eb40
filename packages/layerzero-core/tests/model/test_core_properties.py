"""Properties of the values selection is made of: contexts, keys, reasons, kernels, layouts, tolerances.

A few hundred examples in `make check`; with LAYERZERO_PROVE=1 more than ten thousand.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerzero.device.catalogue import named_device
from layerzero.dispatch.hot import describe_tensor, generic_key
from layerzero.errors import InvalidInputError
from layerzero.model.context import CPU, Context, Strides, TokenizerIdentity
from layerzero.model.describe import attention_context, infer_layout, parse_layout, stride_class, stride_class_of
from layerzero.model.enums import Causal, Layout, MaskKind, OpKind, Platform
from layerzero.model.kernel import KernelSpec, Limit
from layerzero.numerics import HitMode, Tolerance, compare, definition_tolerance, tolerance
from layerzero.plugin.manager import load_plugins
from layerzero.reasons import Reason, ReasonCategory, ReasonCode, reason
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.current import builtin_ops
from layerzero.selection.cache import SHARDS, shard_index
from layerzero.selection.engine import select
from layerzero.selection.world import World, boundaries, find

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
_PLANNED: dict[str, int] = {}

H100 = named_device("h100")
DEVICES = st.sampled_from([CPU, H100])
DTYPES = st.sampled_from(["float16", "bfloat16", "float32", "float64"])


def examples(quick: int, long: int) -> Callable[[Any], Any]:
    """How many examples a property gets in each lane; the long counts are added up below."""

    def decorate(test: Any) -> Any:
        lane = settings(
            max_examples=long if PROVE else quick,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        _PLANNED[test.__name__] = lane.max_examples if PROVE else long
        return pytest.mark.req("R-PROP-01")(lane(test))

    return decorate


@pytest.mark.req("R-PROP-01")
def test_the_long_lane_draws_more_than_ten_thousand_examples() -> None:
    assert sum(_PLANNED.values()) > 10_000 and len(_PLANNED) >= 13


# -- contexts -----------------------------------------------------------------------------------------------
@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """An attention call by its sizes and options: batch 1 to 128, sequences 1 to 8192, head_dim 1 to 512."""
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    found = {
        "batch": draw(st.integers(1, 128)),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "kv_heads": kv_heads,
        "seq_q": draw(st.integers(1, 8192)),
        "seq_k": draw(st.integers(1, 8192)),
        "dim": draw(st.integers(1, 512)),
        "dtype": draw(DTYPES),
        "layout": draw(st.sampled_from(["BHSD", "BSHD"])),
        "device": draw(DEVICES),
    }
    options = {
        "is_causal": st.sampled_from([False, True, "bottom_right"]),
        "window": st.none() | st.integers(0, 4096) | st.tuples(st.integers(-1, 512), st.integers(-1, 512)),
        "softcap": st.none() | st.floats(0.1, 100.0),
        "return_lse": st.booleans(),
        "dropout_p": st.sampled_from([0.0, 0.1]),
        "scale": st.none() | st.floats(1e-3, 10.0),
    }
    return {**found, "options": draw(st.fixed_dictionaries({}, optional=options))}


def build(call: dict[str, Any], **changes: Any) -> Context:
    """The context of a call; its tensors have shapes but no memory."""
    call = {**call, **changes}
    query = (call["batch"], call["heads"], call["seq_q"], call["dim"])
    key = (call["batch"], call["kv_heads"], call["seq_k"], call["dim"])
    if call["layout"] == "BSHD":
        query, key = ((shape[0], shape[2], shape[1], shape[3]) for shape in (query, key))
    dtype = getattr(torch, call["dtype"])
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in (query, key, key))
    return attention_context(q, k, v, layout=call["layout"], device=call["device"], **call["options"])


@examples(80, 2000)
@given(calls())
def test_a_context_says_exactly_what_the_call_was(call: dict[str, Any]) -> None:
    ctx = build(call)
    sizes = {
        name: ctx.dim(name) for name in ("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_k", "head_dim")
    }
    assert list(sizes.values()) == [call[name] for name in ("batch", "heads", "kv_heads", "seq_q", "seq_k", "dim")]
    options = call["options"]
    window = options.get("window")
    assert ("gqa" in ctx.needs) is (call["heads"] != call["kv_heads"])
    assert ("window" in ctx.needs) is (window is not None and window != (-1, -1))
    assert ("softcap" in ctx.needs) is (options.get("softcap") is not None)
    assert ("lse" in ctx.needs) is options.get("return_lse", False)
    assert ("dropout" in ctx.needs) is (options.get("dropout_p", 0.0) > 0)
    causal = {False: set(), True: {"causal_top_left"}, "bottom_right": {"causal_bottom_right"}}
    said = {need for need in ctx.needs if need.startswith("causal")}
    assert said == causal[options.get("is_causal", False)]
    order = (call["seq_q"] > call["seq_k"]) - (call["seq_q"] < call["seq_k"])
    assert ctx.seq_relation == {0: "equal", 1: "longer", -1: "shorter"}[order]
    assert ctx.dtype == call["dtype"] and ctx.layout == call["layout"] and ctx.is_contiguous


@pytest.mark.req("R-CACHE-11")
@examples(60, 1500)
@given(calls())
def test_the_same_call_gives_an_equal_context_however_often_and_wherever(call: dict[str, Any]) -> None:
    one, two = build(call), build(call)
    assert one == two and hash(one) == hash(two) and one is not two
    assert pickle.loads(pickle.dumps(one)) == one
    assert json.loads(json.dumps(one.to_json())) == json.loads(json.dumps(two.to_json()))
    swapped = build(call, layout="BSHD" if call["layout"] == "BHSD" else "BHSD")
    assert swapped.dims == one.dims and swapped.needs == one.needs, "the layout changes the order, not the sizes"


# -- cache keys ---------------------------------------------------------------------------------------------
_OTHER: dict[str, Any] = {
    "op": "paged_attention", "device": H100, "dtype": "float8_e5m2", "needs": frozenset({"something"}),
    "dtypes": ("int8",), "layout": Layout.NHD, "rank": 7, "window": (5, 6), "dropout": True, "needs_grad": True,
    "autocast": "float16", "deterministic": True, "batch_invariant": True, "capturing": True,
    "backend": "mine", "quant_format": "int8",
    "granularity": "per_channel", "kv_cache_dtype": "int8", "kv_cache_layout": Layout.HND, "index_dtype": "int16",
    "tp_size": 4, "tp_rank": 3, "seq_relation": "unknown", "switched_off": frozenset({"x"}),
    "vetoed": frozenset({"y"}), "aligned_pointers": False, "folded": True,
}  # fmt: skip


@pytest.mark.req("R-CACHE-11")
@examples(60, 1500)
@given(calls(), st.sampled_from(sorted(_OTHER)), st.integers(1, 9), st.floats(0.1, 2.0))
def test_a_key_differs_by_anything_selection_may_see_and_by_nothing_else(
    call: dict[str, Any], name: str, more: int, scale: float
) -> None:
    ctx = build(call, device=CPU)
    changed = replace(ctx, **{name: _OTHER[name]})
    assert (changed != ctx) is (getattr(ctx, name) != _OTHER[name]) and shard_index(changed) in range(SHARDS)
    axis = random.Random(more).choice([axis for axis, _ in ctx.dims])
    assert ctx.with_dims(**{axis: ctx.dim(axis) + more}) != ctx
    assert ctx.with_dims(**{axis: ctx.dim(axis)}) == ctx
    same = replace(ctx, scale=scale, dropout_p=0.123, notes=(reason("SELECTED", 1),))
    assert same == ctx and hash(same) == hash(ctx) and shard_index(same) == shard_index(ctx)


@pytest.mark.req("R-CACHE-11")
def test_each_field_alone_makes_another_key() -> None:
    ctx = Context("attention", dims=(("head_dim", 64),))
    others: dict[str, Any] = _OTHER | {
        "dims": (("head_dim", 65),), "kind": OpKind.SAMPLING, "strides": Strides(order="swapped"),
        "causal": Causal.TOP_LEFT, "mask": MaskKind.BOOL, "weight_layout": "int4_tiles",
        "tokenizer": TokenizerIdentity("llama", "aaaa"),
    }  # fmt: skip
    made = {name: replace(ctx, **{name: other}) for name, other in others.items()}
    assert [name for name, changed in made.items() if changed == ctx] == []
    assert len({ctx, *made.values()}) == len(others) + 1, "nor does one change look like another"


def test_no_field_of_a_context_is_forgotten_above() -> None:
    compared = {item.name for item in fields(Context) if item.compare and not item.name.startswith("_")}
    left = compared - set(_OTHER) - {"dims", "kind", "strides", "causal", "mask", "tokenizer", "weight_layout"}
    assert not left, f"a new field: give it another value in _OTHER: {left}"


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@pytest.mark.req("R-CACHE-11")
@examples(60, 1200)
@given(shapes, shapes, st.sampled_from([torch.float32, torch.float16]), st.booleans(), st.floats(allow_nan=True))
def test_a_hot_key_holds_metadata_and_never_values(
    shape: tuple[int, ...], other: tuple[int, ...], dtype: torch.dtype, flag: bool, value: float
) -> None:
    x = torch.zeros(shape, dtype=dtype)
    key = generic_key("op", (x, None, flag, value), "BHSD", None)
    # Of a value only whether it is finite: what is not leads to the cold path, which refuses it.
    again = 0.25 if math.isfinite(value) else math.inf
    assert key == generic_key("op", (torch.ones(shape, dtype=dtype), None, flag, again), "BHSD", None)
    nans = {generic_key("op", (x.clone(), None, flag, odd), "BHSD", None) for odd in (math.nan, -math.nan, math.inf)}
    assert len(nans) == 1, "a NaN leaks no key"
    assert (key in nans) is not math.isfinite(value)
    assert key != generic_key("op", (x, None, not flag, value), "BHSD", None)
    assert key != generic_key("op", (x, None, flag, value), "BSHD", None)
    assert key != generic_key("op", (x, None, flag, value), "BHSD", "mine")
    assert key != generic_key("op", (x.requires_grad_(), None, flag, value), "BHSD", None)
    y = torch.zeros(other, dtype=torch.float64)
    assert describe_tensor(x) != describe_tensor(y)
    assert (describe_tensor(y) == describe_tensor(torch.zeros(shape, dtype=torch.float64))) is (shape == other)
    strided = torch.zeros((*other, 2), dtype=torch.float64)[..., 0]
    if max(other) > 1:
        assert describe_tensor(y) != describe_tensor(strided), "same shape, other strides"


# -- selection ----------------------------------------------------------------------------------------------
_REGISTRY = load_plugins(entry_points=()).registry


def _world(order: random.Random | None = None) -> World:
    kernels = list(_REGISTRY.kernels.values())
    if order is not None:
        order.shuffle(kernels)
    registry = KernelRegistry().add(kernels) if order is not None else _REGISTRY
    return World(registry, builtin_ops)


_WORLD, _SHUFFLED = _world(), _world(random.Random(7))


@examples(40, 1200)
@given(calls())
def test_selection_is_a_function_of_the_context_for_any_head_dim(call: dict[str, Any]) -> None:
    ctx = build(call)
    first, second, shuffled = select(ctx, _WORLD), select(build(call), _WORLD), select(ctx, _SHUFFLED)
    assert first.chosen == second.chosen == shuffled.chosen
    for one, two in zip(first.candidates, second.candidates, strict=True):
        assert (one.kernel_id, one.accepted, one.score, one.reasons) == (
            two.kernel_id,
            two.accepted,
            two.score,
            two.reasons,
        )
    judged = {candidate.kernel_id for candidate in first.candidates}
    assert judged == {kernel.kernel_id for kernel in _REGISTRY.by_op("attention")}, "nobody is left out unsaid"
    assert all(candidate.accepted or candidate.reasons for candidate in first.candidates)
    assert first.chosen, "the reference takes every call"


@examples(40, 1000)
@given(calls(), st.sampled_from(["seq_len_q", "seq_len_k"]), st.integers(0, 10**6))
def test_inside_a_bucket_no_kernel_changes_its_mind(call: dict[str, Any], axis: str, pick: int) -> None:
    ctx = build(call)
    edges = boundaries(_WORLD, "attention", axis)
    low, high = find(edges, ctx.dim(axis))
    assert low <= ctx.dim(axis) <= high
    other = ctx.with_dims(**{axis: low + pick % (high - low + 1)})
    for kernel in _REGISTRY.by_op("attention"):
        assert [r.code for r in kernel.check(ctx)] == [r.code for r in kernel.check(other)], kernel.kernel_id


# -- reasons ------------------------------------------------------------------------------------------------
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
listed = plain | st.lists(plain, max_size=3) | st.frozensets(st.text(max_size=5), max_size=3)


@examples(80, 1500)
@given(st.sampled_from(sorted(ReasonCode)), listed, listed, st.text(max_size=20))
def test_any_code_with_any_values_is_a_whole_sentence(code: ReasonCode, value: Any, limit: Any, detail: str) -> None:
    found = reason(code, value, limit, detail=detail)
    assert found.code is code and isinstance(found.category, ReasonCategory) and found.message
    assert found == reason(code.value, value, limit, detail=detail) or value != value or limit != limit
    assert str(found).startswith(f"{code.value}: ")
    assert not detail or found.message.endswith(f"({detail})")
    kept = json.loads(json.dumps(found.to_json()))
    again = Reason.from_json(kept)
    assert again.code is code and again.message == found.message and again.hint == found.hint
    for given_value, stored in ((value, found.value), (limit, found.limit)):
        if isinstance(given_value, (bool, int, str)) or given_value is None:
            assert stored == given_value and type(stored) is type(given_value), "1 and True are kept apart"


# -- kernels ------------------------------------------------------------------------------------------------
@st.composite
def limits(draw: Any) -> Limit:
    low, high = sorted((draw(st.integers(0, 300)), draw(st.integers(0, 300))))
    return Limit(
        min=draw(st.sampled_from([None, low])),
        max=draw(st.sampled_from([None, high])),
        multiple_of=draw(st.sampled_from([None, 1, 8, 16])),
        one_of=draw(st.none() | st.frozensets(st.integers(0, 300), min_size=1, max_size=3)),
    )


_FEATURES = sorted({"gqa", "window", "softcap", "lse", "dropout", "causal_top_left", "causal_bottom_right", "backward"})


@st.composite
def kernels(draw: Any) -> KernelSpec:
    return KernelSpec(
        kernel_id="mine.attention.x", op="attention", backend="mine", function="m:f",
        platforms=draw(st.sampled_from([frozenset({Platform.CPU}), frozenset({Platform.CPU, Platform.CUDA})])),
        dtypes=draw(st.frozensets(DTYPES, min_size=1)),
        features=draw(st.frozensets(st.sampled_from(_FEATURES))),
        layouts=draw(st.frozensets(st.sampled_from([Layout.BHSD, Layout.BSHD]), min_size=1)),
        limits=(("head_dim", draw(limits())), ("seq_len_k", draw(limits()))),
        grid_layout="library", priority=draw(st.floats(-10, 100)), deterministic=draw(st.booleans()),
    )  # fmt: skip


@examples(60, 1500)
@given(kernels(), calls())
def test_a_kernel_refuses_for_what_it_declared_and_for_nothing_else(kernel: KernelSpec, call: dict[str, Any]) -> None:
    ctx = build(call)
    found = kernel.check(ctx)
    assert found == kernel.check(ctx)
    codes = {item.code.value for item in found}
    if ctx.device.platform not in kernel.platforms:
        assert codes == {"PLATFORM_MISMATCH"}
        return
    assert ("DTYPE_UNSUPPORTED" in codes) is (ctx.dtype not in kernel.dtypes)
    assert ("LAYOUT_UNSUPPORTED" in codes) is (ctx.layout not in kernel.layouts)
    assert ("GQA_UNSUPPORTED" in codes) is ("gqa" in ctx.needs and "gqa" not in kernel.features)
    assert ("WINDOW_UNSUPPORTED" in codes) is ("window" in ctx.needs and "window" not in kernel.features)
    sizes = [problem for name, limit in kernel.limits for problem in limit.problems(name, ctx.dim(name))]
    assert {problem.code for problem in sizes} <= {item.code for item in found}
    more = replace(kernel, features=frozenset(_FEATURES) | {"dropout"}, dtypes=frozenset({*kernel.dtypes, ctx.dtype}))
    assert len(more.check(ctx)) <= len(found), "a kernel that declares more never takes less"
    fewer = replace(ctx, needs=frozenset())
    assert len(kernel.check(fewer)) <= len(found), "a call that asks less is never refused more"
    assert replace(kernel) == kernel and hash(replace(kernel)) == hash(kernel)
    assert json.loads(json.dumps(kernel.to_json()))["kernel_id"] == kernel.kernel_id


@examples(60, 1200)
@given(limits(), st.integers(0, 310), st.integers(0, 310))
def test_between_the_cuts_of_a_limit_its_answer_is_one(limit: Limit, one: int, two: int) -> None:
    good = [
        (limit.min is None or value >= limit.min)
        and (limit.max is None or value <= limit.max)
        and (limit.multiple_of is None or value % limit.multiple_of == 0)
        and (limit.one_of is None or value in limit.one_of)
        for value in (one, two)
    ]
    assert [not limit.problems("head_dim", value) for value in (one, two)] == good
    if limit.multiple_of in (None, 1) and not any(min(one, two) <= cut < max(one, two) for cut in limit.cuts()):
        assert good[0] == good[1]


# -- layouts ------------------------------------------------------------------------------------------------
@examples(60, 1500)
@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 64), st.integers(1, 16), st.booleans())
def test_a_layout_is_told_only_where_it_can_be(batch: int, heads: int, seq: int, dim: int, viewed: bool) -> None:
    stored = torch.empty((batch, seq, heads, dim), device="meta")
    tensor, truth = (stored.transpose(1, 2), Layout.BHSD) if viewed else (stored, Layout.BSHD)
    try:
        found, note = infer_layout(tensor, tensor)
    except InvalidInputError:
        assert heads == seq or 1 in (heads, seq), "refused only where it would be a guess"
        return
    assert note.code == "LAYOUT_INFERRED" and parse_layout(found.value) is found
    if viewed and heads > 1 and seq > 1:
        assert found is truth, "the strides of a transpose tell where it comes from"
    elif not viewed:
        assert (found is Layout.BSHD) is (seq > heads), "longer than there are heads: the sequence"


@examples(60, 1200)
@given(shapes, st.permutations(range(4)), st.sampled_from([torch.float16, torch.float32]), st.integers(1, 3))
def test_a_stride_class_is_that_of_the_memory(
    shape: tuple[int, ...], order: list[int], dtype: torch.dtype, step: int
) -> None:
    x = torch.empty(shape, dtype=dtype)
    found = stride_class([x])
    assert found == stride_class_of([(tuple(x.shape), True, x.element_size())])
    assert found.last == 1 and found.contiguous and stride_class([x, x]) == found
    turned = torch.empty(tuple(shape[i] if i < len(shape) else 2 for i in range(4)), dtype=dtype).permute(*order)
    assert (stride_class([turned]).order == "given") is turned.is_contiguous()
    if turned.transpose(1, 2).is_contiguous() and not turned.is_contiguous():
        assert stride_class([turned]).order == "swapped"
    sparse = torch.empty((*shape, 2 * step), dtype=dtype)[..., ::step]
    assert stride_class([sparse]).last == (step if sparse.shape[-1] > 1 else 1)


# -- tolerances ---------------------------------------------------------------------------------------------
_OPS = ("attention", "rms_norm", "linear", "rope", "sample", "moe", "an_op_of_tomorrow")
_WORDS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8", "nvfp4")
numbers = st.floats(-1e4, 1e4, width=32)


@examples(80, 1500)
@given(st.lists(numbers, min_size=1, max_size=20), st.lists(st.floats(-1, 1), min_size=20, max_size=20),
       st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1))  # fmt: skip
def test_closeness_is_the_rule_it_says(
    values: list[float], noise: list[float], rtol: float, atol: float, share: float
) -> None:
    expected = torch.tensor(values, dtype=torch.float64)
    actual = expected + torch.tensor(noise[: len(values)], dtype=torch.float64)
    assert compare(expected, expected.clone(), Tolerance(0.0, 0.0)).ok
    found = compare(actual, expected, Tolerance(rtol, atol))
    gap = (actual - expected).abs()
    assert found.ok is bool((gap <= atol + rtol * expected.abs()).all())
    assert found.max_abs == pytest.approx(float(gap.max())) and found.mse == pytest.approx(float(gap.square().mean()))
    partly = compare(actual, expected, Tolerance(rtol, atol, hit_ratio=share))
    assert partly.ok is (found.hit_ratio >= share) and (partly.ok or not found.ok)
    wider = compare(actual, expected, Tolerance(rtol + 0.1, atol + 0.1))
    assert wider.ok or not found.ok, "wider bounds never refuse what narrower ones take"
    either = compare(actual, expected, Tolerance(rtol, atol, mode=HitMode.EITHER))
    both = compare(actual, expected, Tolerance(rtol, atol + 1e-8))  # relative errors are taken over |expected| + 1e-8
    assert both.ok or not either.ok, "what either bound takes, both together take"


@examples(60, 800)
@given(st.sampled_from(_OPS), st.sampled_from(_WORDS), st.integers(1, 65536), st.integers(1, 65536))
def test_the_table_is_steady_ordered_and_never_empty(op: str, word: str, one: int, two: int) -> None:
    found = tolerance(op, word)
    assert found == tolerance(op, word) and 0 <= found.rtol < 1 and 0 <= found.atol < 1
    assert found.exact or found.hit_ratio == (0.85 if word in ("float8_e4m3fn", "nvfp4") else 1.0)
    low, high = sorted((one, two))
    assert tolerance(op, word, k=low).rtol <= tolerance(op, word, k=high).rtol, "longer sums are not held tighter"
    widths = [tolerance(op, name).atol for name in ("float32", "float16", "bfloat16")]
    assert widths == sorted(widths), "fewer bits are not held tighter"
    assert definition_tolerance(word).hit_ratio in (1.0, 0.85)

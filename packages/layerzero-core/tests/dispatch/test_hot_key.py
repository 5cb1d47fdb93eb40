"""The hot key is sound: whatever a choice depends on changes the key (or a guard), and nothing else makes it grow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.dispatch import hot, modes
from layerzero.model.enums import Layout
from layerzero.model.kernel import Limit
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.state import state

FULL = frozenset(
    "gqa mask_bool mask_float mask_grad dropout window softcap alibi lse backward causal_top_left "
    "causal_bottom_right head_dim_v".split()
)


def qkv(seq_q: int = 6, seq_k: int = 6, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [torch.randn(1, n, s, dim, dtype=dtype) for n, s in ((heads, seq_q), (2, seq_k), (2, seq_k))]


def transposed(tensors: list[Any]) -> list[Any]:
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]


def plain_case() -> tuple[list[Any], dict[str, Any]]:
    return qkv(), {}


def grown(**extra: Any) -> Callable[[], tuple[list[Any], dict[str, Any]]]:
    return lambda: (qkv(), extra)


def grad_of(index: int) -> Callable[[], tuple[list[Any], dict[str, Any]]]:
    def build() -> tuple[list[Any], dict[str, Any]]:
        tensors = qkv()
        tensors[index].requires_grad_()
        return tensors, {}

    return build


def slopes(needs_grad: bool) -> Callable[[], tuple[list[Any], dict[str, Any]]]:
    return lambda: (qkv(), {"alibi_slopes": torch.rand(2).requires_grad_(needs_grad)})


def masked(kind: torch.dtype, *shape: int, needs_grad: bool = False) -> Callable[[], tuple[list[Any], dict[str, Any]]]:
    def build() -> tuple[list[Any], dict[str, Any]]:
        mask = torch.rand(shape) > 0.3 if kind is torch.bool else torch.randn(shape).to(kind).requires_grad_(needs_grad)
        return qkv(), {"attn_mask": mask}

    return build


# name -> (what the picky kernel asks for, the call it takes, the call it must not get)
PAIRS: dict[str, tuple[dict[str, Any], Callable[..., Any], Callable[..., Any]]] = {
    "shape: head_dim": (
        {"limits": (("head_dim", Limit(one_of=frozenset({8}))),)},
        plain_case,
        lambda: (qkv(dim=16), {}),
    ),
    "shape: heads": ({"limits": (("num_heads", Limit(max=2)),)}, plain_case, lambda: (qkv(heads=4), {})),
    "shape: batch": (
        {"limits": (("batch", Limit(max=1)),)},
        plain_case,
        lambda: ([t.repeat(2, 1, 1, 1) for t in qkv()], {}),
    ),
    "stride": ({"contiguous": True}, plain_case, lambda: (transposed(qkv()), {})),
    "stride of the value alone": (
        {"contiguous": True},
        plain_case,
        lambda: ([*qkv()[:2], transposed(qkv())[2]], {}),
    ),
    "last stride": (
        {"stride_last_dim": 1},
        plain_case,
        lambda: ([torch.randn(1, 2, 6, 16)[..., ::2] for _ in range(3)], {}),
    ),
    "dtype": ({"dtypes": frozenset({"float32"})}, plain_case, lambda: (qkv(dtype=torch.float64), {})),
    "dtype of the key alone": (
        {},
        plain_case,
        lambda: ([qkv()[0], qkv()[1].double(), qkv()[2]], {}),
    ),
    "gqa": ({"features": FULL - {"gqa"}}, plain_case, lambda: (qkv(heads=4), {})),
    "requires_grad of the query": ({"features": FULL - {"backward"}}, plain_case, grad_of(0)),
    "requires_grad of the key": ({"features": FULL - {"backward"}}, plain_case, grad_of(1)),
    "requires_grad of the value": ({"features": FULL - {"backward"}}, plain_case, grad_of(2)),
    "requires_grad of the slopes": ({"features": FULL - {"mask_grad"}}, slopes(False), slopes(True)),
    "requires_grad of the mask": (
        {"features": FULL - {"mask_grad"}},
        masked(torch.float32, 6, 6),
        masked(torch.float32, 6, 6, needs_grad=True),
    ),
    "mask or none": ({"features": FULL - {"mask_bool"}}, plain_case, masked(torch.bool, 6, 6)),
    "mask kind": ({"features": FULL - {"mask_bool"}}, masked(torch.float32, 6, 6), masked(torch.bool, 6, 6)),
    "causal or not": ({"features": frozenset()}, plain_case, grown(is_causal=True)),
    "causal kind": (
        {"features": FULL - {"causal_bottom_right"}},
        lambda: (qkv(4, 6), {"is_causal": True}),
        lambda: (qkv(4, 6), {"is_causal": "bottom_right"}),
    ),
    "layout": ({}, plain_case, lambda: ([t.transpose(1, 2) for t in qkv()], {"layout": "BSHD"})),
    "window": ({"features": FULL - {"window"}}, plain_case, grown(window=2)),
    "softcap": ({"features": FULL - {"softcap"}}, plain_case, grown(softcap=3.0)),
    "dropout": ({"features": FULL - {"dropout"}}, plain_case, grown(dropout_p=1e-9)),
    "lse": ({"features": FULL - {"lse"}}, plain_case, grown(return_lse=True)),
    "alibi": ({"features": FULL - {"alibi"}}, plain_case, slopes(False)),
    "backend": ({}, plain_case, grown(backend="reference")),
    "rank": ({"limits": (("num_heads", Limit(min=2)),)}, plain_case, lambda: ([torch.randn(2, 6, 8)] * 3, {})),
}


def answer(args: list[Any], kwargs: dict[str, Any]) -> Any:
    options = {**kwargs, "backend": "reference"}
    return lz.attention(*args, **options)


@pytest.mark.req("R-CACHE-06", "R-CACHE-11", "R-SEL-07", "R-SEL-18", "R-SEL-20")
@pytest.mark.parametrize("name", PAIRS)
def test_each_attribute_alone_changes_the_choice(lab: Any, name: str) -> None:
    asks, fits, unfit = PAIRS[name]
    lab.use(
        lab.kernel("picky.attention.k", priority=99, **asks), lab.kernel("easy.attention.k", priority=98), only=True
    )
    for _ in range(2):
        args, kwargs = fits()
        assert lab.run(lz.attention, *args, **kwargs)[1] == ["picky.attention.k"]
    for _ in range(2):
        args, kwargs = unfit()
        out, ran = lab.run(lz.attention, *args, **kwargs)
        assert ran != ["picky.attention.k"]
        assert ran == [lz.which("attention", *args, **kwargs)]
        if "dropout_p" not in kwargs:
            main = out[0] if isinstance(out, tuple) else out
            assert_close(out, answer(args, kwargs), tolerance("attention", main.dtype))
    args, kwargs = fits()
    assert lab.run(lz.attention, *args, **kwargs)[1] == ["picky.attention.k"]


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "autocast on": ({"dtypes": frozenset({"float32"})}, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "deterministic": ({"deterministic": False}, deterministic),
}


@pytest.mark.req("R-SEL-02", "R-CACHE-11")
@pytest.mark.parametrize("name", MODES)
def test_each_mode_of_torch_alone_changes_the_choice(lab: Any, name: str) -> None:
    asks, mode = MODES[name]
    lab.use(lab.kernel("picky.attention.k", priority=99, **asks), lab.kernel("picky.rms_norm.k", priority=99, **asks))
    q = qkv()
    x, w = torch.randn(2, 8), torch.ones(8)
    for _ in range(3):
        assert lab.run(lz.attention, *q)[1] == ["picky.attention.k"]
        with mode():
            assert lab.run(lz.attention, *q)[1] == ["sdpa.attention.flash_cpu"]
    if name == "deterministic":
        for _ in range(2):
            assert lab.run(lz.rms_norm, x, w)[1] == ["picky.rms_norm.k"]
            with mode():
                assert lab.run(lz.rms_norm, x, w)[1] == ["torch.rms_norm.native"]


def test_the_dtype_of_autocast_is_part_of_the_key(lab: Any) -> None:
    lab.use(
        lab.kernel("brain.attention.k", priority=99, dtypes=frozenset({"bfloat16"})),
        lab.kernel("half.attention.k", priority=99, dtypes=frozenset({"float16"})),
        lab.kernel("brain.linear.k", priority=99, dtypes=frozenset({"bfloat16"})),
    )
    q, x, w = qkv(), torch.randn(2, 8), torch.randn(4, 8)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, ran = lab.run(lz.attention, *q)
            assert ran == ["brain.attention.k"]
            assert out.dtype is torch.bfloat16
            assert lab.run(lz.linear, x, w)[1] == ["brain.linear.k"]
        with torch.autocast("cpu", dtype=torch.float16):
            out, ran = lab.run(lz.attention, *q)
            assert ran == ["half.attention.k"]
            assert out.dtype is torch.float16
        assert lab.run(lz.linear, x, w)[1] == ["torch.linear.native"]


def test_grad_mode_is_part_of_the_key(lab: Any) -> None:
    weak = frozenset(FULL - {"backward"}) | {"no_weight"}
    lab.use(
        lab.kernel("weak.attention.k", priority=99, features=weak),
        lab.kernel("weak.rms_norm.k", priority=99, features=weak),
        lab.kernel("weak.silu_and_mul.k", priority=99, features=weak),
        lab.kernel("weak.paged_attention.k", priority=99, features=weak, layouts=frozenset()),
    )
    q = qkv()
    q[0].requires_grad_()
    x, w = torch.randn(2, 8, requires_grad=True), torch.ones(8)
    pages, tables = torch.randn(4, 4, 2, 8), torch.zeros(1, 2, dtype=torch.int32)
    lens, query = torch.tensor([5], dtype=torch.int32), torch.randn(1, 2, 8, requires_grad=True)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (lz.attention, tuple(q), "attention"),
        (lz.rms_norm, (x, w), "rms_norm"),
        (lz.silu_and_mul, (x,), "silu_and_mul"),
        (lz.paged_attention, (query, pages, pages, tables, lens), "paged_attention"),
    ]
    for function, args, op in calls:
        for _ in range(2):
            for off in (torch.no_grad, torch.inference_mode):
                with off():
                    assert lab.run(function, *args)[1] == [f"weak.{op}.k"]
            out, ran = lab.run(function, *args)
            assert ran != [f"weak.{op}.k"], op
            assert out.requires_grad


def test_meta_tensors_never_meet_a_kernel_of_the_cpu(lab: Any) -> None:
    q = qkv()
    x, w = torch.randn(3, 8), torch.ones(8)
    lz.attention(*q)
    lz.rms_norm(x, w)
    for _ in range(2):
        out, ran = lab.run(lz.attention, *(t.to("meta") for t in q))
        assert ran == ["reference.attention.plain"]
        assert out.is_meta
        out, ran = lab.run(lz.rms_norm, x.to("meta"), w.to("meta"))
        assert ran == ["reference.rms_norm.plain"]
        assert out.is_meta
    assert lab.run(lz.attention, *q)[1] == ["sdpa.attention.flash_cpu"]


class Tagged(torch.Tensor):
    """A subclass that only passes everything on."""


def test_parameters_and_tensors_are_told_apart_and_subclasses_never_hit(lab: Any) -> None:
    x, w = torch.randn(3, 8), torch.ones(8)
    wanted = lz.rms_norm(x, w)
    keys = len(state.world.hot)
    torch.testing.assert_close(lz.rms_norm(x, Parameter(w)).detach(), wanted)
    assert len(state.world.hot) == keys + 1
    before = len(state.world.hot)
    out = lz.rms_norm(x.as_subclass(Tagged), w)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), wanted)
    q = qkv()
    expected = lz.attention(*q)
    out = lz.attention(*(t.as_subclass(Tagged) for t in q))
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected)
    assert all(Tagged not in _types(key) for key in state.world.hot)
    assert len(state.world.hot) >= before


def _types(key: Any) -> set[Any]:
    found = set()
    for item in key:
        found |= _types(item) if isinstance(item, tuple) else {item} if isinstance(item, type) else set()
    return found


def test_the_users_own_sdpa_flags_are_respected_hot_and_cold(lab: Any) -> None:
    q = qkv()
    for _ in range(2):
        assert lab.run(lz.attention, *q)[1] == ["sdpa.attention.flash_cpu"]
        with sdpa_kernel(SDPBackend.MATH):
            assert lz.which("attention", *q) == "sdpa.attention.math"
            assert lab.run(lz.attention, *q)[1] == ["sdpa.attention.math"]
            assert lz.validate("sdpa.attention.flash_cpu", *q)[0].code == "SWITCHED_OFF"
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert lab.run(lz.attention, *q)[1] == ["sdpa.attention.flash_cpu"]
    with sdpa_kernel(SDPBackend.MATH):
        other = qkv(dim=16)
        assert lab.run(lz.attention, *other)[1] == ["sdpa.attention.math"]
    assert lab.run(lz.attention, *other)[1] == ["sdpa.attention.flash_cpu"]


def test_an_odd_pointer_is_a_guard_not_a_key(lab: Any) -> None:
    for bytes_ in (16, 64):
        lab.use(lab.kernel("picky.rms_norm.k", priority=99, pointer_alignment=bytes_))
        storage = torch.randn(3 * 8 + 4)
        even, odd, middle = storage[:24].view(3, 8), storage[1:25].view(3, 8), storage[4:28].view(3, 8)
        w = torch.ones(8)
        assert even.data_ptr() % 64 == 0
        for _ in range(3):
            assert lab.run(lz.rms_norm, even, w)[1] == ["picky.rms_norm.k"]
            out, ran = lab.run(lz.rms_norm, odd, w)
            assert ran == ["torch.rms_norm.native"]
            torch.testing.assert_close(out, torch.rms_norm(odd, (8,), w, 1e-6))
            expected = "picky.rms_norm.k" if bytes_ == 16 else "torch.rms_norm.native"
            assert lab.run(lz.rms_norm, middle, w)[1] == [expected]
        assert not state.health.snapshot().kernels


# -- what must not be in the key ------------------------------------------------------------------
def test_values_do_not_make_the_table_grow(lab: Any) -> None:
    q, x, w, logits = qkv(), torch.randn(3, 8), torch.ones(8), torch.randn(2, 9)

    def sweep(step: float) -> None:
        lz.attention(*q, scale=0.1 + step)
        lz.attention(*q, dropout_p=0.1 + step / 10)
        lz.attention(*q, softcap=1.0 + step)
        lz.rms_norm(x, w, 1e-6 + step)
        lz.layer_norm(x, w, None, 1e-6 + step)
        lz.sample_topk(logits, 1 + int(step * 100) % 9, temperature=0.5 + step)
        lz.sample_topp(logits, 0.1 + step / 2)

    sweep(0.0)
    keys, selections = len(state.world.hot), state.counters.selections
    for i in range(50):
        sweep(i / 100)
    assert len(state.world.hot) == keys
    assert state.counters.selections == selections


def test_a_value_that_is_not_in_the_key_is_the_one_that_is_used(lab: Any) -> None:
    q = qkv()
    for scale in (0.1, 0.7, None):
        torch.testing.assert_close(lz.attention(*q, scale=scale), lz.attention(*q, scale=scale, backend="reference"))
    for cap in (1.0, 9.0):
        torch.testing.assert_close(lz.attention(*q, softcap=cap), lz.attention(*q, softcap=cap, backend="reference"))
    x, w = torch.randn(3, 8), torch.ones(8)
    for eps in (1e-6, 0.5):
        torch.testing.assert_close(lz.rms_norm(x, w, eps), torch.rms_norm(x, (8,), w, eps))


# -- buckets --------------------------------------------------------------------------------------
@pytest.mark.req("R-CACHE-06")
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_a_decode_loop_stays_hot_and_right(lab: Any, layout: str) -> None:
    steps = 4096
    shape = (1, 1, steps, 8) if layout == "BHSD" else (1, steps, 1, 8)
    keys, values = torch.randn(shape), torch.randn(shape)
    query = torch.randn(1, 2, 1, 8) if layout == "BHSD" else torch.randn(1, 1, 2, 8)
    axis = 2 if layout == "BHSD" else 1
    plain = lab.reference("attention")
    before = state.counters.selections
    for length in range(1, steps + 1):
        k, v = keys.narrow(axis, 0, length), values.narrow(axis, 0, length)
        out = lz.attention(query, k, v, is_causal="bottom_right", layout=layout)
        if length in (1, 2, 3, 511, 512, 513, 1000, 4095, 4096):
            turned = [t if layout == "BHSD" else t.transpose(1, 2) for t in (query, k, v, out)]
            wanted = plain(*turned[:3], None, 0.0, "bottom_right", None, None, None, None, False)
            assert_close(turned[3], wanted, tolerance("attention", torch.float32))
    assert state.counters.selections - before < 20


@pytest.mark.req("R-CACHE-06")
@pytest.mark.parametrize("axis", ["queries", "keys"])
def test_a_length_beyond_its_bucket_another_dtype_and_another_policy_are_selected_afresh(lab: Any, axis: str) -> None:
    """A kernel without limits: its buckets end at powers of two. Inside one nothing is selected a second time."""
    lab.use(lab.kernel("any.attention.k", priority=99), only=True)

    def selected(length: int, dtype: torch.dtype = torch.float32) -> int:
        before = state.counters.selections
        for _ in range(2):
            lengths = (length, 700) if axis == "queries" else (3, length)  # fewer queries than keys, always
            assert lab.run(lz.attention, *qkv(*lengths, dtype=dtype))[1] == ["any.attention.k"]
        return state.counters.selections - before

    assert [selected(length) for length in (130, 129, 200, 256)] == [1, 0, 0, 0]
    assert [selected(length) for length in (257, 512, 513, 128)] == [1, 0, 1, 1]
    assert [selected(200, torch.float64), selected(200, torch.float64), selected(200)] == [1, 0, 0]
    lz.configure(deny=["nobody.*"])
    assert [selected(200), selected(130)] == [1, 0]


def test_a_limit_inside_a_bucket_switches_exactly_there(lab: Any) -> None:
    lab.use(
        lab.kernel("short.attention.k", priority=99, limits=(("seq_len_k", Limit(max=1000)),)),
        lab.kernel("long.attention.k", priority=98, limits=(("seq_len_k", Limit(min=1003)),)),
    )
    query = torch.randn(1, 2, 1, 8)
    cache = torch.randn(1, 2, 1024, 8)
    for order in (range(990, 1010), reversed(range(990, 1010))):
        for length in order:
            k = cache[:, :, :length]
            expected = "short" if length <= 1000 else "sdpa" if length < 1003 else "long"
            _, ran = lab.run(lz.attention, query, k, k)
            assert ran[0].split(".")[0] == expected, length


def test_a_policy_rule_inside_a_bucket_switches_exactly_there(lab: Any, tmp_path: Any) -> None:
    lab.use(lab.kernel("any.attention.k", priority=99))
    file = tmp_path / "layerzero.yaml"
    file.write_text('rules: [{match: {op: attention, when: {seq_len_k: ">=700"}}, deny: ["any.*"]}]\n')
    lz.load_config(file)
    query, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1024, 8)
    for length in (600, 698, 699, 700, 701, 1000, 699):
        k = cache[:, :, :length]
        _, ran = lab.run(lz.attention, query, k, k)
        assert (ran == ["any.attention.k"]) is (length < 700), length


def test_a_modulus_forces_exact_keys(lab: Any) -> None:
    lab.use(lab.kernel("tiles.attention.k", priority=99, limits=(("seq_len_k", Limit(multiple_of=8)),)))
    query, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 64, 8)
    for length in [*range(30, 50), *range(30, 50)]:
        k = cache[:, :, :length]
        out, ran = lab.run(lz.attention, query, k, k)
        assert (ran == ["tiles.attention.k"]) is (length % 8 == 0), length
        torch.testing.assert_close(out, lz.attention(query, k, k, backend="reference"))


def test_the_alignment_of_lengths_is_part_of_the_bucket(lab: Any) -> None:
    """Sq equal to, below or above Sk decides what is_causal means, even inside one pair of buckets."""
    lab.use(lab.kernel("top.attention.k", priority=99, features=FULL - {"causal_bottom_right"}))
    for seq_q, seq_k in ((40, 40), (40, 41), (41, 40), (50, 50), (50, 49), (33, 64)):
        args = qkv(seq_q, seq_k)
        for causal in (True, "bottom_right"):
            out, ran = lab.run(lz.attention, *args, is_causal=causal)
            assert (ran == ["top.attention.k"]) is (causal is True or seq_q == seq_k)
            torch.testing.assert_close(out, lz.attention(*args, is_causal=causal, backend="reference"))


def test_strides_of_a_growing_cache_are_classed(lab: Any) -> None:
    lab.use(
        lab.kernel("packed.attention.k", priority=99, contiguous=True),
        lab.kernel("aligned.attention.k", priority=98, aligned_strides=True),
    )
    query = torch.randn(1, 2, 1, 8)
    for length in range(20, 30):
        dense = torch.randn(1, 2, length, 8)
        window = torch.randn(1, 2, 32, 8)[:, :, :length]
        ragged = torch.randn(1, 2, length, 9)[..., :8]
        for key, expected in ((dense, "packed"), (window, "aligned"), (ragged, "sdpa")):
            _, ran = lab.run(lz.attention, query, key, key)
            assert ran[0].split(".")[0] == expected


def test_a_cache_that_becomes_full_inside_its_bucket_is_another_case(lab: Any) -> None:
    """The strides of a slice stay, but only the full cache is dense: same bucket, same strides, another class."""
    rows = frozenset({Layout.BSHD})
    lab.use(lab.kernel("packed.attention.k", priority=99, contiguous=True, layouts=rows, adapt=frozenset({"layout"})))
    cache = torch.randn(2, 64, 2, 8)
    query = torch.randn(2, 1, 2, 8)
    for length in (64, 63, 60, 64, 50, 64):
        k = cache[:, :length].transpose(1, 2)
        _, ran = lab.run(lz.attention, query.transpose(1, 2), k, k)
        assert (ran == ["packed.attention.k"]) is (length == 64), length
        k = cache[:, :length]
        _, ran = lab.run(lz.attention, query, k, k, layout="BSHD")
        assert (ran == ["packed.attention.k"]) is (length == 64), length


@pytest.mark.req("R-CACHE-09")
def test_the_table_is_bounded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dispatch.run", "dispatch.bind", "_ops.attention"):
        monkeypatch.setattr(sys.modules[f"layerzero.{name}"], "HOT_LIMIT", 100)
    query, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 512, 8)
    for length in range(1, 513):
        k = cache[:, :, :length]
        lz.attention(query, k, k)
        assert len(state.world.hot) <= 102
    for rows in range(1, 400):
        lz.rms_norm(torch.randn(rows, 8), torch.ones(8))
        assert len(state.world.hot) <= 102
    for width in range(1, 300):
        lz.rms_norm(torch.randn(2, width), torch.ones(width))
    assert len(state.world.memo["bound"]) <= 101
    _, ran = lab.run(lz.rms_norm, torch.randn(2, 8), torch.ones(8))
    assert ran == ["torch.rms_norm.native"]


def test_layouts_that_a_kernel_takes_both_need_no_transform(lab: Any) -> None:
    both = frozenset({Layout.BHSD, Layout.BSHD})
    lab.use(lab.kernel("both.attention.k", priority=99, layouts=both))
    q = qkv(5, 7)
    wanted = lz.attention(*q, backend="reference")
    for _ in range(2):
        out, ran = lab.run(lz.attention, *q)
        assert ran == ["both.attention.k"]
        torch.testing.assert_close(out, wanted)
        out, ran = lab.run(lz.attention, *(t.transpose(1, 2) for t in q), layout="BSHD")
        assert ran == ["both.attention.k"]
        torch.testing.assert_close(out.transpose(1, 2), wanted)
    assert lz.explain("attention", *(t.transpose(1, 2) for t in q), layout="BSHD").transform_cost_total == 0


def test_the_tf32_switch_is_read_in_both_of_torchs_spellings():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"  # from here on torch refuses to answer `allow_tf32`
        assert modes.SWITCHES["tf32"]()
        matmul.fp32_precision = "ieee"
        assert not modes.SWITCHES["tf32"]()
    finally:
        matmul.fp32_precision = before


NORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rows": lambda x, w: lz.rms_norm(x[:2], w),
    "dtype": lambda x, w: lz.rms_norm(x.double(), w.double()),
    "dtype of the weight alone": lambda x, w: lz.rms_norm(x, w.double()),
    "strides": lambda x, w: lz.rms_norm(x.repeat(1, 2)[:, ::2], w),
    "strides of the weight": lambda x, w: lz.rms_norm(x, w.repeat(2)[::2]),
    "gradient": lambda x, w: lz.rms_norm(x.clone().requires_grad_(), w),
    "backend": lambda x, w: lz.rms_norm(x, w, backend="reference"),
    "autocast": torch.autocast("cpu", dtype=torch.bfloat16)(lambda x, w: lz.rms_norm(x, w)),
    "dtype of autocast": torch.autocast("cpu", dtype=torch.float16)(lambda x, w: lz.rms_norm(x, w)),
}


@pytest.mark.req("R-CACHE-11")
def test_every_attribute_of_a_norm_has_a_key_of_its_own_and_values_have_none(lab: Any) -> None:
    for _ in range(2):
        lz.rms_norm(torch.randn(3, 8), torch.ones(8))
    keys = len(state.world.hot)
    for number, (name, call) in enumerate(NORMS.items(), 1):
        for _ in range(2):
            call(torch.randn(3, 8), torch.randn(8))
            lz.rms_norm(torch.randn(3, 8), torch.randn(8), 1e-3)
            assert len(state.world.hot) == keys + number, name


def key_of(op: str, *args: Any, layout: str | None = None) -> Any:
    return hot.key_of(public_op(op))(*args, layout, None)


@pytest.mark.req("R-CACHE-11")
def test_the_written_out_key_tells_apart_what_the_generic_one_does() -> None:
    logits, ids, bias = torch.randn(4, 8), torch.arange(4), torch.randn(8)
    gate = (logits, (2, 1, 1), "softmax", True, None, 1.0)
    alike = [(torch.zeros(4, 8), (2, 1, 1), "softmax", True, None, 2.0)]
    others = [
        (logits.double(), *gate[1:]),
        (torch.randn(8, 4).T, *gate[1:]),
        (Parameter(logits), *gate[1:]),
        (logits, (2.0, 1, 1), *gate[2:]),
        (logits, (3, 1, 1), *gate[2:]),
        (logits, (2, True, 1), *gate[2:]),
        (*gate[:2], "sigmoid", *gate[3:]),
        (*gate[:3], 1, None, 1.0),
        (*gate[:3], False, None, 1.0),
        (*gate[:4], bias, 1.0),
        (*gate[:5], 1),
        (*gate[:5], float("nan")),
        (*gate[:5], torch.ones(())),
        (*gate[:5], torch.ones((), dtype=torch.float64)),
    ]
    keys = [hot.generic_key("topk_gate", args, None, None) for args in (gate, *others)]
    found: list[Any] = [key_of("topk_gate", *gate)]
    for args in others:
        try:
            found.append(key_of("topk_gate", *args))
        except TypeError:  # a tuple of anything but whole numbers has no key
            found.append(None)
    assert [key is None for key in found] == [key is None for key in keys]
    there = [key for key in found if key is not None]
    assert len(set(there)) == len(there)
    assert {key_of("topk_gate", *args) for args in alike} == {found[0]}
    assert key_of("cross_entropy", logits, ids, -100, None, None, None, "mean", False) != key_of(
        "cross_entropy", logits.clone().requires_grad_(), ids, -100, None, None, None, "mean", False
    )
    assert key_of("rope", *[logits] * 4, False, "BHSD", None, False, layout="BHSD") != key_of(
        "rope", *[logits] * 4, False, "BSHD", None, False, layout="BSHD"
    )


def test_an_argument_of_another_kind_is_keyed_by_the_generic_key() -> None:
    quantized = lz.quantize(torch.randn(8, 16), "int8", granularity="channel")
    x = torch.randn(2, 16)
    with pytest.raises(AttributeError):
        key_of("linear", x, quantized, None, None)
    for _ in range(2):  # the first call of a kernel without a proof is held against the reference
        lz.linear(x, quantized)
    assert hot.generic_key("linear", (x, quantized, None, None), None, None) in state.world.hot

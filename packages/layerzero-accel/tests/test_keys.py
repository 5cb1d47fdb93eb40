"""The key in C tells calls apart exactly as the key in Python does: neither more coarsely nor more finely."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerzero._ops.bucketed import bucketed_key
from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.hot import generic_key
from layerzero_accel.functions import attention_key, rms_norm_key

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EDGES = (0, 1, 2, 3, 4, 6, 8, 13, 16, 32, 64)


def laid_out(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape in one of the ways tensors come to lie in memory."""
    kind = rng.choice(("plain", "plain", "transposed", "slice", "wide", "strided", "expanded", "offset"))
    if kind == "transposed" and len(shape) == 4:
        return torch.empty((shape[0], shape[2], shape[1], shape[3]), dtype=dtype).transpose(1, 2)
    if kind == "slice" and len(shape) == 4:  # a cache of fixed length, of which a part is used
        return torch.empty((*shape[:2], 64, shape[3]), dtype=dtype)[:, :, : shape[2]]
    if kind == "wide":
        return torch.empty((*shape[:-1], shape[-1] + rng.choice((1, 8))), dtype=dtype)[..., : shape[-1]]
    if kind == "strided":
        return torch.empty((*shape[:-1], shape[-1] * 2), dtype=dtype)[..., ::2]
    if kind == "expanded":
        return torch.empty((1, *shape[1:]), dtype=dtype).expand(shape)
    if kind == "offset":
        return torch.empty((shape[0] + 1, *shape[1:]), dtype=dtype)[1:]
    return torch.empty(shape, dtype=dtype)


def attention_call(rng: random.Random) -> tuple[Any, ...]:
    """The values of all parameters of `lz.attention`."""
    batch, heads, kv_heads = rng.choice((1, 1, 2)), rng.choice((2, 4)), rng.choice((1, 2))
    rows, cols, dim = rng.choice((1, 1, 5, 9)), rng.randrange(0, 24), rng.choice((4, 8))
    layout, dtype = rng.choice(("BHSD", "BHSD", "BSHD")), rng.choice(DTYPES)
    dim_v = rng.choice((dim, dim, 2))
    shapes = [(batch, heads, rows, dim), (batch, kv_heads, cols, dim), (batch, kv_heads, cols, dim_v)]
    if rng.random() < 0.1:
        shapes = [(batch, *shape[2:]) for shape in shapes]
    elif layout == "BSHD":
        shapes = [(shape[0], shape[2], shape[1], shape[3]) for shape in shapes]
    odd = rng.random() < 0.05
    q, k, v = (laid_out(rng, shape, rng.choice(DTYPES) if odd else dtype) for shape in shapes)
    mask = torch.empty(rows, max(cols, 1), dtype=rng.choice((torch.bool, dtype))) if rng.random() < 0.2 else None
    slopes = torch.empty(heads) if rng.random() < 0.1 else None
    causal = rng.choice((False, False, True, "bottom_right"))
    return (q, k, v, mask, 0.0, causal, None, layout, None, False, None, slopes, None, rng.random() < 0.1, None)


def canonical(values: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, mask, dropout, causal, scale, _, window, _, softcap, slopes, _, lse, _ = values
    return (q, k, v, mask, dropout, causal, scale, window, softcap, slopes, lse)


def same_partition(pairs: list[tuple[Any, Any]]) -> None:
    """Both ways of keying put the same calls together."""
    there, back = defaultdict(set), defaultdict(set)
    for one, other in pairs:
        there[one].add(other)
        back[other].add(one)
    assert all(len(found) == 1 for found in there.values()), "C puts together what Python keeps apart"
    assert all(len(found) == 1 for found in back.values()), "C keeps apart what Python puts together"


@pytest.mark.req("R-CACHE-11")
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_is_keyed_as_in_python_exactly_and_by_bucket(native: Any, deterministic: bool) -> None:
    rng = random.Random(7)
    world: Any = SimpleNamespace(memo={"attention edges": EDGES})
    exact, near = [], []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(3000):
            values = attention_call(rng)
            found = native.key("attention", values, EDGES)
            assert found is not None
            key = attention_key(canonical(values), values[7], values[-1])
            exact.append((found[0], key))
            bucket = bucketed_key(world, key)
            assert (bucket is None) == (found[1] is None)
            if bucket is not None:
                near.append((found[1], bucket))
    finally:
        torch.use_deterministic_algorithms(False)
    same_partition(exact)
    same_partition(near)
    assert len(near) > 1500 and len({key for _, key in near}) < len({key for _, key in exact}) < 3000


def test_without_known_buckets_there_is_no_bucketed_key(native: Any) -> None:
    values = attention_call(random.Random(1))
    assert native.key("attention", values, None)[1] is None


@pytest.mark.parametrize("layout", [None, True, False, torch.float16], ids=repr)
def test_a_layout_that_is_no_text_is_not_read_as_one(native: Any, layout: Any) -> None:
    q = torch.empty(1, 2, 5, 8)
    for given, known in (("BHSD", True), (layout, False)):
        values = (q, q, q, None, 0.0, False, None, given, None, False, None, None, None, False, None)
        assert (native.key("attention", values, EDGES)[1] is not None) is known


@pytest.mark.req("R-CACHE-11")
def test_norms_and_rope_are_keyed_as_in_python(native: Any) -> None:
    rng = random.Random(3)
    norms, layers, ropes = [], [], []
    for _ in range(800):
        dtype, hidden = rng.choice(DTYPES), rng.choice((1, 4, 8))
        x = laid_out(rng, rng.choice(((1, hidden), (3, hidden), (2, 3, hidden), (0, hidden))), dtype)
        w = laid_out(rng, (hidden,), rng.choice((dtype, torch.float32)))
        bias = rng.choice((None, torch.empty(hidden, dtype=dtype)))
        eps: Any = rng.choice((1e-6, 1e-5, 1))
        backend = rng.choice((None, None, "reference"))
        norms.append((native.key("rms_norm", (x, w, 1e-6, backend), None)[0], rms_norm_key(x, w, backend)))
        layer: Any = (x, w, bias, eps)
        found = native.key("layer_norm", (*layer, backend), None)[0]
        layers.append((found, generic_key("layer_norm", layer, None, backend)))
        q, k = (laid_out(rng, (1, heads, 3, 8), dtype) for heads in (2, 1))
        cos = torch.empty(rng.choice((3, 9)), 4)
        positions: Any = rng.choice((None, torch.empty(3, dtype=torch.int64)))
        flags = (rng.random() < 0.5, rng.choice(("BHSD", "BSHD")), positions, rng.random() < 0.3)
        key: Any = rng.choice((None, k))
        args = (q, key, cos, cos, *flags)
        ropes.append((native.key("rope", (*args, None), None)[0], generic_key("rope", args, flags[1], None)))
    for pairs in (norms, layers, ropes):
        same_partition(pairs)
        assert len({key for _, key in pairs}) > 20


@pytest.mark.filterwarnings("ignore")  # torch warns of experimental and of old dtypes
def test_every_dtype_has_a_key_of_its_own_or_none(native: Any) -> None:
    found: dict[Any, torch.dtype] = {}
    for name in sorted(dir(torch)):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            continue
        try:
            x = torch.empty(4, 8, dtype=dtype)
        except (RuntimeError, TypeError):
            continue
        key = native.key("silu_and_mul", (x, None), None)
        if key is not None:
            assert found.setdefault(key[0], dtype) is dtype
    usual = {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool}
    assert usual <= set(found.values())


def test_words_are_told_apart_by_their_text_not_by_their_object(native: Any) -> None:
    x = torch.empty(2, 8)
    texts = ["tanh", "".join(["ta", "nh"]), "none", None, "", "tanh "]
    keys = [native.key("gelu_and_mul", (x, text, None), None)[0] for text in texts]
    assert keys[0] == keys[1]
    for one, other in itertools.combinations((0, 2, 3, 4, 5), 2):
        assert keys[one] != keys[other]


@pytest.mark.parametrize("value", [1, 0, 2.0, ("a",), b"tanh", type("Text", (str,), {})("tanh")], ids=repr)
def test_what_is_no_plain_word_has_no_key(native: Any, value: Any) -> None:
    assert native.key("gelu_and_mul", (torch.empty(2, 8), value, None), None) is None


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    "eps", [True, "1e-6", None, 1e-6, 1, float("nan"), float("-inf"), complex(1), torch.tensor(1e-6)], ids=repr
)
def test_finite_numbers_are_keyed_by_type_and_nothing_else_is_a_number(native: Any, eps: Any) -> None:
    key = native.key("rms_norm", (torch.empty(2, 8), torch.empty(8), eps, None), None)
    finite = type(eps) is int or (type(eps) is float and math.isfinite(eps))
    assert (key is not None) == (eps is None or finite)
    if type(eps) is float and finite:
        assert key == native.key("rms_norm", (torch.empty(2, 8), torch.empty(8), 0.5, None), None)


def test_a_rank_beyond_eight_has_no_key(native: Any) -> None:
    assert native.key("silu_and_mul", (torch.empty([1] * 7 + [8]), None), None) is not None
    assert native.key("silu_and_mul", (torch.empty([1] * 8 + [8]), None), None) is None


def test_each_accelerated_op_has_a_parameter_letter_for_each_parameter(native: Any) -> None:
    from layerzero_accel.functions import KINDS

    for name, kinds in KINDS.items():
        assert len(PUBLIC[name].signature.parameters) == len(kinds), name

"""`lz.rope` and `lz.xpos` on every kernel of this machine, alone and before attention; ALiBi at long range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.backends.torch_native.rotary import _few_launches
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, compare, tolerance
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero_cli.calls import context

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXACT64 = tolerance("rope", "float64")


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tables(length, dim, dtype=torch.float64):
    return lz.rope_tables(dim, length, dtype=dtype)


def turn(x, cos, sin, interleaved):
    """[B, H, S, D] turned as complex numbers by tables [.., S, D/2], in float64."""
    x, half = x.double(), x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())
    return torch.view_as_real(turned).flatten(-2) if interleaved else torch.cat((turned.real, turned.imag), -1)


# -- the kernels of rope ---------------------------------------------------------------------------
KERNELS = [
    ("torch.rope.halves", False), ("torch.rope.complex", True),
    ("reference.rope.plain", False), ("reference.rope.plain", True),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "interleaved"), KERNELS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.req("R-API-05", "R-POS-01", "R-TOL-04")
def test_every_kernel_turns_as_complex_numbers_do(kernel, interleaved, dtype, layout):
    q, k = draw(2, 4, 9, 16, dtype=dtype), draw(2, 2, 9, 16, dtype=dtype, seed=1)
    cos, sin = tables(32, 16, torch.float64 if dtype is torch.float64 else torch.float32)
    ids = torch.tensor([[0, 31, 7, 7, 2, 1, 30, 5, 9], list(range(9))])
    for positions, rows in ((None, slice(0, 9)), (ids, ids)):
        c, s = cos[rows], sin[rows]
        want = [turn(x, c.unsqueeze(-3), s.unsqueeze(-3), interleaved) for x in (q, k)]
        for inplace in (False, True):
            given = [x.clone() if layout == "BHSD" else x.transpose(1, 2).contiguous() for x in (q, k)]
            with torch.no_grad():
                got = lz.rope(
                    *given, cos, sin, interleaved=interleaved, layout=layout, position_ids=positions, inplace=inplace,
                    backend=kernel,
                )  # fmt: skip
            assert all((a is b) == inplace for a, b in zip(got, given, strict=True))
            got = [x if layout == "BHSD" else x.transpose(1, 2) for x in got]
            assert all(x.dtype == dtype for x in got)
            assert_close(got, want, tolerance("rope", dtype))


@pytest.mark.req("R-API-05")
def test_what_is_not_said_is_the_layout_of_attention_halves_and_new_tensors():
    """q and k of several heads [B, H, S, D], whose numbers of heads and rows differ, so that no axis is another."""
    q, k = draw(2, 4, 9, 16, dtype=torch.float32), draw(2, 2, 9, 16, dtype=torch.float32, seed=1)
    cos, sin = tables(9, 16, torch.float32)
    kept = q.clone(), k.clone()
    want = [turn(x, cos, sin, False) for x in (q, k)]
    for _ in range(2):  # and the second time, when the call is hot
        turned = lz.rope(q, k, cos, sin)
        assert_close(list(turned), want, tolerance("rope", "float32"))
        assert torch.equal(q, kept[0]) and torch.equal(k, kept[1])
        alone, none = lz.rope(q, None, cos, sin)
        assert none is None and torch.equal(alone, turned[0])
    assert not compare(turn(q, cos, sin, True), want[0], tolerance("rope", "float16")).ok


@pytest.mark.parametrize(("kernel", "interleaved"), KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.req("R-POS-01", "R-TOL-04")
def test_every_kernel_has_the_gradient_of_the_rotation(kernel, interleaved, dtype, rotary):
    q, k = (draw(1, h, 5, 8, dtype=dtype, seed=h).requires_grad_() for h in (3, 1))
    cos, sin = tables(5, rotary, torch.float32)
    outs = lz.rope(q, k, cos, sin, interleaved=interleaved, backend=kernel)
    cotangents = [draw(*x.shape, seed=7).to(dtype) for x in (q, k)]
    got = torch.autograd.grad(outs, (q, k), cotangents)
    # a rotation's gradient is the rotation back
    want = [
        torch.cat((turn(c[..., :rotary], cos, -sin, interleaved), c[..., rotary:].double()), -1) for c in cotangents
    ]
    assert_close(got, want, tolerance("rope", dtype))
    written = [x.detach().clone().requires_grad_() for x in (q, k)]
    outs = lz.rope(*(x * 1 for x in written), cos, sin, interleaved=interleaved, inplace=True, backend=kernel)
    assert_close(torch.autograd.grad(outs, written, cotangents), want, tolerance("rope", dtype))


@pytest.mark.parametrize(("kernel", "interleaved"), KERNELS)
def test_every_kernel_passes_gradcheck_also_through_the_tables(kernel, interleaved):
    given = [draw(1, 2, 3, 6).requires_grad_(), draw(1, 1, 3, 6, seed=1).requires_grad_()]
    given += [t.requires_grad_() for t in tables(3, 4)]
    assert torch.autograd.gradcheck(lambda *t: lz.rope(*t, interleaved=interleaved, backend=kernel), given)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_and_full_width_tables_agree_between_kernels(interleaved):
    q = draw(2, 3, 5, 12, dtype=torch.float32)
    cos, sin = tables(5, 8, torch.float32)
    wide = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)]
    wide = [t.expand(2, -1, -1).contiguous() for t in wide]
    want = torch.cat((turn(q[..., :8], cos, sin, interleaved), q[..., 8:].double()), -1)
    with torch.no_grad():
        for given in ((cos, sin), wide):
            got, none = lz.rope(q, None, *given, interleaved=interleaved)
            assert none is None
            assert_close(got, want, tolerance("rope", "float32"))
            assert torch.equal(got[..., 8:], q[..., 8:])


@pytest.mark.parametrize(("kernel", "interleaved"), KERNELS)
def test_a_view_may_begin_anywhere_in_its_storage(kernel, interleaved):
    q = draw(65, dtype=torch.float32)[1:].view(1, 1, 4, 16)
    cos, sin = tables(4, 16, torch.float32)
    got, _ = lz.rope(q, None, cos, sin, interleaved=interleaved, backend=kernel)
    assert_close(got, turn(q, cos, sin, interleaved), tolerance("rope", torch.float32))


@pytest.mark.req("R-OP-15", "R-POS-02")
def test_a_faster_kernel_runs_where_it_can_and_the_reference_elsewhere(lab):
    q, (cos, sin) = draw(1, 2, 4, 8, dtype=torch.float32), tables(4, 8, torch.float32)
    wide = [t.repeat_interleave(2, -1)[None] for t in (cos, sin)]
    for expected, arguments, options in (
        ("torch.rope.halves", (q, None, cos, sin), {}),
        ("torch.rope.complex", (q, None, cos, sin), {"interleaved": True}),
        ("torch.rope.complex", (q.clone().requires_grad_(), None, cos, sin), {"interleaved": True}),
        ("torch.rope.halves", (q.clone().requires_grad_(), None, cos, sin), {}),
        ("reference.rope.plain", (q, None, *wide), {"interleaved": True}),
        ("reference.xpos.plain", (q, None, cos, sin), {}),
    ):
        function = lz.xpos if "xpos" in expected else lz.rope
        _, ran = lab.run(function, *arguments, **options)
        assert ran == [expected]


@pytest.mark.parametrize("device", ["a100", "h100", "t4", "mi300x"])
@pytest.mark.parametrize(("interleaved", "expected"), [(False, "torch.rope.halves"), (True, "torch.rope.complex")])
def test_on_an_accelerator_torch_turns_both_conventions_not_the_reference(lab, device, interleaved, expected):
    words = {"q": (2, 8, 64, 64), "k": (2, 2, 64, 64), "interleaved": interleaved, "device": device}
    for more in ({}, {"rotary_dim": 32}, {"grad": True}, {"layout": "BSHD", "k": (2, 8, 2, 64)}):
        for dtype in ("float16", "float32"):
            assert select(context("rope", {**words, **more, "dtype": dtype}), state.world).chosen == expected


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("inplace", [False, True])
def test_halves_in_few_launches_equal_the_rotation(dtype, inplace):
    x, (cos, sin) = draw(2, 3, 9, 16, dtype=dtype), tables(9, 16, torch.float32)
    want = turn(x, cos, sin, False)
    out = x if inplace else torch.empty_like(x)
    pair, to = ((t.narrow(-1, 0, 8), t.narrow(-1, 8, 8)) for t in (x, out))
    _few_launches(pair, (cos, sin, cos, sin), to)
    assert_close(out, want, tolerance("rope", torch.float32 if dtype is torch.float64 else dtype))


@pytest.mark.req("R-OP-15", "R-POS-02")
def test_a_variant_a_kernel_does_not_know_falls_back_with_its_reason(lab):
    """A fast XPos that turns interleaved pairs only."""
    lab.use(lab.kernel("fast.xpos.pairs", features=frozenset({"interleaved", "no_key"}), priority=90))
    q, (cos, sin) = draw(1, 2, 4, 8, dtype=torch.float32), tables(4, 8, torch.float32)
    for interleaved, expected in ((True, "fast.xpos.pairs"), (False, "reference.xpos.plain")):
        out, ran = lab.run(lz.xpos, q, None, cos, sin, interleaved=interleaved)
        assert ran == [expected]
        want, _ = lz.xpos(q, None, cos, sin, interleaved=interleaved, backend="reference")
        assert torch.equal(out[0], want)
    report = str(lz.explain("xpos", q, None, cos, sin))
    assert "fast.xpos.pairs" in report and "FEATURE_UNSUPPORTED" in report and "rotate_half" in report


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"position_ids": torch.zeros(3, dtype=torch.int64)}, "SHAPE_INVALID"),
        ({"position_ids": torch.zeros(3, 4, dtype=torch.int64)}, "SHAPE_INVALID"),
        ({"position_ids": torch.full((4,), 9)}, "SEQ_LEN_TOO_LONG"),
        ({"position_ids": torch.tensor([0, 1, -1, 2])}, "SEQ_LEN_TOO_LONG"),
        ({"position_ids": torch.zeros(4)}, "DTYPE_UNSUPPORTED"),
        ({"layout": "NHD"}, "LAYOUT_UNKNOWN"),
    ],
)
@pytest.mark.parametrize("op", ["rope", "xpos"])
def test_positions_that_do_not_fit_are_refused(op, change, code):
    q, (cos, sin) = draw(2, 2, 4, 8), tables(9, 8)
    with pytest.raises(InvalidInputError) as caught:
        getattr(lz, op)(q, None, cos, sin, **change)
    assert caught.value.code == code


def test_a_position_past_the_tables_is_the_callers_error_on_a_hot_call_too():
    q, (cos, sin) = draw(1, 2, 4, 8, dtype=torch.float32), tables(9, 8, torch.float32)
    good, bad = torch.arange(4), torch.tensor([0, 1, 2, 9])
    for _ in range(3):
        lz.rope(q, None, cos, sin, position_ids=good)
    with pytest.raises(InvalidInputError, match="position_ids hold 9"):
        lz.rope(q, None, cos, sin, position_ids=bad)


def test_tables_of_another_batch_are_refused():
    q = draw(2, 2, 4, 8)
    table = torch.ones(3, 4, 8, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match="cos and sin"):
        lz.rope(q, None, table, table)


# -- before attention ------------------------------------------------------------------------------
def attend(q, k, v):
    """Causal attention in float64, GQA by head."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.req("R-OP-13", "R-TOL-01")
def test_rope_then_attention_equals_the_formula(backend, interleaved, dtype):
    q, k, v = draw(2, 4, 12, 16, dtype=dtype), draw(2, 2, 12, 16, dtype=dtype, seed=1), draw(2, 2, 12, 16, seed=2)
    v = v.to(dtype)
    cos, sin = tables(12, 16, torch.float32)
    turned = [turn(x, cos, sin, interleaved).to(dtype).double() for x in (q, k)]
    want = attend(*turned, v.double())
    for inplace in (False, True):
        with torch.no_grad():
            rq, rk = lz.rope(q.clone(), k.clone(), cos, sin, interleaved=interleaved, inplace=inplace, backend=backend)
            assert_close(lz.attention(rq, rk, v, is_causal=True), want, tolerance("attention", dtype))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.req("R-OP-13")
def test_gradients_pass_through_rope_and_attention(interleaved):
    q, k, v = (draw(1, h, 6, 8, dtype=torch.float32, seed=h).requires_grad_() for h in (4, 2, 2))
    cos, sin = tables(6, 8, torch.float32)
    out = lz.attention(*lz.rope(q, k, cos, sin, interleaved=interleaved), v, is_causal=True)
    weight = draw(*out.shape, seed=9)
    got = torch.autograd.grad((out * weight.float()).sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = attend(*(turn(x, cos, sin, interleaved) for x in wide[:2]), wide[2])
    assert_close(got, torch.autograd.grad((exact * weight).sum(), wide), tolerance("gradient", "float32"))


# -- XPos ------------------------------------------------------------------------------------------
def decay(positions, dim, scale_base, gamma, origin):
    """zeta_i ** ((n - origin) / scale_base), pair by pair."""
    zeta = torch.tensor([(2 * i / dim + gamma) / (1 + gamma) for i in range(dim // 2)], dtype=torch.float64)
    return zeta ** ((positions.double()[..., None] - origin) / scale_base)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.req("R-POS-02", "R-TOL-04")
def test_xpos_scales_q_and_k_against_each_other(dtype, interleaved, layout):
    q, k = draw(2, 4, 7, 16, dtype=dtype), draw(2, 2, 7, 16, dtype=dtype, seed=1)
    cos, sin = tables(600, 16, torch.float64 if dtype is torch.float64 else torch.float32)
    ids = torch.tensor([[599, 0, 3, 301, 300, 299, 9], list(range(7))])
    for positions, rows in ((None, torch.arange(7)), (ids, ids)):
        c, s = (t[rows].double().unsqueeze(-3) for t in (cos, sin))
        zeta = decay(rows, 16, 512.0, 0.4, 300.0).unsqueeze(-3)
        want = [turn(q, c * zeta, s * zeta, interleaved), turn(k, c / zeta, s / zeta, interleaved)]
        given = [x if layout == "BHSD" else x.transpose(1, 2) for x in (q, k)]
        got = lz.xpos(*given, cos, sin, interleaved=interleaved, layout=layout, position_ids=positions, origin=300.0)
        got = [x if layout == "BHSD" else x.transpose(1, 2) for x in got]
        assert all(x.dtype == dtype for x in got)
        assert_close(got, want, tolerance("xpos", dtype))
        alone, none = lz.xpos(
            given[0], None, cos, sin, interleaved=interleaved, layout=layout, position_ids=positions, origin=300.0
        )
        assert none is None and torch.equal(alone if layout == "BHSD" else alone.transpose(1, 2), got[0])


@pytest.mark.req("R-POS-02")
def test_xpos_scores_decay_with_the_distance_and_do_not_depend_on_the_origin():
    x = torch.ones(1, 1, 1, 16, dtype=torch.float64).expand(1, 1, 64, 16)
    cos, sin = torch.ones(64, 8, dtype=torch.float64), torch.zeros(64, 8, dtype=torch.float64)  # no rotation
    scores = []
    for origin in (0.0, 31.5):
        q, k = lz.xpos(x, x, cos, sin, scale_base=8.0, origin=origin)
        scores.append((q @ k.transpose(-1, -2))[0, 0])
    assert_close(scores[0], scores[1], EXACT64)
    far = scores[0][-1]  # the last query against every key
    assert (far.diff() > 0).all() and far[-1].item() == pytest.approx(16.0)
    pair = [(2 * i / 16 + 0.4) / 1.4 for i in range(8)]
    assert far[-9].item() == pytest.approx(2 * sum(pair), rel=1e-12)  # distance 8 = scale_base: zeta to the first


def test_xpos_with_an_origin_stays_finite_in_half_precision():
    k = torch.ones(1, 1, 8192, 64, dtype=torch.float16)
    cos, sin = tables(8192, 64, torch.float32)
    assert lz.xpos(k, k, cos, sin)[1].isinf().any()
    assert not lz.xpos(k, k, cos, sin, origin=4096.0)[1].isinf().any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_xpos_gradients_pass_gradcheck(interleaved):
    q, k = draw(1, 1, 3, 6).requires_grad_(), draw(1, 1, 3, 6, seed=1).requires_grad_()
    tables4 = [t.requires_grad_() for t in tables(3, 4)]
    assert torch.autograd.gradcheck(
        lambda *t: lz.xpos(*t, interleaved=interleaved, scale_base=3.0, origin=1.0), (q, k, *tables4)
    )


@pytest.mark.parametrize("change", [{"scale_base": 0.0}, {"gamma": -0.4}, {"origin": math.inf}, {"gamma": math.nan}])
def test_xpos_refuses_numbers_without_meaning(change):
    q, (cos, sin) = draw(1, 1, 3, 4), tables(3, 4)
    with pytest.raises(InvalidInputError, match=next(iter(change))) as caught:
        lz.xpos(q, None, cos, sin, **change)
    assert caught.value.code == "VALUE_INVALID"


# -- properties ------------------------------------------------------------------------------------
shapes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 6).map(lambda n: 2 * n))
values = st.sampled_from([1.0, 0.0, 1e4, -1e4, 1e-30, 1e-310])


def some(shape, seed, scale, strided):
    batch, heads, seq, dim = shape
    if strided:
        return (draw(batch, seq, heads, dim + 3, seed=seed) * scale).transpose(1, 2)[..., :dim]
    return draw(*shape, seed=seed) * scale


@given(shapes, st.booleans(), values, st.booleans(), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
@pytest.mark.req("R-POS-01")
def test_rope_keeps_lengths_and_turning_back_gives_the_input(shape, interleaved, scale, strided, seed):
    x = some(shape, seed, scale, strided)
    cos, sin = tables(shape[2], shape[3])
    there, _ = lz.rope(x, None, cos, sin, interleaved=interleaved)
    assert_close(there.norm(dim=-1), x.norm(dim=-1), EXACT64)
    back, _ = lz.rope(there, None, cos, -sin, interleaved=interleaved)
    assert_close(back, x, EXACT64)
    assert torch.equal(there, lz.rope(x, None, cos, sin, interleaved=interleaved)[0])  # and it is deterministic
    assert torch.equal(there[:, :, 0], x[:, :, 0])  # position 0 does not turn


@given(st.integers(1, 6).map(lambda n: 2 * n), st.booleans(), st.integers(0, 200), st.integers(0, 99), st.booleans())
@settings(max_examples=50, deadline=None)
@pytest.mark.req("R-POS-01", "R-POS-02")
def test_scores_depend_on_the_distance_alone(dim, interleaved, shift, seed, with_decay):
    q, k = draw(1, 1, 5, dim, seed=seed), draw(1, 1, 5, dim, seed=seed + 1)
    cos, sin = tables(300, dim)
    turned = lz.xpos if with_decay else lz.rope
    near, far = (turned(q, k, cos, sin, interleaved=interleaved, position_ids=torch.arange(5) + n) for n in (0, shift))
    scores = [a @ b.transpose(-1, -2) for a, b in (near, far)]
    assert_close(scores[1], scores[0], EXACT64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_nan_and_infinity_stay_in_their_pair(dtype, interleaved):
    x = torch.ones(1, 1, 3, 8, dtype=dtype)
    x[0, 0, 1, 2], x[0, 0, 2, 5] = math.nan, math.inf
    cos, sin = tables(3, 8, torch.float32)
    for backend in ("torch", "reference"):
        with torch.no_grad():
            out, _ = lz.rope(x, None, cos, sin, interleaved=interleaved, backend=backend)
        wrong = (~out.isfinite())[0, 0].nonzero().tolist()
        pair = {False: [[1, 2], [1, 6], [2, 1], [2, 5]], True: [[1, 2], [1, 3], [2, 4], [2, 5]]}[interleaved]
        assert wrong == pair


# -- ALiBi -----------------------------------------------------------------------------------------
def paper_slopes(heads):
    """As the paper's own code has it: powers of two in closed form, other counts from their neighbours."""
    if heads & (heads - 1) == 0:
        start = 2.0 ** (-(2.0 ** -(math.log2(heads) - 3)))
        return [start ** (i + 1) for i in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return paper_slopes(lower) + paper_slopes(2 * lower)[0::2][: heads - lower]


@pytest.mark.req("R-POS-03", "R-TOL-04")
def test_slopes_are_those_of_the_paper_for_any_head_count():
    for heads in range(1, 260):
        got = lz.alibi_slopes(heads)
        want = torch.tensor(paper_slopes(heads), dtype=torch.float64)
        assert got.shape == (heads,) and got.dtype is torch.float32
        assert_close(got, want, tolerance("alibi", "float32"))
        assert (got > 0).all() and (got < 1).all()


@pytest.mark.parametrize("heads", [0, -1, 2.0, True, "8"])
def test_a_head_count_that_is_none_is_refused(heads):
    with pytest.raises(InvalidInputError) as caught:
        lz.alibi_slopes(heads)
    assert caught.value.code == "VALUE_INVALID"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.req("R-POS-03", "R-OP-13", "R-TOL-01")
def test_alibi_holds_over_a_hundred_thousand_tokens(dtype, heads):
    """One query at the end of 131072 keys: distances that sixteen bits cannot tell apart."""
    length, dim = 131_072, 8
    slopes = lz.alibi_slopes(heads) / 64  # gentle ones, so that far keys still count
    q, k, v = (draw(1, heads, n, dim, dtype=dtype, seed=s) for n, s in ((1, 1), (length, 2), (length, 3)))
    v = v + torch.linspace(-1, 1, length)[:, None].to(dtype)  # far values differ from near ones
    with torch.no_grad():
        got = lz.attention(q, k, v, alibi_slopes=slopes)
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    scores = (q.double() @ k.double().transpose(-1, -2)) / math.sqrt(dim) - slopes.double()[:, None, None] * distance
    want = scores.softmax(-1) @ v.double()
    flat = (q.double() @ k.double().transpose(-1, -2) / math.sqrt(dim)).softmax(-1) @ v.double()
    assert (want - flat).abs().max() > 0.1  # the bias matters
    assert_close(got, want, tolerance("attention", dtype))

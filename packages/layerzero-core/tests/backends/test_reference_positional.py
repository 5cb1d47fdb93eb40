"""The reference RoPE against complex multiplication, in both conventions; ALiBi slopes against the paper's numbers."""

from __future__ import annotations

import pytest
import torch

from layerzero.backends.reference.positional import rope
from layerzero.errors import InvalidInputError
from layerzero.model.attention import slopes_of_heads as alibi_slopes
from layerzero.numerics import assert_close, tolerance
from layerzero.reasons import ReasonCode

EXACT64 = tolerance("rope", "float64")


def angles(positions, rotary_dim, base=10000.0):
    freq = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return positions.double()[..., None] * freq


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def turn(x, theta, interleaved):
    """Rotate [B, H, S, R] by theta [.., S, R/2] as complex numbers."""
    if interleaved:
        pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double())
    else:
        half = x.shape[-1] // 2
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(theta), theta)
    if interleaved:
        return torch.view_as_real(turned).flatten(-2)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.req("R-POS-01", "R-TOL-04")
def test_matches_complex_rotation(dtype, interleaved, layout):
    q, k = draw(2, 4, 9, 16, dtype=dtype), draw(2, 2, 9, 16, dtype=dtype, seed=1)
    theta = angles(torch.arange(9), 16)
    cos, sin = theta.cos(), theta.sin()
    if dtype != torch.float64:
        cos, sin = cos.float(), sin.float()
    args = (q, k) if layout == "BHSD" else (q.transpose(1, 2), k.transpose(1, 2))
    out_q, out_k = rope(*args, cos, sin, interleaved, layout, None, False)
    if layout == "BSHD":
        out_q, out_k = out_q.transpose(1, 2), out_k.transpose(1, 2)
    assert out_q.dtype == dtype and out_k.dtype == dtype
    assert_close(out_q, turn(q, theta, interleaved), tolerance("rope", dtype))
    assert_close(out_k, turn(k, theta, interleaved), tolerance("rope", dtype))


@pytest.mark.req("R-POS-01")
def test_the_conventions_differ_by_a_permutation_only():
    q = draw(1, 2, 5, 8)
    theta = angles(torch.arange(5), 8)
    halves, _ = rope(q, None, theta.cos(), theta.sin(), False, "BHSD", None, False)
    pairs, _ = rope(q, None, theta.cos(), theta.sin(), True, "BHSD", None, False)
    assert not torch.allclose(halves, pairs)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # rotate-half element for each interleaved slot
    permuted, _ = rope(q[..., order], None, theta.cos(), theta.sin(), True, "BHSD", None, False)
    assert_close(permuted, halves[..., order], EXACT64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_batched_full_width_tables_equal_half_width_ones(interleaved, layout):
    q = draw(2, 3, 5, 8)
    theta = angles(torch.arange(5), 8)
    wide = theta.repeat_interleave(2, -1) if interleaved else torch.cat((theta, theta), -1)
    x = q if layout == "BHSD" else q.transpose(1, 2)
    want, _ = rope(x, None, theta.cos(), theta.sin(), interleaved, layout, None, False)
    for batch in (1, 2):
        table = wide.expand(batch, -1, -1)
        out, _ = rope(x, None, table.cos(), table.sin(), interleaved, layout, None, False)
        assert torch.equal(out, want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_position_ids_pick_table_rows(interleaved, batched):
    q = draw(2, 3, 4, 8)
    ids = torch.tensor([[7, 0, 3, 19], [5, 5, 1, 2]]) if batched else torch.tensor([7, 0, 3, 19])
    theta = angles(torch.arange(20), 8)
    out, _ = rope(q, None, theta.cos(), theta.sin(), interleaved, "BHSD", ids, False)
    chosen = angles(ids, 8)
    assert_close(out, turn(q, chosen[:, None] if batched else chosen, interleaved), EXACT64)
    wide = (theta.repeat_interleave(2, -1) if interleaved else torch.cat((theta, theta), -1))[None]
    for rows in (wide, wide.expand(2, -1, -1)):
        again, _ = rope(q, None, rows.cos(), rows.sin(), interleaved, "BHSD", ids, False)
        assert torch.equal(again, out)
    swapped, _ = rope(q.transpose(1, 2), None, theta.cos(), theta.sin(), interleaved, "BSHD", ids, False)
    assert torch.equal(swapped.transpose(1, 2), out)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_leaves_the_rest_alone(interleaved):
    q = draw(1, 2, 5, 12)
    theta = angles(torch.arange(5), 8)
    out, _ = rope(q, None, theta.cos(), theta.sin(), interleaved, "BHSD", None, False)
    assert torch.equal(out[..., 8:], q[..., 8:])
    assert_close(out[..., :8], turn(q[..., :8], theta, interleaved), EXACT64)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_inplace_writes_the_same_numbers_into_the_inputs(rotary_dim):
    q, k = draw(1, 2, 5, 8), draw(1, 1, 5, 8, seed=1)
    theta = angles(torch.arange(5), rotary_dim)
    tables = (theta.cos(), theta.sin())
    before = (q.clone(), k.clone())
    want = rope(q, k, *tables, False, "BHSD", None, False)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    out = rope(q, k, *tables, False, "BHSD", None, True)
    assert out[0] is q and out[1] is k
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])


def test_scores_depend_on_relative_position_only_and_norms_are_kept():
    q, k = draw(1, 1, 1, 16).expand(1, 1, 12, 16), draw(1, 1, 1, 16, seed=1).expand(1, 1, 12, 16)
    theta = angles(torch.arange(12), 16)
    rq, rk = rope(q, k, theta.cos(), theta.sin(), False, "BHSD", None, False)
    scores = (rq @ rk.transpose(-1, -2))[0, 0]
    for offset in (-3, 0, 5):
        diagonal = scores.diagonal(offset)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal))
    assert torch.allclose(rq.norm(dim=-1), q.norm(dim=-1))


def test_k_may_be_absent_and_a_longer_table_is_cut():
    q = draw(1, 2, 3, 8)
    theta = angles(torch.arange(50), 8)
    out, none = rope(q, None, theta.cos(), theta.sin(), False, "BHSD", None, False)
    assert none is None
    assert_close(out, turn(q, theta[:3], False), EXACT64)


def test_a_table_wider_than_the_head_is_refused():
    theta = angles(torch.arange(3), 16)
    with pytest.raises(InvalidInputError, match="head_dim 8") as caught:
        rope(draw(1, 1, 3, 8), None, theta.cos(), theta.sin(), False, "BHSD", None, False)
    assert caught.value.code is ReasonCode.SHAPE_INVALID


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_pass_gradcheck(interleaved):
    q, k = draw(1, 1, 2, 6).requires_grad_(), draw(1, 1, 2, 6, seed=1).requires_grad_()
    theta = angles(torch.arange(2), 4)
    tables = (theta.cos(), theta.sin())
    assert torch.autograd.gradcheck(lambda *t: rope(*t, *tables, interleaved, "BHSD", None, False), (q, k))


def test_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.allclose(alibi_slopes(16), 2.0 ** (-0.5 * torch.arange(1, 17)))
    assert alibi_slopes(1).tolist() == [2.0**-8]
    twelve = alibi_slopes(12)
    assert twelve[:8].tolist() == alibi_slopes(8).tolist()
    assert torch.allclose(twelve[8:], alibi_slopes(16)[0::2][:4])
    assert twelve.dtype == torch.float32

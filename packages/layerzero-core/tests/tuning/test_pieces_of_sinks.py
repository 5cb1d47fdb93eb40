"""The truth in pieces keeps the sinks of a call, of the very heads that a piece has."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.varlen import paged_attention, varlen_attention
from layerzero.tuning.pieces import pieces

HEADS = torch.linspace(-2.0, 4.0, 4)


def dense():
    q, k, v = torch.randn(3, 4, 40, 16), torch.randn(3, 2, 40, 16), torch.randn(3, 2, 40, 16)
    return attention, (q, k, v, None, 0.0, True, None, None, None, None, False, HEADS)


def packed():
    q, k, v = torch.randn(70, 4, 16), torch.randn(70, 2, 16), torch.randn(70, 2, 16)
    ends = torch.tensor([0, 30, 70], dtype=torch.int32)
    return varlen_attention, (q, k, v, ends, ends, 40, 40, "bottom_right", None, None, None, None, False, HEADS)


def paged():
    batch = lz.paged_batch(torch.arange(12).view(3, 4).int(), torch.tensor([60, 7, 33], dtype=torch.int32))
    q, k, v = torch.randn(3, 4, 16), torch.randn(12, 16, 2, 16), torch.randn(12, 16, 2, 16)
    return paged_attention, (q, k, v, batch, None, None, None, None, False, "NHD", HEADS)


@pytest.mark.parametrize("made", [dense, packed, paged])
def test_pieces_of_a_call_with_sinks_are_parts_of_its_result(made):
    torch.manual_seed(0)
    whole, args = made()
    op = {"dense": "attention", "packed": "varlen_attention", "paged": "paged_attention"}[made.__name__]
    given = {
        "dense": lambda: lz.select(op, *args[:3], is_causal=True, sinks=HEADS),
        "packed": lambda: lz.select(op, *args[:5], max_seqlen_q=40, max_seqlen_k=40, is_causal=True, sinks=HEADS),
        "paged": lambda: lz.select(op, *args[:4], sinks=HEADS),
    }[made.__name__]
    result = [whole(*args)]
    found = list(pieces(given().context, args, 200))
    assert len(found) > 1
    for piece in found:
        own = {"attention": attention, "paged_attention": paged_attention}[piece.op]
        (part,) = piece.take(result)
        torch.testing.assert_close(own(*piece.args).reshape(part.shape), part)
        other = list(piece.args)
        other[11 if piece.op == "attention" else 10] = None
        assert not torch.allclose(own(*other).reshape(part.shape), part), "the sinks make a difference"


@pytest.mark.parametrize("sinks", [None, HEADS])
def test_an_example_of_paged_decode_fits_its_batch_also_where_it_is_smaller(sinks):
    """A kernel that is checked on an example, since the call itself is too large to be compared."""
    from dataclasses import replace

    from layerzero.tuning.inputs import build

    args = paged()[1]
    ctx = lz.select("paged_attention", *args[:4], sinks=sinks).context
    smaller = replace(ctx, dims=tuple((name, 2 if name == "batch" else size) for name, size in ctx.dims))
    batch = build(smaller).args[3]
    assert batch.batch_size == batch.total_q == 2

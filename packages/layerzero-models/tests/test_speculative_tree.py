"""Trees of candidates: masks and positions, and one call of attention that stands for every path by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

TREE = [-1, 0, 0, 1, 2, 2, -1, 6]


def path_to(parents, node):
    """The nodes from the root to this one."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


trees = st.integers(0, 9).flatmap(lambda size: st.tuples(*(st.integers(-1, i - 1) for i in range(size))))


# -- masks and positions -----------------------------------------------------------------------------
@pytest.mark.req("R-SPEC-03")
@settings(max_examples=200, deadline=None)
@given(trees, st.integers(0, 5), st.integers(0, 3))
def test_a_node_sees_the_text_its_ancestors_and_itself(parents, prefix, spare):
    size = len(parents)
    mask = lz.tree_mask(torch.tensor(parents, dtype=torch.int64), prefix, capacity=prefix + size + spare)
    assert mask.shape == (1, 1, size, prefix + size + spare) and mask.dtype == torch.bool
    for node in range(size):
        own = {prefix + other for other in path_to(parents, node)}
        assert set(mask[0, 0, node].nonzero().flatten().tolist()) == set(range(prefix)) | own
    positions = lz.tree_positions(list(parents), prefix)
    assert positions.tolist() == [[prefix + len(path_to(parents, node)) - 1 for node in range(size)]]


@pytest.mark.req("R-SPEC-03")
def test_each_sequence_may_have_its_own_text_and_its_own_tree():
    lengths, pair = torch.tensor([4, 1]), torch.tensor([[-1, 0, 1], [-1, -1, 0]])
    mask = lz.tree_mask(pair, lengths)
    assert mask.shape == (2, 1, 3, 7)
    for row in range(2):
        keys = int(lengths[row]) + 3
        assert torch.equal(mask[row : row + 1, ..., :keys], lz.tree_mask(pair[row], int(lengths[row])))
        assert not mask[row, ..., keys:].any()
    assert lz.tree_positions(pair, lengths).tolist() == [[4, 5, 6], [1, 1, 2]]
    assert torch.equal(lz.tree_mask([-1, 0, 1], lengths)[0], mask[0])
    assert lz.tree_positions([-1, 0], lengths).tolist() == [[4, 5], [1, 2]]


def test_a_chain_is_the_causal_mask():
    assert torch.equal(lz.tree_mask([-1, 0, 1, 2])[0, 0], torch.ones(4, 4).tril().bool())


BAD = {
    "a parent after its child": (lambda: lz.tree_mask([1, -1]), "VALUE_INVALID"),
    "its own parent": (lambda: lz.tree_mask([0]), "VALUE_INVALID"),
    "a parent below -1": (lambda: lz.tree_positions([-2]), "VALUE_INVALID"),
    "fractions": (lambda: lz.tree_mask(torch.zeros(2)), "DTYPE_UNSUPPORTED"),
    "words": (lambda: lz.tree_mask(["x"]), "TYPE_INVALID"),
    "three axes": (lambda: lz.tree_mask(torch.zeros(1, 1, 1, dtype=torch.int64)), "RANK_INVALID"),
    "a negative text": (lambda: lz.tree_mask([-1], -3), "VALUE_INVALID"),
    "texts by the half": (lambda: lz.tree_mask([-1], torch.tensor([0.5])), "VALUE_INVALID"),
    "two trees, three texts": (lambda: lz.tree_mask([[-1], [-1]], torch.tensor([1, 2, 3])), "BATCH_MISMATCH"),
    "a cache too small": (lambda: lz.tree_mask([-1, 0], 3, capacity=4), "VALUE_INVALID"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tree_that_means_nothing_is_refused(name):
    call, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code


# -- attention ---------------------------------------------------------------------------------------
@pytest.mark.req("R-SPEC-03")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("prefix", [0, 5])
def test_tree_attention_is_attention_along_every_path(prefix, heads, dtype):
    size = len(TREE)
    query = randn(2, heads[0], size, 16, seed=1, dtype=dtype)
    key, value = (randn(2, heads[1], prefix + size, 16, seed=seed, dtype=dtype) for seed in (2, 3))
    out = lz.attention(query, key, value, attn_mask=lz.tree_mask(TREE, prefix))
    for node in range(size):
        path = path_to(TREE, node)
        rows = [*range(prefix), *(prefix + other for other in path)]
        alone = lz.attention(query[:, :, path], key[:, :, rows], value[:, :, rows], is_causal="bottom_right")
        assert_close(out[:, :, node], alone[:, :, -1], tolerance("attention", dtype))


@pytest.mark.req("R-SPEC-03")
def test_a_mask_that_lets_siblings_see_each_other_is_noticed():
    query, key, value = (randn(1, 2, 8, 16, seed=seed) for seed in range(3))
    right, wrong = (
        lz.attention(query, key, value, attn_mask=mask)
        for mask in (lz.tree_mask(TREE), torch.ones(1, 1, 8, 8).tril().bool())
    )
    assert not torch.allclose(right[:, :, 2], wrong[:, :, 2], atol=1e-3)


@pytest.mark.req("R-SPEC-03")
def test_rope_at_tree_positions_turns_siblings_alike():
    angles = torch.arange(12.0)[:, None] * torch.logspace(0, -2, 8)
    query = randn(1, 2, 1, 16).expand(-1, -1, len(TREE), -1).contiguous()
    turned, _ = lz.rope(query, None, angles.cos(), angles.sin(), position_ids=lz.tree_positions(TREE, 4))
    assert torch.equal(turned[:, :, 1], turned[:, :, 2])  # siblings
    assert torch.equal(turned[:, :, 0], turned[:, :, 6])  # both below the root
    assert not torch.allclose(turned[:, :, 0], turned[:, :, 1])

"""`lz.attention` takes what `F.scaled_dot_product_attention` takes, with the same result: torch is the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.runtime.state import state

pytestmark = [pytest.mark.fault(11)]

INF = math.inf


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 7 * seed + len(shape)))


def qkv(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return rand(*q, seed=1), rand(*k, seed=2), rand(*(k if v is None else v), seed=3)


def keep(*shape: int) -> Tensor:
    """A boolean mask with rows that attend some, all and nothing."""
    found = rand(*shape, seed=4) > 0
    if len(shape) > 1 and 0 not in shape:
        found[..., 0, :] = False
        found[..., -1, :] = True
    return found


# name -> (shapes of query, key, value), options
TAKEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "2-D": (((4, 8), (5, 8), (5, 6)), {}),
    "2-D, causal": (((4, 8), (5, 8)), {"is_causal": True}),
    "2-D, longer query, causal": (((6, 8), (3, 8)), {"is_causal": True}),
    "2-D, bool mask": (((4, 8), (5, 8)), {"attn_mask": keep(4, 5)}),
    "2-D, mask of one axis": (((4, 8), (5, 8)), {"attn_mask": rand(5)}),
    "2-D, mask of no axis": (((4, 8), (5, 8)), {"attn_mask": torch.tensor(True)}),
    "3-D": (((3, 4, 8), (3, 5, 8)), {}),
    "3-D, mask a batch": (((3, 4, 8), (3, 5, 8)), {"attn_mask": keep(3, 4, 5)}),
    "3-D, mask of one axis": (((3, 4, 8), (3, 5, 8)), {"attn_mask": rand(5)}),
    "3-D, mask of no axis": (((3, 4, 8), (3, 5, 8)), {"attn_mask": torch.tensor(0.5)}),
    "3-D, broadcast": (((3, 4, 8), (1, 5, 8)), {"is_causal": True}),
    "3-D, grouped": (((8, 4, 8), (2, 5, 8)), {"enable_gqa": True}),
    "5-D": (((2, 3, 2, 4, 8), (2, 3, 2, 5, 8)), {}),
    "5-D, grouped": (((2, 3, 4, 4, 8), (2, 3, 2, 5, 8)), {"enable_gqa": True}),
    "5-D, mask": (((2, 3, 2, 4, 8), (2, 3, 2, 5, 8)), {"attn_mask": keep(3, 1, 4, 5)}),
    "5-D, mask of all axes": (((2, 3, 2, 4, 8), (2, 3, 2, 5, 8)), {"attn_mask": rand(2, 3, 2, 4, 5)}),
    "5-D, mask of ones": (((2, 3, 2, 4, 8), (2, 3, 2, 5, 8)), {"attn_mask": keep(1, 1, 1, 1, 5)}),
    "6-D, broadcast": (((2, 1, 3, 2, 4, 8), (3, 1, 2, 5, 8), (1, 5, 6)), {"scale": 0.3}),
    "keys of one batch": (((2, 3, 4, 8), (1, 3, 5, 8)), {}),
    "query of one batch": (((1, 3, 4, 8), (2, 3, 5, 8)), {"is_causal": True}),
    "values of another batch": (((1, 3, 4, 8), (1, 3, 5, 8), (2, 3, 5, 8)), {"attn_mask": keep(1, 3, 4, 5)}),
    "broadcast, mask a batch": (((2, 3, 4, 8), (1, 3, 5, 8)), {"attn_mask": keep(2, 1, 4, 5)}),
    "broadcast, mask of one axis": (((2, 3, 4, 8), (1, 3, 5, 8)), {"attn_mask": rand(5)}),
    "broadcast, grouped": (((2, 8, 4, 8), (1, 2, 5, 8)), {"enable_gqa": True}),
    "ranks that differ": (((2, 3, 4, 8), (3, 5, 8), (5, 8)), {}),
    "query of fewer axes": (((4, 8), (3, 5, 8), (2, 3, 5, 8)), {"attn_mask": keep(3, 1, 5)}),
    "one KV head": (((2, 4, 4, 8), (2, 1, 5, 8)), {}),
    "one query head": (((2, 1, 4, 8), (2, 4, 5, 8)), {"attn_mask": keep(2, 4, 4, 5)}),
    "K and V heads": (((2, 4, 4, 8), (2, 4, 5, 8), (2, 1, 5, 8)), {}),
    "K and V heads, grouped": (((2, 8, 4, 8), (2, 2, 5, 8), (2, 4, 5, 6)), {"enable_gqa": True}),
    "one head but for V": (((2, 1, 4, 8), (2, 1, 5, 8), (2, 3, 5, 8)), {}),
    "no keys": (((2, 3, 4, 8), (2, 3, 0, 8)), {}),
    "no keys, causal": (((2, 3, 4, 8), (2, 3, 0, 8)), {"is_causal": True}),
    "no keys, mask": (((2, 3, 4, 8), (2, 3, 0, 8)), {"attn_mask": keep(4, 0)}),
    "no keys, 2-D": (((4, 8), (0, 8)), {}),
    "no keys, grouped": (((2, 4, 4, 8), (2, 2, 0, 8)), {"enable_gqa": True}),
    "no queries": (((2, 3, 0, 8), (2, 3, 5, 8)), {}),
    "no queries, no keys": (((2, 3, 0, 8), (2, 3, 0, 8)), {}),
    "no batch": (((0, 3, 4, 8), (0, 3, 5, 8)), {}),
    "no batch, broadcast": (((0, 3, 4, 8), (1, 3, 5, 8)), {}),
    "no heads": (((2, 0, 4, 8), (2, 0, 5, 8)), {}),
    "head_dim 0": (((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 8)), {}),
    "head_dim 0, causal": (((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 8)), {"is_causal": True}),
    "head_dim 0 everywhere": (((2, 3, 4, 0), (2, 3, 5, 0)), {}),
    "value head_dim 0": (((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 0)), {}),
    "everything dropped": (((2, 3, 4, 8), (2, 3, 5, 8)), {"dropout_p": 1.0}),
    "everything dropped, 5-D": (((1, 2, 3, 4, 8), (1, 2, 3, 5, 8)), {"dropout_p": 1.0}),
    "dropout that is True": (((2, 3, 4, 8), (2, 3, 5, 8)), {"dropout_p": True}),
    "dropout as a tensor": (((2, 3, 4, 8), (2, 3, 5, 8)), {"dropout_p": torch.tensor(0.0)}),
    "dropout of numpy": (((2, 3, 4, 8), (2, 3, 5, 8)), {"dropout_p": np.float32(0.0)}),
    "scale as a tensor": (((2, 3, 4, 8), (2, 3, 5, 8)), {"scale": torch.tensor(0.5)}),
    "scale as a half tensor": (((2, 3, 4, 8), (2, 3, 5, 8)), {"scale": torch.tensor(0.5, dtype=torch.float16)}),
    "scale as an integer tensor": (((2, 3, 4, 8), (2, 3, 5, 8)), {"scale": torch.tensor(2)}),
    "scale of numpy": (((2, 3, 4, 8), (2, 3, 5, 8)), {"scale": np.float32(0.5)}),
    "scale of numpy, double": (((4, 8), (5, 8)), {"scale": np.float64(0.5)}),
    "scale of numpy, integer": (((2, 3, 4, 8), (2, 3, 5, 8)), {"scale": np.int64(2)}),
    "scale as an integer": (((2, 3, 4, 8), (2, 3, 5, 8)), {"scale": 2}),
    "mask of one row": (((2, 3, 4, 8), (2, 3, 5, 8)), {"attn_mask": keep(1, 5)}),
    "mask of one column": (((2, 3, 4, 8), (2, 3, 5, 8)), {"attn_mask": keep(4, 1)}),
    "mask of the heads": (((2, 3, 4, 8), (2, 3, 5, 8)), {"attn_mask": rand(3, 1, 1)}),
    "mask of the batch": (((2, 3, 4, 8), (2, 3, 5, 8)), {"attn_mask": keep(2, 1, 1, 5)}),
}

REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str, str]] = {
    "1-D": (((8,), (8,)), {}, "RANK_INVALID", "1"),
    "1-D keys": (((4, 8), (8,), (8,)), {}, "RANK_INVALID", "1"),
    "batches": (((4, 3, 4, 8), (2, 3, 5, 8)), {}, "BATCH_MISMATCH", "4"),
    "batches of 5-D": (((2, 3, 2, 4, 8), (2, 2, 2, 5, 8)), {}, "BATCH_MISMATCH", "(2, 3)"),
    "more KV heads": (((2, 2, 4, 8), (2, 8, 5, 8)), {}, "GQA_RATIO_INVALID", "2"),
    "KV heads that do not divide": (((2, 8, 4, 8), (2, 3, 5, 8)), {"enable_gqa": True}, "GQA_RATIO_INVALID", "3"),
    "K and V heads that do not fit": (
        ((2, 1, 4, 8), (2, 4, 5, 8), (2, 2, 5, 8)), {}, "GQA_RATIO_INVALID", "4",
    ),
    "V heads that do not divide": (((2, 8, 4, 8), (2, 4, 5, 8), (2, 3, 5, 8)), {}, "GQA_RATIO_INVALID", "3"),
    "head dims": (((2, 3, 4, 8), (2, 3, 5, 7)), {}, "HEAD_DIM_MISMATCH", "7"),
    "head dims of 2-D": (((4, 8), (5, 7)), {}, "HEAD_DIM_MISMATCH", "7"),
    "lengths of 2-D": (((4, 8), (5, 8), (6, 8)), {}, "SHAPE_INVALID", "6"),
    "mask of one axis, 4-D": (((2, 3, 4, 8), (2, 3, 5, 8)), {"attn_mask": rand(5)}, "MASK_NOT_BROADCASTABLE", "(5,)"),
    "mask of five axes": (
        ((2, 3, 4, 8), (2, 3, 5, 8)), {"attn_mask": rand(1, 1, 1, 4, 5)}, "MASK_NOT_BROADCASTABLE", "(1, 1, 1, 4, 5)",
    ),
    "mask that widens 2-D": (((4, 8), (5, 8)), {"attn_mask": keep(3, 4, 5)}, "MASK_NOT_BROADCASTABLE", "(3, 4, 5)"),
    "mask that widens 5-D": (
        ((1, 3, 2, 4, 8), (1, 3, 2, 5, 8)), {"attn_mask": rand(2, 3, 2, 4, 5)}, "MASK_NOT_BROADCASTABLE", "(2, 3,",
    ),
    "mask as wide as V alone": (
        ((1, 3, 4, 8), (1, 3, 5, 8), (2, 3, 5, 8)), {"attn_mask": rand(2, 1, 4, 5)}, "MASK_NOT_BROADCASTABLE", "(2, 1,",
    ),
    "mask of integers": (((4, 8), (5, 8)), {"attn_mask": torch.ones(4, 5).long()}, "MASK_DTYPE_INVALID", "int64"),
    "mask of another half": (((4, 8), (5, 8)), {"attn_mask": rand(4, 5).half()}, "MASK_DTYPE_INVALID", "float16"),
    "mask and is_causal": (
        ((4, 8), (5, 8)), {"attn_mask": rand(4, 5), "is_causal": True}, "MASK_WITH_CAUSAL", "is_causal",
    ),
    "dropout above one": (((2, 3, 4, 8), (2, 3, 5, 8)), {"dropout_p": 1.5}, "VALUE_INVALID", "1.5"),
    "dropout below zero": (((2, 3, 4, 8), (2, 3, 5, 8)), {"dropout_p": -1.0}, "VALUE_INVALID", "-1.0"),
    "scale with one axis": (((4, 8), (5, 8)), {"scale": torch.tensor([0.5])}, "TYPE_INVALID", "scale"),
    "scale with a gradient": (
        ((4, 8), (5, 8)), {"scale": torch.tensor(0.5, requires_grad=True)}, "TYPE_INVALID", "scale",
    ),
    "scale as text": (((4, 8), (5, 8)), {"scale": "1"}, "TYPE_INVALID", "scale"),
    "scale as an array": (((4, 8), (5, 8)), {"scale": np.array(0.5)}, "TYPE_INVALID", "scale"),
    "causal as a number": (((4, 8), (5, 8)), {"is_causal": 1}, "VALUE_INVALID", "1"),
}  # fmt: skip

# Refused by us although torch takes them: its own backends disagree, or it reads beyond a tensor.
OURS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "mask and is_causal": (
        ((2, 3, 4, 8), (2, 3, 5, 8)), {"attn_mask": rand(4, 5), "is_causal": True}, "MASK_WITH_CAUSAL",
    ),
    "NaN scale": (((2, 3, 4, 8), (2, 3, 5, 8)), {"scale": math.nan}, "SCALE_INVALID"),
    "infinite scale": (((4, 8), (5, 8)), {"scale": torch.tensor(INF)}, "SCALE_INVALID"),
    "lengths of K and V": (((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 6, 8)), {}, "SHAPE_INVALID"),
    "KV without heads": (((2, 4, 4, 8), (2, 0, 5, 8)), {}, "GQA_RATIO_INVALID"),
}  # fmt: skip


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def lse_of(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], out: Tensor) -> Tensor:
    """The log-sum-exp from torch's own attention: that of scores, read off by attending the identity."""
    given = {**options, "dropout_p": 0.0}
    heads = out.shape[-3] if out.ndim > 2 else 1
    k = k.repeat_interleave(heads // k.shape[-3], -3) if k.ndim > 2 and k.shape[-3] not in (0, 1, heads) else k
    factor = float(given.get("scale") or (q.shape[-1] or 1) ** -0.5)
    scores = (q.double() @ k.double().transpose(-1, -2)) * factor
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF) if mask.dtype is torch.bool else scores + mask
    return torch.logsumexp(scores, -1).float().expand(out.shape[:-1])


@pytest.mark.req("R-BK-SDPA-01", "R-CTX-14")
@pytest.mark.parametrize("name", TAKEN)
def test_what_torch_takes_we_take_with_the_same_result_and_gradients(name: str) -> None:
    if name == "no heads" and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 itself divides by zero here and ends the process")
    shapes, options = TAKEN[name]
    given = qkv(*shapes)
    wanted = F.scaled_dot_product_attention(*given, **options)
    for _ in range(2):  # cold, then hot
        found = lz.attention(*given, **options)
        assert found.dtype is wanted.dtype
        same(found, wanted)
        out, lse = lz.attention(*given, return_lse=True, **options)
        same(out, wanted)
        same(lse, lse_of(*given, options, wanted))
    assert lz.explain("attention", *given, **options).chosen
    planned = lz.plan("attention", *given, **options)
    same(planned(*given, options.get("attn_mask")), wanted)
    same(lz.attention(*given, backend="reference", **options), wanted)
    with lz.disabled():
        same(lz.attention(*given, **options), wanted)
    ours, theirs = ([item.clone().requires_grad_() for item in given] for _ in range(2))
    weight = rand(*wanted.shape, seed=9)
    (lz.attention(*ours, **options) * weight).sum().backward()
    (F.scaled_dot_product_attention(*theirs, **options) * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        same(mine.grad, other.grad)
    assert not state.health.snapshot().kernels


@pytest.mark.req("R-CTX-14")
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_we_refuse_and_name_the_value(name: str) -> None:
    shapes, options, code, shown = REFUSED[name]
    given = qkv(*shapes)
    with pytest.raises((RuntimeError, TypeError, IndexError)) as theirs:
        F.scaled_dot_product_attention(*given, **options)
    for _ in range(2):
        with pytest.raises(InvalidInputError) as caught:
            lz.attention(*given, **options)
        assert caught.value.code == code, str(caught.value)
        assert shown in str(caught.value)
    if isinstance(theirs.value, RuntimeError):
        assert isinstance(caught.value, RuntimeError)
    assert not state.health.snapshot().kernels


@pytest.mark.parametrize("name", OURS)
def test_what_stays_refused(name: str) -> None:
    shapes, options, code = OURS[name]
    with pytest.raises(LayerZeroError) as caught:
        lz.attention(*qkv(*shapes), **options)
    assert caught.value.code == code


def test_other_ranks_go_with_layout_bhsd_only() -> None:
    for shapes in (((4, 8), (5, 8)), ((1, 2, 4, 3, 8), (1, 2, 5, 3, 8)), ((2, 4, 3, 8), (1, 5, 3, 8))):
        with pytest.raises(InvalidInputError) as caught:
            lz.attention(*qkv(*shapes), layout="BSHD")
        assert caught.value.code in ("RANK_INVALID", "BATCH_MISMATCH")


def test_a_hot_decode_loop_does_not_lend_its_kernel_to_a_call_without_keys() -> None:
    q = rand(1, 2, 4, 8)
    for length in (3, 2, 1, 0, 1, 0):
        k = rand(1, 2, length, 8)
        same(lz.attention(q, k, k), F.scaled_dot_product_attention(q, k, k))


COMPILED = ("2-D", "6-D, broadcast", "K and V heads, grouped", "no keys", "head_dim 0", "3-D, mask a batch")
LONG = [(name, grad) for name in COMPILED for grad in (False, True)]


@pytest.mark.parametrize(
    ("name", "grad"), [("5-D, mask", True), *(pytest.param(*one, marks=pytest.mark.slow) for one in LONG)]
)
def test_compiled_graphs_give_the_same(name: str, grad: bool) -> None:
    shapes, options = TAKEN[name]
    given = [item.requires_grad_(grad) for item in qkv(*shapes)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: lz.attention(q, k, v, **options), backend="aot_eager", fullgraph=True)
    wanted = F.scaled_dot_product_attention(*given, **options)
    found = compiled(*given)
    same(found, wanted)
    if grad:
        same(torch.autograd.grad(found.sum(), given), torch.autograd.grad(wanted.sum(), given))


@pytest.mark.parametrize("name", ["2-D", "5-D", "6-D, broadcast", "one query head", "no keys"])
def test_the_opaque_op_and_its_fake_agree_with_torch(name: str) -> None:
    shapes, options = TAKEN[name]
    given = qkv(*shapes)
    mask, scale = options.get("attn_mask"), options.get("scale")
    lz.attention(rand(1, 1, 2, 4), rand(1, 1, 2, 4), rand(1, 1, 2, 4))
    from layerzero.torch_ops import library

    op = library.namespace().attention_lse.default
    args = (mask, "none", scale, "BHSD", None, None, None)
    wanted = F.scaled_dot_product_attention(*given, **options)
    out, lse = op(*given, *args)
    same(out, wanted)
    meta = tuple(item.to("meta") for item in given)
    fake_out, fake_lse = op(*meta, None if mask is None else mask.to("meta"), *args[1:])
    assert (fake_out.shape, fake_out.stride()) == (out.shape, out.stride())
    assert (fake_lse.shape, fake_lse.dtype) == (lse.shape, lse.dtype)


def test_vmap_meets_the_same_ranks() -> None:
    q, k, v = qkv((3, 4, 8), (3, 5, 8))
    same(torch.vmap(lz.attention)(q, k, v), torch.vmap(F.scaled_dot_product_attention)(q, k, v))

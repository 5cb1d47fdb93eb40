"""Wrong values that no key holds are the caller's errors, cold and hot: no kernel is blamed for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.errors import InvalidInputError, PlanMismatchError
from layerzero.model.shapes import overlapping
from layerzero.runtime.state import state

pytestmark = [pytest.mark.fault(10)]

B = torch.randn(2, 4, 5, 8)
COS = torch.ones(5, 4)
X, W = torch.randn(3, 8), torch.ones(8)
LOGITS = torch.randn(2, 9)
CACHE = torch.randn(4, 4, 2, 8)
LENS = torch.tensor([3, 5], dtype=torch.int32)
PAGED = torch.randn(2, 4, 8)


def tables(number: int, place: tuple[int, int] = (1, 1)) -> Tensor:
    found = torch.zeros(2, 2, dtype=torch.int32)
    found[place] = number
    return found


def paged(found: Tensor, backend: str | None = None) -> Any:
    return lz.paged_attention(PAGED, CACHE, CACHE, found, LENS, backend=backend)


def mla(found: Tensor) -> Any:
    cache, rope = CACHE.reshape(4, 4, 16), torch.randn(4, 4, 4)
    batch = lz.paged_batch(found, LENS)
    return lz.mla_paged_attention(torch.randn(2, 3, 16), torch.randn(2, 3, 4), cache, rope, batch, scale=0.1)


def rope(q: Tensor, k: Tensor) -> Any:
    return lz.rope(q, k, COS, COS, inplace=True)


Call = Callable[[], Any]
# name -> (the same call made right, made wrong, code of the error, what the message names)
WRONG: dict[str, tuple[Call, Call, str, str]] = {
    "one tensor in place": (lambda: rope(B.clone(), B.clone()), lambda: rope(B, B), "INPLACE_UNSUPPORTED", "memory"),
    "heads in place twice": (
        lambda: rope(B.clone()[:, :3], B.clone()[:, 1:]),
        lambda: rope(B[:, :3], B[:, 1:]), "INPLACE_UNSUPPORTED", "memory",
    ),
    "page beyond the cache": (lambda: paged(tables(3)), lambda: paged(tables(4)), "BLOCK_TABLE_INVALID", "page 4"),
    "negative page": (lambda: paged(tables(3)), lambda: paged(tables(-1)), "BLOCK_TABLE_INVALID", "page -1"),
    "negative page, reference": (
        lambda: paged(tables(3), "reference"), lambda: paged(tables(-1), "reference"), "BLOCK_TABLE_INVALID", "page -1",
    ),
    "page of MLA": (lambda: mla(tables(3)), lambda: mla(tables(9)), "BLOCK_TABLE_INVALID", "page 9"),
    "generator that is a number": (
        lambda: lz.sample(LOGITS, top_k=3, generator=torch.Generator()),
        lambda: lz.sample(LOGITS, top_k=3, generator=7), "TYPE_INVALID", "int",
    ),
    "generator that is a tensor": (
        lambda: lz.sample_topk(LOGITS, 3), lambda: lz.sample_topk(LOGITS, 3, generator=X), "TYPE_INVALID", "Tensor",
    ),
    "generator that is text": (
        lambda: lz.sample_topp(LOGITS, 0.5), lambda: lz.sample_topp(LOGITS, 0.5, generator="0"), "TYPE_INVALID", "str",
    ),
    "negative top_k": (lambda: lz.sample(LOGITS, top_k=3), lambda: lz.sample(LOGITS, top_k=-1), "VALUE_INVALID", "-1"),
    "negative top_k of a row": (
        lambda: lz.sample(LOGITS, top_k=torch.tensor([3, 2])),
        lambda: lz.sample(LOGITS, top_k=torch.tensor([3, -2])), "VALUE_INVALID", "-2",
    ),
    "NaN top_p": (
        lambda: lz.sample(LOGITS, top_p=0.5), lambda: lz.sample(LOGITS, top_p=math.nan), "VALUE_INVALID", "nan",
    ),
    "NaN top_p of a row": (
        lambda: lz.sample_topp(LOGITS, torch.tensor([0.5, 0.5])),
        lambda: lz.sample_topp(LOGITS, torch.tensor([0.5, math.nan])), "VALUE_INVALID", "nan",
    ),
    "NaN temperature of a row": (
        lambda: lz.sample(LOGITS, temperature=torch.ones(2)),
        lambda: lz.sample(LOGITS, temperature=torch.tensor([math.nan, 1.0])), "VALUE_INVALID", "nan",
    ),
    "NaN eps": (lambda: lz.rms_norm(X, W, 1e-6), lambda: lz.rms_norm(X, W, math.nan), "VALUE_INVALID", "nan"),
    "NaN eps without weight": (lambda: lz.rms_norm(X), lambda: lz.rms_norm(X, None, math.nan), "VALUE_INVALID", "nan"),
    "infinite eps": (lambda: lz.rms_norm(X, W, 1e-6), lambda: lz.rms_norm(X, W, math.inf), "VALUE_INVALID", "inf"),
    "NaN eps, added": (
        lambda: lz.add_rms_norm(X, X, W), lambda: lz.add_rms_norm(X, X, W, math.nan), "VALUE_INVALID", "nan",
    ),
    "NaN eps, layer_norm": (
        lambda: lz.layer_norm(X, W, W), lambda: lz.layer_norm(X, W, W, math.nan), "VALUE_INVALID", "nan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_an_input_error_and_no_breaker_opens(name: str, hot: bool) -> None:
    right, wrong, code, shown = WRONG[name]
    lz.reset()
    before = B.clone()
    for _ in range(2 if hot else 0):
        right()
    for _ in range(2):
        with pytest.raises(InvalidInputError) as caught:
            wrong()
        assert caught.value.code == code
        assert shown in str(caught.value)
    assert torch.equal(B, before)
    assert not state.health.snapshot().kernels
    right()


def test_pages_beyond_a_context_may_hold_anything() -> None:
    torch.testing.assert_close(paged(tables(-1, (0, 1))), paged(tables(0)))


def test_a_table_that_changed_in_place_is_looked_at_again() -> None:
    found = tables(3)
    batch = lz.paged_batch(found, LENS)
    lz.paged_attention(PAGED, CACHE, CACHE, batch)
    found[0, 0] = 77
    with pytest.raises(InvalidInputError, match="page 77"):
        lz.paged_attention(PAGED, CACHE, CACHE, batch)


def test_only_elements_that_are_shared_overlap() -> None:
    packed = torch.zeros(2, 5, 3, 4, 8)
    q, k, v = packed.unbind(2)
    for a, b in ((q, k), (k, v), (q.transpose(1, 2), v.transpose(1, 2)), (q[:0], q), (B, B.clone())):
        assert not overlapping(a, b) and not overlapping(b, a)
    for a, b in ((q, q), (q, packed[:, :, 0, 1:]), (packed, v[1:]), (q[:, ::2], q[:, 2:]), (B[..., :5], B[..., 4:])):
        assert overlapping(a, b) and overlapping(b, a)
    assert not overlapping(q[:, ::2], q[:, 1::2])


# -- plans ----------------------------------------------------------------------------------------
Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
PLANS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "is_causal": ("attention", (Q, K, K), {}, {"is_causal": True}, {"is_causal": False}),
    "window": ("attention", (Q, K, K), {"window": 3}, {"window": 4}, {"window": (3, 0)}),
    "no window": ("attention", (Q, K, K), {}, {"window": 4}, {"window": None}),
    "softcap": ("attention", (Q, K, K), {"softcap": 2.0}, {"softcap": 3.0}, {"softcap": 2.0}),
    "layout": ("attention", (Q, K, K), {}, {"layout": "BSHD"}, {"layout": "BHSD"}),
    "return_lse": ("attention", (Q, K, K), {}, {"return_lse": True}, {"return_lse": False}),
    "dropout": ("attention", (Q, K, K), {}, {"dropout_p": 0.5}, {"dropout_p": 0.0}),
    "mask": ("attention", (Q, K, K), {}, {"attn_mask": torch.zeros(5, 5)}, {"attn_mask": None}),
    "backend": ("rms_norm", (X, W), {}, {"backend": "reference"}, {"backend": None}),
    "interleaved": ("rope", (B, B, COS, COS), {}, {"interleaved": True}, {"interleaved": False}),
    "activation": ("linear", (X, torch.randn(5, 8)), {}, {"activation": "relu"}, {"activation": None}),
    "approximate": ("gelu_and_mul", (X,), {}, {"approximate": "tanh"}, {"approximate": "none"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_refuses_other_options_than_it_was_bound_with(name: str) -> None:
    op, args, bound, other, same = PLANS[name]
    planned = lz.plan(op, *args, **bound)
    with pytest.raises(PlanMismatchError) as caught:
        planned(*args, **other)
    assert caught.value.code == "PLAN_ARGUMENTS_CHANGED"
    assert next(iter(other)) in str(caught.value)
    torch.testing.assert_close(planned(*args, **same), getattr(lz, op)(*args, **bound))


def test_a_plan_refuses_options_given_by_position_and_names_nobody_knows() -> None:
    planned = lz.plan("gelu_and_mul", X)
    with pytest.raises(PlanMismatchError):
        planned(X, "tanh")
    with pytest.raises(InvalidInputError):
        lz.plan("attention", Q, K, K)(Q, K, K, causal=True)
    with pytest.raises(InvalidInputError):
        lz.plan("sample", LOGITS, top_k=-1)


# -- scopes ---------------------------------------------------------------------------------------
def test_scopes_closed_out_of_order_leave_no_lock_behind() -> None:
    chosen = lz.which("rms_norm", X, W)
    locked: AbstractContextManager[None] = lz.scoped(locks={"rms_norm": "reference.rms_norm.plain"})
    other: AbstractContextManager[None] = lz.scoped(prefer=["torch"])
    locked.__enter__()
    other.__enter__()
    assert lz.which("rms_norm", X, W) == "reference.rms_norm.plain"
    locked.__exit__(None, None, None)
    assert lz.which("rms_norm", X, W) == "torch.rms_norm.native"  # the inner one is still open
    other.__exit__(None, None, None)
    assert lz.which("rms_norm", X, W) == chosen
    assert lz.get_locks() == {}


def test_a_scope_closed_in_another_context_leaves_that_one_alone() -> None:
    import contextvars

    chosen = lz.which("rms_norm", X, W)
    scope: AbstractContextManager[None] = lz.scoped(locks={"rms_norm": "reference.rms_norm.plain"})
    contextvars.Context().run(scope.__enter__)
    assert lz.which("rms_norm", X, W) == chosen
    with lz.prefer("reference"):
        scope.__exit__(None, None, None)
        assert lz.which("rms_norm", X, W) == "reference.rms_norm.plain"
    assert lz.which("rms_norm", X, W) == chosen

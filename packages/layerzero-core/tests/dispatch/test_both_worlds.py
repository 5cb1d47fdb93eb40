"""Errors and tracers as users of torch know them: RuntimeErrors, mixed dtypes, torch.fx and TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.jit.frontend import NotSupportedError

import layerzero as lz
from layerzero.errors import InvalidInputError

pytestmark = [pytest.mark.fault(31)]

X, W = torch.randn(3, 8), torch.ones(8)
Q = torch.randn(2, 4, 5, 8)

BOTH: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "attention": (
        lambda: lz.attention(Q, Q[..., :7], Q),
        lambda: F.scaled_dot_product_attention(Q, Q[..., :7], Q),
    ),
    "rms_norm": (lambda: lz.rms_norm(X, torch.ones(7)), lambda: F.rms_norm(X, (8,), torch.ones(7))),
    "layer_norm": (lambda: lz.layer_norm(X, torch.ones(7)), lambda: F.layer_norm(X, (8,), torch.ones(7))),
    "linear": (lambda: lz.linear(X, torch.randn(4, 9)), lambda: F.linear(X, torch.randn(4, 9))),
    "embedding": (
        lambda: lz.embedding(torch.zeros(3), torch.randn(4, 8)),
        lambda: F.embedding(torch.zeros(3), torch.randn(4, 8)),
    ),
}


@pytest.mark.parametrize("op", BOTH)
def test_what_torch_raises_as_a_runtime_error_is_one_of_ours_too(op: str) -> None:
    ours, theirs = BOTH[op]
    with pytest.raises(RuntimeError):
        theirs()
    with pytest.raises(RuntimeError) as caught:
        ours()
    assert isinstance(caught.value, InvalidInputError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("settings", [{"strict_mode": True}, {"allow_adaptation": False}])
def test_mixed_dtypes_are_refused_where_nothing_may_be_adapted(settings: dict[str, bool]) -> None:
    half = Q.half()
    wanted = lz.attention(Q, half, half)  # elsewhere adaptation stands
    torch.testing.assert_close(wanted, lz.attention(Q, half.float(), half.float()))
    with lz.scoped(**settings):
        for call in (
            lambda: lz.attention(Q, half, half),
            lambda: lz.attention(Q, Q, half, backend="reference"),
            lambda: lz.attention(Q[0, 0], half[0, 0], half[0, 0]),
            lambda: lz.plan("attention", Q, half, half),
            lambda: lz.explain("attention", Q, half, half),
        ):
            with pytest.raises(InvalidInputError) as caught:
                call()
            assert caught.value.code == "DTYPE_MIXED"
            assert "float32" in str(caught.value) and "float16" in str(caught.value)
        torch.testing.assert_close(lz.attention(Q, Q, Q), F.scaled_dot_product_attention(Q, Q, Q))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert lz.attention(Q, Q.bfloat16(), Q).dtype is torch.bfloat16
    assert torch.equal(lz.attention(Q, half, half), wanted)


TRACED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rms_norm": (lambda x, w: lz.rms_norm(x, w), (X, W)),
    "rms_norm without weight": (lambda x: lz.rms_norm(x, eps=0.5), (X,)),
    "layer_norm": (lambda x, w: lz.layer_norm(x, w, w, 1e-3), (X, W)),
    "attention": (lambda q: lz.attention(q, q, q, is_causal=True, window=(2, 0)), (Q,)),
    "silu_and_mul": (lambda x: lz.silu_and_mul(x) + 1, (X,)),
    "linear": (lambda x, w: lz.linear(x, w, activation="relu"), (X, torch.randn(4, 8))),
    "rope": (lambda q, c: lz.rope(q, None, c, c, interleaved=True)[0], (Q, torch.randn(5, 4))),
    "embedding": (lambda i, w: lz.embedding(i, w), (torch.arange(3), torch.randn(4, 8))),
}


@pytest.mark.parametrize("name", TRACED)
def test_fx_symbolic_trace_holds_one_node_a_call(name: str) -> None:
    function, given = TRACED[name]
    traced = torch.fx.symbolic_trace(function)
    called = [node.target.__name__ for node in traced.graph.nodes if node.op in ("call_function", "call_method")]
    assert called[0] == name.split()[0] and "hot_key" not in str(traced.graph)
    torch.testing.assert_close(traced(*given), function(*given))
    others = tuple(item * 2 if item.is_floating_point() else item + 1 for item in given)
    torch.testing.assert_close(traced(*others), function(*others))


def scripted(x: Tensor) -> Tensor:
    return lz.silu_and_mul(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore::DeprecationWarning")
def test_torchscript_is_refused_by_name() -> None:
    """Our functions have options that TorchScript has no words for; torch.compile and torch.export take them."""
    with pytest.raises((RuntimeError, NotSupportedError), match="silu_and_mul"):
        torch.jit.script(scripted)

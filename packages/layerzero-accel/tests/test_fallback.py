"""Whatever C cannot key takes the path in Python: the same result, the same error, and nothing found in the table."""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.errors import LayerZeroError
from layerzero_accel.functions import KINDS

X, W = torch.randn(2, 8), torch.ones(8)
Q, K = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)


class Tagged(torch.Tensor):
    """A subclass that only passes everything on."""


def tagged(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(Tagged)


# name -> (op, arguments, options): calls that are right, and that C must leave alone
LEFT: dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "subclass": ("rms_norm", lambda: (tagged(X), W), {}),
    "subclass as weight": ("rms_norm", lambda: (X, tagged(W)), {}),
    "gradient of the input": ("rms_norm", lambda: (X.clone().requires_grad_(), W), {}),
    "gradient of a parameter": ("layer_norm", lambda: (X, Parameter(W.clone())), {}),
    "gradient of the mask": ("attention", lambda: (Q, K, K, torch.zeros(4, 6, requires_grad=True)), {}),
    "gradient of the slopes": ("attention", lambda: (Q, K, K), {"alibi_slopes": torch.ones(2, requires_grad=True)}),
    "window": ("attention", lambda: (Q, K, K), {"window": 3}),
    "softcap": ("attention", lambda: (Q, K, K), {"softcap": 3.0}),
    "scale as an int": ("attention", lambda: (Q, K, K), {"scale": 1}),
    "dropout as an int": ("attention", lambda: (Q, K, K), {"dropout_p": 0}),
    "meta": ("rms_norm", lambda: (X.to("meta"), W.to("meta")), {}),
    "mask value": ("attention", lambda: (torch.randn(1, 2, 6, 8), K, K, lz.chunk_mask(3)), {}),
    "quantized weight": ("linear", lambda: (X, lz.quantize(torch.randn(4, 8), "int8")), {}),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_call_that_c_cannot_key_is_pythons(pair: Any, name: str) -> None:
    op, build, options = LEFT[name]
    both = pair(op)
    args = build()
    before = both.native.counts()["python"]
    found = both.hits(*args, **options)
    assert both.native.counts()["python"] - before >= 4
    # the op that a subclass meets unwraps it and makes a plain call of its own
    assert found == 0 or name.startswith("subclass")
    mine, theirs = both.c(*args, **options), both.python(*args, **options)
    assert type(mine) is type(theirs)
    assert mine.shape == theirs.shape and mine.requires_grad == theirs.requires_grad
    if not mine.is_meta:
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("op", sorted(KINDS))
def test_the_same_call_is_found_from_the_third_time_on(pair: Any, op: str) -> None:
    args: dict[str, tuple[Any, ...]] = {
        "attention": (Q, K, K),
        "rms_norm": (X, W),
        "add_rms_norm": (X, X, W),
        "layer_norm": (X, W, W),
        "rope": (Q, K[:, :, :4], torch.randn(4, 4), torch.randn(4, 4)),
        "linear": (X, torch.randn(4, 8), None, "silu"),
        "embedding": (torch.tensor([[1, 0]]), X, 0),
    }
    both = pair(op)
    given = args.get(op, (X,))
    both.c(*given)  # the first call of a process loads the World
    assert both.hits(*given) >= 3
    mine, theirs = both.c(*given), both.python(*given)
    for one, other in zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]:
        assert torch.equal(one, other)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), False),
        (torch.no_grad, True),
        (torch.inference_mode, True),
        (torch.enable_grad, True),
        (deterministic, True),
    ],
    ids=["autocast", "no_grad", "inference_mode", "enable_grad", "deterministic"],
)
def test_modes_of_torch(pair: Any, mode: Any, found: bool) -> None:
    both = pair("attention")
    both.c(Q, K, K)
    with mode():
        assert (both.hits(Q, K, K) >= 2) is found
        assert torch.equal(both.c(Q, K, K), both.python(Q, K, K))


def test_a_parameter_that_needs_no_gradient_now_is_found(pair: Any) -> None:
    both = pair("rms_norm")
    weight = Parameter(W.clone())
    both.c(X, weight)
    with torch.no_grad():
        assert both.hits(X, weight) >= 2
    assert both.hits(X, weight) == 0
    weight.requires_grad_(False)
    assert both.hits(X, weight) == 4
    weight.requires_grad_()
    assert both.c(X, weight).requires_grad


class Watching(TorchFunctionMode):
    """Sees every torch function, and changes none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "vmap": lambda f: torch.vmap(lambda x: f(x, W))(torch.ones(3, 2, 8)),
    "vmap over the weight": lambda f: torch.vmap(lambda w: f(torch.ones(2, 8), w))(torch.ones(3, 8)),
    "grad": lambda f: torch.func.grad(lambda x: f(x, W).sum())(torch.ones(2, 8)),
    "jvp": lambda f: torch.func.jvp(lambda x: f(x, W), (torch.ones(2, 8),), (torch.ones(2, 8),)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x, W).sum()))(torch.ones(3, 2, 8)),
    "functionalize": lambda f: torch.func.functionalize(lambda x: f(x, W))(torch.ones(2, 8)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_give_what_python_gives(pair: Any, name: str) -> None:
    both = pair("rms_norm")
    for _ in range(3):
        both.c(torch.ones(2, 8), W)  # the key of the wrapped calls is hot
    for _ in range(2):
        torch.testing.assert_close(TRANSFORMS[name](both.c), TRANSFORMS[name](both.python), rtol=0, atol=0)


def test_inside_a_function_mode_the_results_are_the_same(pair: Any) -> None:
    both = pair("attention")
    both.c(Q, K, K)
    with Watching():
        assert torch.equal(both.c(Q, K, K), both.python(Q, K, K))
    with torch.device("cpu"):
        assert torch.equal(both.c(Q, K, K), both.python(Q, K, K))


def test_fake_tensors_never_meet_the_table(pair: Any) -> None:
    both = pair("rms_norm")
    both.c(X, W)
    with FakeTensorMode() as mode:
        x, w = mode.from_tensor(X), mode.from_tensor(W)
        assert both.hits(x, w) == 0
        assert type(both.c(x, w)) is type(x)


WRONG: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ("rms_norm", (), {}),
    "too many": ("rms_norm", (X, W, 1e-6, None, None), {}),
    "unknown name": ("rms_norm", (X, W), {"epsilon": 1e-6}),
    "given twice": ("rms_norm", (X, W), {"weight": W}),
    "no tensor": ("rms_norm", ([1.0], W), {}),
    "eps of a wrong type": ("rms_norm", (X, W), {"eps": "small"}),
    "NaN scale": ("attention", (Q, K, K), {"scale": float("nan")}),
    "infinite scale": ("attention", (Q, K, K), {"scale": float("inf")}),
    "negative dropout": ("attention", (Q, K, K), {"dropout_p": -0.5}),
    "layout": ("attention", (Q, K, K), {"layout": "SBHD"}),
    "causal": ("attention", (Q, K, K), {"is_causal": 1}),
    "backend": ("attention", (Q, K, K), {"backend": "nobody"}),
    "backend of a wrong type": ("attention", (Q, K, K), {"backend": 3}),
    "mask and causal": ("attention", (Q, K, K, torch.ones(4, 6, dtype=torch.bool)), {"is_causal": True}),
    "devices": ("rms_norm", (X, W.to("meta")), {}),
    "shape": ("rms_norm", (X, torch.ones(7)), {}),
    "odd width": ("silu_and_mul", (torch.ones(2, 7),), {}),
    "sparse": ("rms_norm", (X.to_sparse(), W), {}),
    "activation": ("linear", (X, torch.ones(4, 8)), {"activation": "swish"}),
    "unhashable word": ("gelu_and_mul", (X,), {"approximate": ["tanh"]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_what_python_raises(pair: Any, name: str) -> None:
    op, args, options = WRONG[name]
    both = pair(op)
    both.c(*{"attention": (Q, K, K), "rms_norm": (X, W), "linear": (X, torch.ones(4, 8))}.get(op, (X,)))
    for _ in range(3):
        with pytest.raises((LayerZeroError, TypeError)) as theirs:
            both.python(*args, **options)
        with pytest.raises(type(theirs.value)) as mine:
            both.c(*args, **options)
        assert str(mine.value) == str(theirs.value)


def test_keywords_in_any_order_and_unpacked_are_understood(pair: Any) -> None:
    both = pair("attention")
    both.c(Q, K, K)
    expected = both.python(Q, K, K, is_causal=True, layout="BHSD")
    assert torch.equal(both.c(value=K, key=K, query=Q, layout="BHSD", is_causal=True), expected)
    built = {"".join(("is_", "causal")): True}  # a name nobody interned
    for _ in range(3):
        assert torch.equal(both.c(Q, K, K, **built), expected)


@pytest.mark.parametrize("op", sorted(KINDS))
def test_it_looks_like_the_function_it_stands_for(native: Any, op: str) -> None:
    c, python = getattr(lz, op), PUBLIC[op].function
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(python).parameters.values()]
    assert list(inspect.signature(c).parameters.values()) == bare
    assert (c.__name__, c.__module__) == (op, "layerzero")
    assert inspect.getdoc(c) == inspect.getdoc(python)
    assert pickle.loads(pickle.dumps(c)) is c

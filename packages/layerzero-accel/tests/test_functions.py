"""What C is told of the public functions: their parameters, and the keys that Python writes."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero._ops.bucketed import bucket_ends, bucketed_key
from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.accel import accelerator
from layerzero.errors import InvalidInputError
from layerzero.runtime.state import state
from layerzero_accel.functions import KINDS, _find, accelerated, attention_key, rms_norm_key

X, W = torch.randn(2, 8), torch.ones(8)
Q, K = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)


@pytest.mark.parametrize("op", sorted(set(KINDS) - {"attention", "rms_norm"}))
def test_an_accelerated_function_does_nothing_but_dispatch(op: str) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(PUBLIC[op].function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    body = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    (only,) = body
    assert isinstance(only, ast.Return) and isinstance(only.value, ast.Call)
    assert getattr(only.value.func, "id", "") == "dispatch"
    canonical = only.value.args[1]
    assert isinstance(canonical, ast.Tuple)
    assert tuple(getattr(item, "id", "") for item in canonical.elts) == PUBLIC[op].arguments


def test_each_description_is_what_the_library_is_given() -> None:
    given: dict[str, tuple[Any, ...]] = {}
    native = SimpleNamespace(function=lambda *args: given.setdefault(args[0], args))
    assert set(accelerated(native)) == set(KINDS)
    name, module, doc, parameters, canonical, function, *_, bucketed = given["attention"]
    assert (name, module, function, bucketed) == ("attention", "layerzero", PUBLIC["attention"].function, True)
    assert doc.startswith("attention(query, key, value, attn_mask=None,")
    assert [parameters[i][0] for i in canonical] == list(
        PUBLIC["attention"].arguments[:-1]
    )  # no sinks, where none are given
    assert parameters[0] == ("query", "T", True) and parameters[7] == ("layout", "W", False, "BHSD")
    assert not given["rope"][-1]


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": "bottom_right"},
    "masked": {"attn_mask": torch.ones(4, 6, dtype=torch.bool)},
    "slopes": {"alibi_slopes": torch.ones(2)},
    "lse": {"return_lse": True},
    "scale": {"scale": 0.25},
    "backend": {"backend": "reference"},
    "softcap": {"softcap": 2.0},
    "gradient": {},
    "deterministic": {},
}


@pytest.mark.parametrize("case", ATTENTION)
def test_the_key_told_to_c_is_the_key_attention_writes(lab: Any, case: str) -> None:
    options = ATTENTION[case]
    q = Q.clone().requires_grad_() if case == "gradient" else Q
    torch.use_deterministic_algorithms(case == "deterministic")
    try:
        PUBLIC["attention"].function(q, K, K, **options)
        args, layout, backend = PUBLIC["attention"].normalize((q, K, K), options)
        key = attention_key(args, layout, backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert key in state.world.hot
    coarse = bucketed_key(state.world, key)
    assert (coarse is None) == (case == "masked")
    assert coarse is None or state.world.hot[coarse] is state.world.hot[key]
    assert bucket_ends(state.world)


def test_the_keys_told_to_c_are_those_of_the_other_ops(lab: Any) -> None:
    world = state.world
    PUBLIC["rms_norm"].function(X, W, backend="reference")
    assert rms_norm_key(X, W, "reference") in state.world.hot
    calls: dict[str, tuple[Any, ...]] = {
        "layer_norm": (X, W, None, 1e-5),
        "rms_norm": (X, None, 1e-6),
        "rope": (Q, None, torch.randn(4, 4), torch.randn(4, 4), False, "BHSD", None, False),
        "embedding": (torch.tensor([1]), X, None),
    }
    for op, args in calls.items():
        layout = "BHSD" if op == "rope" else None
        find = _find(PUBLIC[op])
        assert find(state.world, args, layout, None) is None
        given = dict(zip(PUBLIC[op].arguments, args, strict=True))
        PUBLIC[op].function(**given)
        found = find(state.world, args, layout, None)
        assert found is not None and found[0].decision.op == op
    assert state.world is world


def test_the_public_face_is_the_accelerated_one_where_it_is_in_use() -> None:
    for op in KINDS:
        function = PUBLIC[op].function
        assert type(function).__name__ == "function"
        built_in = type(getattr(lz, op)).__name__ == "builtin_function_or_method"
        assert built_in is (accelerator.native is not None)
        # Integrations import from the op's own module.
        assert getattr(sys.modules[function.__module__], op) is getattr(lz, op)
        assert getattr(sys.modules["layerzero.ops"], op) is getattr(lz, op)


def _answered(native: Any, call: Callable[[], Any]) -> int:
    """How many of four equal calls were answered by the table in C."""
    before = native.counts()["exact"]
    for _ in range(4):
        call()
    return int(native.counts()["exact"] - before)


def test_a_dtype_is_a_word_of_the_key(fresh: Any) -> None:
    """Casts to two dtypes are two calls, and each is found in C."""
    x = torch.randn(3, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        assert _answered(fresh, lambda dtype=dtype: lz.cast(x, dtype)) >= 2
        assert lz.cast(x, dtype).dtype is dtype and torch.equal(lz.cast(x, dtype), x.to(dtype))
    with pytest.raises(InvalidInputError):
        lz.cast(x, "float16")  # type: ignore[arg-type]


def test_a_zero_that_means_nothing_is_told_as_none(fresh: Any) -> None:
    """With the defaults and with zeros the loss is found in C; another value, and None, are Python's to judge."""
    logits, labels = torch.randn(4, 7), torch.tensor([1, 0, 6, -100])
    plain = torch.nn.functional.cross_entropy(logits, labels)
    for call in (
        lambda: lz.cross_entropy(logits, labels),
        lambda: lz.cross_entropy(logits, labels, label_smoothing=0.0, z_loss=0.0),
    ):
        assert _answered(fresh, call) >= 2 and torch.allclose(call(), plain)
    smooth = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert _answered(fresh, lambda: lz.cross_entropy(logits, labels, label_smoothing=0.1)) == 0
    assert torch.allclose(lz.cross_entropy(logits, labels, label_smoothing=0.1), smooth)
    with pytest.raises(InvalidInputError):
        lz.cross_entropy(logits, labels, z_loss=None)  # type: ignore[arg-type]

"""Under torch.compile the C forms are traced like the functions they stand for: one graph, no break."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero import attention as by_name
from layerzero._ops.signature import PUBLIC

X, W = torch.randn(2, 8), torch.ones(8)
Q, K = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
COS = torch.randn(4, 4)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (lambda q, k: lz.attention(q, k, k, is_causal=True), (Q, K)),
    "attention by name": (lambda q, k: by_name(q, k, k), (Q, K)),
    "partial": (lambda q, k: functools.partial(lz.attention, scale=0.5)(q, k, k), (Q, K)),
    "rms_norm": (lambda x, w: lz.rms_norm(x, w) * 2, (X, W)),
    "layer_norm": (lambda x, w: lz.layer_norm(x, w), (X, W)),
    "rope": (lambda q, c: lz.rope(q, None, c, c)[0], (Q, COS)),
    "silu_and_mul": (lambda x: lz.silu_and_mul(x), (X,)),
    "linear": (lambda x, w: lz.linear(x, w, None, "silu"), (X, torch.randn(4, 8))),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_with_the_result_of_eager(native: Any, name: str) -> None:
    function, args = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*args), function(*args))


def test_the_function_in_python_is_traced_too(native: Any) -> None:
    python = PUBLIC["rms_norm"].function
    torch.compiler.reset()
    compiled = torch.compile(lambda x: python(x, W), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), python(X, W))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch._dynamo", "layerzero"])
def test_whichever_is_imported_first(native: Any, first: str) -> None:
    code = f"""
import torch, {first}
import torch._dynamo, layerzero as lz
assert type(lz.rms_norm).__name__ == "builtin_function_or_method"
x, w = torch.randn(2, 8), torch.ones(8)
out = torch.compile(lambda x: lz.rms_norm(x, w) + 1, fullgraph=True, backend="eager")(x)
torch.testing.assert_close(out, lz.rms_norm(x, w) + 1)
"""
    env = {**os.environ, "LAYERZERO_PLUGINS": "", "LAYERZERO_ACCEL": "on"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_after_a_graph_break_the_c_form_runs(fresh: Any) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return lz.rms_norm(y, W)

    torch.compiler.reset()
    compiled = torch.compile(broken, backend="eager")
    torch.testing.assert_close(compiled(X), lz.rms_norm(X + 1, W))

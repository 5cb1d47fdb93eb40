"""Softcap for FlashAttention 4 with the cap as a number given at run time.

The library's own `softcap=` compiles the number in, so that each new value costs a compilation inside a request; and
it takes the fast tanh, whose error times the cap is larger than what float16 results may be off.
"""

from __future__ import annotations

import importlib
from typing import Any

_cute: Any = importlib.import_module("cutlass.cute")
_cutlass: Any = importlib.import_module("cutlass")


def number(value: float) -> Any:
    """A float32 that the compiled kernel takes as an argument."""
    return _cutlass.Float32(value)


@_cute.jit
def SOFTCAP(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):  # type: ignore[no-untyped-def]
    """cap * tanh(score / cap)."""
    cap = aux_scalars[0]
    return cap * _cute.math.tanh(score / cap)


@_cute.jit
def SOFTCAP_GRAD(  # type: ignore[no-untyped-def]
    grad, score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars
):
    """Gradient through it: grad * (1 - tanh²)."""
    flat = _cute.math.tanh(score / aux_scalars[0])
    return grad * (1.0 - flat * flat)

"""The programs that are compiled, and adapters: canonical arguments to the rows a program takes, and back.

A program is looked up by what it was compiled for. The first use in a process loads it from disk; where it is not on
disk the adapter compiles, which selection lets happen only beside the requests or for a caller who waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.inductor.compiling import Inputs, load
from layerzero.backends.reference import feed_forward, norm
from layerzero.backends.reference.positional import rope_halves
from layerzero.model.describe import dtype_name

_ROWS = 37  # example sizes of free axes: distinct primes, met by no fixed size of a model
_OUTER, _SEQ, _INNER = 3, 41, 5

_programs: dict[Any, Callable[[list[Tensor]], list[Tensor]]] = {}
_locks: dict[Any, threading.Lock] = {}  # one for each program: compilers run side by side


def _program(key: tuple[Any, ...], inputs: Callable[[], Inputs]) -> Callable[[list[Tensor]], list[Tensor]]:
    found = _programs.get(key)
    if found is None:
        with _locks.setdefault(key, threading.Lock()):
            found = _programs.get(key)
            if found is None:
                found = _programs[key] = load(key[0], inputs(), key[1])
    return found


@lru_cache(maxsize=256)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def _as_lies(tensor: Tensor) -> Tensor:
    """Dense, and without torch's negative bit: a compiled program takes strides and signs on trust."""
    return tensor.contiguous().resolve_neg()


def _rows(name: str, tensors: tuple[Tensor, ...], weights: tuple[Tensor, ...], eps: float | None) -> list[Tensor]:
    """Run a program over the last axis: `tensors` have rows, `weights` have none."""
    x = tensors[0]
    hidden, device = x.shape[-1], x.device
    words = tuple(map(dtype_name, (*tensors, *weights)))

    def inputs() -> Inputs:
        rows = tuple(((_ROWS, hidden), word, (0,)) for word in words[: len(tensors)])
        flat = tuple(((hidden,), word, ()) for word in words[len(tensors) :])
        return (*rows, *flat, *((((), "float32", ()),) if eps is not None else ()))

    run = _program((name, device.type, hidden, words), inputs)
    given = [_as_lies(item.reshape(-1, hidden)) for item in tensors]
    given += [_as_lies(item) for item in weights]
    if eps is not None:
        given.append(_scalar(eps, device))
    return run(given)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return _rows("rms_norm", (x,), (weight,), eps)[0].view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add and RMSNorm."""
    out, stream = _rows("add_rms_norm", (x, residual), (weight,), eps)
    return out.view(x.shape), stream.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm."""
    if bias is None:
        bias = _zeros(weight.shape[0], weight.dtype, weight.device)
    return _rows("layer_norm", (x,), (weight, bias), eps)[0].view(x.shape)


def _gated(name: str, x: Tensor) -> Tensor:
    return _rows(name, (x,), (), None)[0].view(*x.shape[:-1], x.shape[-1] // 2)


silu_and_mul, relu_and_mul = partial(_gated, "silu_and_mul"), partial(_gated, "relu_and_mul")


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """GeGLU, either formula."""
    return _gated("gelu_tanh_and_mul" if approximate == "tanh" else "gelu_and_mul", x)


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, layout: str, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    """Rotary embedding of halves over the whole head, one table row per token."""
    return _rotated(q, cos, sin, layout), None if k is None else _rotated(k, cos, sin, layout)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    batch, one, two, width = x.shape
    seq = two if layout == "BHSD" else one
    # Tokens are one axis, the others before or behind it: BHSD is [B·H, S, 1, D], BSHD is [B, S, H, D].
    shaped = x.reshape(batch * one, seq, 1, width) if layout == "BHSD" else x

    def inputs() -> Inputs:
        inner = 1 if layout == "BHSD" else _INNER
        tokens = ((_OUTER, _SEQ, inner, width), dtype_name(x), (0, 1) if layout == "BHSD" else (0, 1, 2))
        table = ((_SEQ, width // 2), dtype_name(cos), (0,))
        return (tokens, table, table)

    run = _program(("rope", x.device.type, width, layout, dtype_name(x), dtype_name(cos)), inputs)
    return run([_as_lies(shaped), _as_lies(cos[:seq]), _as_lies(sin[:seq])])[0].view(x.shape)


# -- the programs, as plain PyTorch ------------------------------------------------------------------------------
# Each reads its inputs once and rounds once at the end; most are the reference's own formulas. Rows are a free size,
# everything else is fixed when a program is compiled. `eps` comes in as a tensor of one element, so that one compiled
# program serves every value.
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: x [outer, S, inner, D], cos and sin [S, D / 2]."""
    return rope_halves(x, None, cos, sin, False, "BSHD", None, False)[0]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "rms_norm": norm.rms_norm,
    "add_rms_norm": norm.add_rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "silu_and_mul": feed_forward.silu_and_mul,
    "relu_and_mul": feed_forward.relu_and_mul,
    "gelu_and_mul": partial(feed_forward.gelu_and_mul, approximate="none"),
    "gelu_tanh_and_mul": partial(feed_forward.gelu_and_mul, approximate="tanh"),
}

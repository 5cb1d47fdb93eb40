"""The CPU kernels: canonical arguments as dense float32 tensors, one call in C, results in the op's dtypes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.plugin import BackendNotAvailableError
from layerzero_linear_attention.build import LIBRARY
from layerzero_linear_attention.packed import empty_as, lies_in_rows

_ALONE = 1 << 14  # elements of a state below which other threads are not worth waking


def _load() -> tuple[Any, int]:
    """The library, and the address by which torch's own threads do something: 0 where they are not OpenMP's."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise BackendNotAvailableError(
            f"layerzero-linear-attention has no compiled kernels here: {error}",
            code="NATIVE_KERNELS_MISSING",
            value=str(error),
        ) from error
    address, number, flag, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    library.lz_delta.argtypes = [*(address,) * 9, *(number,) * 6, real, flag, flag, flag, address]
    library.lz_scan.argtypes = [*(address,) * 10, *(number,) * 6, flag, address]
    library.lz_conv.argtypes = [*(address,) * 7, *(number,) * 8, flag, flag, flag, address]
    for function in (library.lz_delta, library.lz_scan, library.lz_conv):
        function.restype = None
    for name in (None, "libgomp.so.1") if torch.backends.openmp.is_available() else ():  # type: ignore[no-untyped-call]
        with contextlib.suppress(AttributeError, OSError):  # torch has loaded it, not always for all to see
            loaded = ctypes.CDLL(name, ctypes.DEFAULT_MODE | getattr(os, "RTLD_NOLOAD", 0))
            return library, ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value or 0
    return library, 0


_LIBRARY, _TEAM = _load()


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _ALONE else 1


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Each head's state is read twice a token and written once; its second reading finds it in the cache."""
    q, k, v, decay, b = (_dense(item) for item in (query, key, value, g, beta))
    state = None if initial_state is None else _dense(initial_state)
    offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    tokens, key_heads, width = query.shape[1:]
    heads, values = value.shape[2:]
    count = query.shape[0] if offsets is None else offsets.shape[0] - 1
    out = torch.empty(v.shape)
    last = torch.empty((count, heads, width, values))
    _LIBRARY.lz_delta(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), b.data_ptr(), _address(state), out.data_ptr(),
        last.data_ptr(), _address(offsets), count, tokens, key_heads, heads, width, values,
        width**-0.5 if scale is None else scale, qk_l2norm, g.dim() == 4, _threads(last.numel()), _TEAM,
    )  # fmt: skip
    return out.to(value.dtype), last


kimi_delta_attention = gated_delta_rule


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float | None,
) -> tuple[Tensor, Tensor]:
    """Each head's state is read and written once a token."""
    step = dt.to(torch.float32) if dt_bias is None else dt.to(torch.float32) + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(dt_min, dt_max).contiguous()
    given, decay, k, q = (_dense(item) for item in (x, A, B, C))
    skip = None if D is None else _dense(D)
    state = None if initial_state is None else _dense(initial_state)
    offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    tokens, heads, width = x.shape[1:]
    groups, states = B.shape[2:]
    count = x.shape[0] if offsets is None else offsets.shape[0] - 1
    out = torch.empty(given.shape)
    last = torch.empty((count, heads, width, states))
    _LIBRARY.lz_scan(
        given.data_ptr(), step.data_ptr(), decay.data_ptr(), k.data_ptr(), q.data_ptr(), _address(skip),
        _address(state), out.data_ptr(), last.data_ptr(), _address(offsets), count, tokens, groups, heads, width,
        states, _threads(last.numel()), _TEAM,
    )  # fmt: skip
    return out.to(x.dtype), last


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """A row of channels a token or a row of tokens a channel, as x lies; the activation in the same pass."""
    given, taps = x.to(torch.float32), _dense(weight)
    given = given if lies_in_rows(given) else given.contiguous()
    rows = lies_in_rows(given) or x.shape[2] == 1
    added = None if bias is None else _dense(bias)
    state = None if initial_state is None else _dense(initial_state)
    offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    channels, tokens = x.shape[1:]
    count = x.shape[0] if offsets is None else offsets.shape[0] - 1
    kept = taps.shape[1] - 1 if state is None else state.shape[2]
    out = empty_as(given)
    last = torch.empty((count, channels, kept))
    _LIBRARY.lz_conv(
        given.data_ptr(), taps.data_ptr(), _address(added), _address(state), out.data_ptr(), last.data_ptr(),
        _address(offsets), count, channels, tokens, taps.shape[1], kept, *given.stride(), activation == "silu", rows,
        _threads(out.numel()), _TEAM,
    )  # fmt: skip
    return out.to(x.dtype), last.to(x.dtype)

"""In which precision the reference computes, and how it rounds what is wider."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

# Device types that know autocast; asking torch.amp.is_autocast_available would break a graph of torch 2.11.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype is torch.float64:
            return torch.float64
    return torch.float32


def number(value: float, like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """A number on the device of a tensor; on CUDA one that stays there, unless a graph is captured."""
    if type(like) is Tensor and like.is_cuda and not torch.cuda.is_current_stream_capturing():
        return _lasting(value, dtype, like.device, shape)
    return like.new_full(shape, value, dtype=dtype)


@lru_cache(maxsize=64)
def _lasting(value: float, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """Copied from the host, so that it is there before any stream reads it."""
    return torch.full(shape, value, dtype=dtype).to(device)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keep autocast from narrowing a computation that was widened on purpose."""
    if device_type in _AUTOCAST and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def computable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the precision to compute in: float32 on a CPU that has no fast product of their own dtype.

    Without one the blocked kernel multiplies number by number, ten to a hundred times slower than after widening. Few
    CPUs multiply float16 matrices fast, so that one is always widened.
    """
    dtype = tensors[0].dtype
    if dtype.itemsize > 2 or tensors[0].is_cuda:
        return tensors
    if dtype is torch.bfloat16 and torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return tensors
    return tuple(tensor.float() for tensor in tensors)


def to_odd(x: Tensor) -> Tensor:
    """float64 to float32, rounded to odd: a later rounding to fewer bits is then as if there had been only one.

    Where x lies between two numbers of float32 it becomes the one whose last bit is set, which keeps it off every tie
    and every number of the narrower dtype. What float32 cannot hold is left as it is: every narrower dtype has ended
    before. So are tensors of other dtypes.
    """
    if x.dtype != torch.float64:
        return x
    given = x.detach()
    near = given.to(torch.float32)
    toward = torch.where(given > near.to(torch.float64), torch.inf, -torch.inf).to(torch.float32)
    other = torch.nextafter(near, toward)  # near and other enclose x
    both = near.to(torch.float64) + other.to(torch.float64)
    odd = both - (both / 2).to(torch.float32).to(torch.float64)  # their middle is a tie, which rounds to the even one
    inexact = near.isfinite() & other.isfinite() & (near.to(torch.float64) != given)
    # Neighbours differ exactly, so adding the difference gives the rounded number, and x keeps its gradient. (Adding
    # -0.0 changes nothing; +0.0 would change the sign of -0.0.)
    return (x + torch.where(inexact, odd - given, -0.0)).to(torch.float32)

"""What a launch relies on, checked before it: a wrong call must raise, not read or write outside its tensors."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.grouped import GroupedBatch

__all__ = ["check_call"]

_HALVES = (torch.float16, torch.bfloat16)


def check_call(query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, head_dims: Container[int]) -> None:
    """Raise for tensors that do not fit each other, the batch, or the kernels; looks at metadata only."""
    shape, other = query.shape, key.shape
    if len(shape) != 3 or len(other) != 3 or other != value.shape or shape[2] != other[2]:
        given = f"query {tuple(shape)}, key {tuple(other)}, value {tuple(value.shape)}"
        raise invalid("SHAPE_INVALID", given, "[total_q, Hq, D] and twice [total_k, Hkv, D]")
    if shape[2] not in head_dims:
        raise invalid("HEAD_DIM_INVALID", shape[2], str(head_dims))
    if other[1] == 0 or shape[1] % other[1]:
        raise invalid("GQA_RATIO_INVALID", shape[1], other[1])
    if shape[0] != batch.total_q or other[0] != batch.total_k:
        message = "the tensors do not fit the batch"
        expected = f"{batch.total_q} and {batch.total_k}"
        raise invalid("SHAPE_INVALID", f"{shape[0]} queries, {other[0]} keys", expected, message)
    if not query.dtype == key.dtype == value.dtype or (query.is_cuda and query.dtype not in _HALVES):
        expected = "float16 or bfloat16, all the same"
        raise invalid("DTYPE_UNSUPPORTED", ", ".join(str(item.dtype) for item in (query, key, value)), expected)
    if not query.device == key.device == value.device:
        raise invalid("DEVICE_MIXED", ", ".join(str(item.device) for item in (query, key, value)), "one device")

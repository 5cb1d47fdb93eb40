"""LayerZero as a backend of diffusers' attention dispatcher.

Newer processors hand q, k and v to `dispatch_attention_fn` with the backend noted on the processor. The names of
backends are an Enum that takes no new members by ordinary means, so one is made by hand, once for the process. From
then on `model.set_attention_backend("layerzero")` works, too.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from layerzero import attention

NAME = "layerzero"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """What the dispatcher calls: tensors are [B, S, H, D], a mask of rank 2 says which keys of each row count."""
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    found = attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale,
        layout="BSHD", enable_gqa=enable_gqa, return_lse=return_lse,
    )  # fmt: skip
    return (found[0], found[1].transpose(1, 2)) if return_lse else found


def backend() -> Any:
    """The member of AttentionBackendName that stands for LayerZero; registered at the first call."""
    library: Any = importlib.import_module("diffusers.models.attention_dispatch")
    names = library.AttentionBackendName
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        library._AttentionBackendRegistry.register(member)(attend)
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member  # last: what is found here is complete
    return member

"""The mask side of `attn_implementation="layerzero"`: no mask where the attention function can say it by itself.

transformers asks for a mask once a forward pass. What comes back is None or a boolean mask that is true word for word,
so that model code may slice or combine it. Where the mask is one that `lz.attention` has words for, it carries a note
(`noted`) that spares the kernel from reading it; a mask that was changed on the way has lost its note and is read.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_layerzero_note"


@dataclass(frozen=True, slots=True)
class Note:
    """What a mask says, in the words of `lz.attention`.

    causal  "bottom_right": nothing after the query's own place, the new tokens being the last ones
    window  (left, right) keys around it
    used    a tensor with the number of places in use, of a cache whose places are all there from the start: one new
            token, the last of them, sees these (in its window, where there is one) and no others
    """

    causal: str | None = None
    window: tuple[int, int] | None = None
    used: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Unread:
    """In place of the note on a mask over a static cache: whether a token is hidden is read when an attention asks.

    Reading it waits for the device. A compiled forward never asks, so its steps are queued without a wait.
    """

    padding: Tensor | None

    def note(self, found: Tensor) -> Note | None:
        # Without padding the places in use are those that the mask shows.
        return None if _padded(self.padding) else Note(used=found[0, 0, 0].sum())


def noted(attention_mask: Any) -> Note | None:
    """The note on a mask made here and not changed since."""
    found: Note | _Unread | None = getattr(attention_mask, _ATTRIBUTE, None)
    if isinstance(found, _Unread):
        found = found.note(attention_mask)
        setattr(attention_mask, _ATTRIBUTE, found)
    return found


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **rest: Any,
) -> Tensor | None:
    """The mask function registered beside the attention function; the arguments are transformers'."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    compiling = torch.compiler.is_compiling()
    window = None if local_size is None else _window(config, local_size)
    known = local_size is None or window is not None
    causal = rest.get("mask_function", causal_mask_function) is causal_mask_function
    # One new token at a place of a cache that is all there from the start.
    static = isinstance(q_offset, Tensor) and causal and q_length == 1 and not compiling
    ends_here = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if compiling and causal and allow_is_causal_skip and ends_here and attention_mask is None and local_size is None:
        if q_length == kv_length and not torch.compiler._is_exporting_flag:
            return None  # where transformers makes one: a kernel that reads it computes what it hides too
    said = known and allow_is_causal_skip and ends_here and not compiling
    if said and local_size is not None and q_length in (1, kv_length) and not _padded(attention_mask):
        if (q_length == 1 and kv_length <= local_size) or _passes_window(str(getattr(config, "model_type", ""))):
            return None  # nothing is hidden, or the attention function is told the window by the model
    found: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        config=config,
        **rest,
    )
    if found is None or compiling:
        return found
    if static:
        return with_note(found, _Unread(attention_mask))
    if said and (causal or window is not None) and not _padded(attention_mask):
        return with_note(found, Note("bottom_right", window))
    return found


def with_note(found: Tensor, note: Note | _Unread) -> Tensor:
    """The same mask, saying what it says."""
    setattr(found, _ATTRIBUTE, note)
    return found


def _padded(attention_mask: Tensor | None) -> bool:
    """Whether a token is hidden. Reading that waits for the device, which a capture forbids: then it may be."""
    if attention_mask is None:
        return False
    if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return not bool(attention_mask.all())


def _window(config: Any, local_size: int) -> tuple[int, int] | None:
    """The window a local size stands for; None for chunks, whose size comes by the same name."""
    if getattr(config, "attention_chunk_size", None) is not None or getattr(config, "is_causal", True) is False:
        return None
    return (local_size - 1, 0) if getattr(config, "sliding_window", None) == local_size else None


@lru_cache(maxsize=256)
def _passes_window(model_type: str) -> bool:
    """Whether an architecture hands its window to the attention function: every call of it in the model's source."""
    folder = model_type.removesuffix("_text")
    names = {f"transformers.models.{name}.modeling_{name}" for name in (model_type, folder)}
    for module in (sys.modules[name] for name in names if name in sys.modules):
        try:
            tree = ast.parse(inspect.getsource(module))
        except (OSError, SyntaxError, TypeError):
            return False
        called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        calls = [node for node in called if getattr(node.func, "id", "") == "attention_interface"]
        return bool(calls) and all(any(k.arg == "sliding_window" for k in call.keywords) for call in calls)
    return False

"""Adapters over `flash_attn.cute`, FlashAttention 4. Causal and window are aligned to the bottom right.

Without a gradient the library's forward is called directly, as torch itself does, and its compiled kernel is
remembered for the shape (see `replay`); with one, its autograd functions are. The library copies tensors whose
pointers or strides are not multiples of 16 bytes; the descriptor asks for such, so nothing is copied here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import no_keys, scaled, upright
from layerzero.model.variants import GradientVariant
from layerzero_flashattn.compiler import library
from layerzero_flashattn.fa4.replay import Recorded, record, replayable
from layerzero_flashattn.interface import dead_rows, may_have_dead_rows, sides
from layerzero_flashattn.quiet import hush_backward, quietly

_log = logging.getLogger("layerzero.flashattn")
_library: Any = library("flash_attn.cute.interface")
_forward = _library._flash_attn_fwd
_quiet_forward = quietly(_forward)
_func = quietly(_library.flash_attn_func)
_varlen_func = quietly(_library.flash_attn_varlen_func)
_record = quietly(record)

Asked = tuple[float, bool, tuple[int, int] | None, bool]
"""Scale, causal, window, and whether the log-sum-exp is wanted."""

_grad_enabled = torch.is_grad_enabled
# Kernel of each query shape and set of options; cleared when full, so that changing shapes cannot fill the memory.
_recorded: dict[Any, Recorded | None] = {}
_RECORDED_LIMIT = 4096
_REPLAYABLE = replayable(_forward)
_on_device = torch.cuda.device
SHORT, LONG = 1, 256  # tokens: within one tile of queries for every GQA ratio, and beyond it


class Families:
    """Which sets of options have been compiled for both lengths.

    Under a mask, and over packed sequences, FlashAttention 4 compiles a kernel of its own for queries that fit into one
    tile, which selection cannot tell from the descriptor: to it, both are one artifact. So whoever compiles the one has
    the other compiled in the same go, in the background or by a caller who said that he would wait; never a later
    request.
    """

    def __init__(self) -> None:
        self._complete: set[Hashable] = set()

    def complete(self, family: Hashable, query: Tensor, run: Callable[[int], object]) -> None:
        """Have `run` make a call with a query of each length, once for a family of options."""
        if family in self._complete or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._complete.add(family)
        for length in (SHORT, LONG):
            run(length)


families = Families()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: None,
    return_lse: bool,
    *,
    deterministic: bool = False,
) -> Any:
    """[B, S, H, D]; the cheapest way into the library that the call allows."""
    query, scale = scaled(query, scale)
    asked = (scale, bool(is_causal), window, return_lse)
    if _grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        options = {"deterministic": deterministic, **_softcap(softcap)}
        out, lse = _with_gradient(_func, query, key, value, asked, **options)

        def there_and_back(length: int) -> None:
            q, k, v = (item.new_zeros((1, length, *item.shape[2:])) for item in (query, key, value))
            _derived(_func, q, k, v, asked, **options)

        shape = (query.shape[2:], key.shape[2], value.shape[3], query.dtype, query.get_device())
        families.complete(("backward", *shape, *asked[1:], softcap is None, deterministic), query, there_and_back)
    elif softcap is not None or not key.shape[1]:
        out, lse = plain_forward(query, key, value, asked, **_softcap(softcap))
    else:
        out, lse = _remembered(query, key, value, asked)
    if not return_lse:
        return out
    dead = may_have_dead_rows(query.shape[1], key.shape[1], is_causal, window)
    return out, dead_rows(lse) if dead and lse is not None else lse


deterministic_attention = GradientVariant(attention, deterministic=True)


def _is_current(tensor: Tensor) -> bool:
    """Whether the tensor lies on the device that kernels are launched on now."""
    return tensor.get_device() == torch._C._cuda_getDevice()


def _remembered(query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> tuple[Tensor, Tensor | None]:
    """Through the compiled kernel where the shape is known. The number of keys decides nothing in the library."""
    scale, causal, window, return_lse = asked
    if 0 in query.stride() or 0 in key.stride() or 0 in value.stride():
        # The library compiles for expanded tensors; a copy is what a request can afford.
        query, key, value = (item.clone(memory_format=torch.contiguous_format) for item in (query, key, value))
    where = (query.shape, key.shape[2], value.shape[3], query.dtype, query.get_device(), causal, window, return_lse)
    found = _recorded.get(where)
    if found is not None and _is_current(query):
        if query.requires_grad or key.requires_grad or value.requires_grad:
            query, key, value = query.detach(), key.detach(), value.detach()
        return found.run(query, key, value, scale)
    if not _REPLAYABLE or where in _recorded:
        return plain_forward(query, key, value, asked)
    left, right = sides(window)
    options = {"causal": causal, "window_size_left": left, "window_size_right": right}
    with _on_device(query.device):
        result, made = _record(_forward, query, key, value, scale, return_lse, **options)
    if len(_recorded) >= _RECORDED_LIMIT:
        _recorded.clear()
    _recorded[where] = made
    if causal or window is not None:

        def tokens(length: int) -> object:
            q, k, v = (item.new_zeros((1, length, *item.shape[2:])) for item in (query, key, value))
            return plain_forward(q, k, v, asked)

        families.complete((query.shape[2:], *where[1:]), query, tokens)
    return result


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, asked: Asked, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The library's forward as a whole."""
    scale, causal, window, return_lse = asked
    left, right = sides(window)
    options.pop("score_mod_bwd", None)
    options.update(causal=causal, window_size_left=left, window_size_right=right, return_lse=return_lse)
    with _on_device(query.device):
        out, lse, *_ = _quiet_forward(query, key, value, softmax_scale=scale, **options)
    return out, lse


def _with_gradient(
    function: Any, query: Tensor, key: Tensor, value: Tensor, asked: Asked, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The library's autograd function."""
    scale, causal, window, return_lse = asked
    options.update(causal=causal, window_size=sides(window), return_lse=return_lse)
    found: tuple[Tensor, Tensor | None] = function(query, key, value, softmax_scale=scale, **options)
    hush_backward(*found)
    return found


def _derived(function: Any, query: Tensor, key: Tensor, value: Tensor, asked: Asked, **options: Any) -> None:
    """A call with its backward: for that, too, the library compiles a kernel of its own for short lengths, at their
    first use. It is compiled with the forward of its family, by whoever waits for that one; a length that the library
    does not take is left to the call that has it."""
    given = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    try:
        out, _ = _with_gradient(function, *given, asked, **options)
        torch.autograd.grad(out, given, torch.zeros_like(out))
    except Exception:
        _log.info("the backward of %d tokens was not compiled ahead", query.shape[-3], exc_info=True)


def _softcap(cap: float | None) -> dict[str, Any]:
    if cap is None:
        return {}
    scores = importlib.import_module("layerzero_flashattn.fa4.scores")  # late: most processes never need it
    return {
        "score_mod": scores.SOFTCAP,
        "score_mod_bwd": scores.SOFTCAP_GRAD,
        "aux_scalars": (scores.number(cap),),
    }


def attention_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: None,
    alibi_slopes: None,
    return_lse: bool,
) -> Any:
    """FP8 in; the kernel writes bfloat16, and the result goes back to the query's dtype."""
    if scale is None:
        scale = query.shape[3] ** -0.5
    if scale <= 0.0:
        wide, scale = upright(query.to(torch.bfloat16), scale)
        query = wide.to(query.dtype)
    out, lse = plain_forward(query, key, value, (scale, bool(is_causal), window, return_lse))
    out = out.to(query.dtype)
    return (out, dead_rows(lse)) if return_lse and lse is not None else out


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: None,
    return_lse: bool,
    *,
    deterministic: bool = False,
) -> Any:
    """Packed tokens; the host reads no offset."""
    if max_seqlen_k == 0:
        return no_keys(query, value, return_lse)
    query, scale = scaled(query, scale)
    lengths: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q.to(torch.int32),
        "cu_seqlens_k": cu_seqlens_k.to(torch.int32),
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    options = _softcap(softcap)
    asked = (scale, bool(is_causal), window, return_lse)
    if _grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        options["deterministic"] = deterministic
        out, lse = _with_gradient(_varlen_func, query, key, value, asked, **lengths, **options)

        def there_and_back(length: int) -> None:
            q, k, v = (item.new_zeros((length, *item.shape[1:])) for item in (query, key, value))
            _derived(_varlen_func, q, k, v, asked, **_one_sequence(length, query.device), **options)

        shape = (query.shape[1:], key.shape[1], value.shape[2], query.dtype, query.get_device())
        family = ("packed backward", *shape, *asked[1:], softcap is None, deterministic)
        families.complete(family, query, there_and_back)
    else:
        out, lse = plain_forward(query, key, value, asked, **lengths, **options)

        def tokens(length: int) -> object:
            q, k, v = (item.new_zeros((length, *item.shape[1:])) for item in (query, key, value))
            return plain_forward(q, k, v, asked, **_one_sequence(length, query.device), **options)

        shape = (query.shape[1:], key.shape[1], value.shape[2], query.dtype, query.get_device())
        families.complete((*shape, *asked[1:], softcap is None), query, tokens)
    return (out, dead_rows(lse).transpose(0, 1)) if return_lse and lse is not None else out


def _one_sequence(length: int, device: torch.device) -> dict[str, Any]:
    ends = torch.arange(0, length + 1, length, dtype=torch.int32, device=device)
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length, "max_seqlen_k": length}


deterministic_varlen_attention = GradientVariant(varlen_attention, deterministic=True)

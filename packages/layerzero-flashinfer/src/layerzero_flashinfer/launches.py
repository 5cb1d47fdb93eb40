"""The launch of a planned decode wrapper without its public `run`: what that looks up anew at each call is bound once.

`run` of a decode wrapper checks and converts for several µs what a plan has settled: dtypes, layout, scale, buffers.
The function it ends in takes all of it as arguments. Only a function whose parameters are the known ones is called; a
release in which they have changed is called by its public door.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from layerzero_flashinfer.options import Options
from layerzero_flashinfer.vendor import starts_with

Launch = Callable[..., Any]
"""(query, keys, values, out, log-sum-exp or None), all but the last on the device of the plan."""

_ORDER = {"NHD": 0, "HND": 1}  # FlashInfer's numbers for the two orders of a cache
_TENSOR_CORES = (
    "float_workspace_buffer", "int_workspace_buffer", "plan_info_vec", "q", "paged_k_cache", "paged_v_cache",
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "o", "maybe_lse", "mask_mode",
    "layout", "window_left", "enable_pdl", "maybe_custom_mask", "maybe_mask_indptr", "maybe_alibi_slopes",
    "maybe_prefix_len_ptr", "maybe_token_pos_in_items_ptr", "maybe_max_item_len_ptr", "logits_soft_cap", "sm_scale",
    "scale_q", "scale_k", "scale_v", "rope_scale", "rope_theta", "token_pos_in_items_len", "workspace_size",
)  # fmt: skip
_CUDA_CORES = (
    "float_workspace_buffer", "int_workspace_buffer", "plan_info_vec", "q", "paged_k_cache", "paged_v_cache",
    "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "o", "maybe_lse", "kv_layout_code", "window_left",
    "enable_pdl", "alibi_slopes", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta",
)  # fmt: skip

_known = lru_cache(maxsize=64)(starts_with)  # a module's function is made once; a plan is made at each step


@lru_cache(maxsize=16)
def _dependent_launch(device: torch.device) -> bool:
    """Whether a launch may begin before the one ahead of it has ended: what FlashInfer's `run` chooses from SM 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def decode_launch(wrapper: Any, layout: str, options: Options) -> Launch | None:
    """The launch of a decode wrapper that has just been planned; None where only its public door is known."""
    cores = getattr(wrapper, "use_tensor_cores", None)
    module = getattr(wrapper, "_cached_module", None)
    call = getattr(module, "paged_run" if cores else "run", None)
    if cores is None or call is None or not _known(call, _TENSOR_CORES if cores else _CUDA_CORES):
        return None
    try:
        first = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._plan_info
        pages = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf
        ends = (wrapper._qo_indptr_buf,) if cores else ()
        early, size = _dependent_launch(first[0].device), first[0].numel()
    except AttributeError:
        return None
    shape = (_ORDER[layout], options.window, early)
    numbers = (options.softcap, options.scale)
    if cores:
        rest: tuple[Any, ...] = (
            0, *shape, None, None, None, None, None, None, *numbers, None, None, None, 1.0, 1e4, 0, size
        )  # fmt: skip
    else:
        rest = (*shape, None, *numbers, 1.0, 1e4)

    def launch(query: Any, keys: Any, values: Any, out: Any, lse: Any) -> None:
        call(*first, query, keys, values, *ends, *pages, out, lse, *rest)

    return launch

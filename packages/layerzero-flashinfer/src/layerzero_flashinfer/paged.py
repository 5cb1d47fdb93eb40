"""`lz.paged_attention` on FlashInfer's wrappers: a batch is planned at its first call and kept in the batch.

Every layer of a model asks the same of a batch, so one plan serves them all. With a batch made for a capture the plan
lies in fixed buffers, and `batch.update` plans into them again; any other batch is refused inside a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero_flashinfer.options import options
from layerzero_flashinfer.plans import Plan, capturing, plan_batch, problem_of, refuse_planning
from layerzero_flashinfer.workspace import place


def _kernel(kind: str) -> Callable[..., Any]:
    """The kernel of one wrapper and template."""

    def attend(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        scale: float | None,
        window: tuple[int, int] | None,
        softcap: float | None,
        alibi_slopes: Any,
        return_lse: bool,
        layout: str,
    ) -> Any:
        # A graph is captured on a stream of its own: its plans belong to the batch, whatever the stream.
        where = None if batch.capture else place(query)
        key = (kind, query.shape, query.dtype, key_cache.shape, key_cache.dtype, layout, scale, window, softcap, where)
        found = batch.plans.get(key)
        if found is None:
            asked = options(kind[0] == "p", window, softcap, scale, query.shape[-1])
            page = key_cache.shape[1 if layout == "NHD" else 2]
            problem = problem_of(kind, query, key_cache, page, asked, layout)
            found = batch.plans[key] = plan_batch(problem, place(query), batch)
        elif where is not None and capturing():
            refuse_planning("this batch may be planned again behind the graph's back")
        assert isinstance(found, Plan)
        if key_cache.stride() != value_cache.stride():  # the kernels read both with one set of strides
            key_cache, value_cache = key_cache.contiguous(), value_cache.contiguous()
        return found.run(query, key_cache, value_cache, return_lse)

    return attend


decode = _kernel("decode")  # one query a sequence, on CUDA cores
decode_tc = _kernel("decode_tc")  # on tensor cores: the heads of a GQA group share one read of the cache
prefill_fa2 = _kernel("paged_fa2")  # any number of queries a sequence
prefill_fa3 = _kernel("paged_fa3")  # Hopper's template

"""`lz.varlen_attention` on FlashInfer's ragged wrappers.

The offsets come as device tensors and a plan needs them on the host: one wait for a batch. The plan is kept with the
very tensors it was read from (and torch's count of writes to them), so the other layers of a model find it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from layerzero.model import attention
from layerzero_flashinfer.options import live_rows, options
from layerzero_flashinfer.plans import Lengths, Plan, Problem, problem_of, refuse_planning
from layerzero_flashinfer.workspace import place

_KEPT = 8


class _Kept(NamedTuple):
    """A plan and the offsets it is for; another tensor that has taken their address is not taken for them."""

    plan: Plan
    sources: tuple[weakref.ref[Tensor], ...]
    counts: tuple[int, int]

    def serves(self, offsets: tuple[Tensor, Tensor], counts: tuple[int, int]) -> bool:
        return counts == self.counts and all(ref() is item for ref, item in zip(self.sources, offsets, strict=True))


_plans: OrderedDict[Any, _Kept] = OrderedDict()
_guard = threading.Lock()


def _counts(offsets: tuple[Tensor, Tensor]) -> tuple[int, int] | None:
    """torch's count of writes; None for tensors of inference mode, which have none and are read anew."""
    try:
        return offsets[0]._version, offsets[1]._version
    except RuntimeError:
        return None


def _planned(problem: Problem, query: Tensor, offsets: tuple[Tensor, Tensor]) -> Plan:
    where = place(query)
    key = (problem, where, id(offsets[0]), id(offsets[1]))
    counts, found = _counts(offsets), _plans.get(key)
    if found is not None and counts is not None and found.serves(offsets, counts):
        return found.plan
    refuse_planning("these offsets have no plan yet")
    starts_q, starts_k = (item.tolist() for item in offsets)
    queries, contexts = (
        tuple(stop - start for start, stop in itertools.pairwise(starts)) for starts in (starts_q, starts_k)
    )
    split_q, split_k = live_rows(problem.options.causal, queries, contexts)
    lengths = Lengths(split_q, split_k, next(attention.offsets(split_k)), None, None)
    made = Plan(problem, where, query.device, lengths)
    if counts is not None:
        with _guard:
            _plans[key] = _Kept(made, tuple(map(weakref.ref, offsets)), counts)
            while len(_plans) > _KEPT:
                _plans.popitem(last=False)
    return made


def _kernel(kind: str) -> Callable[..., Any]:
    """The kernel of one template."""

    def attend(
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
        alibi_slopes: Any,
        return_lse: bool,
    ) -> Any:
        if key.shape[0] == 0:  # no sequence has a key
            return attention.no_keys(query, value, return_lse)
        asked = options(is_causal, window, softcap, scale, query.shape[-1])
        problem = problem_of(kind, query, key, 1, asked)
        return _planned(problem, query, (cu_seqlens_q, cu_seqlens_k)).run(query, key, value, return_lse)

    return attend


varlen_fa2 = _kernel("ragged_fa2")
varlen_fa3 = _kernel("ragged_fa3")  # Hopper's template

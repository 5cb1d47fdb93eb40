"""What a call asks, in FlashInfer's words: causal, left window, softcap, a positive scale, base-2 logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.model.context import Context
from layerzero.model.enums import Causal
from layerzero.reasons import Reason, reason

LN2 = math.log(2.0)
_NOTHING = -49_000.0 * LN2


class Options(NamedTuple):
    """The scalars of an attention call. `causal` is aligned to the bottom right, `window` -1 means unlimited."""

    causal: bool
    window: int
    softcap: float
    scale: float
    turned: float  # the query is multiplied by this first: 1, -1 for a negative scale, 0 for a scale of zero


def options(
    causal: bool | str, window: tuple[int, int] | None, softcap: float | None, scale: float | None, head_dim: int
) -> Options:
    """Scores are scaled after they are masked, and -inf times -1 is no mask: a scale below zero turns the query."""
    left, right = (-1, -1) if window is None else window
    value = head_dim**-0.5 if scale is None else float(scale)
    turned = 1.0 if value > 0.0 else (-1.0 if value < 0.0 else 0.0)
    return Options(bool(causal) or right == 0, left, softcap or 0.0, abs(value) or 1.0, turned)


def one_sided(ctx: Context) -> list[Reason]:
    """A predicate: no key after the query's own position may be limited by a window, except by a causal one."""
    window = ctx.window
    if window is None or window[1] <= 0 or ctx.causal is not Causal.NONE:
        return []
    return [reason("WINDOW_UNSUPPORTED", window, "no keys ahead (right 0), all of them (-1), or causal")]


def live_rows(causal: bool, query_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same lengths with rows that see no key as sequences of their own.

    With more queries than keys under a causal mask FlashInfer raises, or gives wrong rows.
    """
    queries: list[int] = []
    contexts: list[int] = []
    for rows, cols in zip(query_lens, kv_lens, strict=True):
        dead = max(0, rows - cols) if causal else 0
        if dead and cols:
            queries.append(dead)
            contexts.append(0)
        queries.append(rows - dead if cols else rows)
        contexts.append(cols)
    return queries, contexts


def no_keys(causal: bool, query_lens: Any, kv_lens: Any) -> tuple[tuple[int, int], ...]:
    """Spans of packed query rows that may attend nothing: no keys at all, or causal with more queries than keys."""
    spans: list[tuple[int, int]] = []
    start = 0
    for rows, cols in zip(query_lens, kv_lens, strict=True):
        dead = rows if cols == 0 else max(0, rows - cols) if causal else 0
        if dead:
            spans.append((start, start + dead))
        start += rows
    return tuple(spans)


def behind(live: Any, dead: int) -> Any:
    """A result [B, S, H, D] (and log-sum-exp [B, H, S]) with `dead` rows that see no key in front."""
    out, lse = live if isinstance(live, tuple) else (live, None)
    full = out.new_zeros((out.shape[0], dead + out.shape[1], *out.shape[2:]))
    full[:, dead:] = out
    if lse is None:
        return full
    logs = lse.new_full((*lse.shape[:2], dead + lse.shape[2]), -torch.inf)
    logs[..., dead:] = lse
    return full, logs


def unwritten(lse: Tensor) -> Tensor:
    """In a graph nobody knows which sequences will be empty: FlashInfer's -50000 (base 2) for them becomes -inf."""
    return lse.masked_fill_(lse < _NOTHING, -torch.inf)


def bury(out: Tensor, lse: Tensor | None, spans: tuple[tuple[int, int], ...]) -> None:
    """A row that attends nothing gives zeros, and -inf as its log-sum-exp."""
    for first, last in spans:
        out[first:last].zero_()
        if lse is not None:
            lse[first:last].fill_(-torch.inf)

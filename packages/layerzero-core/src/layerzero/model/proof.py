"""What a call must be like for a proof to cover it: its kind, in words.

A kind of call is its op, its dtype and what it asks of a kernel (causal, GQA, a gradient, a quantized weight, …). A
kernel that was right for one call of a kind is trusted with the others: sizes are what its declared limits are for.
"""

from __future__ import annotations

from typing import NamedTuple

from layerzero.model.context import Context
from layerzero.model.enums import OpKind

# Said of where a call runs or what is chosen for it; no kernel computes anything else because of them.
_NEUTRAL = frozenset({"tp_invariant", "graph"})


def words_of(ctx: Context) -> frozenset[str]:
    """What a call asks of a kernel, beside op and dtype."""
    found = set(ctx.needs - _NEUTRAL)
    if ctx.needs_grad:
        found.add("backward")
    if ctx.quant_format is not None:
        found.add(f"format:{ctx.quant_format}")
    if ctx.granularity is not None:
        found.add(f"scales:{ctx.granularity}")
    if ctx.weight_layout is not None:
        found.add(f"packed:{ctx.weight_layout}")
    if ctx.kv_cache_dtype not in (None, ctx.dtype):
        found.add(f"kv:{ctx.kv_cache_dtype}")
    if ctx.tokenizer is not None:  # right for one vocabulary says nothing of another
        found.add(f"vocab:{ctx.tokenizer.vocab_hash[:16]}")
    return frozenset(found)


def kind_of(ctx: Context) -> str:
    """The kind of a call as it is written down: "float16 causal_top_left gqa"."""
    return " ".join((ctx.dtype, *sorted(words_of(ctx))))


def draws(ctx: Context) -> bool:
    """Whether a call draws random numbers: two right answers to it need not be equal."""
    return ctx.kind is OpKind.SAMPLING or ctx.dropout


class KitProof(NamedTuple):
    """What a passed conformance kit says of one kernel on one family of devices: each of these dtypes and words."""

    dtypes: frozenset[str]
    words: frozenset[str]
    source: str = ""

    def covers(self, ctx: Context) -> bool:
        """Whether the kit has tried all that a call asks for."""
        return ctx.dtype in self.dtypes and words_of(ctx) <= self.words

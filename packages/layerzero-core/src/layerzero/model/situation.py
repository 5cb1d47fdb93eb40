"""A call in words: its situation, by which times and tables are kept, and its kind, which a proof covers.

The situation is everything a choice may depend on besides machine and sizes, as plain text can hold it. The kind is
op, dtype and what is asked of a kernel (causal, GQA, a gradient, a quantized weight, …). A kernel that was right for
one call of a kind is trusted with the others: sizes are what its declared limits are for.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from layerzero.model.context import Context
from layerzero.model.enums import OpKind

# Not part of a situation: the machine (the table's own header), sizes (buckets), and values no choice depends on.
_SKIPPED = frozenset({"op", "device", "dims", "notes", "tp_rank"})
_NAMES = sorted(f.name for f in fields(Context) if f.compare and f.name not in _SKIPPED and not f.name.startswith("_"))
_PROPERTIES = attrgetter(*_NAMES)
_USUAL = _PROPERTIES(Context("attention", dims=(("head_dim", 1),)))

Situation = tuple[tuple[str, Any], ...]


def situation(ctx: Context) -> Situation:
    """Every property of a call that a choice may depend on, beside machine and sizes; defaults left out."""
    return tuple(
        (name, _plain(value))
        for name, value, usual in zip(_NAMES, _PROPERTIES(ctx), _USUAL, strict=True)
        if value is not usual and value != usual
    )


def _plain(value: Any) -> Any:
    """A hashable form that JSON can hold."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (frozenset, set)):
        return tuple(sorted(str(item) for item in value))
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return tuple((name, _plain(getattr(value, name))) for name in value.__dataclass_fields__)
    return str(value)


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
        return ctx.dtype in self.dtypes and words_of(ctx) <= self.words

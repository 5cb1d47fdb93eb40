"""How PerfDB names a bucket of calls: everything exact but the sizes that grow, which end at powers of two."""

from __future__ import annotations

import json
from collections.abc import Iterable

from layerzero.model.context import Context
from layerzero.model.situation import situation

# Sizes that vary with traffic rather than with the model.
GROWING = frozenset({"batch", "seq_len_q", "seq_len_k", "rows", "tokens", "tokens_k", "num_blocks"})


def upper(size: int) -> int:
    """The end of the bucket of a size: the next power of two; 0 and 1 stand for themselves."""
    return size if size < 2 else 1 << (size - 1).bit_length()


def bucket_of(ctx: Context, growing: Iterable[str] = ()) -> str:
    """The bucket of a call as stable text. `growing` names further axes of the op that vary from call to call."""
    axes = GROWING | set(growing)
    sizes = {name: upper(size) if name in axes else size for name, size in ctx.dims}
    return json.dumps({"sizes": sizes, "when": dict(situation(ctx))}, sort_keys=True, separators=(",", ":"))

"""What capabilities.json cannot say; pure functions of the Context."""

from __future__ import annotations

from layerzero.model.enums import Causal
from layerzero.plugin import Context, Reason, reason


def single_query(ctx: Context) -> list[Reason]:
    """Split-K knows no causal mask; bottom-right over one query hides nothing, so there it may be asked for."""
    if ctx.causal is Causal.NONE or ctx.seq_len_q == 1:
        return []
    return [reason("CAUSAL_ALIGNMENT_UNSUPPORTED", f"{ctx.causal} with {ctx.seq_len_q} queries", "a single query")]


def cutlass_masks(ctx: Context) -> list[Reason]:
    """What the CUTLASS kernel cannot mask by itself; beside a mask of the call everything is written out.

    Bottom-right over more queries than keys it computes wrongly; windows it has only below that diagonal, and without a
    backward.
    """
    if {"mask_bool", "mask_float"} & ctx.needs:
        return []
    if ctx.causal is Causal.BOTTOM_RIGHT and ctx.seq_relation == "longer":
        return [reason("SEQ_LEN_MISMATCH", f"{ctx.seq_len_q} queries", f"{ctx.seq_len_k} keys or fewer queries")]
    if "window" not in ctx.needs:
        return []
    if ctx.causal is Causal.NONE or (ctx.causal is Causal.TOP_LEFT and ctx.seq_relation != "equal"):
        return [reason("WINDOW_UNSUPPORTED", ctx.window, "a bottom-right causal window")]
    return [reason("BACKWARD_UNSUPPORTED", "a causal window")] if "backward" in ctx.needs else []

"""What Liger's fused MLP asks of a call that data cannot say."""

from __future__ import annotations

from layerzero.plugin import Context, Reason, reason


def mlp(context: Context) -> list[Reason]:
    """The block has to give back as many columns as it takes: its backward counts on that."""
    hidden, out = context.dim("hidden"), context.dim("n")
    if hidden != out:
        return [reason("DIM_OUT_OF_RANGE", f"n={out}", f"n={hidden}, the columns of x")]
    return []

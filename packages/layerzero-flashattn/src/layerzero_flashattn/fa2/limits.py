"""What FlashAttention 2 cannot do together; each by itself is declared."""

from __future__ import annotations

from layerzero.plugin import Context, Reason, reason


def attention(context: Context) -> list[Reason]:
    """No softcap under dropout; beside dropout the log-sum-exp comes only with all probabilities written out."""
    if not context.dropout:
        return []
    found: list[Reason] = []
    if "softcap" in context.needs:
        found.append(reason("DROPOUT_UNSUPPORTED", "with softcap"))
    if "lse" in context.needs:
        found.append(reason("DROPOUT_UNSUPPORTED", "with return_lse"))
    return found

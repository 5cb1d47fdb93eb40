"""Indices are checked where that costs no wait."""

from __future__ import annotations

from torch import Tensor

from layerzero.dispatch import modes
from layerzero.errors import invalid


def expect_below(ids: Tensor, name: str, limit: int, *, but: int | None = None, code: str = "VALUE_INVALID") -> None:
    """Refuse indices outside 0 … limit - 1, `but` excepted, where looking at them costs no wait: on the CPU.

    A call is described when it is cold, and again when a kernel raised; so a bad index that only a hot call meets
    still ends here, as one clear error.
    """
    if not ids.is_cpu or ids.numel() == 0 or not modes.plain((ids,)):
        return
    wrong = (ids < 0) | (ids >= limit)
    if but is not None:
        wrong &= ids != but
    if wrong.any():
        found = int(ids[wrong][0])
        raise invalid(code, f"{name} {found}", limit - 1, f"{name} hold {found}, outside 0 to {limit - 1}")

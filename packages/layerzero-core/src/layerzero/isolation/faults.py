"""What an isolated call can end in besides a result. A fault is charged to the kernel and the next candidate runs."""

from __future__ import annotations

from layerzero.reasons import Reason, reason


class IsolationFault(RuntimeError):
    """The child crashed, hung or spoke nonsense; `reason` says which. Dispatch turns it into a fallback."""

    def __init__(self, why: Reason) -> None:
        super().__init__(str(why))
        self.reason = why


class ChildError(IsolationFault):
    """The kernel raised inside the child, which is well; the words are the kernel's own."""


class ChildOutOfMemory(ChildError, MemoryError):
    """The child ran out of host or device memory: pressure, not the kernel's fault."""


def fault(code: str, value: object = None, limit: object = None, *, detail: str = "") -> IsolationFault:
    """A fault with the words of its reason code."""
    return IsolationFault(reason(code, value, limit, detail=detail))

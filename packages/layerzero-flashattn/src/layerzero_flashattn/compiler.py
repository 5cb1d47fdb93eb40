"""The CuTe libraries, imported so that their compiler has one caller at a time.

FlashAttention 4 and QuACK compile inside the process, at the first call of each configuration. Their compiler keeps
what it is building in places that all threads share: two compilations at once, of our background workers, of a caller
or of a backward pass, which has a thread of its own, end the process with an abort and no exception. A compilation
therefore waits for the one before it, whoever began it. Calls of what is compiled never come here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from typing import Any

from layerzero_flashattn.quiet import hush

__all__ = ["library"]

_log = logging.getLogger("layerzero.flashattn")
_one = threading.RLock()  # re-entrant: a compilation may ask for another


def library(name: str) -> Any:
    """A module of FlashAttention 4 or QuACK, imported without its remarks."""
    hush()
    found = importlib.import_module(name)
    _in_turn()
    return found


def _in_turn() -> None:
    """Let the compiler's entry take the lock. Once a process; where there is no such entry, nothing is changed."""
    compile_ = getattr(sys.modules.get("cutlass.cute"), "compile", None)
    kind = type(compile_)
    entry = kind.__dict__.get("__call__")
    if compile_ is None or getattr(entry, "in_turn", False):
        return
    if not callable(entry):
        _log.warning("the CuTe compiler has another entry than we know: do not compile in two threads at once")
        return

    @functools.wraps(entry)
    def one_by_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _one:
            return entry(self, *args, **kwargs)

    one_by_one.in_turn = True  # type: ignore[attr-defined]
    kind.__call__ = one_by_one  # type: ignore[method-assign,assignment]

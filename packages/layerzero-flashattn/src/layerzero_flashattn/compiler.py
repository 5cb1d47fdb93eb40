"""The CuTe libraries, imported so that their compiler has one caller at a time.

FlashAttention 4 and QuACK compile inside the process, at the first call of each configuration. Their compiler keeps
what it is building in places that all threads share: two compilations at once, of our background workers, of a caller
or of a backward pass, which has a thread of its own, end the process with an abort and no exception. A compilation
therefore waits for the one before it, whoever began it, and so do those who write a compiled kernel to disk or read
one from there. Calls of what is compiled never come here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from typing import Any

from layerzero_flashattn.quiet import hush

_log = logging.getLogger("layerzero.flashattn")
_one = threading.RLock()  # re-entrant: a compilation may ask for another


def library(name: str) -> Any:
    """A module of FlashAttention 4 or QuACK, imported without its remarks."""
    hush()
    found = importlib.import_module(name)
    _in_turn()
    return found


def _in_turn() -> None:
    """Let the compiler's entries take the lock. Once a process; where there is no such entry, nothing is changed."""
    compile_ = getattr(sys.modules.get("cutlass.cute"), "compile", None)
    if compile_ is None:
        return
    if not _one_by_one(type(compile_), "__call__"):
        _log.warning("the CuTe compiler has another entry than we know: do not compile in two threads at once")
    runtime = sys.modules.get("cutlass.cute.runtime")
    made = getattr(sys.modules.get("cutlass.cutlass_dsl"), "JitCompiledFunction", None)
    if runtime is not None:
        _one_by_one(runtime, "load_module")
    for kind in getattr(made, "__mro__", ()):
        if "export_to_c" in vars(kind):
            _one_by_one(kind, "export_to_c")


def _one_by_one(owner: Any, name: str) -> bool:
    """Let a function or method take the lock; whether there is such a one."""
    entry = vars(owner).get(name)
    if not callable(entry):
        return False
    if getattr(entry, "in_turn", False):
        return True

    @functools.wraps(entry)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with _one:
            return entry(*args, **kwargs)

    in_turn.in_turn = True  # type: ignore[attr-defined]
    setattr(owner, name, in_turn)
    return True

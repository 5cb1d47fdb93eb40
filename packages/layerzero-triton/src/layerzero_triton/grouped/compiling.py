"""Where the first call of a kernel puts what it compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

from layerzero_triton import cache

__all__ = ["into_our_cache"]

_compiled: set[Hashable] = set()
_MOST = 4096  # keys; a program with more starts over, which costs a lock a call


@contextlib.contextmanager
def into_our_cache(*key: Hashable) -> Iterator[bool]:
    """The first call with a key compiles into our own folder (see `cache`); later ones find the kernel in memory.

    Gives whether it is the first: it then compiles what only later calls may need, so that no request does.
    """
    if key in _compiled:
        yield False
        return
    with cache.scoped():
        yield True
    if len(_compiled) >= _MOST:
        _compiled.clear()
    _compiled.add(key)

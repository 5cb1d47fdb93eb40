"""What a forked child has to do over: of the threads of its parent it has one, and the others may have held locks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


def in_child(renew: Callable[[], object]) -> None:
    """Call `renew()` in every child that this process forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def fresh_lock(kind: Callable[[], Any] = threading.Lock) -> Any:
    """A lock that nobody holds in a forked child; for what lives as long as the process."""
    made = kind()
    in_child(made._at_fork_reinit)
    return made

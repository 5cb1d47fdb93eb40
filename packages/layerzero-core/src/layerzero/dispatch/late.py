"""The cold path behind a door: the ops import this, and the machinery is imported when a call first misses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from layerzero.runtime.current import Unloaded, collector_paused, now

if TYPE_CHECKING:
    from layerzero.selection.world import World


def _machinery() -> Any:
    """`layerzero.dispatch.run`, with plugins discovered: both happen at the first cold call."""
    found = sys.modules.get("layerzero.dispatch.run")
    if found is not None and now.world is not Unloaded:
        return found
    with collector_paused():
        from layerzero.dispatch import run
        from layerzero.runtime.state import state

        state.load()
    return run


def current_world() -> World:
    """The World of the active scope, else the current one."""
    return _machinery().current_world()  # type: ignore[no-any-return]


def miss(*args: Any) -> Any:
    """See `layerzero.dispatch.run.miss`."""
    return _machinery().miss(*args)


def seen(*args: Any) -> Any:
    """See `layerzero.dispatch.traced_calls.seen`."""
    _machinery()
    from layerzero.dispatch.traced_calls import seen as found

    return found(*args)


def recover(*args: Any) -> Any:
    """See `layerzero.dispatch.run.recover`."""
    return _machinery().recover(*args)

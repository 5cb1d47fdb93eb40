"""The cold path behind a door: the ops import this, and the machinery is imported when a call first misses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.selection.world import World

__all__ = ["current_world", "miss", "recover"]


def current_world() -> World:
    """The World of the active scope, else the current one."""
    from layerzero.dispatch import run

    return run.current_world()


def miss(*args: Any) -> Any:
    """See `layerzero.dispatch.run.miss`."""
    from layerzero.dispatch import run

    return run.miss(*args)


def recover(*args: Any) -> Any:
    """See `layerzero.dispatch.run.recover`."""
    from layerzero.dispatch import run

    return run.recover(*args)

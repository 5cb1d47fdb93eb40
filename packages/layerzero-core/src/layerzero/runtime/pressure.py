"""Free memory as selection sees it: looked up now and then, in steps, so that a few bytes more change nothing.

Asked for by `memory_headroom_mb` in the policy, and for a while after a kernel has run out of memory. A step down or up
swaps the World; inside a step every choice stays as it is, and a hot call reads nothing of this. Other processes show
in the driver's numbers (and in the container's limit), so their pressure counts like our own.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from layerzero.device.memory import free_bytes
from layerzero.forking import fresh_lock, in_child
from layerzero.model.config import FrozenMap
from layerzero.runtime.state import state
from layerzero.runtime.timers import timers

if TYPE_CHECKING:
    from layerzero.selection.world import World

_STEPS = 4  # per doubling
_EVERY_S = 0.25
_TIMER_S = 1.0
_AFTER_OOM_S = 30.0


class Levels(FrozenMap):
    """Free bytes by device, rounded down to a step; made here and nowhere else."""

    __slots__ = ()


def level(free: int) -> int:
    """Free bytes rounded down to one of four steps a doubling: what selection is told."""
    if free < 1:
        return 0
    return math.floor(2 ** (math.floor(math.log2(free) * _STEPS) / _STEPS))


class Pressure:
    """Looks at devices that were called lately, and publishes a World when a step was crossed."""

    def __init__(self) -> None:
        self._lock = fresh_lock()
        self._looked: dict[str, float] = {}
        self._levels: dict[str, int] = {}
        self._until = 0.0
        self._ticking = False

    def wanted(self, world: World) -> bool:
        """Whether free memory plays a part: by policy, or because there was none left a moment ago."""
        return world.policy.memory_headroom_mb is not None or time.monotonic() < self._until

    def with_memory(self, world: World) -> World:
        """The World with free memory in it where that is wanted, and without where it is not."""
        ours = world.free_memory is None or isinstance(world.free_memory, Levels)
        if not ours:
            return world  # a tool or a test says it itself
        if not self.wanted(world):
            return world if world.free_memory is None else world.changed(free_memory=None)
        if not self._levels:
            self._look("cpu")
        found = Levels(self._levels)
        return world if world.free_memory == found else world.changed(free_memory=found)

    def met(self, world: World, device: str) -> bool:
        """On the cold path: look at the device of this call unless that was just done; True when the World changed."""
        if not self.wanted(world):
            return False
        if not self._ticking:
            self._tick()
        if time.monotonic() - self._looked.get(device, -_EVERY_S) < _EVERY_S:
            return False
        return self._look(device) and self._publish()

    def felt(self, device: str) -> None:
        """A kernel ran out of memory on the device: mind what is free there for a while."""
        self._until = time.monotonic() + _AFTER_OOM_S
        self._look(device)
        self._publish()
        self._tick()

    def _tick(self) -> None:
        self._ticking = True
        timers.after("memory", _TIMER_S, self._again)

    def _again(self) -> None:
        """The timer's part: calls that stay hot never come by, so free memory is looked at for them."""
        self._ticking = False
        if not state.loaded:
            return
        wanted = self.wanted(state.world)
        changed = [self._look(device) for device in list(self._looked)] if wanted else [True]
        if any(changed):
            self._publish()
        if wanted:
            self._tick()

    def _look(self, device: str) -> bool:
        """Read one device; True when its step is another than before."""
        free = free_bytes(device)
        with self._lock:
            self._looked[device] = time.monotonic()
            if free is None:
                return self._levels.pop(device, None) is not None
            now, before = level(free), self._levels.get(device)
            # One step up is within the noise of a busy machine; down counts at once.
            if before is not None and before <= now <= before * 2 ** (1.5 / _STEPS):
                return False
            self._levels[device] = now
            return True

    def _publish(self) -> bool:
        with state.changing():
            if not state.loaded:
                return False
            before = state.world
            after = self.with_memory(before)
            if after is before:
                return False
            state.publish(free_memory=after.free_memory)
            return True

    def forget(self) -> None:
        """As in a new process."""
        self._looked.clear()
        self._levels.clear()
        self._until = 0.0
        self._ticking = False

    def after_fork(self) -> None:
        """The timer's thread is the parent's."""
        self._ticking = False


pressure = Pressure()
state.on_reset(pressure.forget)
in_child(pressure.after_fork)

"""Doctor's look at the measurements that came with packages: which count on the devices here, and why others do not."""

from __future__ import annotations

from layerzero.device.family import family_of
from layerzero.measurements.shipped import standing
from layerzero.public.checks import Check, Status
from layerzero.public.situation import Situation

__all__ = ["shipped"]

_GROUP = "shipped measurements"


def shipped(now: Situation, only: str | None = None) -> list[Check]:
    """One check for each available backend and family of devices that its file has something to say of."""
    if not now.world.policy.setting("perfdb.shipped"):
        return [Check(_GROUP, "perfdb.shipped", Status.OK, "off: kernels without times here are ranked by priority")]
    found = []
    for name, backend in sorted(now.world.registry.backends.items()):
        if only not in (None, name) or not backend.available:
            continue
        for family in sorted({family_of(device) for device in now.devices}):
            own, why = standing(backend, family)
            if why is not None:
                # Rates of other devices still count, which is as it should be; nothing else of a refused file does.
                found.append(Check.because(_GROUP, name, Status.WARN if own is None else Status.OK, why))
            elif own is not None:
                words = f"{own.calls} calls on {family}: {own.device}, commit {own.commit}, torch {own.torch}"
                found.append(Check(_GROUP, name, Status.OK, words))
    return found

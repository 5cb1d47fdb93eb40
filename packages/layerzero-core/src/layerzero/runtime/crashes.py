"""The quarantine in this process: read when the World is built, written when a kernel takes something down.

Three things put a kernel there: a process that ended during its first run (the next start finds its crash marker), a
device error that no process survives, and an isolated process it crashed twice.
"""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero import env
from layerzero.errors import LayerZeroError
from layerzero.forking import in_child
from layerzero.health.breaker import LAST_RESORT
from layerzero.health.crash_markers import CrashMarker, CrashMarkers, gather
from layerzero.health.quarantine import SUSPECTED, Quarantine, default_file
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.reasons import Reason, ReasonCode
from layerzero.runtime.state import state

if TYPE_CHECKING:
    from layerzero.registry.kernels import KernelRegistry

_log = logging.getLogger("layerzero.health")

_CHILD_CRASHES = 2

_markers: CrashMarkers | None = None  # of this process, since the World was built; None: none are left
_child_crashes: Counter[str] = Counter()
_set_aside: dict[Path, tuple[Reason, ...]] = {}  # what was wrong with a file when the World was built


def place() -> Path | None:
    """The quarantine file in force, or None."""
    try:
        return default_file(env.read().quarantine)
    except LayerZeroError:  # a wrong variable is said elsewhere
        return default_file(None)


def set_aside(file: Path) -> tuple[Reason, ...]:
    """Why this quarantine file was set aside in this process, when the World was built; empty where it was not."""
    return _set_aside.get(file, ())


def _leave_markers(file: Path | None) -> None:
    """Leave crash markers beside this quarantine file from now on."""
    global _markers
    folder = None if file is None else file.parent / "crash_markers"
    if _markers is not None and _markers.folder != folder:
        _markers.close()
        _markers = None
    if _markers is None and folder is not None:
        _markers = CrashMarkers(folder)


def collect(quarantine: Quarantine) -> None:
    """Turn crash markers that processes which are gone have left beside a quarantine into its entries."""
    gather(quarantine.path.parent / "crash_markers", lambda marker: _judge(quarantine, marker))


def take_up(registry: KernelRegistry) -> None:
    """Collect what crashed processes have left and block what is quarantined here; never raises."""
    _child_crashes.clear()
    file = place()
    _leave_markers(file)
    if file is None:
        state.health.set_quarantined({})
        return
    quarantine = Quarantine(file)
    try:
        collect(quarantine)
        entries = quarantine.entries() if file.exists() else ()
    except OSError as error:
        _log.warning("the quarantine cannot be read or written: %s", error)
        entries = ()
    for problem in quarantine.problems:
        _log.warning("%s", problem)
    if quarantine.problems:
        _set_aside[file] = quarantine.problems
    versions = {kernel.kernel_id: kernel.version for kernel in registry.kernels.values()} if entries else {}
    meant = [entry for entry in entries if versions.get(entry.kernel_id) == entry.version]
    here: set[str] = set()
    if meant:  # devices are looked at only where it matters
        from layerzero.device.probe import probe_devices

        here = {device.signature for device in probe_devices()}
    blocked = {entry.kernel_id: entry.why for entry in meant if entry.device_signature in here}
    for name, why in blocked.items():
        _log.warning("%s is in quarantine and is not used: %s", name, why)
    state.health.set_quarantined(blocked)


def _judge(quarantine: Quarantine, marker: CrashMarker) -> None:
    """A fatal signal convicts at once; a process that was killed or left makes a suspect."""
    key = (marker.kernel_id, marker.version, marker.device_signature)
    if marker.kernel_id.partition(".")[0] == LAST_RESORT:
        return
    if marker.fault:
        quarantine.add(
            *key, ReasonCode.KERNEL_CRASHED, f"{marker.fault} in the first run of {marker.op or 'the kernel'}"
        )
        return
    times = quarantine.suspect(*key)
    if times >= SUSPECTED:
        quarantine.add(*key, ReasonCode.KERNEL_CRASHED, f"{times} processes ended during the first run of {marker.op}")


def put(kernel: KernelSpec, device: DeviceSpec, why: Reason) -> bool:
    """Write a kernel into the quarantine and block it here as well. False where nothing could be written."""
    if kernel.backend == LAST_RESORT:
        return False
    file = place()
    health = state.health
    text = f"{why.code.value}: {why.message}"
    health.set_quarantined({**health.snapshot().quarantined, kernel.kernel_id: text})
    if file is None:
        return False
    try:
        Quarantine(file).add(kernel.kernel_id, kernel.version, device.signature, why.code, why.message)
    except OSError as error:
        _log.error("%s could not be written into the quarantine: %s", kernel.kernel_id, error)
        return False
    _log.error("%s is in quarantine from now on: %s", kernel.kernel_id, text)
    return True


def child_crashed(kernel: KernelSpec, device: DeviceSpec, why: Reason) -> None:
    """An isolated kernel took its process down; the second time the next start does without it."""
    _child_crashes[kernel.kernel_id] += 1
    if _child_crashes[kernel.kernel_id] >= _CHILD_CRASHES:
        put(kernel, device, why)


def first_run(kernel: KernelSpec, device: DeviceSpec) -> tuple[CrashMarkers | None, int | None]:
    """Leave a crash marker for a run that may be the last thing this process does."""
    if kernel.backend == LAST_RESORT:
        return None, None
    kept = _markers
    return kept, None if kept is None else kept.enter(kernel.kernel_id, kernel.version, device.signature, kernel.op)


atexit.register(lambda: None if _markers is None else _markers.close())
in_child(lambda: None if _markers is None else _markers.after_fork())

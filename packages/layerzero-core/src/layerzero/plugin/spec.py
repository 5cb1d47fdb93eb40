"""The plugin contract: every hook, in one file.

`layerzero.plugin` shows a complete plugin: a module that implements some of these hooks with `@hookimpl`.
Hooks fill tables; calls read tables. No hook runs on the path of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus, HealthReport

if TYPE_CHECKING:
    from layerzero.model.decision import Decision
    from layerzero.plugin.registrar import Registrar

API_VERSION = "2.0"
ENTRY_POINT_GROUP = "layerzero.backends"
PROJECT = "layerzero"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def layerzero_register(registrar: Registrar) -> None:
    """Register kernels (and new ops). Fires once per process, at the first call or inspection.

    Must not import the vendor library: kernels name their adapters by string, and the string is
    imported when a kernel is bound for the first time.
    """


@hookspec
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Say whether the vendor works on this device, its version, its usable kernels, else reason and fix.

    Fires in a subprocess with a time limit, from `lz doctor`, `lz readiness` and `lz plugin check`;
    it may import the vendor.
    """
    raise AssertionError("a hookspec is never called")  # pragma: no cover


@hookspec
def layerzero_health(backend: str) -> HealthReport:
    """Run a known-answer self test. Fires on demand: doctor, readiness, and a half-open breaker."""
    raise AssertionError("a hookspec is never called")  # pragma: no cover


@hookspec
def layerzero_warmup(shapes: list[dict[str, Any]]) -> None:
    """Optional. Compile or allocate what the given shapes will need. Fires from `lz.warmup`, never from a call."""


@hookspec
def layerzero_decided(decision: Decision) -> None:
    """Optional observer. Fires after a new decision was made (a cold call), never on a hot one."""

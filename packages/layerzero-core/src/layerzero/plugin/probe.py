"""The child side of a probe: `python -m layerzero.plugin.probe NAME [DEVICE_JSON [ENCLOSURE_JSON]]`.

Loads one plugin, asks it `layerzero_capabilities` and `layerzero_health`, and writes one JSON object to standard
output. Whatever the vendor prints goes to standard error. Started only by `layerzero.plugin.probing`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from layerzero.errors import import_reason, importing, one_line
from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.discovery import install_hint, is_known
from layerzero.plugin.enclosure import Enclosure, enter
from layerzero.plugin.manager import Loaded, PluginState, call_hook, load_plugins
from layerzero.reasons import Reason, reason


def answer(loaded: Loaded, name: str, device: DeviceSpec) -> dict[str, Any]:
    """Ask one backend (or plugin) about itself; a hook that raises becomes a reason."""
    record = loaded.record(name)
    if record is None:
        package = f"layerzero-{name}"
        fix = install_hint(package, name) if is_known(package) else "lz doctor names the backends that are here"
        why = replace(reason("BACKEND_NOT_INSTALLED", name, package), hint=fix)
        return {"status": BackendStatus(name, False, reasons=(why,), fix=fix).to_json(), "health": None}
    if record.state in (PluginState.FAILED, PluginState.DENIED):
        status = BackendStatus(name, False, reasons=record.reasons, fix=record.fix)
        return {"status": status.to_json(), "health": None}
    plugin = loaded.pm.get_plugin(record.name)
    backend = name if name in record.backends or not record.backends else record.backends[0]
    status = _bindable(_capabilities(plugin, backend, device, record.kernels), loaded)
    return {"status": status.to_json(), "health": _health(plugin, backend, status)}


def _capabilities(plugin: Any, backend: str, device: DeviceSpec, kernels: tuple[str, ...]) -> BackendStatus:
    try:
        said = call_hook(plugin, "layerzero_capabilities", device=device)
    except Exception as error:
        why = reason("BACKEND_IMPORT_FAILED", one_line(error))
        return BackendStatus(backend, False, reasons=(why,), fix=why.hint)
    if said is None:  # the hook is optional for a backend that needs no vendor
        return BackendStatus(backend, True, kernels=kernels)
    # A plugin with several backends answers with one status for each.
    answers = said if isinstance(said, (list, tuple)) else (said,)
    for status in answers:
        if isinstance(status, BackendStatus) and status.backend == backend:
            return status
    why = reason("PLUGIN_REGISTER_FAILED", f"layerzero_capabilities gave {type(said).__name__} without {backend}")
    return BackendStatus(backend, False, reasons=(why,), fix="report it to the plugin's author")


def _bindable(status: BackendStatus, loaded: Loaded) -> BackendStatus:
    """Import the adapter of every kernel that is said to be usable; what cannot be imported is not available."""
    usable: list[str] = []
    against: list[Reason] = []
    for kernel_id in status.kernels if status.available else ():
        spec = loaded.registry.kernels.get(kernel_id)
        try:
            if spec is not None:
                resolve_name(spec.function)
            usable.append(kernel_id)  # an id nobody registered is for the reader of the answer to notice
        except Exception as error:
            against.append(import_reason(spec.function if spec else kernel_id, error))
    if not against:
        return status
    reasons = (*status.reasons, *against)
    return replace(status, available=bool(usable), kernels=tuple(usable), reasons=reasons, fix=against[0].hint)


def _health(plugin: Any, backend: str, status: BackendStatus) -> dict[str, Any] | None:
    if not status.available:
        return None
    started = time.perf_counter()
    try:
        said = call_hook(plugin, "layerzero_health", backend=backend)
    except Exception as error:
        return HealthReport(backend, False, one_line(error)).to_json()
    if said is None:
        return None
    if not isinstance(said, HealthReport):
        return HealthReport(
            backend, False, f"layerzero_health gave {type(said).__name__}, not a HealthReport"
        ).to_json()
    return said.to_json() | {"seconds": round(time.perf_counter() - started, 4)}


def main(argv: list[str]) -> int:
    """Entry point of the child."""
    out = os.dup(1)
    os.dup2(2, 1)  # a vendor that prints must not spoil the answer
    if len(argv) > 2:  # a backend that runs in a process of its own is asked in the same surroundings
        enter(Enclosure.from_json(json.loads(argv[2])))
    device = DeviceSpec.from_json(json.loads(argv[1])) if len(argv) > 1 and argv[1] else DeviceSpec.detect()
    with importing():
        found = answer(load_plugins(), argv[0], device)
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        json.dump(found, stream)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

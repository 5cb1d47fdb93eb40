"""Probe a backend in a subprocess with a time limit, so that a vendor that crashes or hangs takes nothing down.

A probe costs seconds (it imports torch and the vendor): only `lz doctor`, readiness and `lz plugin check` start one.
The child is this module, too: `python -m layerzero.plugin.probing NAME [DEVICE_JSON [ENCLOSURE_JSON]]` loads one
plugin, asks it `layerzero_capabilities` and `layerzero_health`, and writes one JSON object to standard output.
Whatever the vendor prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

from layerzero.errors import import_reason, importing, one_line
from layerzero.json_form import Plain
from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.discovery import install_hint, is_known
from layerzero.plugin.enclosure import Enclosure, enter
from layerzero.plugin.manager import Loaded, PluginState, call_hook, load_plugins
from layerzero.reasons import Reason, reason

_MAX_ANSWER = 1 << 20
_MAX_ERROR = 2_000


@dataclass(frozen=True, slots=True)
class ProbeResult(Plain):
    """What came back, and how long it took."""

    status: BackendStatus
    health: HealthReport | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return Plain.to_json(self) | {"seconds": round(self.seconds, 3)}


def probe(
    backend: str,
    timeout: float = 20.0,
    *,
    device: DeviceSpec | None = None,
    env: Mapping[str, str] | None = None,
    enclosure: Enclosure | None = None,
) -> ProbeResult:
    """Ask a backend about itself in a fresh process, within `enclosure`; never raises for the backend's sake."""
    started = time.perf_counter()
    given = ("" if item is None else json.dumps(item.to_json()) for item in (device, enclosure))
    found = _run(backend, [sys.executable, "-P", "-m", "layerzero.plugin.probing", backend, *given], timeout, env)
    return replace(found, seconds=time.perf_counter() - started)


def _run(backend: str, command: list[str], timeout: float, env: Mapping[str, str] | None) -> ProbeResult:
    # Files instead of pipes: a grandchild that outlives the child would keep a pipe open and us waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
            )
        except OSError as error:
            return _bad(backend, reason("BACKEND_PROBE_CRASHED", f"cannot start Python: {error.strerror}"))
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return _bad(backend, reason("BACKEND_PROBE_TIMEOUT", backend, timeout))
        finally:
            if child.poll() is None:  # it and what it started: its own session
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        err.seek(0, os.SEEK_END)
        err.seek(max(0, err.tell() - _MAX_ERROR))
        tail = err.read().decode(errors="replace").strip().splitlines()
        return _parse(backend, code, out.read(_MAX_ANSWER + 1), tail[-1] if tail else "")


def _parse(backend: str, code: int, data: bytes, last_line: str) -> ProbeResult:
    if code != 0:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _bad(backend, reason("BACKEND_PROBE_CRASHED", f"{how}; {last_line}"[:400] if last_line else how))
    try:
        if len(data) > _MAX_ANSWER:
            raise ValueError("the answer is too long")
        return ProbeResult.from_json(json.loads(data))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return _bad(backend, reason("BACKEND_PROBE_CRASHED", f"the answer is not understood: {error}"[:400]))


def _bad(backend: str, why: Reason) -> ProbeResult:
    return ProbeResult(BackendStatus(backend, False, reasons=(why,), fix=why.hint))


# -- the child ------------------------------------------------------------------------------------------------------
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
    try:
        said = call_hook(plugin, "layerzero_health", backend=backend)
    except Exception as error:
        return HealthReport(backend, False, one_line(error)).to_json()
    if said is None:
        return None
    if not isinstance(said, HealthReport):
        text = f"layerzero_health gave {type(said).__name__}, not a HealthReport"
        return HealthReport(backend, False, text).to_json()
    return said.to_json()


def main(argv: list[str]) -> int:
    """Entry point of the child."""
    name, described, enclosed = (*argv, "", "")[:3]
    out = os.dup(1)
    os.dup2(2, 1)  # a vendor that prints must not spoil the answer
    if enclosed:  # a backend that runs in a process of its own is asked in the same surroundings
        enter(Enclosure.from_json(json.loads(enclosed)))
    device = DeviceSpec.from_json(json.loads(described)) if described else DeviceSpec.detect()
    with importing():
        found = answer(load_plugins(), name, device)
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        json.dump(found, stream)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

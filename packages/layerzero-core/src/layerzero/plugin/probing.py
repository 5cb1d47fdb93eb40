"""Probe a backend in a subprocess with a time limit, so that a vendor that crashes or hangs takes nothing down.

A probe costs seconds (it imports torch and the vendor): only `lz doctor`, readiness and `lz plugin check` start
one.
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
from dataclasses import dataclass
from typing import Any

from layerzero.json_form import Plain
from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.enclosure import Enclosure
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
    command = [sys.executable, "-P", "-m", "layerzero.plugin.probe", backend]
    if device is not None or enclosure is not None:
        command.append("" if device is None else json.dumps(device.to_json()))
    if enclosure is not None:
        command.append(json.dumps(enclosure.to_json()))
    found = _run(backend, command, timeout, None if env is None else dict(env))
    return ProbeResult(found.status, found.health, time.perf_counter() - started)


def _run(backend: str, command: list[str], timeout: float, env: dict[str, str] | None) -> ProbeResult:
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
            _end(child)
        out.seek(0)
        err.seek(0, os.SEEK_END)
        err.seek(max(0, err.tell() - _MAX_ERROR))
        tail = err.read().decode(errors="replace").strip().splitlines()
        return _parse(backend, code, out.read(_MAX_ANSWER + 1), tail[-1] if tail else "")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started (its own session), and collect it."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _parse(backend: str, code: int, data: bytes, last_line: str) -> ProbeResult:
    if code != 0:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _bad(backend, reason("BACKEND_PROBE_CRASHED", f"{how}; {last_line}"[:400] if last_line else how))
    try:
        if len(data) > _MAX_ANSWER:
            raise ValueError("the answer is too long")
        return _from_json(json.loads(data))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return _bad(backend, reason("BACKEND_PROBE_CRASHED", f"the answer is not understood: {error}"[:400]))


def _bad(backend: str, why: Reason) -> ProbeResult:
    return ProbeResult(BackendStatus(backend, False, reasons=(why,), fix=why.hint))


def _from_json(data: Mapping[str, Any]) -> ProbeResult:
    said, health = data["status"], data["health"]
    status = BackendStatus(
        str(said["backend"]),
        said["available"] is True,
        None if said["version"] is None else str(said["version"]),
        tuple(str(kernel) for kernel in said["kernels"]),
        tuple(Reason.from_json(item) for item in said["reasons"]),
        str(said["fix"]),
    )
    if health is None:
        return ProbeResult(status)
    error = health["max_error"]
    report = HealthReport(
        str(health["backend"]), health["ok"] is True, str(health["detail"]), None if error is None else float(error)
    )
    return ProbeResult(status, report)

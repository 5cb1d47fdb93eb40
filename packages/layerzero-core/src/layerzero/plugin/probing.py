"""Probe a backend in a subprocess with a time limit, so that a vendor that crashes or hangs takes nothing down.

A probe costs seconds (it imports torch and the vendor): only `lz doctor`, readiness and `lz plugin check` start
one. Good answers can be kept, keyed by the versions of everything involved and by the device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.json_form import Plain
from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.discovery import CORE_DIST, dist_version
from layerzero.plugin.enclosure import Enclosure
from layerzero.reasons import Reason, reason

__all__ = ["ProbeResult", "probe"]

_MAX_ANSWER = 1 << 20
_MAX_ERROR = 2_000


@dataclass(frozen=True, slots=True)
class ProbeResult(Plain):
    """What came back, how long it took, and whether it was remembered."""

    status: BackendStatus
    health: HealthReport | None = None
    seconds: float = 0.0
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return Plain.to_json(self) | {"seconds": round(self.seconds, 3)}


def probe(
    backend: str,
    timeout: float = 20.0,
    *,
    device: DeviceSpec | None = None,
    dists: Iterable[str] = (),
    cache: bool = False,
    cache_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
    enclosure: Enclosure | None = None,
) -> ProbeResult:
    """Ask a backend about itself in a fresh process; never raises for the backend's sake.

    With `cache` a former good answer is used while the versions of `dists` (the plugin's and the vendor's), of core,
    torch and Python, and the device are the same. A crash, a hang or garbage is never remembered. `enclosure` asks a
    backend in the surroundings of its own process; that answer is never kept.
    """
    where = _cache_file(backend, device, dists, cache_dir) if cache and enclosure is None else None
    if where is not None and (kept := _recall(where)) is not None:
        return kept
    started = time.perf_counter()
    command = [sys.executable, "-P", "-m", "layerzero.plugin.probe", backend]
    if device is not None or enclosure is not None:
        command.append("" if device is None else json.dumps(device.to_json()))
    if enclosure is not None:
        command.append(json.dumps(enclosure.to_json()))
    found = _run(backend, command, timeout, None if env is None else dict(env))
    result = ProbeResult(found.status, found.health, time.perf_counter() - started)
    if where is not None and result.status.available:
        _keep(where, result)
    return result


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


# -- the memory of good answers --------------------------------------------------------------------
def _cache_file(backend: str, device: DeviceSpec | None, dists: Iterable[str], folder: Path | None) -> Path | None:
    if folder is None:
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("layerzero")) / "probes"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError:
        return None
    if os.name == "posix" and (state.st_uid != os.getuid() or state.st_mode & 0o022):
        return None  # somebody else may write there: not a place to believe
    versions = {name: dist_version(name) for name in sorted({CORE_DIST, "torch", *dists})}
    key = [backend, None if device is None else device.signature, versions, sys.version, sys.executable]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def _recall(path: Path) -> ProbeResult | None:
    try:
        kept = _from_json(json.loads(path.read_bytes()[: _MAX_ANSWER + 1]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # a bad file is a miss
    return ProbeResult(kept.status, kept.health, 0.0, cached=True)


def _keep(path: Path, result: ProbeResult) -> None:
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(result.to_json(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()

"""The last check before a lock: load the build in a process of its own, and see what it registers and changes.

One helper process imports torch once and forks for each build, so builds never meet. The fork has no token and no home
in its environment, and, where the kernel allows, no network, no files of homes, no way to write and no other process to
see (`sandbox`); what is refused is said in `Prober.notes`. The helper itself never runs code of a build: which ops
appeared or changed it reads from the memory of the fork (`dispatcher`), not from what the fork says. This is the first
time a kernel's code runs, after every check that needs no running.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from layerzero_hub.errors import refuse
from layerzero_hub.fingerprint import Finding
from layerzero_hub.lockfile import LockedVariant

_KEPT: Final = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "LC_ALL", "OMP_NUM_THREADS")
_HOMES: Final = ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
_LINE: Final = 2**24


Placed = tuple[Path, LockedVariant]
"""A build and the folder it lies in."""


class Prober:
    """Runs imports in children. Start is late: without a build to probe nothing is started."""

    launcher: tuple[str, ...] = ()
    """Words put before the helper's command, to start it in surroundings of another kind."""

    def __init__(self, timeout: float = 60.0, *, hidden: tuple[str, ...] = ()) -> None:
        self.timeout = timeout
        self.hidden = hidden
        self.notes: tuple[str, ...] = ()
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._answers = -1

    def run(
        self, folder: Path, variant: LockedVariant, *, needs: Mapping[str, Placed] | None = None
    ) -> tuple[str, ...]:
        """Import the build; the ops namespaces that appeared. `needs`: all it depends on, as `owner/name@version`.

        A crash, an error or too long a wait raises HUB_PROBE_FAILED; an op that changed or a finding its own code.
        """
        below = {name: _build_json(*one) for name, one in (needs or {}).items()}
        data = self._ask({"build": _build_json(folder, variant), "needs": below})
        self.notes = tuple(sorted({*self.notes, *map(str, data["notes"])}))
        if "error" in data:
            raise refuse(str(data.get("code") or "HUB_PROBE_FAILED"), data["error"], data.get("limit"))
        if data["changed"]:
            raise refuse("HUB_DISPATCHER_CHANGED", str(data["changed"][0]))
        for finding in _findings(data):
            raise refuse(finding.code, finding.what, finding.mark)
        return tuple(map(str, data["namespaces"]))

    def replay(self, modules: list[str]) -> frozenset[Finding]:
        """What importing installed modules, and no kernel, changes in a fresh process."""
        data = self._ask({"modules": modules})
        if "error" in data:
            raise refuse("HUB_PROBE_FAILED", data["error"])
        return frozenset(_findings(data))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        child = self._start()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({**request, "timeout": self.timeout}).encode() + b"\n")
            child.stdin.flush()
            data: dict[str, Any] = json.loads(self._line())
            return data
        except (OSError, ValueError):
            self.close()
            raise refuse("HUB_PROBE_FAILED", "the probe's process ended") from None

    def close(self) -> None:
        if self._child is not None:
            self._child.terminate()  # it ends what it forked, then itself
            try:
                self._child.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()
            assert self._child.stdin is not None
            self._child.stdin.close()
            os.close(self._answers)
            self._child = None
        if self._home is not None:
            self._home.cleanup()
            self._home = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is not None:
            return self._child
        self._home = tempfile.TemporaryDirectory(prefix="layerzero-hub-probe-")
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= {"HOME": self._home.name, "TMPDIR": self._home.name, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
        # Answers come over a pipe of their own, which the helper holds and no fork of it.
        self._answers, write_end = os.pipe()
        command = [sys.executable, "-P", "-m", "layerzero_hub.probing", str(write_end)]
        hidden = [os.environ[name] for name in _HOMES if os.environ.get(name)]
        self._child = subprocess.Popen(
            [*self.launcher, *command, *self.hidden, *hidden],
            env=environment,
            cwd=self._home.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        return self._child

    def _line(self) -> bytes:
        deadline = time.monotonic() + self.timeout + 60  # torch's own import comes on top, once
        found = bytearray()
        while not found.endswith(b"\n"):
            if len(found) > _LINE or not select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]:
                raise ValueError("no answer")
            part = os.read(self._answers, 65536)
            if not part:
                raise ValueError("the process ended")
            found += part
        return bytes(found)


def _findings(data: dict[str, Any]) -> list[Finding]:
    return [Finding(*map(str, one)) for one in data["findings"]]


def _build_json(folder: Path, variant: LockedVariant) -> dict[str, Any]:
    return {"path": str(folder), "name": variant.name, "build": variant.to_json()}

"""The last check before a lock: load the build in a process of its own, and see what it registers and changes.

One helper process imports torch once and forks for each build, so builds never meet. It gets an empty environment but
for what Python and torch need: no tokens, no proxies, no home. This is the first time a kernel's code runs, after every
check that needs no running.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from layerzero_hub.errors import refuse

__all__ = ["Probed", "Prober"]

_KEPT: Final = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "LC_ALL", "OMP_NUM_THREADS")
_LINE: Final = 2**20


@dataclass(frozen=True, slots=True)
class Probed:
    """What the import did: ops namespaces that appeared, existing ops that changed."""

    namespaces: tuple[str, ...]
    changed: tuple[str, ...]


class Prober:
    """Runs imports in children. Start is late: without a build to probe nothing is started."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._answers = -1

    def run(self, variant_path: Path, *, needs: dict[str, str] | None = None) -> Probed:
        """Import the build. A crash, an error or too long a wait raises HUB_PROBE_FAILED."""
        child = self._start()
        assert child.stdin is not None
        request = {"path": str(variant_path), "needs": needs or {}}
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            data = json.loads(self._line())
        except (OSError, ValueError):
            self.close()
            raise refuse("HUB_PROBE_FAILED", "the probe's process ended") from None
        if "error" in data:
            raise refuse("HUB_PROBE_FAILED", str(data["error"]))
        return Probed(tuple(map(str, data["namespaces"])), tuple(map(str, data["changed"])))

    def close(self) -> None:
        """End the helper and everything it started."""
        if self._child is not None:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is not None:
            return self._child
        self._home = tempfile.TemporaryDirectory(prefix="layerzero-hub-probe-")
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= {"HOME": self._home.name, "TMPDIR": self._home.name, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
        # Answers come over a pipe of their own: what a kernel prints cannot be taken for one.
        self._answers, write_end = os.pipe()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "layerzero_hub.probe", str(write_end), str(self.timeout)],
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
        deadline = time.monotonic() + self.timeout + 30  # torch's own import comes on top, once
        found = b""
        while not found.endswith(b"\n"):
            if len(found) > _LINE or not select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]:
                raise ValueError("no answer")
            part = os.read(self._answers, 65536)
            if not part:
                raise ValueError("the process ended")
            found += part
        return found


# -- in the helper's process ----------------------------------------------------------------------------------------
def _serve(write_end: int, timeout: float) -> None:
    """Answer requests until stdin ends; each import happens in a fork that ends with it."""
    import torch  # noqa: F401 - imported once, here, for all forks

    from layerzero_hub import fingerprint

    before = fingerprint.take()
    for line in sys.stdin.buffer:
        answer = json.dumps(_in_fork(json.loads(line), before, timeout))
        os.write(write_end, answer.encode() + b"\n")


def _in_fork(request: dict[str, Any], before: Any, timeout: float) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read_end)
            os.write(write_end, json.dumps(_imported(request, before)).encode()[:_LINE])
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    said, deadline = b"", time.monotonic() + timeout
    while select.select([read_end], [], [], max(0, deadline - time.monotonic()))[0]:
        part = os.read(read_end, 65536)
        if not part:
            break
        said += part
    else:
        os.kill(child, signal.SIGKILL)
        said = json.dumps({"error": f"no end after {timeout:g} s"}).encode()
    os.close(read_end)
    _, status = os.waitpid(child, 0)
    if not said:
        return {"error": f"the process ended with {_ending(status)}"}
    try:
        answer: dict[str, Any] = json.loads(said)
        return answer
    except ValueError:
        return {"error": "the kernel wrote over the answer"}


def _imported(request: dict[str, Any], before: Any) -> dict[str, Any]:
    from kernels.importer import _import_from_path

    from layerzero_hub import fingerprint

    sys.pycache_prefix = os.environ["HOME"]  # empty: no compiled file of the kernel is looked at
    try:
        needed = {repo: _import_from_path(Path(path), deps={}) for repo, path in request["needs"].items()}
        if needed:
            before = fingerprint.take()
        _import_from_path(Path(request["path"]), deps=needed)
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    after = fingerprint.take()
    added = fingerprint.namespaces(frozenset(after) - frozenset(before))
    return {"namespaces": sorted(added), "changed": list(fingerprint.changed(before, after))[:5]}


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))

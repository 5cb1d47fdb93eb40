"""The child as a process: started by exec, watched by descriptor, ended with growing force, always collected."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layerzero.isolation.arena import Arena
from layerzero.isolation.wire import fault
from layerzero.model.kernel import BackendSpec
from layerzero.plugin.enclosure import Enclosure

_TAIL = 1_500
_MAX_LOG = 1 << 20
_COLLECT_S = 0.5
_BACKGROUND_BYTES = 16 << 30  # the most memory a process in the background may have; a large nvcc takes 4

# Killed, but still held by the kernel (an uninterruptible driver call): looked at again at the next start.
_lingering: list[subprocess.Popen[bytes]] = []


def uncollected() -> int:
    """Children that were killed and have not gone yet."""
    _lingering[:] = [item for item in _lingering if item.poll() is None]
    return len(_lingering)


class Process:
    """One child. `subprocess` execs a fresh interpreter: nothing of this one's CUDA state is ever forked."""

    def __init__(self, settings: Settings, arena: Arena) -> None:
        uncollected()
        self.settings = settings
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # The child holds the reading end; when this process is gone, however it went, the end of file tells it.
        lifeline_theirs, self._lifeline = os.pipe()
        memory = hasattr(os, "memfd_create")
        self._log = os.memfd_create("layerzero-log") if memory else os.open(os.devnull, os.O_RDWR)
        proc = memory and os.path.isdir("/proc/self/fd")
        log = os.open(f"/proc/self/fd/{self._log}", os.O_WRONLY | os.O_APPEND) if proc else os.dup(self._log)
        command = [
            sys.executable, "-P", "-m", "layerzero.isolation.child",
            str(theirs.fileno()), str(arena.handle), str(lifeline_theirs), json.dumps(settings.enclosure.to_json()),
        ]  # fmt: skip
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), arena.handle, lifeline_theirs),
                env=settings.environ(os.environ),
                start_new_session=True,  # Ctrl-C is the parent's to handle, and what the child starts ends with it
            )
        except OSError as error:
            ours.close()
            os.close(self._lifeline)
            os.close(self._log)
            raise fault("ISOLATION_START_FAILED", f"cannot start Python: {error.strerror}") from None
        finally:
            theirs.close()
            os.close(lifeline_theirs)
            os.close(log)
        self.socket = ours
        self.pid = self._popen.pid
        if settings.background:
            _step_back(self.pid)
        self.sentinel = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1

    def ended(self) -> bool:
        return self._popen.poll() is not None

    def how(self) -> str:
        """How it ended, with the last line it wrote: for people."""
        self._gone(_COLLECT_S)
        code = self._popen.returncode
        if code is None:
            words = "it closed the channel and lives on"
        elif code < 0:
            words = f"signal {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                words += ", as the kernel's out-of-memory killer sends it"
        else:
            words = f"exit code {code}"
        last = self.last_line()
        return f"{words}; {last}" if last else words

    def last_line(self) -> str:
        try:
            size = os.fstat(self._log).st_size
            tail = os.pread(self._log, _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
        except OSError:
            return ""
        return tail.splitlines()[-1][:300] if tail else ""

    def trim(self) -> None:
        """Forget what it printed, once that is long."""
        with contextlib.suppress(OSError):
            if os.fstat(self._log).st_size > _MAX_LOG:
                os.ftruncate(self._log, 0)

    def end(self) -> None:
        """Ask it to go, then make it go, and collect it; takes little more than the grace."""
        with contextlib.suppress(OSError):
            self.socket.close()
        if self._popen.poll() is None:
            self._signal(signal.SIGTERM)
            if not self._gone(self.settings.grace_s):
                self._signal(signal.SIGKILL)
                if not self._gone(_COLLECT_S):
                    _lingering.append(self._popen)
        else:
            self._signal(signal.SIGKILL)  # whatever it started and left behind
        self._close()

    def kill(self) -> None:
        """Make it go, with what it started; whoever waits for it collects it."""
        self._signal(signal.SIGKILL)

    def forget(self) -> None:
        """After a fork, in the new process: the child is not ours; leave it alone."""
        self._popen.returncode = 0
        with contextlib.suppress(OSError):
            self.socket.close()
        self._close()

    def _close(self) -> None:
        for handle in (self.sentinel, self._lifeline, self._log):
            if handle >= 0:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self.sentinel = self._lifeline = self._log = -1

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _gone(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        return self._popen.returncode is not None


def _step_back(pid: int) -> None:
    """Let everybody else go first: the lowest priority, as a batch job, bounded memory.

    Not SCHED_IDLE: what wakes up waits no less beside it, and where all processors are busy it gets a fifth of what a
    batch job gets, which is nothing that a compiler could use before its deadline.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError, ImportError, AttributeError, ValueError):
        import resource

        resource.prlimit(pid, resource.RLIMIT_DATA, (_BACKGROUND_BYTES, _BACKGROUND_BYTES))


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a child is started with. Equal settings share one child.

    deadline_s   a call that has no answer by then is given up and its child ended
    start_s      the same for starting the child and importing the vendor
    memory_mb    the most shared host memory (and memory per device) tensors of one call may take
    background   of the lowest priority and with bounded memory: for work that nobody waits for
    """

    backend: str
    env: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    deadline_s: float = 30.0
    start_s: float = 120.0
    memory_mb: float = 4096.0
    arena_mb: float = 64.0
    background: bool = False
    grace_s: float = field(default=0.25, compare=False)

    @staticmethod
    def of(backend: str, entry: Mapping[str, Any], spec: BackendSpec | None = None) -> Settings:
        """Merge the policy's entry with what the backend declares; the policy is stronger, hidden names add up."""
        declared: Mapping[str, Any] = {} if spec is None else spec.isolation
        env = {**declared.get("env", {}), **entry.get("env", {})}
        hide = (*entry.get("hide", ()), *declared.get("hide", ()))
        numbers: dict[str, Any] = {
            name: float(entry[name]) for name in ("deadline_s", "start_s", "memory_mb") if name in entry
        }
        return Settings(
            backend,
            tuple(sorted((str(name), str(value)) for name, value in env.items())),
            tuple(os.path.abspath(place) for place in entry.get("path", ())),
            tuple(dict.fromkeys(hide)),
            **numbers,
        )

    @property
    def enclosure(self) -> Enclosure:
        """What the child sees otherwise than this process."""
        return Enclosure(self.path, self.hide)

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the child: this one, the entry's on top, the entry's folders first on its path."""
        made = {name: value for name, value in base.items() if name != "PYTHONPATH"}
        made["LAYERZERO_ISOLATION"] = "in_process"  # a kernel that calls LayerZero itself starts no further children
        made.update(self.env)
        before = made.get("PYTHONPATH", base.get("PYTHONPATH", ""))
        # Where this process found things, the child finds them too: the adapter's package above all.
        ours = [place for place in sys.path if place and os.path.isabs(place) and not place.endswith(".zip")]
        made["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys([*self.path, *filter(None, before.split(os.pathsep)), *ours])
        )
        return made

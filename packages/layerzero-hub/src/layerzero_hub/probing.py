"""The helper process of `probe`: forks, waits and looks, and never runs code of a build itself.

helper      imports torch and what builds import honestly; opens and verifies the builds; reads the fork's memory
 └ outer    has left the namespaces, and waits for its children
    ├ init  the first process of the new namespace: when the helper ends it, everything in the namespace ends
    └ inner confined; imports the build, says what it saw, and stands still
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from layerzero_hub import fingerprint, sandbox, source
from layerzero_hub.contents import Contents, open_build
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.fingerprint import Dispatcher, Snapshot
from layerzero_hub.lockfile import parse_variant

_MOST: Final = 2**24
_OWN_WORD: Final = "the dispatcher's memory looks unknown: what changed is the probed process's own word"


class _Ended(Exception):
    """The parent went away or asked to end."""


def main() -> None:
    """Answer requests until stdin ends."""
    answers = int(sys.argv[1])
    signal.signal(signal.SIGTERM, _end)
    import torch  # noqa: F401 - imported once, here, for all forks

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    source.prepare()
    dispatcher = Dispatcher.find()
    for line in sys.stdin.buffer:
        try:
            answer = _answer(json.loads(line), dispatcher)
        except HubError as error:
            reason = error.reasons[0]
            answer = {"error": str(reason.value), "limit": reason.limit, "code": error.code.value, "notes": []}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _answer(request: dict[str, Any], dispatcher: Dispatcher | None) -> dict[str, Any]:
    opened: list[Contents] = []
    try:
        needs = {name: _open(one, opened) for name, one in request.get("needs", {}).items()}
        build = _open(request["build"], opened) if "modules" not in request else None
        source.import_for(opened)
        while True:
            before = _before(dispatcher, len(sys.modules))
            answer = _in_fork(_Task(request, build, needs, opened, before, secrets.token_hex(16)))
            # What the kernel brought in of torch by a way its sources do not show: with that there before, once more.
            late = [name for name in answer.pop("others", ()) if name.startswith("torch.") and name not in sys.modules]
            bad = answer.get("changed") or answer.get("findings") or len(answer.get("namespaces", ())) > 1
            if build is None or not bad or not source.import_all(late):
                return answer
    finally:
        for contents in opened:
            contents.close()


@dataclass(frozen=True, slots=True)
class _Before:
    """How things stand in the helper, as every fork finds them."""

    dispatcher: Dispatcher | None
    memory: Mapping[str, bytes]
    seen: Snapshot


@functools.lru_cache(maxsize=1)
def _before(dispatcher: Dispatcher | None, modules: int) -> _Before:
    """Looked at again only when there are other modules: after something was imported."""
    memory = dispatcher.read(os.getpid()) if dispatcher else {}
    return _Before(dispatcher, memory, fingerprint.take(ops=dispatcher is None))


def _open(build: dict[str, Any], opened: list[Contents]) -> Contents:
    """A verified build of a request."""
    opened.append(open_build(Path(build["path"]), parse_variant(build["name"], build["build"], "request")))
    return opened[-1]


@dataclass(frozen=True, slots=True)
class _Task:
    """What a fork is to do: a request, its build (None: a replay), what that needs, all opened, how things stood."""

    request: dict[str, Any]
    build: Contents | None
    needs: Mapping[str, Contents]  # by `owner/name@version`
    opened: list[Contents]
    before: _Before
    token: str


def _in_fork(task: _Task) -> dict[str, Any]:
    request, before, token = task.request, task.before, task.token
    setup, words, timeout = os.pipe(), os.pipe(), float(request["timeout"])
    sandbox.set_dumpable(False)  # for the time of the fork: where it has no namespaces, it cannot read us either
    child = os.fork()
    if child == 0:
        _outer(task, setup[1], words[1])
    os.close(setup[1])
    os.close(words[1])
    status, notes, pids = None, [], {}
    try:
        deadline = time.monotonic() + timeout
        for line in _read(setup[0], deadline).decode().splitlines():
            said = json.loads(line)
            pids |= said.get("pids", {})
            notes += said.get("notes", [])
        said = _words(_read(words[0], deadline, until=b"\n"), token)
        if said is None and time.monotonic() >= deadline:
            return {"error": f"no end after {timeout:g} s", "notes": notes}
        if said is None:
            status = _ended(child, 2.0)
            return {"error": f"the process ended with {_ending(status)}", "notes": notes}
        if "error" not in said:
            _look(said, before, pids["inner"], notes)
            # Those of what a build depends on were looked at when that was locked.
            known = {space for one in task.needs.values() for space in one.variant.ops_namespaces}
            said["namespaces"] = sorted(set(said.get("namespaces", ())) - known)
        return {**said, "notes": notes}
    finally:
        os.close(setup[0])
        os.close(words[0])
        _end_all(pids, child, reaped=status is not None)
        sandbox.set_dumpable(True)


def _look(said: dict[str, Any], before: _Before, inner: int, notes: list[str]) -> None:
    """Put what the fork's memory shows in place of what it says."""
    os.kill(inner, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while _state(inner)[0] not in b"TtZX" and time.monotonic() < deadline:
        time.sleep(0.001)
    if before.dispatcher is None:
        notes.append(_OWN_WORD)
        return
    try:
        after = before.dispatcher.read(inner)
    except (OSError, ValueError) as error:
        said.clear()
        said["error"] = f"its memory cannot be read: {error}"
        return
    if "others" in said:  # not for a replay, which runs nobody's code but installed modules'
        said["namespaces"] = sorted(fingerprint.namespaces(frozenset(after) - frozenset(before.memory)))
        said["changed"] = list(before.dispatcher.changed(before.memory, after))[:50]


# -- in the forks ---------------------------------------------------------------------------------------------------
def _outer(task: _Task, setup: int, words: int) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sandbox.set_dumpable(True)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sandbox.close_others([setup, words, *(handle for one in task.opened for handle in one.objects.values())])
        notes = sandbox.unshare()
        apart = not any(note.startswith("no namespaces") for note in notes)
        pids = {}
        if apart:
            pids["init"] = os.fork()
            if not pids["init"]:
                _init()
        pids["inner"] = os.fork()
        if not pids["inner"]:
            # What an import may need: the builds, Python's own folders, and those of the libraries.
            libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
            python = [sys.prefix, sys.base_prefix, os.path.dirname(sys.executable), *sys.path, *libraries]
            visible = [*(str(one.folder) for one in task.opened), *python]
            _inner(task, visible if apart else [], notes, setup, words)
        os.write(setup, json.dumps({"pids": pids}).encode() + b"\n")
        sandbox.close_others([])
        _, status = os.waitpid(pids["inner"], 0)
        if os.WIFSIGNALED(status):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        status = os.waitstatus_to_exitcode(status)
    finally:
        os._exit(status)


def _init() -> NoReturn:
    """The first process of the namespace: it reaps, and holds nothing."""
    sandbox.close_others([])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(3600)


def _inner(task: _Task, visible: list[str], notes: list[str], setup: int, words: int) -> NoReturn:
    status = 1
    try:
        if visible:
            notes = [*notes, *sandbox.confine(visible, sys.argv[2:])]
        os.environ["HOME"] = os.environ["TMPDIR"] = "/tmp" if visible else os.environ["HOME"]
        os.chdir(os.environ["HOME"])
        os.write(setup, json.dumps({"notes": notes}).encode() + b"\n")
        os.close(setup)
        build, token = task.build, task.token
        said = _replayed(task.request["modules"]) if build is None else _imported(build, task.needs, task.before)
        os.write(words, (json.dumps({**said, "token": token})[: _MOST - 1] + "\n").encode())
        os.close(words)
        while True:
            signal.pause()  # the helper looks, then ends us
    finally:
        os._exit(status)


def _imported(build: Contents, needs: Mapping[str, Contents], known: _Before) -> dict[str, Any]:
    done: dict[str, ModuleType] = {}
    # Bound here: the kernel's code may put others in their place.
    compare, take, ops = fingerprint.compare, fingerprint.take, known.dispatcher is None

    def load(contents: Contents) -> ModuleType:
        variant = contents.variant
        if variant.digest not in done:
            needed = {repo: load(needs[f"{repo}@{version}"]) for repo, version in variant.kernel_depends}
            inner = functools.partial(_asked_for, variant.id, needed)
            done[variant.digest] = source.import_build(contents, needed, inner)
        return done[variant.digest]

    try:
        for one in needs.values():
            load(one)
        before = take(ops=ops) if needs else known.seen
        load(build)
    except HubError as error:
        return {"error": str(error.reasons[0].value), "limit": error.reasons[0].limit, "code": error.code.value}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    after, own = take(ops=ops), build.variant.id
    found = compare(before, after, own, (own,))
    shown = ("HUB_DISPATCHER_CHANGED", "HUB_NAMESPACE_FOREIGN")  # by `changed` and `namespaces`
    return {
        "namespaces": sorted(fingerprint.namespaces(frozenset(after.ops) - frozenset(before.ops))),
        "changed": [one.what for one in found if one.code == "HUB_DISPATCHER_CHANGED"][:50],
        "findings": [astuple(one) for one in found if one.code not in shown][:50],
        "others": [name for name in after.modules if name not in before.modules],
    }


def _asked_for(wanted_by: str, needed: Mapping[str, ModuleType], repo_id: str, version: int | None) -> ModuleType:
    if repo_id not in needed:
        raise refuse("HUB_DEPENDENCY_NOT_ALLOWED", repo_id, wanted_by)
    return needed[repo_id]


def _replayed(modules: list[str]) -> dict[str, Any]:
    before = fingerprint.take()
    source.import_all(modules)
    found = fingerprint.compare(before, fingerprint.take(), "", ())
    return {"findings": [astuple(one) for one in found]}


# -- small ends -----------------------------------------------------------------------------------------------------
def _read(handle: int, deadline: float, until: bytes = b"") -> bytes:
    """Everything, or up to and with `until`; what came by the deadline. Raises when the parent is gone."""
    found = bytearray()
    while not (until and until in found) and len(found) < _MOST:
        ready = select.select([handle, 0], [], [], max(0, deadline - time.monotonic()))[0]
        if ready == [0]:
            raise _Ended  # one request at a time: something on stdin now is its end
        part = os.read(handle, 65536) if ready else b""
        if not part:
            break
        found += part
    return bytes(found)


def _words(raw: bytes, token: str) -> dict[str, Any] | None:
    try:
        said = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(said, dict) or said.pop("token", None) != token:
        return None
    return said


def _end_all(pids: dict[str, int], child: int, *, reaped: bool) -> None:
    """End the namespace with all in it; where there is none, every process that descends from us."""
    _kill(*pids.values(), *(() if reaped else (child,)))
    if not reaped:
        os.waitpid(child, 0)
    while left := _children():
        _kill(*left)
        with contextlib.suppress(ChildProcessError):
            os.wait()


def _kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Processes whose parent we are: as their reaper, we inherit all that descend from a fork of ours."""
    ours = str(os.getpid()).encode()
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _state(pid)[1:2] == [ours]]


def _state(pid: int | str) -> list[bytes]:
    """State, parent and so on of a process, as /proc has them; a lone X where it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
    return [b"X"]


def _ended(child: int, seconds: float) -> int | None:
    """The status of a child that has ended by itself, now or within so many seconds; it is reaped then."""
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid or time.monotonic() > deadline:
            return status if pid else None
        time.sleep(0.002)


def _end(signum: int, frame: object) -> None:
    raise _Ended


def _ending(status: int | None) -> str:
    if status is None:
        return "a forged answer"
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit status {code}"


if __name__ == "__main__":
    with contextlib.suppress(_Ended):
        main()

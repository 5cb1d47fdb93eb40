"""What an isolated kernel is bound to: one child for one backend, and the children of this process by their settings.

A child is started when first asked, asked one call at a time, started again after it failed.

After a failure the next start waits: not at all the first time, then twice as long each time, up to half a minute; a
call that comes in between is refused at once, with ISOLATION_BACKOFF, and another kernel runs it. One good answer
to a call makes it all forgotten; that an adapter could be imported does not. Frames to the child have a deadline each,
and the process itself is watched at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import select
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerzero.errors import BackendNotAvailableError, from_outside
from layerzero.forking import fresh_lock, in_child
from layerzero.health.sticky import sticky
from layerzero.isolation import wire
from layerzero.isolation.arena import Memory, home
from layerzero.isolation.process import Process, Settings
from layerzero.model.kernel import KernelSpec
from layerzero.reasons import reason
from layerzero.selection.world import World


class Channel:
    """The parent's end. Every way an answer can fail to come is an IsolationFault with its own reason code."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._socket = process.socket
        self._sequence = 0
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if process.sentinel >= 0:
            self._poll.register(process.sentinel, select.POLLIN)

    def ask(self, kind: wire.Kind, body: dict[str, Any], until: float, limit_s: float) -> wire.Frame:
        self._sequence += 1
        data = wire.encode(kind, self._sequence, body)
        self._socket.settimeout(max(0.001, until - time.monotonic()))
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise wire.fault("ISOLATION_TIMEOUT", "the request was not taken", limit_s) from None
        except OSError:
            raise wire.fault("ISOLATION_CRASHED", self._process.how()) from None
        return self.receive(self._sequence, until, limit_s)

    def receive(self, sequence: int, until: float, limit_s: float) -> wire.Frame:
        """The next frame, which must answer `sequence`."""
        self._socket.setblocking(False)
        try:
            first = wire.head(self._exactly(wire.HEADER_BYTES, until, limit_s, begun=False))
            frame = wire.decode(first, self._exactly(first.length, until, limit_s, begun=True))
        except wire.WireError as error:
            raise wire.fault("ISOLATION_GARBAGE", str(error)) from None
        if frame.sequence != sequence or not frame.kind & 1:
            raise wire.fault("ISOLATION_GARBAGE", f"{frame.kind.name} {frame.sequence} in answer to {sequence}")
        return frame

    def _exactly(self, count: int, until: float, limit_s: float, *, begun: bool) -> bytes:
        """`count` bytes, or the fault that keeps them from coming."""
        found = bytearray()
        while len(found) < count:
            if not self._poll.poll(max(0.0, until - time.monotonic()) * 1000.0):
                raise wire.fault("ISOLATION_TIMEOUT", "no answer", limit_s)
            try:
                got = self._socket.recv(count - len(found))
            except BlockingIOError:
                if not self._process.ended():
                    continue
                got = b""  # only the sentinel woke us: the process is gone, and what it had written was read before
            except OSError:
                got = b""
            if not got and (found or begun):
                said = f"{len(found)} of {count} bytes"
                raise wire.fault("ISOLATION_TRUNCATED", said, detail=self._process.how())
            if not got:
                raise wire.fault("ISOLATION_CRASHED", self._process.how())
            found += got
        return bytes(found)


_FIRST_S = 0.25
_MOST_S = 30.0
_TRIM_EVERY = 256
_ROUNDS = 3

Answer = TypeVar("Answer")


def delay_s(failures: int) -> float:
    """How long the next start waits after this many failures in a row."""
    return 0.0 if failures < 2 else min(_MOST_S, _FIRST_S * 2.0 ** (failures - 2))


class Worker:
    """The parent's view of one isolated backend. Safe to call from many threads; calls take turns."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._memory: Memory | None = None
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._loaded: set[str] = set()
        self._failures = 0
        self._not_before = 0.0
        self.calls = 0
        self.starts = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    # -- what is asked ---------------------------------------------------------------------------
    def load(self, function: str) -> None:
        """Import an adapter in the child. Raises ChildError with the vendor's own words when that fails."""
        self._turn(lambda until: self._loaded_there(function), self.settings.start_s)

    def _loaded_there(self, function: str) -> None:
        """Once per child: importing a vendor may take longer than any call."""
        if function not in self._loaded:
            limit = self.settings.start_s
            answer = self._ask(wire.Kind.LOAD, {"function": function}, time.monotonic() + limit, limit)
            self._expect(answer, wire.Kind.LOADED)
            self._loaded.add(function)

    def ping(self) -> float:
        """Seconds of one empty round trip; starts the child when there is none."""

        def ask(until: float) -> float:
            started = time.perf_counter()
            self._expect(self._ask(wire.Kind.PING, {}, until, self.settings.deadline_s), wire.Kind.PONG)
            return time.perf_counter() - started

        return self._turn(ask, self.settings.deadline_s)

    def call(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None = None) -> Any:
        """Run an adapter in the child and give its result, as it would have been here.

        The answer, or the fault, comes within `deadline_s`; a call that has to start the child first waits for that,
        at most `start_s`, as well.
        """
        limit = self.settings.deadline_s

        def ask(until: float) -> Any:
            if function not in self._loaded:
                self._loaded_there(function)
                until = time.monotonic() + limit
            return self._run(function, args, kwargs, seed, until)

        return self._turn(ask, limit, proves=True)

    def _run(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None, until: float) -> Any:
        memory = self._memory
        assert memory is not None
        tensors = wire.tensors_in([*args, *kwargs.values()])
        index = next((item.get_device() for item in tensors if item.is_cuda), None)
        needed = memory.needed(tensors)
        for _ in range(_ROUNDS):
            memory.make_room(needed)
            bumps = memory.bumps(needed)
            body = {
                "function": function,
                "args": [_packed(item, bumps) for item in args],
                "kwargs": {name: _packed(item, bumps) for name, item in kwargs.items()},
                "arenas": memory.told(),
                "used": {name: bump.used for name, bump in bumps.items()},
                "seed": seed,
                "device": index,
            }
            if index is not None:
                torch.cuda.current_stream(index).synchronize()  # the inputs are in the arena before the child looks
            answer = self._ask(wire.Kind.CALL, body, until, self.settings.deadline_s)
            if answer.kind in (wire.Kind.RESULT, wire.Kind.ROOM):
                memory.acknowledged()
            if answer.kind is not wire.Kind.ROOM:
                break
            needed = answer.body["needed"]
            if not all(isinstance(name, str) and type(size) is int and size >= 0 for name, size in needed.items()):
                raise wire.Malformed(f"room {str(needed)[:80]}")
        result = wire.unpack(self._expect(answer, wire.Kind.RESULT)["result"], memory.take)
        if index is not None:
            torch.cuda.current_stream(index).synchronize()  # the next call writes over the arena
        return result

    # -- turns, starts and ends ------------------------------------------------------------------
    def _turn(self, ask: Callable[[float], Answer], limit: float, *, proves: bool = False) -> Answer:
        """Wait for the child to be free, ask, and clear up after whatever goes wrong.

        `proves`: an answer shows that the child does its work, so that failures before it count no more.
        """
        if not self._lock.acquire(timeout=limit):
            raise wire.fault("ISOLATION_TIMEOUT", "another call holds it", limit)
        try:
            self._ensure()
            try:
                answer = ask(time.monotonic() + limit)
            except wire.ChildError as error:
                if sticky(error) is not None:  # its device answers nothing more: a new process has a new context
                    raise self._failed(error) from None
                self._failures = 0 if proves else self._failures  # the kernel raised; the process is well
                raise
            except (wire.Malformed, KeyError, TypeError) as error:
                if from_outside(error):  # a handler's, not the child's words
                    self._drop()
                    raise
                raise self._failed(wire.fault("ISOLATION_GARBAGE", f"{type(error).__name__}: {error}")) from None
            except wire.IsolationFault as error:
                if error.reason.code in ("ISOLATION_UNSUPPORTED", "ISOLATION_NO_ROOM"):
                    raise  # nothing was sent, nothing is broken
                raise self._failed(error) from None
            except BaseException:  # interrupted in the middle: what the child will say belongs to nobody
                self._drop()
                raise
            self._failures = 0 if proves else self._failures
            self.calls += 1
            if self.calls % _TRIM_EVERY == 0 and self._process is not None:
                self._process.trim()
            return answer
        finally:
            self._lock.release()

    def _ensure(self) -> None:
        if self._process is not None and not self._process.ended():
            return
        if self._process is not None:  # it died between two calls
            self._failed(wire.fault("ISOLATION_CRASHED", self._process.how()))
        now = time.monotonic()
        if now < self._not_before:
            raise wire.fault("ISOLATION_BACKOFF", self._failures, round(self._not_before - now, 2))
        self._start()

    def _start(self) -> None:
        limit = self.settings.start_s
        if self._memory is None:
            self._memory = Memory(self.settings.arena_mb, self.settings.memory_mb)
        self._memory.new_child()
        self._loaded.clear()
        try:
            self._process = Process(self.settings, self._memory.host)
            self.starts += 1
            self._channel = Channel(self._process)
            self._expect(self._channel.receive(0, time.monotonic() + limit, limit), wire.Kind.HELLO)
        except wire.IsolationFault as error:
            why = error.reason
            if why.code not in ("ISOLATION_START_FAILED", "ISOLATION_TIMEOUT"):
                error = wire.fault("ISOLATION_START_FAILED", why.value)
            raise self._failed(error) from None
        except BaseException:
            self._drop()
            raise

    def _failed(self, error: wire.IsolationFault) -> wire.IsolationFault:
        self._drop()
        self._failures += 1
        self._not_before = time.monotonic() + delay_s(self._failures)
        return error

    def _drop(self) -> None:
        process, self._process, self._channel = self._process, None, None
        if process is not None:
            process.end()

    def _ask(self, kind: wire.Kind, body: dict[str, Any], until: float, limit: float) -> wire.Frame:
        assert self._channel is not None
        try:
            return self._channel.ask(kind, body, until, limit)
        except wire.WireError as error:
            raise wire.fault("ISOLATION_UNSUPPORTED", str(error), "shorter arguments") from None

    def _expect(self, answer: wire.Frame, kind: wire.Kind) -> dict[str, Any]:
        if answer.kind is wire.Kind.RAISED:
            raise _raised(answer.body)
        if answer.kind is not kind:
            raise wire.fault("ISOLATION_GARBAGE", f"{answer.kind.name}, expected {kind.name}")
        return answer.body

    def close(self, *, wait: bool = True) -> None:
        """End the child and free the memory. The next call starts anew."""
        if not self._lock.acquire(timeout=self.settings.deadline_s if wait else 0.0):
            return
        try:
            self._drop()
            if self._memory is not None:
                self._memory.close()
                self._memory = None
        finally:
            self._lock.release()

    def kill(self) -> None:
        """End the child now, from any thread; a call under way ends with ISOLATION_CRASHED."""
        process = self._process
        if process is not None:
            process.kill()

    def after_fork(self) -> None:
        """In a forked process: the child belongs to the parent. Let go of it without a word."""
        self._lock = threading.Lock()
        process, self._process, self._channel, self._memory = self._process, None, None, None
        if process is not None:
            with contextlib.suppress(Exception):
                process.forget()


def _packed(value: Any, bumps: dict[str, Any]) -> Any:
    try:
        return wire.pack(value, lambda item: bumps[home(item)].put(item))
    except wire.Unsendable as error:
        raise wire.fault("ISOLATION_UNSUPPORTED", str(error), "tensors, numbers, words and tuples of them") from None


def _raised(body: dict[str, Any]) -> wire.ChildError:
    """The child's exception in our words; its own type and text are in them."""
    words = f"{body['type']}: {body['text']}"[:1_000]
    if body["memory"] is True:
        return wire.ChildOutOfMemory(reason("OUT_OF_MEMORY", words))
    return wire.ChildError(reason("KERNEL_RAISED", words))


_MOST = 8

_lock = fresh_lock()
_workers: dict[Settings, Worker] = {}


def settings_for(backend: str, world: World) -> Settings:
    """How the World's policy and the backend itself want it isolated."""
    return Settings.of(backend, world.policy.isolation_entry(backend), world.registry.backends.get(backend))


def worker_for(settings: Settings) -> Worker:
    """The one child with these settings; of too many, those used longest ago are closed."""
    with _lock:
        found = _workers.pop(settings, None) or Worker(settings)
        _workers[settings] = found
        surplus = [_workers.pop(old) for old in list(_workers)[:-_MOST]]
    for worker in surplus:
        worker.close(wait=False)
    return found


def workers() -> tuple[Worker, ...]:
    """Those that were asked for in this process."""
    return tuple(_workers.values())


def isolated(kernel: KernelSpec, world: World, *, rng: bool) -> Callable[..., Any]:
    """A callable that runs the kernel in its child. The adapter is imported there now, so that binding fails here.

    A kernel that draws random numbers gets a seed drawn from this process's generator: the same seed here gives the
    same numbers there.
    """
    worker = worker_for(settings_for(kernel.backend, world))
    try:
        worker.load(kernel.function)
    except wire.ChildError as error:
        why = reason("ISOLATION_IMPORT_FAILED", error.reason.value)
        raise BackendNotAvailableError(f"{kernel.kernel_id}: {why.message}", reasons=(why,)) from error
    except wire.IsolationFault:
        pass  # it may start next time: the call itself will say so, and its breaker decides how long to wait
    function = kernel.function

    def run(*args: Any, **kwargs: Any) -> Any:
        return worker.call(function, args, kwargs, _seed(args) if rng else None)

    return run


def _seed(args: tuple[Any, ...]) -> int:
    tensor = next((item for item in args if isinstance(item, Tensor)), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    return int(torch.randint(2**31, (1,), device=device).item())


def close_all() -> None:
    """End every child of this process: at exit, and between tests."""
    with _lock:
        known = list(_workers.values())
        _workers.clear()
    for worker in known:
        worker.close(wait=False)


def _after_fork() -> None:
    known = list(_workers.values())
    _workers.clear()
    for worker in known:
        worker.after_fork()


atexit.register(close_all)
in_child(_after_fork)

"""The other side: `python -m layerzero.isolation.child SOCKET ARENA LIFELINE ENCLOSURE`.

Imports the adapters it is asked for, runs them on tensors in the arenas, and answers every frame with one frame.
Started only by `layerzero.isolation.process`. What a vendor prints goes to the log of the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import importing
from layerzero.health.sticky import NO_MEMORY
from layerzero.isolation import wire
from layerzero.isolation.arena import NAME, Arena, Bump, buffer_of, home, sent_bytes, view
from layerzero.isolation.device_arena import OpenedArena
from layerzero.plugin.enclosure import Enclosure, enter

_WORDS = 1_200


class NoRoom(Exception):
    """The results do not fit into the arenas; carries the bytes needed by arena."""

    def __init__(self, needed: dict[str, int]) -> None:
        super().__init__(str(needed))
        self.needed = needed


class Child:
    """Answers one parent until its end of the socket closes."""

    def __init__(self, channel: socket.socket, arena_handle: int) -> None:
        self._socket = channel
        self._stream = channel.makefile("rb")
        host = Arena(arena_handle, os.fstat(arena_handle).st_size)
        self._arenas: dict[str, Any] = {NAME: host}  # and an OpenedArena for each device
        self._adapters: dict[str, Callable[..., Any]] = {}

    def serve(self) -> None:
        self._answer(wire.Kind.HELLO, 0, {})
        while (frame := self._next()) is not None:
            try:
                kind, body = self._done(frame)
            except NoRoom as short:
                kind, body = wire.Kind.ROOM, {"needed": short.needed}
            except BaseException as error:  # a vendor that wants to exit raises, as in process
                kind, body = wire.Kind.RAISED, _described(error)
            self._answer(kind, frame.sequence, body)

    def _done(self, frame: wire.Frame) -> tuple[wire.Kind, dict[str, Any]]:
        if frame.kind is wire.Kind.CALL:
            return wire.Kind.RESULT, self._call(frame.body)
        if frame.kind is wire.Kind.LOAD:
            self._adapter(frame.body["function"])
            return wire.Kind.LOADED, {}
        if frame.kind is wire.Kind.PING:
            return wire.Kind.PONG, {}
        raise wire.Malformed(f"{frame.kind.name} is not for a child")

    def _adapter(self, path: str) -> Callable[..., Any]:
        if path not in self._adapters:
            with importing():
                self._adapters[path] = resolve_name(path)
        return self._adapters[path]

    def _call(self, body: dict[str, Any]) -> dict[str, Any]:
        self._map(body["arenas"])
        args = [wire.unpack(item, self._find) for item in body["args"]]
        kwargs = {name: wire.unpack(item, self._find) for name, item in body["kwargs"].items()}
        if body["seed"] is not None:
            torch.manual_seed(body["seed"])
        index = body["device"]
        with torch.no_grad(), nullcontext() if index is None else torch.cuda.device(index):
            placed = self._placed(self._adapter(body["function"])(*args, **kwargs), body["used"])
            if index is not None:
                torch.cuda.synchronize(index)  # the parent reads as soon as it has the answer
            return placed

    def _map(self, arenas: dict[str, Any]) -> None:
        """Follow the parent: a larger host arena, new device arenas."""
        for name, told in arenas.items():
            known: Any = self._arenas.get(name)
            if name == NAME:
                if told["bytes"] != known.size:
                    self._arenas[name] = Arena(known.handle, told["bytes"])
            elif told["handle"] is not None:
                if known is not None:
                    known.close()
                opened = OpenedArena(told["index"], told["bytes"], bytes.fromhex(told["handle"]))
                self._arenas[name] = opened
                opened.answer(bytes.fromhex(told["mark"]))

    def _find(self, placed: wire.Placed) -> Tensor:
        return view(buffer_of(self._arenas, placed.arena), placed)

    def _placed(self, result: Any, used: dict[str, int]) -> dict[str, Any]:
        """Copy the results behind the arguments, which must stay: a result may be a view of one."""
        needed = dict(used)
        for item in wire.tensors_in(result):
            name = home(item)
            needed[name] = needed.get(name, 0) + sent_bytes(item)
        short = {name: size for name, size in needed.items() if size > self._room(name)}
        if short:
            raise NoRoom(short)
        bumps = {name: Bump(name, buffer_of(self._arenas, name), used.get(name, 0)) for name in needed}
        return {"result": wire.pack(result, lambda item: bumps[home(item)].put(item))}

    def _room(self, name: str) -> int:
        return buffer_of(self._arenas, name).numel() if name in self._arenas else 0

    # -- frames ----------------------------------------------------------------------------------
    def _answer(self, kind: wire.Kind, sequence: int, body: dict[str, Any]) -> None:
        try:
            data = wire.encode(kind, sequence, body)
        except ValueError as error:
            data = wire.encode(wire.Kind.RAISED, sequence, _described(error))
        self._socket.sendall(data)

    def _next(self) -> wire.Frame | None:
        first = self._stream.read(wire.HEADER_BYTES)
        if len(first) < wire.HEADER_BYTES:
            return None
        known = wire.head(first)
        data = self._stream.read(known.length)
        return wire.decode(known, data) if len(data) == known.length else None


def _described(error: BaseException) -> dict[str, Any]:
    """An exception in words: its type, its text, whether memory ran out."""
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in NO_MEMORY)
    return {"type": type(error).__name__, "text": str(error)[:_WORDS], "memory": memory}


def _end_with_parent(handle: int) -> None:
    """Read until the parent is gone, then end at once: a child must not outlive it, even inside a long kernel.

    Where the kernel can signal the end of the pipe it kills the whole process group: a library that holds the
    interpreter keeps this thread from running.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(handle, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_ASYNC)
    while True:
        try:
            if not os.read(handle, 1):
                os._exit(3)
        except OSError:
            os._exit(3)


def main(argv: list[str]) -> int:
    """Entry point of the child."""
    socket_handle, arena_handle, lifeline = (int(item) for item in argv[:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    enter(Enclosure.from_json(json.loads(argv[3])))
    channel = socket.socket(fileno=socket_handle)
    Child(channel, arena_handle).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

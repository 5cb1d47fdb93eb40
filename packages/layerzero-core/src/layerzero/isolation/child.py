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
from layerzero.isolation.arena import NAME, Arena, Bump, sent_bytes, view
from layerzero.isolation.device_arena import OpenedArena, named_arena
from layerzero.isolation.wire import (
    HEADER_BYTES,
    VERSION,
    Frame,
    Kind,
    Malformed,
    Placed,
    decode,
    encode,
    head,
    pack,
    tensors_in,
    unpack,
)
from layerzero.plugin.enclosure import Enclosure, enter

_WORDS = 1_200


class NoRoom(Exception):
    """The results do not fit into the arenas; carries the bytes needed by arena."""

    def __init__(self, needed: dict[str, int]) -> None:
        super().__init__(str(needed))
        self.needed = needed


class Child:
    """Answers one parent until it says goodbye or its end of the socket closes."""

    def __init__(self, channel: socket.socket, arena_handle: int) -> None:
        self._socket = channel
        self._stream = channel.makefile("rb")
        self._handle = arena_handle
        self._host = Arena(arena_handle, os.fstat(arena_handle).st_size)
        self._devices: dict[str, OpenedArena] = {}
        self._adapters: dict[str, Callable[..., Any]] = {}

    def serve(self) -> None:
        self._answer(Kind.HELLO, 0, {"pid": os.getpid(), "protocol": VERSION, "torch": str(torch.__version__)})
        while (frame := self._next()) is not None and frame.kind is not Kind.BYE:
            try:
                kind, body = self._done(frame)
            except NoRoom as short:
                kind, body = Kind.ROOM, {"needed": short.needed}
            except BaseException as error:  # a vendor that wants to exit raises, as in process
                kind, body = Kind.RAISED, _described(error)
            self._answer(kind, frame.sequence, body)

    def _done(self, frame: Frame) -> tuple[Kind, dict[str, Any]]:
        if frame.kind is Kind.CALL:
            return Kind.RESULT, self._call(frame.body)
        if frame.kind is Kind.LOAD:
            self._adapter(frame.body["function"])
            return Kind.LOADED, {}
        if frame.kind is Kind.PING:
            return Kind.PONG, {}
        raise Malformed(f"{frame.kind.name} is not for a child")

    def _adapter(self, path: str) -> Callable[..., Any]:
        if path not in self._adapters:
            with importing():
                self._adapters[path] = resolve_name(path)
        return self._adapters[path]

    def _call(self, body: dict[str, Any]) -> dict[str, Any]:
        self._map(body["arenas"])
        args = [unpack(item, self._find) for item in body["args"]]
        kwargs = {name: unpack(item, self._find) for name, item in body["kwargs"].items()}
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
        size = arenas[NAME]["bytes"]
        if size != self._host.size:
            self._host = Arena(self._handle, size)
        for name, told in arenas.items():
            if name == NAME:
                continue
            known = self._devices.get(name)
            if told["handle"] is not None:
                if known is not None:
                    known.close()
                opened = OpenedArena(told["index"], told["bytes"], bytes.fromhex(told["handle"]))
                self._devices[name] = opened
                opened.answer(bytes.fromhex(told["mark"]))

    def _buffer(self, name: str) -> Tensor:
        if name == NAME:
            return self._host.bytes
        return named_arena(self._devices, name).bytes

    def _find(self, placed: Placed) -> Tensor:
        return view(self._buffer(placed.arena), placed)

    def _placed(self, result: Any, used: dict[str, int]) -> dict[str, Any]:
        """Copy the results behind the arguments, which must stay: a result may be a view of one."""
        needed = dict(used)
        for item in tensors_in(result):
            name = self._home(item)
            needed[name] = needed.get(name, 0) + sent_bytes(item)
        short = {name: size for name, size in needed.items() if size > self._room(name)}
        if short:
            raise NoRoom(short)
        bumps = {name: Bump(name, self._buffer(name), used.get(name, 0)) for name in needed}
        return {"result": pack(result, lambda item: bumps[self._home(item)].put(item))}

    def _home(self, item: Tensor) -> str:
        return f"cuda:{item.get_device()}" if item.is_cuda else NAME

    def _room(self, name: str) -> int:
        return self._buffer(name).numel() if name == NAME or name in self._devices else 0

    # -- frames ----------------------------------------------------------------------------------
    def _answer(self, kind: Kind, sequence: int, body: dict[str, Any]) -> None:
        try:
            data = encode(kind, sequence, body)
        except ValueError as error:
            data = encode(Kind.RAISED, sequence, _described(error))
        self._socket.sendall(data)

    def _next(self) -> Frame | None:
        first = self._stream.read(HEADER_BYTES)
        if len(first) < HEADER_BYTES:
            return None
        known = head(first)
        data = self._stream.read(known.length)
        return decode(known, data) if len(data) == known.length else None


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
    channel.setblocking(True)
    Child(channel, arena_handle).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

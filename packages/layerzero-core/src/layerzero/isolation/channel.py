"""Frames over the socket to a child, each with a deadline; the process itself is watched at the same time."""

from __future__ import annotations

import select
import time
from typing import Any

from layerzero.isolation.process import Process
from layerzero.isolation.wire import HEADER_BYTES, Frame, Kind, WireError, decode, encode, fault, head

_CHUNK = 1 << 16


class Channel:
    """The parent's end. Every way an answer can fail to come is an IsolationFault with its own reason code."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._socket = process.socket
        self._socket.setblocking(False)
        self._sequence = 0
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if process.sentinel >= 0:
            self._poll.register(process.sentinel, select.POLLIN)

    def ask(self, kind: Kind, body: dict[str, Any], until: float, limit_s: float) -> Frame:
        self._sequence += 1
        self._send(encode(kind, self._sequence, body), until, limit_s)
        return self.receive(self._sequence, until, limit_s)

    def say(self, kind: Kind) -> None:
        """Send a frame that has no answer; a child that cannot take it is about to be ended anyway."""
        try:
            self._socket.send(encode(kind, 0, {}))
        except OSError:
            return

    def receive(self, sequence: int, until: float, limit_s: float) -> Frame:
        """The next frame, which must answer `sequence`."""
        try:
            first = head(self._exactly(HEADER_BYTES, until, limit_s, begun=False))
            frame = decode(first, self._exactly(first.length, until, limit_s, begun=True))
        except WireError as error:
            raise fault("ISOLATION_GARBAGE", str(error)) from None
        if frame.sequence != sequence or not frame.kind & 1:
            raise fault("ISOLATION_GARBAGE", f"{frame.kind.name} {frame.sequence} in answer to {sequence}")
        return frame

    def _send(self, data: bytes, until: float, limit_s: float) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0 or not select.select((), (self._socket,), (), left)[1]:
                    raise fault("ISOLATION_TIMEOUT", "the request was not taken", limit_s) from None
            except OSError:
                raise fault("ISOLATION_CRASHED", self._process.how()) from None

    def _exactly(self, count: int, until: float, limit_s: float, *, begun: bool) -> bytes:
        """`count` bytes, or the fault that keeps them from coming."""
        parts: list[bytes] = []
        missing = count
        while missing:
            left = until - time.monotonic()
            ready = self._poll.poll(max(0.0, left) * 1000.0)
            if not ready:
                raise fault("ISOLATION_TIMEOUT", "no answer", limit_s)
            got = self._some(min(missing, _CHUNK))
            if got is None:
                continue
            if not got:
                if parts or begun:
                    said = count - missing
                    raise fault("ISOLATION_TRUNCATED", f"{said} of {count} bytes", detail=self._process.how())
                raise fault("ISOLATION_CRASHED", self._process.how())
            parts.append(got)
            missing -= len(got)
        return b"".join(parts)

    def _some(self, count: int) -> bytes | None:
        """What is there; b"" at the end of the stream, None for nothing yet."""
        try:
            return self._socket.recv(count)
        except BlockingIOError:
            # Only the sentinel woke us: the process is gone, and what it had written was read before.
            return b"" if self._process.ended() else None
        except (ConnectionError, OSError):
            return b""

"""Frames and values of the isolation channel: what is sent arrives, and nothing that is not ours is ever believed."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.isolation.arena import Arena, Bump, compact, sent_bytes, view
from layerzero.isolation.wire import (
    HEADER_BYTES,
    MAX_BODY,
    IsolationFault,
    Kind,
    Malformed,
    Placed,
    Unsendable,
    WireError,
    decode,
    encode,
    head,
    pack,
    unpack,
)
from layerzero.isolation.worker import Channel

KINDS = st.sampled_from(list(Kind))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def parsed(raw: bytes) -> Any:
    return decode(head(raw[:HEADER_BYTES]), raw[HEADER_BYTES:])


# -- frames ---------------------------------------------------------------------------------------
@given(KINDS, st.integers(0, 2**64 - 1), st.dictionaries(st.text(max_size=8), JSON, max_size=5))
def test_a_frame_arrives_as_it_was_sent(kind: Kind, sequence: int, body: dict[str, Any]) -> None:
    frame = parsed(encode(kind, sequence, body))
    assert (frame.kind, frame.sequence, frame.body) == (kind, sequence, body)


@given(st.data())
def test_a_frame_with_any_bit_turned_is_refused(data: st.DataObject) -> None:
    raw = bytearray(encode(Kind.RESULT, 7, {"result": [1, 2, {"f": "0x1p+0"}]}))
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << at % 8
    with pytest.raises(WireError):
        parsed(bytes(raw))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_only_ever_a_wire_error(raw: bytes) -> None:
    with pytest.raises(WireError):
        parsed(raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"magic": b"HTTP"}, "begins with"),
        ({"version": 9}, "protocol 9"),
        ({"kind": 200}, "unknown kind"),
        ({"length": MAX_BODY + 1}, "claims"),
        ({"zero": 1}, "reserved"),
    ],
)
def test_a_header_is_judged_before_its_body_is_waited_for(change: dict[str, Any], words: str) -> None:
    fields = {"magic": b"LZic", "version": 1, "kind": 5, "zero": 0, "sequence": 1, "length": 2, **change}
    with pytest.raises(WireError, match=words):
        head(struct.pack("<4sBBHQII", *fields.values(), 0))


def test_a_message_that_is_too_long_is_refused_where_it_is_made() -> None:
    with pytest.raises(WireError, match="allowed"):
        encode(Kind.CALL, 1, {"text": "x" * MAX_BODY})
    with pytest.raises(WireError, match="cannot be written"):
        encode(Kind.CALL, 1, {"number": math.nan})


# -- values ---------------------------------------------------------------------------------------
def nowhere(item: Any) -> Any:
    raise AssertionError("no tensor was given")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**61), 2**61) | st.text(max_size=20) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(PLAIN)
def test_values_keep_type_and_every_bit(value: Any) -> None:
    assert same(unpack(json.loads(json.dumps(pack(value, nowhere))), nowhere), value)


@pytest.mark.parametrize("value", [object(), {"a": 1}, {1, 2}, b"bytes", 2**70, torch.Generator(), [lambda: 1]])
def test_what_has_no_form_is_refused_before_anything_is_sent(value: Any) -> None:
    with pytest.raises(Unsendable):
        pack(value, nowhere)


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_descriptions_from_the_other_side_are_understood_or_refused(data: Any) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    try:
        unpack(data, lambda placed: view(buffer, placed))
    except Malformed:
        pass


@pytest.mark.parametrize(
    "inner",
    [
        ["host", 0, 64, "float32", [16], [1, 1]],
        ["host", 0, 64, "float32", [17], [1]],
        ["host", 0, 64, "float32", [2, 8], [9, 1]],
        ["host", -256, 64, "float32", [16], [1]],
        ["host", 0, 64, "float32", [-1], [1]],
        ["host", 0, 64, "float32", [True], [1]],
        ["host", 0, 64, "load", [16], [1]],
        ["host", 0, 64, "__class__", [16], [1]],
        ["host", 4096, 64, "float32", [16], [1]],
        ["host", 4, 64, "float32", [16], [1]],
        ["host", 0, 2**61, "float32", [2**59], [1]],
        ["host", 0, 63, "float32", [1], [1]],
        ["host", 0, 64, "float32"],
        "host",
    ],
)
def test_a_tensor_outside_its_arena_is_never_made(inner: Any) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(Malformed):
        unpack({"t": inner}, lambda placed: view(buffer, placed))


# -- the channel, with small real processes at the other end -----------------------------------------
class Small:
    """A child that is only a script: what it writes is what the channel has to make sense of."""

    def __init__(self, script: str) -> None:
        self.socket, theirs = socket.socketpair()
        source = (
            f"import os, sys, time\nwrite = lambda data: os.write({theirs.fileno()}, bytes.fromhex(data))\n"
            f"hear = lambda: os.read({theirs.fileno()}, 4096)\n{script}"
        )
        self._popen = subprocess.Popen([sys.executable, "-I", "-S", "-c", source], pass_fds=(theirs.fileno(),))
        theirs.close()
        self.sentinel = os.pidfd_open(self._popen.pid)

    def ended(self) -> bool:
        return self._popen.poll() is not None

    def how(self) -> str:
        return f"exit code {self._popen.wait(60)}"

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        os.close(self.sentinel)
        self.socket.close()


GOOD = encode(Kind.PONG, 1, {}).hex()
FLIPPED = (encode(Kind.PONG, 1, {})[:-1] + b"~").hex()
ANSWERS = {
    "good": (f"write('{GOOD}'); time.sleep(300)", None),
    "in pieces": (f"for i in range(0, {len(GOOD)}, 2): write('{GOOD}'[i:i+2])\ntime.sleep(300)", None),
    "good, then gone": (f"write('{GOOD}')", None),
    "garbage": ("write('00' * 100); time.sleep(300)", "ISOLATION_GARBAGE"),
    "a wrong checksum": (f"write('{FLIPPED}'); time.sleep(300)", "ISOLATION_GARBAGE"),
    "another question's answer": (f"write('{encode(Kind.PONG, 2, {}).hex()}'); time.sleep(300)", "ISOLATION_GARBAGE"),
    "a question": (f"write('{encode(Kind.PING, 1, {}).hex()}'); time.sleep(300)", "ISOLATION_GARBAGE"),
    "half a header": (f"write('{GOOD[:20]}')", "ISOLATION_TRUNCATED"),
    "half a body": (f"write('{GOOD[:-2]}'); os._exit(0)", "ISOLATION_TRUNCATED"),
    "half, then silence": (f"write('{GOOD[:-2]}'); time.sleep(300)", "ISOLATION_TIMEOUT"),
    "nothing": ("time.sleep(300)", "ISOLATION_TIMEOUT"),
    "an exit": ("os._exit(9)", "ISOLATION_CRASHED"),
    "a signal": ("os.kill(os.getpid(), 11)", "ISOLATION_CRASHED"),
    "a grandchild that holds the line": ("os.fork() or list(iter(hear, b'')); os._exit(4)", "ISOLATION_CRASHED"),
}


@pytest.mark.req("R-ISO-06")
@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_the_other_end_does_is_an_answer_or_a_fault_in_time(name: str) -> None:
    script, code = ANSWERS[name]
    small = Small(script)
    # What never comes is waited for as long as was said; all else is known long before.
    limit = 0.6 if code == "ISOLATION_TIMEOUT" else 100.0
    started = time.monotonic()
    try:
        channel = Channel(small)  # type: ignore[arg-type]  # as much of a Process as it looks at
        if code is None:
            assert channel.ask(Kind.PING, {}, started + limit, limit).kind is Kind.PONG
        else:
            with pytest.raises(IsolationFault) as caught:
                channel.ask(Kind.PING, {}, started + limit, limit)
            assert caught.value.reason.code == code, caught.value
            assert code != "ISOLATION_TIMEOUT" or caught.value.reason.limit == limit
    finally:
        small.close()


# -- arenas ---------------------------------------------------------------------------------------
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_tensors_lie_in_an_arena_bit_for_bit_with_their_strides(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]))
    x = torch.randint(0, 2, shape).to(dtype)
    if shape:
        x = x.permute(data.draw(st.permutations(range(len(shape)))))
        if data.draw(st.booleans()):
            x = x[..., ::2]
        if data.draw(st.booleans()):
            x = x.unsqueeze(0).expand(3, *x.shape)
    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    used = data.draw(st.integers(0, 1000))
    bump = Bump("host", buffer, used=used)
    placed = bump.put(x)
    assert used <= bump.used <= min(used + sent_bytes(x), buffer.numel())
    seen = view(buffer, Placed(*placed))
    assert (seen.shape, seen.stride(), seen.dtype) == (x.shape, x.stride(), x.dtype)
    assert torch.equal(seen.double(), x.double())


def test_a_slice_of_something_large_is_gathered_and_not_sent_whole() -> None:
    cache = torch.zeros(64, 4096, 8)
    flat, strides = compact(cache[:, :3])
    assert flat.numel() == 64 * 3 * 8 and strides == (24, 8, 1)


def test_shared_memory_has_no_name_cannot_shrink_and_may_grow() -> None:
    arena = Arena.create(1 << 16)
    arena.bytes[:] = 7
    with pytest.raises(PermissionError):  # a mapping that ends under its reader would kill it
        os.ftruncate(arena.handle, 4096)
    larger = arena.grown(1 << 18)
    assert larger.bytes.numel() == 1 << 18 and int(larger.bytes[100]) == 7
    larger.bytes[5] = 9
    assert int(arena.bytes[5]) == 9
    arena.close()
    assert int(larger.bytes[5]) == 9  # the memory lives as long as a tensor looks at it

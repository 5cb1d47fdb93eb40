"""The quarantine file: kernels that took a process down stay out until someone lifts it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerzero.health.breaker import HealthRegistry
from layerzero.health.quarantine import Quarantine

KERNEL = ("fake.attention.fast", "1.2.0", "0123456789abcdef")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "quarantine.json"


def test_an_entry_is_found_by_another_process(path: Path) -> None:
    code = (
        "import os, sys; from layerzero.health.quarantine import Quarantine;"
        "Quarantine(sys.argv[1]).add(*sys.argv[2:5], 'DEVICE_LOST', 'illegal memory access'); os._exit(139)"
    )
    env = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code, str(path), *KERNEL], env=env, check=False)
    assert done.returncode == 139
    (entry,) = Quarantine(path).entries()
    health = HealthRegistry()
    health.set_quarantined({entry.kernel_id: entry.why})
    reason = health.snapshot().blocked_by(KERNEL[0])
    assert reason is not None and reason.code == "QUARANTINED"
    assert reason.value == "DEVICE_LOST: illegal memory access"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_another_kernel_version_or_device_is_not_quarantined(path: Path, position: int) -> None:
    Quarantine(path).add(*KERNEL, "DEVICE_LOST")
    other = list(KERNEL)
    other[position] = "other"
    assert [entry.key for entry in Quarantine(path).entries()] == [KERNEL] != [tuple(other)]


def test_a_missing_file_is_an_empty_quarantine(path: Path) -> None:
    quarantine = Quarantine(path)
    assert quarantine.entries() == () and quarantine.problems == ()
    assert not path.exists()


def test_entries_are_listed_in_order_and_one_key_is_kept_once(path: Path) -> None:
    quarantine = Quarantine(path, clock=lambda: 12.5)
    quarantine.add("b.x.y", "1", "s", "KERNEL_TIMEOUT", "first")
    quarantine.add("a.x.y", "1", "s", "DEVICE_LOST", "x" * 5000)
    quarantine.add("b.x.y", "1", "s", "DEVICE_LOST", "second")
    assert [(entry.kernel_id, entry.detail[:6], entry.since) for entry in quarantine.entries()] == [
        ("a.x.y", "xxxxxx", 12.5), ("b.x.y", "second", 12.5),
    ]  # fmt: skip
    assert len(quarantine.entries()[0].detail) == 2000


def test_quarantine_can_be_lifted_whole_or_for_one_version(path: Path) -> None:
    quarantine = Quarantine(path)
    for version in ("1", "2", "3"):
        quarantine.add("a.x.y", version, "s", "DEVICE_LOST")
    assert quarantine.remove("a.x.y", "2") == 1
    assert quarantine.remove("a.x.y", device_signature="elsewhere") == 0
    assert quarantine.remove("a.x.y") == 2
    assert quarantine.entries() == ()


def test_blocked_kernels_reach_the_health_book(path: Path) -> None:
    quarantine = Quarantine(path)
    quarantine.add(*KERNEL, "DEVICE_LOST")
    blocked = {entry.kernel_id: entry.why for entry in quarantine.entries()}
    assert blocked == {KERNEL[0]: "DEVICE_LOST"}
    health = HealthRegistry()
    health.set_quarantined(blocked)
    assert health.snapshot().blocks(KERNEL[0])


GOOD_ROW = {
    "kernel_id": "a",
    "version": "1",
    "device_signature": "s",
    "code": "DEVICE_LOST",
    "detail": "",
    "since": 0.0,
}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'"text"', b"[" * 100_000,
        json.dumps({"schema_version": "9.0", "entries": []}).encode(),
        json.dumps({"schema_version": "1.0"}).encode(),
        json.dumps({"schema_version": "1.0", "entries": [{"kernel_id": "a"}]}).encode(),
        json.dumps({"schema_version": "1.0", "entries": [GOOD_ROW | {"extra": 1}]}).encode(),
        json.dumps({"schema_version": "1.0", "entries": [GOOD_ROW | {"code": "NO_SUCH_CODE"}]}).encode(),
        json.dumps({"schema_version": "1.0", "entries": [GOOD_ROW | {"version": 7}]}).encode(),
        b" " * (4 * 2**20 + 1),
    ],
    ids=lambda content: repr(content[:24]),
)  # fmt: skip
def test_a_corrupt_file_is_set_aside_and_rebuilt(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    quarantine = Quarantine(path)
    assert quarantine.entries() == ()
    assert [reason.code for reason in quarantine.problems] == ["CACHE_CORRUPT"]
    kept = list(path.parent.glob("quarantine.json.corrupt-*"))
    assert len(kept) == 1 and kept[0].read_bytes() == content
    quarantine.add(*KERNEL, "DEVICE_LOST")
    again = Quarantine(path)
    assert len(again.entries()) == 1 and again.problems == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_or_cut_file_never_raises(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "quarantine.json"
    path.unlink(missing_ok=True)
    Quarantine(path, clock=lambda: 1.0).add(*KERNEL, "DEVICE_LOST", "detail")
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content[: data.draw(st.integers(place, len(content)))])
    quarantine = Quarantine(path)
    assert len(quarantine.entries()) <= 1
    quarantine.add(*KERNEL, "DEVICE_LOST")
    assert KERNEL in [entry.key for entry in quarantine.entries()]


def test_a_failed_write_leaves_the_old_file_and_no_litter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quarantine = Quarantine(path)
    quarantine.add(*KERNEL, "DEVICE_LOST")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        quarantine.add("b.x.y", "1", "s", "DEVICE_LOST")
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.tmp"))


def _add_many(path: str, name: str) -> None:
    for number in range(20):
        Quarantine(path).add(f"{name}.op.k{number}", "1", "s", "DEVICE_LOST")


def test_two_processes_adding_at_once_lose_nothing_and_readers_see_whole_files(path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers = [context.Process(target=_add_many, args=(str(path), name)) for name in ("a", "b")]
    for worker in workers:
        worker.start()
    reader = Quarantine(path)
    while any(worker.is_alive() for worker in workers):
        reader.entries()
    for worker in workers:
        worker.join()
    assert reader.problems == ()
    assert len(reader.entries()) == 40

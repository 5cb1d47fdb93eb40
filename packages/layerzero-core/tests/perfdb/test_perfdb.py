"""PerfDB: what is acknowledged is kept, what is damaged is never believed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import select
import signal
import sqlite3
import threading
import time
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero import env
from layerzero.errors import CacheCorruptionError, ConfigurationError, InvalidInputError
from layerzero.perfdb.measurement import Measurement, Platform, Surroundings, bucket_of, checksum_of, upper, weight
from layerzero.perfdb.store import COLUMNS, PerfDB
from layerzero_tune.perfdb.exchange import export_json, from_json, import_json, merge, prune, verify

PROVE = env.read().prove
HERE = Platform("cpu-1234", "cpu-neon", "", "", "2.13.0")


def sample(kernel="sdpa.attention.math", bucket="b", **changes):
    given = {
        "op": "attention", "bucket": bucket, "kernel_id": kernel, "kernel_version": "1", "backend_version": "2.13",
        "platform": HERE, "median_us": 10.0, "p95_us": 11.0, "p99_us": 12.0, "variance": 0.25, "samples": 50,
        "max_error": 1e-6, "surroundings": Surroundings(55.0, None, 0.3, False), "measured_at": 1000.0,
    }  # fmt: skip
    return Measurement(**{**given, **changes})


@pytest.fixture
def db(tmp_path):
    found = PerfDB(tmp_path / "perf.db")
    yield found
    found.close()


@pytest.mark.req("R-PDB-01", "R-PDB-02", "R-PDB-03")
def test_what_is_put_is_found(db):
    one, two = sample(), sample("reference.attention.plain", median_us=40.0)
    assert db.put([one, two]) == 2
    assert sorted(db.find("attention", "b"), key=lambda m: m.median_us) == [one, two]
    assert db.find("attention", "c") == [] and db.find("rms_norm", "b") == []
    assert db.find("attention", "b", "graph/hot") == []
    again = replace(one, median_us=9.0, measured_at=2000.0)
    db.put([again])
    assert again in db.find("attention", "b") and one not in db.find("attention", "b")
    assert len(db) == 2 and PerfDB(db.path).all() == db.all()
    found = db.find("attention", "b")[0]
    assert (found.p95_us, found.p99_us, found.variance, found.samples) == (11.0, 12.0, 0.25, 50)


@pytest.mark.req("R-PDB-01")
def test_the_columns_are_there_for_people(db):
    db.put([sample(platform=Platform("gpu-1", "sm90", "570.1", "12.8", "2.13.0"), kernel_version="7")])
    with contextlib.closing(sqlite3.connect(db.path)) as raw:
        names = "device, family, driver, runtime, torch, backend_version, kernel_version"
        row = raw.execute(f"SELECT {names} FROM measurements").fetchone()
        assert row == ("gpu-1", "sm90", "570.1", "12.8", "2.13.0", "2.13", "7")
        assert raw.execute("PRAGMA user_version").fetchone() == (2,)


@pytest.mark.req("R-PDB-04")
def test_surroundings_are_kept_and_bucketed(db):
    db.put([sample()])
    assert db.all()[0].surroundings == Surroundings(55.0, None, 0.3, False)
    assert Surroundings(85.0, 600.0, 0.95, True).bucket == "hot/600 W/full/shared"
    assert Surroundings().bucket == "unknown/unknown/unknown/alone"


@pytest.mark.req("R-PDB-04")
@pytest.mark.parametrize(
    "around",
    [
        Surroundings(61.5, 412.25, 0.25, False), Surroundings(None, 99.0, None, None),
        Surroundings(80.0, None, 0.9, True), Surroundings(),
    ],
)  # fmt: skip
def test_every_reading_of_the_machine_comes_back_as_it_was_stored(db, around):
    db.put([sample(surroundings=around)])
    assert [item.surroundings for item in db.find("attention", "b")] == [around]
    with contextlib.closing(PerfDB(db.path)) as again:
        assert [item.surroundings for item in again.all()] == [around]
    with contextlib.closing(sqlite3.connect(db.path)) as raw:
        row = raw.execute("SELECT temperature_c, power_w, memory_used, shared FROM measurements").fetchone()
    assert row == tuple(around)


@pytest.mark.req("R-PDB-04")
@pytest.mark.parametrize(
    ("around", "bucket"),
    [
        (Surroundings(79.9, 100.0, 0.89, False), "cool/100 W/free/alone"),
        (Surroundings(80.0, 100.0, 0.89, False), "hot/100 W/free/alone"),
        (Surroundings(79.9, 100.0, 0.90, False), "cool/100 W/full/alone"),
        (Surroundings(20.0, 100.0, 0.0, True), "cool/100 W/free/shared"),
        (Surroundings(None, 100.0, 0.5, False), "unknown/100 W/free/alone"),
        (Surroundings(20.0, 100.0, None, False), "cool/100 W/unknown/alone"),
        (Surroundings(20.0, 99.9, 0.5, False), "cool/0 W/free/alone"),
        (Surroundings(20.0, 699.0, 0.5, False), "cool/600 W/free/alone"),
        (Surroundings(20.0, None, 0.5, False), "cool/unknown/free/alone"),
    ],
)
def test_a_bucket_says_how_hot_at_what_power_how_full_and_whether_alone_each_for_itself(around, bucket):
    assert around.bucket == bucket


@pytest.mark.req("R-PDB-05", "R-CACHE-10")
@pytest.mark.parametrize("field", ["device", "driver", "runtime", "torch", "kernel_version", "backend_version"])
def test_another_version_of_anything_is_another_measurement(db, field):
    one = sample()
    other = (
        replace(one, **{field: "x"}) if hasattr(one, field) else replace(one, platform=HERE._replace(**{field: "x"}))
    )
    assert one.key != other.key and one.place == other.place
    db.put([one, other])
    assert len(db) == 2
    if not hasattr(one, field):
        assert prune(db, platform=HERE) == 1
        assert db.all() == [one]


# -- the number of threads ---------------------------------------------------------------------------------------------
_V1 = (
    "op bucket kernel_id kernel_version backend_version device family driver runtime torch median_us p95_us p99_us "
    "variance samples max_error mode temperature_c power_w memory_used shared measured_at"
).split()


def version_1(path, *items: Measurement) -> None:
    """A database as the first version wrote it: its columns, its keys, its checksums."""

    def digest(*parts: str) -> bytes:
        return hashlib.sha256("\0".join(parts).encode()).digest()[:16]

    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
        columns = ", ".join(f"{name} {'TEXT NOT NULL' if name in _V1[:10] else 'REAL'}" for name in _V1)
        columns = columns.replace("samples REAL", "samples INTEGER NOT NULL").replace("mode REAL", "mode TEXT NOT NULL")
        raw.execute(
            f"CREATE TABLE measurements (key BLOB PRIMARY KEY, place BLOB NOT NULL, {columns}, crc INTEGER NOT NULL)"
        )
        raw.execute("CREATE INDEX by_place ON measurements (place)")
        raw.execute("PRAGMA user_version = 1")
        raw.execute("BEGIN")
        for item in items:
            flat = {**item.to_json(), **item.platform._asdict(), **item.surroundings._asdict()}
            values = [flat[name] for name in _V1]
            crc = zlib.crc32(json.dumps(values, separators=(",", ":")).encode())
            key = digest(*(flat[name] for name in (*_V1[:5], "mode", *_V1[5:10])))
            row = (key, digest(item.op, item.bucket, item.mode), *values, crc)
            raw.execute(f"INSERT INTO measurements VALUES ({', '.join('?' * len(row))})", row)
        raw.execute("COMMIT")


@pytest.mark.req("R-PDB-01")
@pytest.mark.fault(26)
def test_a_database_of_the_first_version_migrates_and_loses_nothing(tmp_path):
    items = [sample(), sample("reference.attention.plain", max_error=None, surroundings=Surroundings(None, None, 0.5))]
    version_1(tmp_path / "perf.db", *items)
    with contextlib.closing(sqlite3.connect(tmp_path / "perf.db", isolation_level=None)) as raw:
        raw.execute("UPDATE measurements SET median_us = 1.0 WHERE kernel_id = ?", ("reference.attention.plain",))
    db = PerfDB(tmp_path / "perf.db")
    assert db.find("attention", "b") == items[:1] and verify(db) == (1, 1, [])  # what was damaged is not made whole
    newer = replace(items[0], platform=HERE._replace(threads=4), median_us=3.0)
    db.put([newer])
    assert sorted(db.all(), key=str) == sorted([items[0], newer], key=str)  # beside it, not instead of it
    assert not db.problems and not list(tmp_path.glob("*.corrupt-*"))
    with contextlib.closing(sqlite3.connect(db.path)) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (2,)
        assert raw.execute("SELECT threads FROM measurements ORDER BY threads").fetchall() == [(0,), (0,), (4,)]
        raw.execute("UPDATE measurements SET threads = 0 WHERE threads = 4")
        raw.execute("UPDATE measurements SET threads = 8 WHERE threads = 0 AND median_us = 10.0")
        raw.commit()
    assert db.all() == []  # the number is under the checksum


@pytest.mark.fault(26)
def test_a_database_of_the_first_version_that_cannot_be_written_is_read_as_it_is(tmp_path, monkeypatch):
    version_1(tmp_path / "perf.db", sample())
    before = (tmp_path / "perf.db").read_bytes()

    connect = sqlite3.connect

    def to_read(path, **more):  # as on a disk that is mounted to be read only; root may write anything else
        return connect(f"file:{path}?mode=ro", uri=True, **more)

    monkeypatch.setattr("layerzero.perfdb.store.sqlite3.connect", to_read)
    db = PerfDB(tmp_path / "perf.db")
    assert db.find("attention", "b") == [sample()] == db.all() and verify(db) == (1, 0, [])
    assert (tmp_path / "perf.db").read_bytes() == before and not db.problems


@pytest.mark.fault(26)
def test_what_is_left_of_a_damaged_database_of_the_first_version_is_carried_over(tmp_path):
    items = [sample(bucket=str(number)) for number in range(300)]
    version_1(tmp_path / "perf.db", *items)
    raw = bytearray((tmp_path / "perf.db").read_bytes())
    raw[-4096:] = b"\xff" * 4096  # its last page
    (tmp_path / "perf.db").write_bytes(raw)
    db = PerfDB(tmp_path / "perf.db")
    db.put([sample(bucket="new")])
    kept = db.all()
    assert len(kept) > 100 and all(item in [*items, sample(bucket="new")] for item in kept)


@pytest.mark.fault(26)
def test_times_of_other_numbers_of_threads_are_other_measurements(db, tmp_path):
    rows = [sample(platform=HERE._replace(threads=count), median_us=10.0 / count) for count in (1, 2, 8)]
    assert len({row.key for row in (*rows, sample())}) == 4
    db.put([*rows, sample()])
    assert len(db) == 4 and prune(db, platform=HERE._replace(threads=2)) == 0  # the same machine
    export_json(db, tmp_path / "out.json")
    other = PerfDB(tmp_path / "other.db")
    assert import_json(other, tmp_path / "out.json") == 4 and sorted(other.all(), key=str) == sorted(db.all(), key=str)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["format"] == "layerzero-perfdb/2"
    for item in data["measurements"]:
        del item["platform"]["threads"]  # as the first version wrote them
    (tmp_path / "old.json").write_text(json.dumps(data | {"format": "layerzero-perfdb/1"}))
    assert import_json(PerfDB(tmp_path / "third.db"), tmp_path / "old.json") == 1
    data["measurements"][0]["platform"]["threads"] = "many"
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match="threads"):
        import_json(PerfDB(tmp_path / "third.db"), tmp_path / "bad.json")


@pytest.mark.req("R-PDB-05")
def test_old_measurements_expire(db):
    now = time.time()
    db.put([sample(measured_at=now - 100), sample("reference.attention.plain", measured_at=now)])
    assert len(db.find("attention", "b")) == 2
    short = PerfDB(db.path, ttl_s=50)
    assert [item.kernel_id for item in short.find("attention", "b")] == ["reference.attention.plain"]
    assert prune(db, older_than_s=50) == 1 and len(db) == 1


@pytest.mark.req("R-PDB-08")
def test_influence_falls_as_the_spread_rises():
    steady = [weight(sample(variance=(spread * 10.0) ** 2)) for spread in (0.0, 0.05, 0.25, 0.5, 0.99, 1.0, 3.0)]
    assert steady == sorted(steady, reverse=True)
    assert steady[0] == 1.0 and steady[2] == pytest.approx(0.5) and steady[-2:] == [0.0, 0.0]


@pytest.mark.parametrize(
    "wrong", [{"median_us": 0.0}, {"median_us": float("nan")}, {"p95_us": -1.0}, {"samples": 0}, {"variance": True}]
)
def test_a_measurement_that_means_nothing_is_refused(wrong):
    with pytest.raises(InvalidInputError):
        sample(**wrong)


def test_buckets_end_at_powers_of_two_and_keep_the_rest_exact():
    assert [upper(n) for n in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 1024, 2048]
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 100, 16)
    one = bucket_of(lz.select("attention", q, k, k).context)
    longer, shorter = torch.randn(1, 4, 128, 16), torch.randn(1, 4, 60, 16)
    assert one == bucket_of(lz.select("attention", q, longer, longer).context)
    assert one != bucket_of(lz.select("attention", q, shorter, shorter).context)
    assert one != bucket_of(lz.select("attention", q.double(), k.double(), k.double()).context)


# -- exchange ----------------------------------------------------------------------------------------------------------
def test_export_and_import_give_the_same_database(db, tmp_path):
    items = [sample(), sample("reference.attention.plain", max_error=None, surroundings=Surroundings())]
    db.put(items)
    assert export_json(db, tmp_path / "out.json") == 2
    other = PerfDB(tmp_path / "other.db")
    assert import_json(other, tmp_path / "out.json") == 2
    assert sorted(other.all(), key=str) == sorted(items, key=str)
    assert import_json(other, tmp_path / "out.json") == 0
    export_json(other, tmp_path / "again.json")
    assert (tmp_path / "out.json").read_bytes() == (tmp_path / "again.json").read_bytes()


def test_merging_keeps_the_newer_of_two(tmp_path):
    one, two, three = (PerfDB(tmp_path / name) for name in ("1.db", "2.db", "3.db"))
    one.put([sample(measured_at=5.0, median_us=5.0)])
    two.put([sample(measured_at=9.0, median_us=9.0), sample("reference.attention.plain")])
    three.put([sample(measured_at=7.0, median_us=7.0)])
    assert merge(one, [two, three]) == 2
    assert sorted(item.median_us for item in one.all()) == [9.0, 10.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": "other/1", "measurements": []}',
        '{"format": "layerzero-perfdb/3", "measurements": []}',
        '{"format": "layerzero-perfdb/1", "measurements": [{}]}',
        '{"format": "layerzero-perfdb/1", "measurements": [1]}',
        "[" * 100_000,
    ],
)
def test_a_wrong_export_is_refused_whole(db, tmp_path, text):
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(ConfigurationError):
        import_json(db, tmp_path / "in.json")
    assert db.all() == []


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-3, 1e9), st.floats(0, 1e12), st.integers(1, 10**9), st.text(max_size=30),
    st.one_of(st.none(), st.floats(0, 1e300)),
)  # fmt: skip
def test_every_measurement_survives_the_round_trip(tmp_path_factory, median, variance, samples, bucket, error):
    item = sample(bucket=bucket, median_us=median, variance=variance, samples=samples, max_error=error)
    if any(0xD800 <= ord(c) < 0xE000 for c in bucket):
        return
    db = PerfDB(tmp_path_factory.mktemp("trip") / "p.db")
    db.put([item])
    assert db.find("attention", bucket) == [item]
    assert from_json(json.loads(json.dumps(item.to_json()))) == item


# -- many at once ------------------------------------------------------------------------------------------------------
def test_threads_share_one_database(db):
    failed = []

    def work(number):
        try:
            for step in range(10):
                db.put([sample(bucket=f"{number}/{step}")])
                assert db.find("attention", f"{number}/{step}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and len(db) == 80


def test_a_forked_child_opens_its_own_connection(db):
    db.put([sample()])
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            db.put([sample(bucket="child")])
            os._exit(0 if len(db.find("attention", "b")) == 1 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(db) == 2


def writer(path, name):
    """A process that writes one row after the other, saying each number once it is stored; (pid, pipe)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:  # pragma: no cover
        own = PerfDB(path)
        for step in itertools.count():
            own.put([sample(bucket=f"{name}/{step}")])
            os.write(writing, b"%d\n" % step)
    finally:
        os._exit(1)


@pytest.mark.timeout(3600)
@pytest.mark.req("R-PDB-07")
def test_no_acknowledged_row_is_lost_when_writers_are_killed(tmp_path):
    rounds, writers = (300, 8) if PROVE else (10, 3)
    path = tmp_path / "perf.db"
    rng = random.Random(1)
    lost = kept = 0
    for turn in range(rounds):
        running = {f"{turn}.{number}": writer(path, f"{turn}.{number}") for number in range(writers)}
        assert select.select([pipe for _, pipe in running.values()], (), (), 60)[0]  # some row is stored
        time.sleep(rng.uniform(0.0, 0.2))
        for pid, _ in running.values():
            os.kill(pid, signal.SIGKILL)
        db = PerfDB(path)
        for name, (pid, pipe) in running.items():
            os.waitpid(pid, 0)
            with open(pipe, "rb") as said:
                acknowledged = len(said.read().splitlines())
            for step in range(acknowledged):
                found = db.find("attention", f"{name}/{step}")
                kept, lost = (kept + 1, lost) if len(found) == 1 else (kept, lost + 1)
        assert db.problems == ()
        db.close()
    assert lost == 0 and kept >= rounds
    print(f"killed {rounds} rounds x {writers} writers: {kept} acknowledged rows kept, {lost} lost")


# -- damage ------------------------------------------------------------------------------------------------------------
def truth(path, rows=60):
    db = PerfDB(path)
    items = [sample(f"k.attention.n{n % 7}", bucket=f"b{n % 20}", median_us=1.0 + n) for n in range(rows)]
    db.put(items)
    db.close()
    return {item.key: item for item in db.all()}


def look(path, known):
    """Everything a user might do with a damaged file: no exception, and nothing that was never put."""
    db = PerfDB(path)
    for number in range(20):
        for item in db.find("attention", f"b{number}"):
            assert known.get(item.key) == item
    for item in db.all():
        assert known.get(item.key) == item
    verify(db)
    fresh = sample("k.attention.new", bucket="new")
    db.put([fresh])
    assert db.find("attention", "new") == [fresh]
    db.close()
    return bool(db.problems)


@pytest.mark.timeout(3600)
@pytest.mark.req("R-PDB-07")
def test_no_flipped_bit_is_believed(tmp_path):
    known = truth(tmp_path / "good.db")
    raw = (tmp_path / "good.db").read_bytes()
    rng = random.Random(2)
    noticed = 0
    count = 2000 if PROVE else 60
    for turn in range(count):
        damaged = bytearray(raw)
        for _ in range(rng.choice((1, 1, 1, 4, 64))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path = tmp_path / f"{turn}.db"
        path.write_bytes(damaged)
        noticed += look(path, known)
        for left in tmp_path.glob(f"{turn}.db*"):
            left.unlink()
    print(f"{count} files with flipped bits: no wrong value, {noticed} set aside or partly refused")


@pytest.mark.req("R-PDB-07")
def test_no_truncated_file_is_believed(tmp_path):
    known = truth(tmp_path / "good.db")
    raw = (tmp_path / "good.db").read_bytes()
    rng = random.Random(3)
    count = 500 if PROVE else 25
    for turn in range(count):
        path = tmp_path / f"{turn}.db"
        path.write_bytes(raw[: rng.randrange(len(raw))])
        look(path, known)
        for left in tmp_path.glob(f"{turn}.db*"):
            left.unlink()
    print(f"{count} truncated files: no wrong value, no exception")


@pytest.mark.req("R-PDB-07")
def test_a_damaged_row_is_ignored_and_rebuilt(db):
    one, two = sample(), sample("reference.attention.plain")
    db.put([one, two])
    with contextlib.closing(sqlite3.connect(db.path, isolation_level=None)) as raw:
        raw.execute("UPDATE measurements SET median_us = 0.001 WHERE kernel_id = ?", (one.kernel_id,))
    assert db.find("attention", "b") == [two]
    assert verify(db) == (1, 1, [])
    db.put([one])
    assert len(db.find("attention", "b")) == 2 and verify(db) == (2, 0, [])
    with contextlib.closing(sqlite3.connect(db.path, isolation_level=None)) as raw:
        raw.execute("UPDATE measurements SET crc = 1 WHERE kernel_id = ?", (two.kernel_id,))
    assert prune(db) == 1 and db.all() == [one]


@pytest.mark.req("R-PDB-07")
@pytest.mark.parametrize("name", ["median_us", "p95_us", "variance", "measured_at"])
def test_a_partial_row_is_ignored_and_rebuilt(db, name):
    """Also one whose checksum is that of what is there: a row without a number was never a measurement."""
    one, two = sample(), sample("reference.attention.plain")
    db.put([two])
    left = [None if column == name else value for column, value in zip(COLUMNS[2:-1], one.values(), strict=True)]
    row = (one.key, one.place, *left, checksum_of(left))
    with contextlib.closing(sqlite3.connect(db.path, isolation_level=None)) as raw:
        raw.execute(f"INSERT INTO measurements VALUES ({', '.join('?' * len(row))})", row)
    assert db.find("attention", "b") == [two] == db.all() and verify(db) == (1, 1, [])
    db.put([one])
    assert verify(db) == (2, 0, []) and one in db.find("attention", "b")


def test_a_file_that_is_no_database_is_set_aside_at_our_own_place(tmp_path, monkeypatch):
    path = tmp_path / "perf.db"
    monkeypatch.setattr("layerzero.perfdb.store.user_cache", lambda name: path)
    path.write_text("this is a diary, not a database\n" * 100)
    db = PerfDB(path)
    assert db.find("attention", "b") == []
    db.put([sample()])
    assert len(db) == 1 and len(list(tmp_path.glob("perf.db.corrupt-*"))) == 1
    assert "kept as" in db.problems[0].message
    assert verify(db) == (1, 0, [str(db.problems[0])])  # what was lost is told, though the fresh file is intact


def diary(path):
    path.write_text("this is a diary, not a database\n" * 100)


def accounts(path, version=0):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("CREATE TABLE accounts (name, balance)")
        raw.execute("INSERT INTO accounts VALUES ('mine', 7)")
        raw.execute(f"PRAGMA user_version = {version}")


def barometer(path):
    """A database of somebody else, with a table that is called as ours is."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("CREATE TABLE measurements (day, hectopascal)")


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    "foreign",
    [
        diary, accounts, barometer, lambda path: accounts(path, 1), lambda path: accounts(path, 2),
        lambda p: accounts(p, 99),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_neither_moved_nor_changed(tmp_path, foreign):
    path = tmp_path / "notes.db"
    foreign(path)
    before = path.read_bytes()
    db = PerfDB(path)
    assert db.find("attention", "b") == [] and db.all() == [] and len(db) == 0
    with pytest.raises(CacheCorruptionError) as caught:
        db.put([sample()])
    assert caught.value.code == "PERF_FILE_FOREIGN"
    assert [why.code for why in db.problems] == ["PERF_FILE_FOREIGN"]
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.req("R-PDB-01")
def test_a_database_of_a_later_version_is_left_alone_on_disk(tmp_path):
    path = tmp_path / "perf.db"
    PerfDB(path).put([sample()])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("CREATE TABLE future (x)")
        raw.execute("PRAGMA user_version = 99")
    db = PerfDB(path)
    assert db.find("attention", "other") == []
    (kept,) = tmp_path.glob("perf.db.corrupt-*")
    with contextlib.closing(sqlite3.connect(kept)) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (99,)


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_quota_that_is_spent_costs_nothing_that_was_measured(db):
    import resource

    db.put([sample()])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (db.path.stat().st_size, before[1]))
        with pytest.raises(CacheCorruptionError, match="cannot be written") as caught:
            db.put([sample(bucket=str(number)) for number in range(1000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "make room" in caught.value.hint and "set aside" not in str(caught.value)
    assert not list(db.path.parent.glob("*corrupt*")) and PerfDB(db.path).all() == [sample()]


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((CacheCorruptionError, OSError)):
        PerfDB(tmp_path / "file" / "perf.db").put([sample()])

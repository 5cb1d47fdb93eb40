"""Everything that reads bytes from outside meets mutated ones; only our own exceptions come out.

`make check` plays about a thousand a target; `make prove NAME=fuzz` plays 1 000 000, resumable.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from layerzero import env
from tests.fuzz.targets import TARGETS
from tools import fuzz
from tools.fuzz import CORPORA, Crash, Fuzzer, Target, corpus, mutated

COUNT = 1_000
FIGURES = Path(__file__).parents[2] / "build" / "prove" / "fuzz.json"


@pytest.mark.req("R-FUZZ-01", "R-FUZZ-03")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutated_inputs_bring_out_our_exceptions_only(target: Target) -> None:
    fuzzer = Fuzzer(target, seed=3)
    fuzzer.begin()
    first, known = len(fuzzer.lines), len(fuzzer.pool)
    fuzzer.play(COUNT)
    outcomes = fuzzer.outcomes
    assert sum(outcomes.values()) == COUNT + len(corpus(target.name))
    # Inputs that are all refused at the door, or all accepted, would show nothing.
    assert len(outcomes) >= 3 and max(outcomes.values()) < COUNT, outcomes
    assert len(fuzzer.lines) > first and len(fuzzer.pool) > known, "coverage does not grow"


@pytest.mark.req("R-FUZZ-01")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_some_of_the_corpus_is_accepted(target: Target) -> None:
    assert {target.run(data) for data in corpus(target.name)} & {"ok", "values"}


@pytest.mark.req("R-FUZZ-01")
def test_every_corpus_has_a_target_and_is_small() -> None:
    names = {target.name for target in TARGETS}
    assert {"context", "policy", "kernel_spec"} <= names
    assert {item.name for item in CORPORA.iterdir()} == names and all(corpus(name) for name in names)
    assert sum(file.stat().st_size for file in CORPORA.rglob("*") if file.is_file()) < 100_000


@pytest.mark.req("R-FUZZ-02")
@pytest.mark.skipif(not env.read().prove, reason="make prove NAME=fuzz plays them; this looks at its figures")
def test_a_million_inputs_a_target_were_played_on_this_very_code() -> None:
    data = json.loads(FIGURES.read_bytes())
    rows = {row["target"]: row for row in data["targets"]}
    assert set(rows) == {target.name for target in TARGETS}
    for name, row in rows.items():
        assert row["iterations"] >= 1_000_000 and row["crashes"] == 0, (name, row["iterations"])
        assert sum(row["outcomes"].values()) >= row["iterations"]
        assert row["growth"][-1][1] > row["growth"][0][1]
        assert row["code"] == fuzz.code_digest(next(target for target in TARGETS if target.name == name)), name


# -- the engine itself -------------------------------------------------------------------------------
def planted(data: bytes) -> str:
    """Reads a length and believes it where the magic is right: the kind of bug that is looked for."""
    if data[:2] == b"LZ":
        size = int.from_bytes(data[2:3], "little")
        if size > 200:
            return str(data[3 : 3 + size][size - 1])
        return "short"
    return "other"


@pytest.fixture
def planted_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "one").write_bytes(b"LZ\x03abc")
    monkeypatch.setattr(fuzz, "CORPORA", tmp_path)
    monkeypatch.setattr(fuzz, "STATE", tmp_path / "state")
    return Target("planted", planted, (__name__,))


def test_a_planted_bug_is_found_named_and_kept(planted_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Crash, match="IndexError") as caught:
        Fuzzer(planted_target).play(20_000)
    assert caught.value.data[:2] == b"LZ"
    assert fuzz.run_one(planted_target, 20_000, float("inf"), seed=1) == 1
    (kept,) = (fuzz.STATE / "planted").glob("crash-*")
    with pytest.raises(IndexError):
        planted(kept.read_bytes())
    assert "IndexError" in capsys.readouterr().out


def test_an_interrupt_goes_through(planted_target: Target) -> None:
    def interrupted(data: bytes) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Fuzzer(Target("planted", interrupted, ())).play(1)


def test_a_run_is_the_same_for_the_same_seed_and_goes_on_where_it_was_interrupted(
    planted_target: Target, tmp_path: Path
) -> None:
    harmless = Target("planted", lambda data: hashlib.sha256(data).hexdigest()[:1], ())
    whole = Fuzzer(harmless, seed=5)
    whole.play(1_000)
    whole.play(1_000)
    half = Fuzzer(harmless, seed=5)
    half.play(1_000)
    half.save(tmp_path / "state.json")
    again = Fuzzer.load(harmless, tmp_path / "state.json", seed=5)
    again.play(1_000)
    assert again.done == 2_000 and again.outcomes == whole.outcomes
    other = Fuzzer.load(harmless, tmp_path / "state.json", seed=6)
    assert other.done == 0
    (tmp_path / "state.json").write_text("{")
    assert Fuzzer.load(harmless, tmp_path / "state.json", seed=5).done == 0


@pytest.mark.req("R-FUZZ-02")
def test_a_check_plays_a_hundred_thousand_inputs_of_up_to_4096_bytes(planted_target: Target) -> None:
    rows = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8").splitlines()
    (command,) = (row for row in rows if row.startswith("FUZZ :="))
    check = rows[next(n for n, row in enumerate(rows) if row.startswith("check:")) :]
    assert any("$(FUZZ)" in row for row in check[: check.index("")])
    words = command.partition("-m tools.fuzz ")[2].split()
    assert words[:2] == ["--iterations", "100000"] and all(word.startswith("--") for word in words[::2])  # every target
    sizes: list[int] = []
    long = Target("planted", lambda data: str(sizes.append(len(data))), ())
    (fuzz.CORPORA / "planted" / "one").write_bytes(b"x" * 4_096)
    assert fuzz.run_one(long, 300, float("inf"), seed=1) == 0
    assert sizes[0] == 4_096 and len(sizes) == 301  # the corpus, then as many as were asked for
    assert max(sizes[1:]) == 4_096 > min(sizes)


def test_mutations_stay_short_and_reach_every_kind_of_change() -> None:
    chance, base = random.Random(0), json.dumps({"a": [1, 2, {"b": "text"}], "c": None}).encode()
    seen: set[Any] = set()
    for _ in range(3_000):
        data = mutated(base, [base, b"\0" * 64], chance, [b"WORD"])
        assert len(data) <= fuzz.MAX_LEN
        try:
            tree = json.loads(data)
            seen.add(type(tree).__name__)
            if isinstance(tree, dict):
                seen |= {f"keys {len(tree)}", type(tree.get("a")).__name__}
        except (ValueError, RecursionError):
            seen.add("broken")
    assert {"broken", "dict", "list", "keys 1", "keys 3", "NoneType", "str"} <= seen

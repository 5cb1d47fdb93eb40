"""Time that the host gave to others: read as the system counts it, and what was timed meanwhile is timed again."""

from __future__ import annotations

import os

import pytest
import torch

import layerzero as lz
from layerzero.cli.tuning import _stolen
from layerzero.tuning import stolen
from layerzero.tuning import trial as trial_module
from layerzero.tuning.sitting import Outcome
from layerzero.tuning.stolen import LIMIT, Ticks, calmly, ticks
from layerzero.tuning.traffic import Recorded

pytestmark = pytest.mark.usefixtures("built_in")

PAUSES = stolen._PAUSES


class Machine:
    """Ticks of a machine on which each try wants a hundred, of which so many are stolen."""

    def __init__(self, *stolen: int) -> None:
        self.stolen, self.now, self.waits, self.runs = list(stolen), Ticks(1000, 9000), [], 0

    def read(self) -> Ticks:
        return self.now

    def run(self) -> str:
        taken = self.stolen[self.runs]
        self.now = Ticks(self.now.stolen + taken, self.now.wanted + 100)
        self.runs += 1
        return f"try {self.runs}"

    def calmly(self) -> tuple[str, float]:
        return calmly(self.run, self.read, self.waits.append)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """As it is for users; conftest.py takes it away, so that a busy host does not lengthen every test that tunes."""
    monkeypatch.setattr(stolen, "_PAUSES", PAUSES)


@pytest.mark.req("R-TUNE-03")
def test_what_was_timed_while_the_host_served_others_is_timed_again():
    calm, once, always, little = Machine(0), Machine(30, 1), Machine(30, 11, 20), Machine(4)
    assert calm.calmly() == ("try 1", 0.0) and not calm.waits
    assert once.calmly() == ("try 2", 0.0) and len(once.waits) == 1
    assert always.calmly() == ("try 2", 0.11) and always.runs == 3  # the calmest, and no fourth
    assert little.calmly() == ("try 1", 0.0)  # a tick or two in a moment are no share
    hurried = Machine(30, 1)
    assert calmly(hurried.run, hurried.read, pytest.fail, patient=False) == ("try 1", 0.3)


def test_a_system_that_does_not_count_is_believed_at_once(tmp_path):
    assert calmly(lambda: 7, lambda: None, pytest.fail) == (7, 0.0)
    assert ticks(str(tmp_path / "absent")) is None
    for text in ("", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "intr 1 2 3 4 5 6 7 8\n"):
        (tmp_path / "stat").write_text(text)
        assert ticks(str(tmp_path / "stat")) is None
    (tmp_path / "stat").write_text("cpu  10 20 30 4000 500 6 7 80 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert ticks(str(tmp_path / "stat")) == Ticks(80, 10 + 20 + 30 + 6 + 7 + 80)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux counts it")
def test_this_machine_counts_what_was_wanted():
    before = ticks()
    assert before is not None
    while ticks().wanted == before.wanted:  # spins until a tick of work is counted
        pass
    assert ticks().stolen >= before.stolen


@pytest.mark.req("R-TUNE-03", "R-PDB-01")
def test_a_trial_says_how_much_was_stolen_and_marks_its_rows(monkeypatch):
    """The rows say that the machine was shared, and `lz tune` names the calls."""
    ctx = lz.select("rms_norm", torch.randn(4, 64), torch.ones(64)).context

    def told(share):
        monkeypatch.setattr(trial_module, "calmly", lambda run, patient: (run(), share))
        return trial_module.trial(ctx, seconds=0.02, jit="off")

    found = told(0.25)
    assert found.stolen == 0.25 and found.to_json()["stolen"] == 0.25
    assert all(row.surroundings.shared and row.surroundings.bucket.endswith("/shared") for row in found.rows)
    line = _stolen([Outcome("norm", Recorded(ctx), found)])
    assert line.startswith("1 of 1 calls were timed while the host gave up to 25% of the time to others: norm;")
    assert _stolen([Outcome("norm", Recorded(ctx), told(LIMIT))]) == ""

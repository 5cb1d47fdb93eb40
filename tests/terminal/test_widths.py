"""What a reader sees in terminals of 60 to 120 columns: nothing of a kernel id or a time is ever cut.

Each page is held against a golden file; `LAYERZERO_WRITE_GOLDEN=1 pytest tests/terminal` writes them anew.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path

import click
import pytest

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.model.context import Context
from layerzero.model.enums import Platform as DevicePlatform
from layerzero.perfdb.measurement import Measurement, Platform, Surroundings
from layerzero.perfdb.store import PerfDB
from layerzero.public.checks import Check, DoctorReport
from layerzero.reasons import ReasonCode
from layerzero.recording.traffic import Recorded
from layerzero_cli.output import Cell, Line, Table, progress_bar, show
from layerzero_cli.root import cli

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (60, 80, 100, 120)
KERNELS = (
    "alpha.rms_norm.x",
    "flashinfer.rms_norm.with_a_long_name",
    "somebackend.rms_norm.persistent_pingpong_sm90_fp8",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return int(request.param)


def page(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What `lz WORDS` shows in the terminal, without its colours."""
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        with pytest.raises(SystemExit):
            cli.main(list(words), "lz")
    return click.unstyle(screen.getvalue())


def holds(name: str, text: str, width: int, *whole: str) -> None:
    """No line is too long, what must be whole is whole, and the page is the golden one."""
    lines = [line.rstrip() for line in text.splitlines()]
    assert [line for line in lines if len(line) > width] == []
    assert [item for item in whole if not any(item in line for line in lines)] == []
    file = GOLDEN / f"{name}-{width}.txt"
    if os.environ.get("LAYERZERO_WRITE_GOLDEN"):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == file.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def kernels(lab) -> None:
    made = [lab.kernel(name, priority=60.0 - number) for number, name in enumerate(KERNELS)]
    elsewhere = lab.kernel("beta.rms_norm.elsewhere", platforms=frozenset({DevicePlatform.ROCM}))
    lab.use(*made, elsewhere, only=True)


@pytest.mark.usefixtures("kernels")
def test_explain(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("explain", "rms_norm", "--shape", "4,64", "--dtype", "fp32", "--device", "zen4")
    text = page(monkeypatch, *asked)
    holds(
        "explain", text, width, *KERNELS, "reference.rms_norm.plain", "1 more are for other devices; --all shows them"
    )
    assert "beta.rms_norm.elsewhere" not in text and "beta.rms_norm.elsewhere" in page(monkeypatch, *asked, "--all")


@pytest.mark.usefixtures("kernels")
def test_list(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerzero.device.probe.probe_devices", lambda: (named_device("zen4"),))
    holds("list", page(monkeypatch, "list", "--op", "rms_norm"), width, *KERNELS)


def test_doctor(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = ("it took a process down on 2026-11-02", ReasonCode.QUARANTINED, "lz quarantine clear KERNEL")
    checks = (
        Check("machine", "python", "ok", "3.12.3"),
        Check("machine", "cpu", "ok", "AMD EPYC 9654, 96 cores, avx512_bf16 and whatever else such a processor has"),
        Check("kernels", KERNELS[2], "fail", *crashed),
        Check("kernels", "probe", "warn", "the slowest took 1234.5 µs", None, "measure again when it is quiet"),
    )
    report = DoctorReport(checks, {"flash-attn": None, "flashinfer-python": "0.6.6", "torch": "2.11.0+cu130"})
    monkeypatch.setattr("layerzero.public.checks.doctor", lambda *_, **__: report)
    holds("doctor", page(monkeypatch, "doctor"), width, KERNELS[2], "1234.5 µs", "0.6.6", "2.11.0+cu130")


def test_the_end_of_tune(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from layerzero_tune.timing.race import Times
    from layerzero_tune.trial import Trial
    from layerzero_tune.tuning_run import Outcome, Tuned

    context = Context("rms_norm", named_device("zen4"), "bfloat16", (("rows", 4), ("hidden", 64)))
    outcomes = []
    timed = Measurement(
        "rms_norm", "a bucket", KERNELS[0], "1.0", "1.0", Platform("zen4", "cpu", threads=2), 1, 1, 1, 0, 9
    )
    names = ("rms_norm rows=4 hidden=64 bfloat16", "a call with quite a long name, as grids have")
    for number, name in enumerate(names):
        times = {kernel: Times.of([10.0 + place + 1000 * number]) for place, kernel in enumerate(KERNELS)}
        trial = Trial(
            context, times, {}, {"gamma.rms_norm.wrong": "it was wrong"} if number else {}, KERNELS[number], True, 0.1,
            torch=Times.of([33.0 + 1000 * number]), choice=KERNELS[number], before=KERNELS[2], rows=(timed,),
        )  # fmt: skip
        outcomes.append(Outcome(name, Recorded(context, 1, threads=4 * number), trial))
    found = Tuned("perf.db", tuple(outcomes), seconds=1.5, rows=6, chosen={outcomes[0].name: KERNELS[0]})
    monkeypatch.setattr(lz, "tune", lambda *_, **__: found, raising=False)
    text = page(monkeypatch, "tune", "traffic.json")
    holds("tune", text, width, "10.0 µs", "1011.0 µs", *KERNELS[:2], "3.30")
    assert re.search(r"2 calls: \S+× torch, 1 choice changed\s*\Z", text)
    assert "recorded with 4 threads and timed with 2, which counts with 2 only" in " ".join(text.split())


@pytest.mark.req("R-PDB-04")
def test_perfdb_show(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "layerzero.measurements.believed.doubt_of",
        lambda item, world: "measured with torch 2.9, here is 2.11" if item.kernel_id == KERNELS[2] else None,
    )
    database, then = PerfDB(Path("perf.db")), time.time() - 3 * 86_400
    database.put(
        [
            Measurement(
                "rms_norm", "rms_norm|bfloat16|hidden=4096|rows=65..128|weight", kernel, "1.0", "1.0",
                Platform("some-device", "sm90"), 12.3 * 40**number, 20.0 * 40**number, 30.0 * 40**number, 1.0, 50,
                surroundings=Surroundings(83.0, 412.0, 0.25, False), measured_at=then,
            )
            for number, kernel in enumerate(KERNELS)
        ]
    )  # fmt: skip
    text = page(monkeypatch, "perfdb", "show", "--database", "perf.db", "--all")
    holds("perfdb-show", text, width, *KERNELS, "12.3 µs", "492.0 µs", "19680.0 µs", "3 d", "hot/400 W/free/alone")
    assert re.match(r"\s+12.3 µs\b", text.splitlines()[2])


def test_policy_show(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_text(f"locks: {{rms_norm: {KERNELS[2]}}}\ndeny: [beta, gamma.*]\n", encoding="utf-8")
    monkeypatch.setenv("LAYERZERO_CONFIG", "policy.yaml")
    monkeypatch.setenv("LAYERZERO_DENY", "delta.rms_norm.y")
    lz.reset()
    text = page(monkeypatch, "policy", "show")
    lz.reset()
    holds("policy-show", text, width, KERNELS[2], "LAYERZERO_DENY", "perfdb.tune_samples")


def test_a_word_longer_than_the_terminal_is_folded_and_nothing_of_it_lost(width: int) -> None:
    screen, long = Terminal(), "x" * 150
    show([Table(("kernel", "µs", "why"), [(long, "1.0", long)]), Line(long)], screen)
    text = click.unstyle(screen.getvalue())
    assert max(map(len, text.splitlines())) <= width and text.count("x") == 450 and "µs 1.0" in text


def test_styles_stay_with_their_cells(width: int) -> None:
    screen = Terminal()
    show([Table(("a", "b"), [(Cell("one", "green"), "two words " * 30)])], screen)
    assert "\x1b[32mone" in screen.getvalue()


def test_a_bar_and_its_count_stay_beside_a_long_name(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar() as bar:
        assert bar is not None
        bar(7, 19, "attention batch=1 heads=32 " * 9, "1:23 left")
    lines = [line for line in click.unstyle(screen.getvalue()).splitlines() if "7/19" in line]
    assert lines and all("━" in line and "1:23 left" in line and "attention" in line for line in lines[-1:])
    assert all(len(line) <= width for line in lines)

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.model.decision import Candidate
from layerzero.reasons import reason
from layerzero_cli.output import show
from layerzero_tune.cli import demo
from layerzero_tune.demo import tour as demo_tour
from layerzero_tune.demo.block import KVCache, Model, PlainTorch, Sizes, forward, sizes_for, weights_for
from layerzero_tune.demo.page import render
from layerzero_tune.demo.stations import DECODE, PREFILL, Check, Tour, blocks, duration, notes, summary, verdict

STATIONS = (*PREFILL, *DECODE)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOSTILE = '<script>alert("x")</script>&\'"'


@pytest.fixture(scope="module")
def tour() -> Tour:
    lz.reset()  # choices made by earlier tests would be found, not made
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAYERZERO_ON_FIRST_USE", "off")  # a kernel without a proof is selected once more after its check
        return demo_tour.take("cpu", quick=True, tick=lambda _: None)


@pytest.fixture(scope="module")
def page(tour: Tour) -> str:
    return render(tour)


# -- the tour ------------------------------------------------------------------------------------
def test_every_station_is_visited_in_order_with_its_op(tour: Tour) -> None:
    assert [stop.station for stop in tour.stops] == list(STATIONS)
    assert {stop.station.op for stop in tour.stops} >= {
        "embedding", "rms_norm", "linear", "rope", "attention", "add_rms_norm", "silu_and_mul",
        "sample_topk", "sample_topp", "paged_attention",
    }  # fmt: skip


def test_the_kernel_named_is_the_kernel_that_ran(tour: Tour) -> None:
    for stop in tour.stops:
        assert stop.ran is not None, stop.station.title
        assert stop.ran == stop.chosen
        assert stop.kernel in {item.kernel_id for item in stop.candidates if item.accepted}


def test_every_result_matches_the_reference(tour: Tour) -> None:
    assert tour.ok, tour.failed
    assert tour.agreement.ok


def test_every_kernel_that_did_not_run_has_one_line_of_reason(tour: Tour) -> None:
    for stop in tour.stops:
        told = dict(stop.why_not())
        assert set(told) == {item.kernel_id for item in stop.candidates} - {stop.kernel}
        assert all(text and "\n" not in text for text in told.values())


def test_the_decode_loop_selects_at_its_start_and_at_the_end_of_a_bucket_only(tour: Tour) -> None:
    steps = tour.decode
    assert [step.context for step in steps] == list(range(tour.sizes.prompt + 1, tour.sizes.longest + 1))
    assert [step.context for step in steps if step.selections] == [tour.sizes.prompt + 1, 33]
    assert tour.decode_selections == tour.counters["selections"] < tour.decode_calls


def test_tick_is_called_as_often_as_announced() -> None:
    seen: list[str] = []
    demo_tour.take("cpu", quick=True, tick=seen.append)
    assert len(seen) == demo_tour.TICKS


def test_the_tour_leaves_no_trace_in_the_random_state_and_draws_the_same_tokens_again() -> None:
    sizes = sizes_for("cpu", quick=True)
    before = torch.random.get_rng_state()
    tokens = []
    for _ in range(2):
        model = Model(sizes, torch.device("cpu"), torch.float32)
        with torch.no_grad():
            tokens.append(int(model.prefill(lz).token))
    assert tokens[0] == tokens[1]
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    true_rope = lz.rope

    def wrong(q: torch.Tensor, k: torch.Tensor, *args: object, **kwargs: object) -> object:
        rotated, key = true_rope(q, k, *args, **kwargs)  # type: ignore[arg-type]
        return rotated * 1.01, key

    monkeypatch.setattr(lz, "rope", wrong)
    found = demo_tour.take("cpu", quick=True, tick=lambda _: None)
    assert not found.ok
    assert found.failed == ["RoPE"]


def test_a_sampler_that_draws_outside_its_set_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def worst(logits: torch.Tensor, k: int, **_: object) -> torch.Tensor:
        return logits.argmin(dim=-1)

    monkeypatch.setattr(lz, "sample_topk", worst)
    assert demo_tour.take("cpu", quick=True, tick=lambda _: None).failed == ["top-k sampling"]


def test_plain_torch_and_layerzero_compute_the_same_block() -> None:
    sizes, device = sizes_for("cpu", quick=True), torch.device("cpu")
    weights = weights_for(sizes, device, torch.float64)
    ids = torch.arange(sizes.prompt).unsqueeze(0) % sizes.vocab
    streams = []
    for ops in (lz, PlainTorch):
        cache = KVCache(sizes, device, torch.float64)
        with torch.no_grad():
            forward(ops, weights, sizes, cache, ids, torch.Generator().manual_seed(0))
            out = forward(ops, weights, sizes, cache, ids[:, :1], torch.Generator().manual_seed(0))
        assert out.paged is not None and out.dense is not None
        streams.append(out.paged)
        torch.testing.assert_close(out.paged, out.dense.squeeze(2))
    torch.testing.assert_close(streams[0], streams[1])


def test_the_prompt_ends_before_a_bucket_and_decoding_crosses_it() -> None:
    for kind in ("cpu", "cuda"):
        for quick in (False, True):
            sizes: Sizes = sizes_for(kind, quick=quick)
            edge = 1 << sizes.prompt.bit_length()
            assert sizes.prompt < edge < sizes.longest


# -- words ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("us", "against", "words"),
    [(100, 104, "same"), (100, 250, "2.50× faster"), (130, 100, "1.30× slower"), (1140, 100, "11.4× slower")],
)
def test_slower_is_called_slower(us: float, against: float, words: str) -> None:
    assert verdict(us, against) == words


@pytest.mark.parametrize(
    ("us", "words"), [(4.25, "4.25 µs"), (999.4, "999 µs"), (999.7, "1 ms"), (64_700, "64.7 ms"), (2.5e6, "2.5 s")]
)
def test_times_have_three_digits_and_a_unit(us: float, words: str) -> None:
    assert duration(us) == words


def test_a_failover_and_a_faster_loser_are_told(tour: Tour) -> None:
    stop = next(stop for stop in tour.stops if stop.station.key == "attention")
    loser = next(item.kernel_id for item in stop.candidates if item.accepted and item.kernel_id != stop.chosen)
    told = dataclasses.replace(stop, ran=loser, others_us={"sdpa.attention.math": stop.lz_us / 3})
    first, *rest = notes(told)
    assert first == f"{stop.chosen} was chosen and failed; {loser} ran instead."
    assert any("sdpa.attention.math was faster" in note for note in rest)


def test_the_plain_text_names_each_kernel_and_ends_with_the_summary(tour: Tour) -> None:
    out = io.StringIO()
    show(blocks(tour, Path("here.html")), out)
    lines = out.getvalue().splitlines()
    for stop in tour.stops:
        assert any(line.startswith(stop.station.title) and stop.kernel in line for line in lines)
    assert "all results match the reference, page written to here.html" in lines[-2]
    assert "\x1b" not in "\n".join(lines)


def test_a_wrong_result_is_in_the_summary_and_on_the_page(tour: Tour) -> None:
    bad = dataclasses.replace(tour.stops[3], check=Check(False, 0.5, "may not differ"))
    wrong = dataclasses.replace(tour, stops=(*tour.stops[:3], bad, *tour.stops[4:]))
    assert "WRONG results: RoPE" in summary(wrong, None)
    assert "1 wrong" in render(wrong)


# -- the command ---------------------------------------------------------------------------------
def test_run_prints_json_alone_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "demo.html"
    assert demo.run(html=path, json=True, device="cpu", quick=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True and data["page"] == str(path)
    assert [stop["key"] for stop in data["stops"]] == [station.key for station in STATIONS]
    assert all(stop["ran"] == stop["chosen"] and stop["check"]["ok"] for stop in data["stops"])
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert os.listdir(path.parent) == ["demo.html"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 140])
def test_run_in_a_terminal_shows_a_bar_and_a_table(monkeypatch: pytest.MonkeyPatch, tour: Tour, columns: int) -> None:
    out, err = Terminal(), Terminal()
    with monkeypatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = demo.run(device="cpu", quick=True)
    assert code == 0
    assert "\x1b[" in out.getvalue() and "sampling" in err.getvalue()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    lines = [line.rstrip() for line in lines]
    table = lines[: lines.index("Why not the others")]
    for stop in tour.stops:
        assert any(stop.kernel in line for line in table)


def test_run_refuses_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(device="cuda:77", quick=True) == 2
    assert "cuda:77" in capsys.readouterr().err


def test_run_refuses_a_device_that_computes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(device="meta", quick=True) == 2
    assert "meta" in capsys.readouterr().err


def test_run_says_when_policy_lets_nothing_run(capsys: pytest.CaptureFixture[str]) -> None:
    with lz.scoped(deny=["*"]):
        assert demo.run(device="cpu", quick=True) == 1
    assert "could not run" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tour: Tour, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo.html"
    path.write_text("old", encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(demo_tour, "take", lambda *_, **__: tour)
    assert demo.run(html=path) == 1
    assert "no space left" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["demo.html"]


# -- the page ------------------------------------------------------------------------------------
class Reader(HTMLParser):
    """Collects attributes and checks that tags are balanced."""

    VOID = frozenset({"meta", "br", "wbr", "!doctype"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def assert_needs_nothing_else(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<img|<iframe|\bon\w+=", page)
    assert all(value.startswith("#") for _, name, value in read(page).attributes if name in ("href", "src"))


@pytest.mark.fault(23)
def test_the_page_is_well_formed_and_needs_nothing_else(page: str) -> None:
    assert_needs_nothing_else(page)
    assert "default-src 'none'" in page and "script-src" not in page  # a page without a script allows none


def test_every_box_of_the_diagram_leads_to_its_op(page: str) -> None:
    found = read(page).attributes
    targets = [value for _, name, value in found if name == "id"]
    assert targets == [station.key for station in STATIONS]
    assert [value[1:] for tag, name, value in found if (tag, name) == ("a", "href")] == targets


def test_the_page_tells_every_candidate_and_reason(tour: Tour, page: str) -> None:
    text = "".join(read(page).text)
    for stop in tour.stops:
        for item in stop.candidates:
            assert item.kernel_id in text
            if not item.accepted:
                assert all(found.message in text and found.code.value in text for found in item.reasons)
    assert "<th>" not in page and '<th scope="col">kernel</th>' in page
    assert f"{tour.decode_selections} selections for {len(tour.decode)} steps" in text


def test_the_page_says_who_decided_a_score_a_preference_or_a_lock(tour: Tour, page: str) -> None:
    assert "best score of those that fit" in page and "fits, but scored lower" in page
    kernel = "reference.rms_norm.plain"
    call = ("rms_norm", torch.randn(4, 64), torch.ones(64))
    for policy, won, lost in (
        ({"prefer": ["reference"]}, "the policy prefers it", "the policy prefers another"),
        (
            {"locks": {"rms_norm": kernel}, "on_fault": "fallback"},
            "the op is locked to it",
            "the op is locked to another",
        ),
    ):
        with lz.scoped(**policy):
            report = lz.explain(*call)
        stop = dataclasses.replace(tour.stops[1], chosen=kernel, ran=kernel, candidates=tuple(report.candidates))
        text = "".join(read(render(dataclasses.replace(tour, stops=(stop,)))).text)
        assert won in text and f"fits, but {lost}" in text
        assert "scored lower" not in text and "best score" not in text
        assert all(lost in why for _, why in stop.why_not() if why.startswith("fits"))
        quick = dataclasses.replace(stop, others_us={"torch.rms_norm.native": stop.lz_us / 3})
        (told,) = notes(quick)
        assert "torch.rms_norm.native was faster" in told and "The policy decided" in told


def test_after_a_failover_the_page_says_which_kernel_failed(tour: Tour) -> None:
    stop = next(stop for stop in tour.stops if stop.station.key == "attention")
    loser = next(item.kernel_id for item in stop.candidates if item.accepted and item.kernel_id != stop.chosen)
    text = "".join(read(render(dataclasses.replace(tour, stops=(dataclasses.replace(stop, ran=loser),)))).text)
    assert f"next in line when {stop.chosen} failed" in text and "fits, but failed" in text
    assert "best score" not in text


def test_hostile_names_are_escaped(tour: Tour) -> None:
    rejected = Candidate(
        f"evil.rope.{HOSTILE}", HOSTILE, False, reasons=(reason("PLATFORM_MISMATCH", HOSTILE, HOSTILE),), flip=HOSTILE
    )
    stop = dataclasses.replace(tour.stops[3], candidates=(*tour.stops[3].candidates, rejected), shape=HOSTILE)
    device = dataclasses.replace(tour.device, name=HOSTILE)
    hostile = dataclasses.replace(
        tour, stops=(*tour.stops[:3], stop, *tour.stops[4:]), device=device, facts=((HOSTILE, HOSTILE),)
    )
    page = render(hostile)
    assert "alert(" in page
    assert_needs_nothing_else(page)


@pytest.mark.needs_tool("chromium")
def test_a_browser_renders_every_op_and_fetches_nothing(tour: Tour, page: str, tmp_path: Path) -> None:
    path = tmp_path / "demo.html"
    path.write_text(page, encoding="utf-8")
    browser = next(found for name in CHROMIUM if (found := shutil.which(name)))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    dom = done.stdout
    assert_needs_nothing_else(dom)
    rows = re.findall(r'<details class="op" id="([^"]+)"', dom)
    assert rows == [station.key for station in STATIONS]
    assert dom.count('title="context ') == len(tour.decode)
    for stop in tour.stops:
        assert stop.kernel in dom.replace("<wbr>", "")

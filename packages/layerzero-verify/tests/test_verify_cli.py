"""`lz verify` as people meet it: exit codes, JSON that keeps its schema, a page that needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

import layerzero as lz
from layerzero.numerics import ErrorLocation
from layerzero_cli.root import cli
from layerzero_verify.cli.page import render
from layerzero_verify.report import Check, Level, StageDiff, Status, Verdict, VerifyReport

pytestmark = pytest.mark.usefixtures("clean")

QUICK = ("--lane", "quick", "--op", "relu_and_mul", "--level", "1", "--device", "cpu")


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["verify", *args])


def schema() -> Any:
    return json.loads(files("layerzero_verify").joinpath("report.schema.json").read_text(encoding="utf-8"))


def report(*, ok: bool = False, name: str = "backend toy") -> VerifyReport:
    """A report with one of everything."""
    spot = ErrorLocation((0, 3), float("nan"), 1.0, float("inf"), float("inf"))
    stages = tuple(
        StageDiff(f"layer 0 {stage}", "linear", "toy.linear.x", size, 1e-4, size <= 1e-4)
        for stage, size in (("q_proj", 1e-6), ("q_rope", 0.0), ("attn_out", float("inf")))
    )
    failed = Check(
        2, "forward", Status.FAIL, "linear", "toy.linear.x", "layer 0 attn_out", "tiny [toy]", "float32", float("inf"),
        0.1, 1e-4, float("inf"), spot, "attention", "<b>q & k</b>", ("a red flag",), stages, (("loss", 1.5),),
        ("toy.linear.x",),
    )  # fmt: skip
    passed = Check(1, "forward", Status.OK, "linear", "toy.linear.x", "result: plain", "", "float32", 1e-6, 1e-7, 1e-5)
    checks = (replace(failed, status=Status.OK, first=None),) if ok else (failed,)
    levels = (
        Level(0, (Check(0, "contract", Status.OK, "linear", "toy.linear.x"),)),
        Level(1, (passed,), "", 0.5),
        Level(2, checks, "", 1.5),
        Level(4, (), "transformers is not installed"),
    )
    verdict = Verdict(ok, "pass" if ok else "integration", None if ok else 2, "text of the verdict", "attention")
    return VerifyReport(
        "quick", name, "cpu", "", 0, ("toy.linear.x",), (("toy.linear.cuda", "runs on cuda"),), levels, verdict, 2.0,
        (("torch", "2.13"),), ("a note",),
    )  # fmt: skip


@pytest.mark.req("R-PAR-13", "R-PAR-14")
def test_a_green_run_leaves_with_0_and_json_that_keeps_its_schema(tmp_path: Path) -> None:
    page = tmp_path / "deep" / "report.html"
    result = run(*QUICK, "--json", "--html", str(page))
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    jsonschema.validate(data, schema())
    assert data["ok"] and data["verdict"]["kind"] == "pass" and data["page"] == str(page)
    assert data["levels"][0]["name"] == "preflight" and data["levels"][1]["passed"] > 5
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_plain_text_has_no_colour_and_no_bar_when_piped() -> None:
    result = run(*QUICK)
    assert result.exit_code == 0 and "\x1b" not in result.output
    assert "1 kernels" in result.stdout and "op relu_and_mul: all" in result.stdout
    assert result.stderr == ""


def test_every_kind_of_finding_fits_the_schema() -> None:
    for ok in (True, False):
        data = json.loads(json.dumps(report(ok=ok).to_json(), allow_nan=False))
        jsonschema.validate(data, schema())
    assert data["levels"][2]["checks"][0]["first_difference"]["actual"] == "nan"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--lane", "lunch"), "quick"),
        (("--level", "6"), "1<=x<=5"),
        (("--config", "huge"), "no_rope"),
        (("--backend", "tourch"), "did you mean torch?"),
        (("--kernel", "torch.rms_norm.natve"), "did you mean torch.rms_norm.native?"),
        (("--op", "rms_nrm"), "did you mean rms_norm"),
        (("--dtype", "int3"), "float32"),
    ],
)
def test_what_cannot_be_meant_is_usage(args: tuple[str, ...], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("verb", [("prove",), ("check", "--kit")])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quack", "quack is a backend of the plugin flashattn, give that"),
        ("flashatn", "did you mean flashattn?"),
        ("nobody-has-this", "known here: "),
    ],
)
def test_the_kit_is_run_on_a_plugin_that_there_is(
    verb: tuple[str, ...], name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERZERO_PLUGINS", "flashattn")
    done = CliRunner().invoke(cli, ["plugin", *verb, name])
    assert done.exit_code == 2 and f"no plugin is named {name!r}" in done.output and words in done.output, done.output


def test_a_kernel_that_cannot_run_here_is_no_pass() -> None:
    result = run("--kernel", "sdpa.attention.flash", "--device", "cpu", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and data["verdict"]["kind"] == "nothing"
    assert data["absent"] == [{"kernel": "sdpa.attention.flash", "why": "runs on cuda, the device is cpu"}]


@pytest.mark.req("R-PAR-15")
def test_the_checklist_is_shown() -> None:
    result = run("--checklist", "--json")
    steps = json.loads(result.stdout)["items"]
    assert result.exit_code == 0 and len(steps) == 6
    assert "Weight conversion" in run("--checklist").stdout


def test_the_public_function_is_the_same_ladder() -> None:
    found = lz.verify(op="relu_and_mul", level=1, device="cpu")
    assert found.ok and found.to_json()["target"] == "op relu_and_mul"
    seen: list[tuple[int, int, str]] = []
    lz.verify(
        op="relu_and_mul", level=1, device="cpu", progress=lambda done, total, label: seen.append((done, total, label))
    )
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == len(seen) - 1
    assert "torch.relu_and_mul.native" in {label for _, _, label in seen}


# -- the page ---------------------------------------------------------------------------------------------
def test_the_page_needs_nothing_from_anywhere_and_escapes_what_it_shows() -> None:
    text = render(report(name='<script>alert("x")</script>'))
    assert "<script" not in text and "&lt;script&gt;" in text and "&lt;b&gt;q &amp; k&lt;/b&gt;" in text
    assert re.search(r"https?:|url\(|@import|src=", text) is None
    assert "default-src 'none'" in text and "script-src" not in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text and "max-width: 640px" in text
    assert "first difference" in text and "[0, 3]: got nan, want 1" in text
    assert 'href="#level-2"' in text and 'id="level-2"' in text
    assert "transformers is not installed" in text and "runs on cuda" in text


def test_the_page_says_well_when_all_is_well() -> None:
    text = render(report(ok=True))
    assert "<h1>Verified: backend toy</h1>" in text and "What differs" not in text


def test_a_page_that_cannot_be_written_is_a_problem_and_leaves_no_crumbs(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    result = run(*QUICK, "--html", str(blocked / "report.html"))
    assert result.exit_code == 1 and "could not be written" in result.output
    assert blocked.read_text() == "in the way" and list(tmp_path.glob(".report*")) == []


@pytest.mark.slow
@pytest.mark.needs_tool("chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_draws_the_page(tmp_path: Path, width: int) -> None:
    program = next(
        shutil.which(n) for n in ("chromium", "chromium-browser", "google-chrome", "chrome") if shutil.which(n)
    )
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render(report()), encoding="utf-8")
    subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1600",
         f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert picture.stat().st_size > 10_000

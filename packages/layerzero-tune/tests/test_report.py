"""`lz report`: the figures, the maps, and the page in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from layerzero.errors import ConfigurationError
from layerzero.measurements.believed import REFUSED
from layerzero.perfdb.measurement import Measurement, Platform
from layerzero.perfdb.store import PerfDB
from layerzero_cli.root import cli
from layerzero_tune.report.data import FORMAT, Measured, Timed, axes, backends, figures, from_json, maps, phase
from layerzero_tune.report.page import render
from layerzero_tune.report.perfdb import cases_of
from layerzero_tune.timing.baselines import TORCH_DEFAULT

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOSTILE = '<script>alert("x")</script>&\'"'


def attention(name: str, queries: int, keys: int, dim: int, torch_us: float | None = 100.0, **us: float) -> Measured:
    sizes = {"batch": 1, "num_heads": 8, "num_kv_heads": 2, "seq_len_q": queries, "seq_len_k": keys, "head_dim": dim}
    kernels = {f"{lib}.attention.x": Timed(value, 1e-3) for lib, value in us.items()}
    chosen = min(kernels, key=lambda kernel: kernels[kernel].us)
    return Measured(name, "attention", "bfloat16", sizes, "GPU", "eager", chosen, kernels, torch_us, causal=queries > 1)


def norm(rows: int, torch_us: float | None, **us: float) -> Measured:
    kernels = {f"{lib}.rms_norm.x": Timed(value) for lib, value in us.items()}
    chosen = min(kernels, key=lambda kernel: kernels[kernel].us)
    sizes = {"rows": rows, "hidden": 4096}
    return Measured(f"norm {rows}", "rms_norm", "float32", sizes, "GPU", "eager", chosen, kernels, torch_us)


CASES = [
    attention("prefill 512", 512, 512, 64, alpha=50.0, sdpa=80.0, reference=900.0),
    attention("prefill 2048", 2048, 2048, 128, alpha=200.0, sdpa=90.0),
    attention("decode 4096", 1, 4096, 128, sdpa=25.0),
    attention("chunk 128 over 512", 128, 512, 64, beta=10.0),
    norm(16, 20.0, beta=5.0),
]


BEHIND = replace(CASES[4], name="slow norm", torch_us=3.0)
FACTS = {"device": "GPU", "measured": "2026-11-17", "cores": "2", "threads": "2", "load": "0.3", "steadiness": "quiet"}


# -- figures -----------------------------------------------------------------------------------------
def test_a_library_alone_is_its_own_kernels_and_torch_elsewhere():
    found = figures(CASES)
    assert found.cases == 5 and found.ratio.geomean == 1.0 and found.layerzero.geomean == 1.0
    alpha = found.libraries["alpha"]
    # 1, 200/90, and torch default in three: 100/25, 100/10, 20/5
    assert alpha.geomean == pytest.approx((200 / 90 * 4 * 10 * 4) ** (1 / 5))
    assert (alpha.used_in, alpha.cases, alpha.worst, alpha.worst_case) == (2, 5, 10.0, "chunk 128 over 512")
    assert found.libraries["torch default"].used_in == 5
    assert "reference" not in found.libraries
    assert found.speedup == pytest.approx((2 * 100 / 90 * 4 * 10 * 4) ** (1 / 5))
    assert found.slowest == ("prefill 2048", pytest.approx(100 / 90))


def test_torch_is_part_of_the_fastest_of_all_but_not_of_the_oracle():
    case = norm(16, 4.0, beta=5.0)
    found = figures([case])
    assert found.ratio.geomean == 1.0 and found.layerzero.geomean == pytest.approx(1.25)
    assert found.libraries["torch default"].geomean == 1.0 and found.speedup == pytest.approx(0.8)


def test_a_case_where_torch_is_faster_says_why():
    assert [case.behind for case in CASES] == [""] * 5
    assert BEHIND.behind == "no kernel that may run here is as fast; the nearest is beta.rms_norm.x"
    late = replace(CASES[0], chosen="reference.attention.x")
    assert "alpha.attention.x is as fast as torch" in late.behind and "lz tune" in late.behind
    short = replace(CASES[2], torch_us=25.0, call_us=30.0)
    assert short.behind == "the kernel keeps up; finding it adds 5.0 µs to a call this short"
    assert "others used the machine" in replace(BEHIND, busy=True).behind
    page = render([*CASES, BEHIND], FACTS)
    assert "Torch default is faster in one case" in page and page.index("steadiness") < page.index("figure-fastest")
    assert "Torch default is faster" not in render(CASES, FACTS)


def test_the_public_call_is_what_is_held_against_torch():
    case = replace(CASES[2], call_us=30.0)
    assert case.speedup == pytest.approx(100 / 30) and case.ratio == 1.0


def test_a_case_without_torch_counts_where_it_can():
    found = figures([norm(16, None, beta=5.0, alpha=10.0)])
    assert found.speedup is None and found.libraries["alpha"].geomean == pytest.approx(2.0)
    assert "torch default" not in found.libraries
    assert figures([]).ratio is None


def test_a_choice_behind_the_oracle_shows():
    late = replace(CASES[0], chosen="sdpa.attention.x")
    assert figures([late]).ratio.worst == pytest.approx(1.6)


# -- reading -----------------------------------------------------------------------------------------
def document(cases: list[Measured]) -> dict:
    return {
        "format": FORMAT,
        "machine": {"device": "GPU", "torch": "2.11"},
        "cases": [
            {
                "name": case.name, "op": case.op, "dtype": case.dtype, "sizes": dict(case.sizes), "device": case.device,
                "mode": case.mode, "chosen": case.chosen, "causal": "top_left" if case.causal else "none",
                "torch": {} if case.torch_us is None else {"us": case.torch_us}, "call": {},
                "kernels": {
                    **{name: {"us": item.us, **({} if item.error is None else {"error": item.error})}
                       for name, item in case.kernels.items()},
                    **{name: {"why": why} for name, why in case.refused.items()},
                },
            }
            for case in cases
        ],
    }  # fmt: skip


def test_what_is_written_is_read_again():
    given = [*CASES[:2], replace(CASES[3], refused={"zeta.attention.y": "raised"})]
    given = [replace(case, busy=None) for case in given]  # the file does not say
    assert from_json(document(given), "x.json") == given


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"us": float("nan")}, "us is nan"),
        ({"us": 0}, "us is 0"),
        ({"us": "fast"}, "us is 'fast'"),
        ({"us": 1.0, "error": -1}, "error is -1"),
    ],
)
def test_numbers_that_are_none_are_refused_by_place(change, says):
    data = document(CASES[:1])
    data["cases"][0]["kernels"] = {"a.b.c": change}
    with pytest.raises(ConfigurationError, match=re.escape(says)) as caught:
        from_json(data, "x.json")
    assert "cases[0]" in str(caught.value)


@pytest.mark.parametrize("data", [[], {}, {"format": "other", "cases": []}, {"format": FORMAT, "cases": [1]}])
def test_other_files_are_refused(data):
    with pytest.raises(ConfigurationError):
        from_json(data, "x.json")


# -- maps --------------------------------------------------------------------------------------------
def test_a_map_has_lengths_down_and_head_dims_across():
    found = {item.title: item for item in maps(CASES)}
    prefill = found["prefill, bfloat16"]
    assert prefill.rows == ("128 → 512", "512", "2\u2009048") and prefill.columns == ("64", "128")
    assert [case.name for case in prefill.cells["2\u2009048", "128"]] == ["prefill 2048"]
    assert found["decode, bfloat16"].rows == ("4\u2009096",)
    assert (found["rms_norm, float32"].down, found["rms_norm, float32"].across) == ("rows", "hidden")
    assert [item.title for item in maps(CASES)][-1] == "rms_norm, float32"
    assert axes(CASES[0]).rest == "B1 H8/2 causal" and phase(CASES[2]) == "decode"
    assert backends(CASES) == ["beta", "sdpa", "alpha", "reference"]


def test_an_op_nobody_thought_of_has_a_map_too():
    odd = replace(CASES[4], op="mystery", sizes={"left": 3, "right": 5})
    assert (axes(odd).down_value, axes(odd).across_value) == ((3,), (5,))
    assert maps([replace(odd, sizes={})])[0].rows == ("0",)


# -- PerfDB ------------------------------------------------------------------------------------------
def row(kernel: str, us: float, error: float | None = 0.1, mode: str = "eager/hot", at: float = 1.0) -> Measurement:
    bucket = json.dumps({"sizes": {"rows": 16, "hidden": 64}, "when": {"dtype": "bfloat16"}})
    place = Platform("sig", "family")
    return Measurement("rms_norm", bucket, kernel, "1", "1", place, us, us, us, 0.0, 5, error, mode, measured_at=at)


def test_perfdb_gives_one_case_a_bucket(tmp_path: Path):
    db = PerfDB(tmp_path / "perf.db")
    db.put([
        row("a.rms_norm.x", 10.1), row("b.rms_norm.x", 10.0), row("c.rms_norm.x", 4.0, None),
        row(TORCH_DEFAULT, 30.0, None), row("d.rms_norm.x", 1.0, 9.0, REFUSED),
        row("a.rms_norm.x", 8.0, mode="graph/hot"),
    ])  # fmt: skip
    eager, graph = cases_of(db)
    assert set(eager.kernels) == {"a.rms_norm.x", "b.rms_norm.x"} and eager.torch_us == 30.0
    assert eager.chosen == "a.rms_norm.x"  # inside the noise the name decides, as in selection
    assert eager.refused == {"d.rms_norm.x": "wrong by 9.0e+00"} and eager.dtype == "bfloat16"
    assert graph.mode == "graph/hot" and graph.torch_us is None
    assert eager.name == "rms_norm rows 16 hidden 64 bfloat16"


# -- the page ----------------------------------------------------------------------------------------
class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.links, self.text = 0, [], []
        self.tags, self.handlers = set(), []

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "background", "srcset")]

    def handle_data(self, data):
        self.text.append(data)


def read(page: str) -> Page:
    found = Page()
    found.feed(page)
    return found


def test_the_page_needs_nothing_else_and_says_everything():
    page = render(
        [*CASES, replace(CASES[4], name="refusing", refused={"zeta.rms_norm.y": "wrong: off by 3"})], {"torch": "2.11"}
    )
    found = read(page)
    assert found.scripts == 1 and all(link.startswith("#case-") for link in found.links)
    assert re.search(r"https?:|url\(|@import", page) is None and "default-src 'none'" in page
    text = "".join(found.text)
    for case in CASES:
        assert case.name in text
        assert all(kernel in text for kernel in case.kernels)
    assert "wrong: off by 3" in text and "1.0e-03" in text
    for needed in ("prefers-color-scheme: dark", 'name="viewport"', "max-width: 720px"):
        assert needed in page


def test_hostile_names_are_escaped():
    bad = replace(CASES[0], name=HOSTILE, device=HOSTILE, dtype=HOSTILE, refused={HOSTILE: HOSTILE})
    page = render([bad], {HOSTILE: HOSTILE})
    found = read(page)
    assert found.scripts == 1 and "alert(" in page and "<script>alert" not in page


BREAKS_OUT = '" onpointerenter="alert(1)" x="<img src=x onerror=alert(2)>'


@pytest.mark.fault(23)
def test_no_text_of_a_foreign_file_leaves_its_place_in_the_page():
    """Every text of the file, and every name it chooses, ends an attribute, opens an element and adds a handler."""

    def hostile(value, chosen_names: bool = False):
        if isinstance(value, dict):
            bad = BREAKS_OUT if chosen_names else ""
            return {name + bad: hostile(item, name in ("kernels", "sizes")) for name, item in value.items()}
        if isinstance(value, list):
            return [hostile(item) for item in value]
        return value + BREAKS_OUT if isinstance(value, str) and value != FORMAT else value

    data = hostile(document([replace(CASES[0], refused={"zeta.attention.y": "wrong"}), *CASES[1:]]))
    found = read(render(from_json(data, "bench.json"), {BREAKS_OUT: BREAKS_OUT}))
    assert found.scripts == 1 and not found.handlers and "img" not in found.tags
    assert found.links and all(re.fullmatch(r"#case-[A-Za-z0-9-]*", link) for link in found.links)


@pytest.mark.fault(23)
def test_the_policy_of_the_page_allows_the_script_it_came_with_and_no_other():
    page = render(CASES, {})
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'" and rules["default-src"] == "'none'"


def run(*words: str):
    return CliRunner().invoke(cli, [*words])


def test_the_verb_writes_the_page_and_says_the_figures(tmp_path: Path):
    source, page = tmp_path / "bench.json", tmp_path / "out" / "page.html"
    source.write_text(json.dumps(document(CASES)))
    result = run("report", str(source), "--out", str(page), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["tuned_over_oracle"]["geomean"] == 1.0 and data["page"] == str(page)
    assert "prefill 2048" in page.read_text() and "2.11" in page.read_text()
    plain = run("report", str(source), "--out", str(page))
    assert "chosen ÷ oracle: 1.000" in plain.stdout and "LayerZero" in plain.stdout


def test_what_a_file_does_not_say_of_its_making_is_not_made_up(tmp_path: Path):
    source, page = tmp_path / "bench.json", tmp_path / "page.html"

    def facts(**machine: object) -> dict[str, str]:
        source.write_text(json.dumps({**data, "machine": machine}))
        found = run("report", str(source), "--out", str(page), "--json")
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)["facts"]

    data = document(CASES)
    top = facts(cores=2)
    assert {name for name, value in top.items() if value == "not written down"} == {
        "measured", "threads", "load", "steadiness",
    }  # fmt: skip
    assert page.read_text().count("not written down") == 4
    data["cases"][0]["busy"], data["cases"][1]["stolen"] = 0.0, 0.9
    top = facts(cores=2, threads=1, load=0.25, measured="2026-11-18")
    assert top["threads"] == "1" and top["steadiness"] == "the machine was quiet in 1 of 2 cases that say it"
    for case in data["cases"]:
        case |= {"busy": 0.01, "stolen": 0.0}
    assert facts(cores=2)["steadiness"] == "the machine was quiet in 5 of 5 cases"


def test_the_verb_reads_perfdb_and_says_when_there_is_nothing(tmp_path: Path):
    db = PerfDB(tmp_path / "perf.db")
    db.put([row("a.rms_norm.x", 10.0, at=time.time())])
    page = tmp_path / "page.html"
    assert run("report", "--perfdb", str(db.path), "--out", str(page)).exit_code == 0
    assert "rms_norm rows 16" in page.read_text()
    empty = run("report", "--perfdb", str(tmp_path / "none.db"), "--out", str(page))
    assert empty.exit_code == 1 and "holds no measurements" in empty.output
    told = run("report", "--perfdb", str(tmp_path / "none.db"), "--json")
    assert told.exit_code == 1 and "lz tune" in json.loads(told.stdout)["error"]["hint"]
    both = run("report", str(page), "--perfdb", str(db.path))
    assert both.exit_code == 2 and "either files or --perfdb" in both.output
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "SCHEMA_INVALID" in run("report", str(broken)).output
    assert "CONFIG_FILE_MISSING" in run("report", str(tmp_path / "gone.json")).output
    blocked = run("report", "--perfdb", str(db.path), "--out", str(broken / "page.html"))
    assert blocked.exit_code == 2 and "could not be written" in blocked.output


# -- a browser ---------------------------------------------------------------------------------------
def browser(tmp_path: Path, *more: str) -> str:
    program = next(found for name in CHROMIUM if (found := shutil.which(name)))
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", *more],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return done.stdout


def allowing(page: str, script: str) -> str:
    """The page with one more inline script, which its policy allows."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("script-src '", f"script-src 'sha256-{digest}' '")
    return page.replace("</body>", f"<script>{script}</script></body>")


# Drives the page as a reader would, and leaves what it saw in the document.
_DRIVE = """
const seen = {};
// Texts whose contrast with what lies behind them is below 4.5, as WCAG 2.1 AA counts it.
const parts = (text) => {
  const found = text.match(/[\\d.]+/g).map(Number);
  return text.startsWith("color") ? [...found.slice(0, 3), found[3] ?? 1]
    : [...found.slice(0, 3).map((part) => part / 255), found[3] ?? 1];
};
const light = (colour) => {
  const [r, g, b] = colour.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (let place = element; place; place = place.parentElement) {
    const found = parts(getComputedStyle(place).backgroundColor);
    if (found[3] === 1) return found;
  }
  return [1, 1, 1, 1];
};
const faint = () => {
  const low = [];
  for (const element of document.querySelectorAll("main *")) {
    const texts = [...element.childNodes].filter((node) => node.nodeType === 3 && node.textContent.trim());
    if (!texts.length || element.matches("option, script") || !element.getClientRects().length) continue;
    const pair = [light(parts(getComputedStyle(element).color)), light(behind(element))].sort();
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName} ${texts[0].textContent.trim().slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return low;
};
const count = () => document.querySelectorAll(".case:not([hidden])").length;
const pick = (name, value) => {
  const field = document.querySelector(`[data-filter=${name}]`);
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
seen.all = count();
pick("phase", "decode"); seen.decode = count();
seen.maps = document.querySelectorAll(".map:not([hidden])").length;
seen.gain = document.getElementById("figure-speedup").textContent;
pick("phase", ""); pick("text", "PREFILL alpha"); seen.text = count();
pick("text", ""); pick("winner", "beta"); seen.beta = count(); pick("winner", "");
const order = document.getElementById("order");
order.value = "speedup"; order.dispatchEvent(new Event("input", { bubbles: true }));
seen.first = document.querySelector("#list .case strong").textContent;
location.hash = document.querySelector(".map .chip").getAttribute("href");
setTimeout(() => {
  seen.opened = document.querySelectorAll(".case[open]").length;
  seen.wide = document.documentElement.scrollWidth - innerWidth;
  seen.back = getComputedStyle(document.body).backgroundColor;
  seen.inner = innerWidth;
  for (const place of document.querySelectorAll("details")) place.open = true;
  seen.headings = document.querySelectorAll("th:not([scope])").length;
  const marks = ["header", "main", "footer", "form[role=search]"];
  seen.landmarks = marks.filter((name) => document.querySelector(name)).length;
  seen.unreachable = [...document.querySelectorAll(".scroll")].filter((box) => box.tabIndex !== 0).length;
  seen.faint = faint();
  const note = document.createElement("pre");
  note.id = "seen";
  note.textContent = JSON.stringify(seen);
  document.body.append(note);
}, 50);
"""


_AXE = """
document.querySelectorAll("details").forEach((place) => (place.open = true));
setTimeout(() => axe.run().then((found) => {
  const note = document.createElement("pre");
  note.id = "axe";
  note.textContent = JSON.stringify(found.violations.map((item) => item.id));
  document.body.append(note);
}), 50);
"""


@pytest.mark.needs_tool("chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_in_a_browser_filters_count_sorts_order_and_nothing_overflows(tmp_path: Path, width: int, dark: bool):
    hostile = (
        "<script>document.body.textContent = 'ran'</script><img src=x onerror=\"document.body.textContent = 'ran'\">"
    )
    page = allowing(render(CASES, {"torch": "2.11"}), _DRIVE).replace("<footer>", f"{hostile}<footer>")
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom = browser(
        tmp_path, *theme, f"--window-size={width},1500", "--virtual-time-budget=4000", "--dump-dom", path.as_uri()
    )
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', dom, re.S)[1])
    assert seen["all"] == 5 and seen["decode"] == 1 and seen["maps"] == 1 and seen["gain"] == "4.00×"
    assert seen["text"] == 1 and seen["beta"] == 2 and seen["first"] == "chunk 128 over 512" and seen["opened"] == 1
    assert seen["wide"] <= 0 and seen["inner"] <= max(width, 500)
    assert seen["back"] == ("rgb(17, 20, 27)" if dark else "rgb(246, 247, 249)")
    assert (seen["headings"], seen["landmarks"], seen["unreachable"], seen["faint"]) == (0, 4, 0, [])


@pytest.mark.needs_tool("chromium")
@pytest.mark.skipif(
    "LAYERZERO_AXE" not in os.environ, reason="LAYERZERO_AXE names no axe.min.js (npm install axe-core)"
)
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_in_the_page(tmp_path: Path, dark: bool):
    axe = Path(os.environ["LAYERZERO_AXE"]).read_text(encoding="utf-8").replace("</script>", "<\\/script>")
    path = tmp_path / "page.html"
    path.write_text(allowing(allowing(render([*CASES, BEHIND], FACTS), axe), _AXE), encoding="utf-8")
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom = browser(tmp_path, *theme, "--virtual-time-budget=20000", "--dump-dom", path.as_uri())
    assert json.loads(re.search(r'<pre id="axe">(.*?)</pre>', dom, re.S)[1]) == []


def test_plain_torch_is_timed_beside_what_was_tuned(tmp_path: Path, lab):
    from layerzero.perfdb.measurement import bucket_of
    from layerzero_cli.calls import context
    from layerzero_tune.report.perfdb import torch_beside

    lab.use(lab.kernel("alpha.rms_norm.x"), only=True)
    ctx = context("rms_norm", {"shape": (4, 64), "dtype": "fp32", "device": "cpu"})
    elsewhere = context("rms_norm", {"shape": (4, 64), "dtype": "fp32", "device": "h100"})
    found = torch_beside([ctx, ctx, elsewhere], seconds=0.02)
    bucket = bucket_of(ctx, ("rows",))
    assert set(found) == {("rms_norm", bucket)} and found["rms_norm", bucket][0] == "alpha.rms_norm.x"
    db = PerfDB(tmp_path / "perf.db")
    db.put([replace(row("alpha.rms_norm.x", 10.0), bucket=bucket)])
    (case,) = cases_of(db, {("rms_norm", bucket): ("alpha.rms_norm.x", 3.0)})
    assert case.torch_us == pytest.approx(30.0) and case.speedup == pytest.approx(3.0)
    assert cases_of(db)[0].torch_us is None

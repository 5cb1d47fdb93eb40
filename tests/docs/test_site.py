"""The site builds without a warning and without an outside address, and reads well on a desk and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import site
from tools.workspace import ROOT

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
SHOWN = (
    "index.html",
    "learn/backend.html",
    "understand/call.html",
    "reference/commands.html",
    "reference/ops/attention.html",
)


def test_the_home_page_lists_every_page() -> None:
    home = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {(ROOT / "docs" / target).resolve() for target in re.findall(r"^- \[[^\]]+\]\(([^)#]+)\)", home, re.M)}
    home_pages = {ROOT / "README.md", ROOT / "docs" / "README.md"}
    assert set(site.places()) - listed == home_pages, "name the page in a list of docs/README.md"
    for section in ("Learn", "Do", "Look up", "Understand"):
        assert f"\n## {section}\n" in home


def test_links_become_links_of_the_site_and_blocks_show_what_they_need(tmp_path: Path) -> None:
    known = site.places()
    page = ROOT / "docs" / "learn" / "model.md"
    text = site.relinked(
        page, "[a](../policy.md#who) `[b](../policy.md)`\n\n```\n[c](../policy.md)\n```\n", known, tmp_path
    )
    assert text.startswith("[a](../policy.md#who)") and "[c](../policy.md)" in text
    home = site.relinked(
        ROOT / "docs" / "README.md", "[a](../CONTRIBUTING.md) [b](compatibility.toml)", known, tmp_path
    )
    assert home == "[a](contributing.md) [b](files/docs/compatibility.toml)"
    assert (tmp_path / "files" / "docs" / "compatibility.toml").exists()
    assert "Needs a CUDA device" in site.marked("```python gpu\nx\n```\n")
    assert site.marked("a\n\n<!-- python\nx = 1\n-->\n\n```python\nx\n```\n") == "a\n\n```python\nx\n```\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site; Sphinx ends with an error after a warning."""
    folder = tmp_path_factory.mktemp("site")
    assert site.build(folder / "html", folder / "source") == 0
    return folder / "html"


@pytest.mark.slow
@pytest.mark.needs_package("sphinx", "furo", "myst_parser")
class TestBuilt:
    def test_nothing_is_fetched_from_elsewhere(self, built: Path) -> None:
        pages = list(built.rglob("*.html"))
        assert len(pages) > 100
        for page in pages:
            text = page.read_text(encoding="utf-8")
            assert not re.search(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"(?:https?:)?//", text), page
        for sheet in built.rglob("*.css"):
            assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet

    @pytest.mark.needs_tool("chromium")
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
    def test_five_pages_in_a_browser(self, built: Path, tmp_path: Path, width: int, dark: bool) -> None:
        seen = _looked_at(built, tmp_path, [*SHOWN], width, dark)
        assert list(seen) == [*SHOWN]
        for page, facts in seen.items():
            assert facts["wide"] <= 0, f"{page} scrolls sideways by {facts['wide']} pixels"
            assert facts["dark"] is dark, page
            assert (facts["lang"], facts["h1"], facts["main"], facts["nav"]) == ("en", 1, 1, 1), (page, facts)
            assert facts["skipped"] == [] and facts["unnamed"] == [] and facts["faint"] == [], page
            assert facts["out_of_reach"] == [], page

    @pytest.mark.needs_tool("chromium")
    def test_what_a_reader_cannot_read_is_found(self, tmp_path: Path) -> None:
        text = "<h1>One</h1><h3>Two</h3><a href='#'></a><p style='color: #999'>pale</p><hr style='width: 999px'>"
        text += "<p role='heading'>Three</p><aside>a</aside><aside>b</aside>"
        text += f"<pre style='overflow: auto; width: 99px'>{'x' * 99}</pre>"
        (tmp_path / "page.html").write_text(f"<body><article>{text}</article></body>", encoding="utf-8")
        facts = _looked_at(tmp_path, tmp_path, ["page.html"], 390, False)["page.html"]
        assert [item[:4] for item in facts["out_of_reach"]] == ["<pre"] and len(facts["unnamed"]) == 4
        assert facts["wide"] and facts["skipped"] == [3] and facts["faint"] == ["2.85 : pale"]
        assert (facts["lang"], facts["main"], facts["nav"]) == ("", 0, 0)

    @pytest.mark.needs_tool("chromium")
    def test_search_finds_pages_without_a_server(self, built: Path, tmp_path: Path) -> None:
        dom = _browser(
            tmp_path, "--dump-dom", "--virtual-time-budget=15000", (built / "search.html").as_uri() + "?q=quarantine"
        )
        found = re.findall(r'<a href="([^"#]+)[^"]*"[^>]*>[^<]*</a>', dom.partition('id="search-results"')[2])
        assert any("runbooks.html" in link for link in found) and any("health.html" in link for link in found), found


def _browser(tmp_path: Path, *more: str) -> str:
    program = next(path for name in CHROMIUM if (path := shutil.which(name)))
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-component-update", "--disable-sync", "--allow-file-access-from-files", "--hide-scrollbars",
         f"--user-data-dir={tmp_path / 'profile'}", *more],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return done.stdout


def _looked_at(built: Path, tmp_path: Path, pages: list[str], width: int, dark: bool) -> dict[str, dict[str, object]]:
    """What a browser makes of pages in frames of a width: a window of its own is never narrower than 500 pixels."""
    frames = "".join(
        f'<iframe src="{(built / page).as_uri()}" width="{width}" height="900"></iframe>' for page in pages
    )
    script = _LOOK.replace("PAGES", json.dumps(pages))
    (tmp_path / "frames.html").write_text(f"<body>{frames}<script>{script}</script></body>", encoding="utf-8")
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom = _browser(tmp_path, theme, "--window-size=1600,1200", "--virtual-time-budget=20000", "--dump-dom",
                   (tmp_path / "frames.html").as_uri())  # fmt: skip
    note = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.S)
    assert note is not None, dom[-2000:]
    found: dict[str, dict[str, object]] = json.loads(
        note[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )
    return found


# Contrast as WCAG 2 has it: 4.5 for text, 3 for large text.
_LOOK = r"""
const rgb = (text) => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
const light = (c) => {
  const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const over = (top, below) => { const a = top[3] ?? 1; return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)); };
function ground(view, element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const colour = rgb(view.getComputedStyle(at).backgroundColor);
    if ((colour[3] ?? 1) > 0) layers.push(colour);
    if ((colour[3] ?? 1) === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
}
function look(view) {
  const page = view.document, faint = new Set(), root = page.documentElement;
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const text = walk.currentNode.textContent.trim();
    if (!text || element.closest("script, style, noscript, svg")) continue;
    if (!element.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true })) continue;
    const style = view.getComputedStyle(element), back = ground(view, element), fore = over(rgb(style.color), back);
    const [a, b] = [light(fore), light(back)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) faint.add(`${ratio.toFixed(2)} ${element.className}: ${text.slice(0, 30)}`);
  }
  const all = (selector) => [...page.querySelectorAll(selector)];
  const levels = all("h1, h2, h3, h4, h5").map((heading) => +heading.tagName[1]);
  const name = (e) => e.textContent.trim() || e.ariaLabel || e.title;
  return {
    wide: root.scrollWidth - root.clientWidth,
    dark: light(ground(view, page.querySelector("article"))) < 0.2,
    lang: root.lang,
    h1: page.querySelectorAll("h1").length,
    main: page.querySelectorAll("main, [role=main]").length,
    nav: page.querySelectorAll("nav[aria-label]").length,
    skipped: levels.filter((level, i) => i && level > levels[i - 1] + 1),
    unnamed: [
      ...all("a[href], button").filter((e) => !name(e)),
      ...all("img").filter((e) => !e.alt),
      ...all("[role=heading]:not([aria-level])"),
      ...(all("aside").length > 1 ? all("aside:not([aria-label])") : []),
      ...all("input:not([type=hidden]):not([type=checkbox])").filter((e) => !e.ariaLabel && !e.labels?.length),
    ].map((e) => e.outerHTML.slice(0, 120)),
    out_of_reach: all("pre, div, p").filter((e) => e.scrollWidth > e.clientWidth && e.tabIndex < 0
      && /auto|scroll/.test(view.getComputedStyle(e).overflowX)
      && !e.querySelector("a[href], [tabindex='0']")).map((e) => e.outerHTML.slice(0, 120)),
    faint: [...faint],
  };
}
addEventListener("load", () => setTimeout(() => {
  const seen = {};
  PAGES.forEach((page, i) => { seen[page] = look(frames[i]); });
  const note = document.createElement("pre");
  note.id = "seen";
  note.textContent = JSON.stringify(seen);
  document.body.append(note);
}, 500));
"""

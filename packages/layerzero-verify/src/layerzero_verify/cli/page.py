"""The report of `lz verify` as one HTML page that needs nothing else; light and dark, one column on a phone.

Every text that comes from outside this file (kernels, stages, errors) goes through `_e`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.resources import files

from layerzero_cli.html import breakable as _name
from layerzero_cli.html import escaped as _e
from layerzero_cli.html import page
from layerzero_verify.report import Check, Level, Status, VerifyReport

_MEANING = {
    0: "Declarations and three models that have to run at all, before anything heavy.",
    1: "Each kernel alone, forward and backward, against the reference in float64.",
    2: "A whole layer with every stage, and prefill + decode against the full forward.",
    3: "The stages of a layer with real weights: where a difference begins.",
    4: "Real architectures: logits and top-1 against transformers' own computation.",
    5: "Training: losses, gradients and weights, stepped side by side with torch.",
}
_SHOWN = 60
_NAMES = ("op", "kernel", "stage", "on")


def render(report: VerifyReport) -> str:
    """The whole page."""
    css = files("layerzero_verify.cli").joinpath("verify.css").read_text(encoding="utf-8")
    title = f"Verified: {report.target}" if report.ok else f"Not verified: {report.target}"
    parts = [_header(report, title), _ladder(report), _failures(report)]
    parts += [_level(level) for level in report.levels if level.checks]
    parts.append(_absent(report))
    versions = ", ".join(f"{_e(name)} {_e(version)}" for name, version in report.versions)
    parts.append(
        f"<footer>lz verify, {_e(report.lane)} lane, seed {report.seed}, {report.seconds:.1f} s. {versions}.</footer>"
    )
    return page(title, css, parts)


def _header(report: VerifyReport, title: str) -> str:
    checks = sum(level.passed + len(level.failures) for level in report.levels)
    kind = "good" if report.ok else "bad"
    return (
        f'<header class="{kind}"><h1>{_e(title)}</h1><p class="verdict">{_e(report.verdict.text)}</p>'
        '<div class="cards">'
        f"<div><b>{checks - len(report.failures)}</b><span>checks passed</span></div>"
        f"<div><b>{len(report.failures)}</b><span>failed</span></div>"
        f"<div><b>{len(report.kernels)}</b><span>kernels on {_e(report.device)}</span></div>"
        f"<div><b>{report.seconds:.0f} s</b><span>{_e(report.lane)} lane</span></div>"
        "</div></header>"
    )


def _ladder(report: VerifyReport) -> str:
    rungs = []
    for level in sorted(report.levels, key=lambda item: -item.number):
        status = level.status.value
        words = {"ok": "passes", "fail": "fails", "skip": "left out"}[status]
        count = level.skipped or f"{level.passed} of {level.passed + len(level.failures)} checks"
        if level.status is Status.SKIP and level.checks:
            count = level.checks[0].detail
        rungs.append(
            f'<li class="{status}"><a href="#level-{level.number}"><b>{level.number}</b>'
            f"<strong>{_e(level.name)}</strong><em>{words}</em>"
            f"<span>{_e(_MEANING[level.number])} <i>{_e(count)}</i></span></a></li>"
        )
    return (
        "<h2>The ladder</h2><p>Read from the bottom: the lowest rung that fails is where the fault is. "
        f'A rung that fails above sound ones is an integration fault.</p><ol class="ladder">{"".join(rungs)}</ol>'
    )


def _failures(report: VerifyReport) -> str:
    if not report.failures:
        return ""
    items = []
    for check in report.failures[:_SHOWN]:
        facts = [("op", check.op), ("kernel", check.kernel), ("stage", check.stage), ("on", check.subject)]
        facts += [("dtype", check.dtype), ("component", check.component)]
        if check.first is not None:
            spot = check.first
            facts.append(("first difference", f"{list(spot.index)}: got {spot.actual:.6g}, want {spot.expected:.6g}"))
        if check.max_abs is not None and check.threshold is not None:
            facts.append(("largest error", f"{check.max_abs:.3g} (limit {check.threshold:.0e})"))
        rows = "".join(
            f"<div><dt>{_e(name)}</dt><dd>{_name(text) if name in _NAMES else _e(text)}</dd></div>"
            for name, text in facts
            if text
        )
        notes = "".join(f'<p class="note">{_e(text)}</p>' for text in (check.detail, *check.flags) if text)
        items.append(f'<li><h3>Level {check.level}: {_e(check.name)}</h3><dl class="facts">{rows}</dl>{notes}</li>')
    more = len(report.failures) - _SHOWN
    rest = f'<p class="soft">and {more} more, in the JSON report</p>' if more > 0 else ""
    return f'<h2>What differs</h2><ul class="failures">{"".join(items)}</ul>{rest}'


def _level(level: Level) -> str:
    body = _by_kernel(level) if level.number <= 1 else _by_subject(level)
    opened = " open" if level.failures or level.number == 3 else ""
    return (
        f'<details class="level {level.status.value}" id="level-{level.number}"{opened}>'
        f"<summary><strong>Level {level.number}: {_e(level.name)}</strong>"
        f"<span>{level.passed} passed, {len(level.failures)} failed, {level.seconds:.1f} s</span></summary>"
        f"{body}</details>"
    )


def _table(head: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    cells = "".join(f"<th>{word}</th>" for word in head)
    return f"<table{kind}><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _bar(percent: float, word: str) -> str:
    return f'<td><div class="bar"><i style="width:{min(100.0, percent):.1f}%"></i></div><small>{word}</small></td>'


def _by_kernel(level: Level) -> str:
    found: dict[str, list[Check]] = {}
    for check in level.checks:
        found.setdefault(check.kernel or check.subject or check.name, []).append(check)
    rows = []
    for kernel, checks in found.items():
        own = Level(level.number, tuple(checks))
        share = max((check.used for check in checks if check.used is not None), default=0.0)
        word = f"{share:.0%}" if share < 10 else f"{share:.3g} times the limit"
        rows.append(
            f'<tr class="{own.status.value}"><td class="mono">{_name(kernel)}</td><td class="num">{own.passed}</td>'
            f'<td class="num">{len(own.failures) or ""}</td>{_bar(100.0 * share, word)}</tr>'
        )
    return _table(("kernel", "passed", "failed", "largest error, of what is allowed"), rows)


def _by_subject(level: Level) -> str:
    parts = []
    first = True  # of the stages of level 3, which are there to be looked at
    for check in level.checks:
        state = check.status.value
        size = (
            "" if check.max_abs is None or check.threshold is None else f"{check.max_abs:.2e} of {check.threshold:.0e}"
        )
        figures = ", ".join(f"{_e(name)} {value:.4g}" for name, value in check.figures)
        head = (
            f'<b class="{state}">{state}</b> <strong>{_e(check.subject)}</strong> {_e(check.name)} '
            f'<span class="soft">{_e(check.dtype)} {size} {figures}</span>'
        )
        detail = f'<p class="note">{_e(check.detail)}</p>' if check.detail else ""
        if not check.stages:
            parts.append(f'<div class="row">{head}{detail}</div>')
            continue
        opened = " open" if check.status is Status.FAIL or (level.number == 3 and first) else ""
        first = False
        parts.append(f'<details class="row"{opened}><summary>{head}</summary>{detail}{_stages(check)}</details>')
    return "".join(parts)


def _stages(check: Check) -> str:
    """Differences on a logarithmic scale, from 1e-9 to 1."""
    rows = []
    for row in check.stages:
        size = row.max_abs if math.isfinite(row.max_abs) and row.max_abs > 0 else (1.0 if row.max_abs else 1e-9)
        percent = max(0.0, 100.0 * (math.log10(size) + 9) / 9)
        rows.append(
            f'<tr class="{"ok" if row.ok else "fail"}"><td class="mono">{_name(row.stage)}</td>'
            f'{_bar(percent, f"{row.max_abs:.2e}")}<td class="mono soft">{_name(row.kernel)}</td></tr>'
        )
    return _table(("stage", "largest difference (1e-9 to 1)", "kernel"), rows, ' class="stages"')


def _absent(report: VerifyReport) -> str:
    if not report.absent:
        return ""
    rows = "".join(f'<li><span class="mono">{_name(name)}</span> {_e(why)}</li>' for name, why in report.absent)
    head = f"<summary><strong>Kernels that cannot run here</strong><span>{len(report.absent)}</span></summary>"
    return f'<details class="level skip">{head}<ul>{rows}</ul></details>'

"""Measurements as one HTML page that needs nothing else: no font, picture or script from anywhere.

Everything is in the page when it is loaded; the little script only hides, sorts and counts. Every text that comes
from outside this file goes through `_e`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template

from layerzero_cli.html import breakable as _kernel
from layerzero_cli.html import escaped as _e
from layerzero_cli.html import page
from layerzero_tune.bench.contest import short_time as _time
from layerzero_tune.report.data import SLOWER, Figures, Map, Measured, axes, backend, backends, figures, maps, phase
from layerzero_tune.timing.clock import BEFORE

_COLOURS = 9
_SCALE = 6.0
_BUSY = (
    '<p class="busy"><strong>{busy} of {cases} cases were measured while others used the machine.</strong> Ratios of '
    "one run mostly hold, times by themselves do not; measure again when it is quiet.</p>"
)


def render(cases: Sequence[Measured], facts: Mapping[str, str]) -> str:
    """The page. `facts` stand under the title: machine, versions, commit, how it was measured."""
    colours = {name: number % _COLOURS for number, name in enumerate(backends(cases))}
    found = figures(cases)
    devices = sorted({case.device for case in cases})
    title = f"Measured on {', '.join(devices)}" if devices else "Nothing measured"
    own = files("layerzero_tune.report")
    style, script, body = (own.joinpath(f"report.{tail}").read_text(encoding="utf-8") for tail in ("css", "js", "html"))
    rules = dict.fromkeys((case.mode, case.rule or "not named; on a GPU, " + BEFORE["cuda/eager"]) for case in cases)
    filled = Template(body).substitute(
        title=_e(title),
        cards=_cards(found),
        busy=_BUSY.format(busy=found.busy, cases=found.cases) if found.busy else "",
        behind=_behind(cases),
        facts="".join(f"<div><dt>{_e(name)}</dt><dd>{_e(value)}</dd></div>" for name, value in facts.items()),
        choices=_choices(cases),
        legend="".join(f'<span class="chip c{number}">{_e(name)}</span>' for name, number in colours.items()),
        maps="".join(_map(group, colours) for group in maps(cases)),
        ways=_ways(found),
        cases="".join(_case(case, colours) for case in cases),
        rules="".join(f"<li>{_e(mode)}: {_e(rule)}</li>" for mode, rule in rules),
    )
    return page(title, style, [filled], script)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


# -- top ------------------------------------------------------------------------------------------------
def _cards(found: Figures) -> str:
    own, oracle = found.layerzero, found.ratio
    cards = [
        ("fastest", own and f"{own.geomean:.3f}", "÷ the fastest of all, torch included (1 is perfect)"),
        ("farthest", own and f"{own.worst:.2f}", "the same, worst case"),
        ("count", str(found.cases), "cases measured"),
        ("speedup", _times(found.speedup), "faster than torch default (geometric mean)"),
        ("ratio", oracle and f"{oracle.geomean:.3f}", "÷ the fastest kernel (the oracle)"),
    ]
    if found.libraries:
        name, nearest = min(found.libraries.items(), key=lambda item: item[1].geomean)
        words = f"÷ fastest with one library only: {name}, the nearest"
        cards.append(("nearest", f"{nearest.geomean:.2f}", words))
    return "".join(
        f'<div class="card"><b id="figure-{key}">{_e(value or "–")}</b><span>{_e(text)}</span></div>'
        for key, value, text in cards
    )


def _behind(cases: Sequence[Measured]) -> str:
    """The cases where torch default beats the choice, each with the reason."""
    told = [(case, why) for case in cases if case.chosen in case.kernels and (why := case.behind)]
    if not told:
        return ""
    rows = "".join(
        f'<li><a href="#{_anchor(case)}">{_e(case.name)}</a>: {_times(case.speedup)} torch; {_e(why)}</li>'
        for case, why in sorted(told, key=lambda item: item[0].speedup or 0.0)
    )
    one = "one case" if len(told) == 1 else f"{len(told)} cases"
    return f'<section class="behind" id="behind"><h2>Torch default is faster in {one}</h2><ul>{rows}</ul></section>'


def _choices(cases: Sequence[Measured]) -> str:
    """What to show; without a script everything is shown and these do nothing."""
    fields = []
    for name, label, read in (
        ("phase", "op", phase),
        ("dtype", "dtype", lambda case: case.dtype),
        ("winner", "chosen backend", lambda case: backend(case.chosen)),
        ("device", "device", lambda case: case.device),
        ("mode", "mode", lambda case: case.mode),
    ):
        values = sorted({read(case) for case in cases})
        if len(values) > 1 or name not in ("device", "mode"):
            options = '<option value="">all</option>' + "".join(f"<option>{_e(value)}</option>" for value in values)
            fields.append(f'<label>{label}<select data-filter="{name}">{options}</select></label>')
    return "".join(fields)


# -- winner maps ----------------------------------------------------------------------------------------
def _map(group: Map, colours: Mapping[str, int]) -> str:
    head = "".join(f'<th scope="col">{_e(value)}</th>' for value in group.columns)
    rows = []
    for row in group.rows:
        cells = "".join(
            "<td>" + "".join(_chip(case, colours) for case in group.cells.get((row, column), ())) + "</td>"
            for column in group.columns
        )
        rows.append(f'<tr><th scope="row">{_e(row)}</th>{cells}</tr>')
    return (
        f'<figure class="map"><figcaption><strong>{_e(group.title)}</strong> '
        f"<small>{_e(group.down)} ↓ {_e(group.across)} →</small></figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_e(group.title)}">'
        f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</div></figure>"
    )


def _chip(case: Measured, colours: Mapping[str, int]) -> str:
    name = backend(case.chosen)
    extra = axes(case).rest
    note = f"<small>{_e(extra)}</small>" if extra else ""
    slow = ' class="slow"' if case.speedup is not None and case.speedup < SLOWER else ""
    gain = f" · <em{slow}>{_times(case.speedup)}</em>" if case.speedup is not None else ""
    variant = case.chosen.rpartition(".")[2]
    return (
        f'<a class="chip c{colours.get(name, 0)}" href="#{_anchor(case)}" {_data(case)} title="{_e(case.chosen)}">'
        f"<b>{_e(name)}</b> {_e(variant)}{note}<span>{_time(case.chosen_us)}{gain}</span></a>"
    )


def _anchor(case: Measured) -> str:
    """An id of letters, digits and dashes, whatever the name and the mode are."""
    text = f"{case.name}-{case.mode}"
    return "case-" + "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text)


def _data(case: Measured) -> str:
    values = {
        "phase": phase(case),
        "dtype": case.dtype,
        "winner": backend(case.chosen),
        "device": case.device,
        "mode": case.mode,
        "text": f"{case.name} {case.op} {case.chosen}".lower(),
        "speedup": "" if case.speedup is None else f"{case.speedup:.6g}",
        "ratio": f"{case.ratio:.6g}",
        "fastest": f"{case.over_fastest:.6g}",
    }
    return " ".join(f'data-{name}="{_e(value)}"' for name, value in values.items())


# -- one library or all ------------------------------------------------------------------------------------
def _ways(found: Figures) -> str:
    slowest = max((item.geomean for _, item in found.ways), default=0.0)
    return "".join(
        f"<tr{' class=own' if name == 'LayerZero' else ''}>"
        f'<th scope="row">{_e(name)}</th>'
        f'<td><div class="bar"><i style="width:{100 * item.geomean / slowest:.1f}%"></i></div></td>'
        f'<td class="num">{item.geomean:.3f}</td>'
        f'<td class="num">{item.worst:.2f} <small>{_e(item.worst_case)}</small></td>'
        f'<td class="num">{item.used_in} of {item.cases}</td></tr>'
        for name, item in found.ways
    )


# -- every case --------------------------------------------------------------------------------------------
def _case(case: Measured, colours: Mapping[str, int]) -> str:
    name = backend(case.chosen)
    far = ' class="far"' if case.ratio > 1.1 else ""
    head = (
        f"<strong>{_e(case.name)}</strong>"
        f'<span class="chip c{colours.get(name, 0)}">{_kernel(case.chosen)}</span>'
        f'<span class="num">{_time(case.chosen_us)}</span><span class="num">{_times(case.speedup)} torch</span>'
        f'<span class="num"><em{far}>{case.ratio:.2f}</em> ÷ oracle</span>'
    )
    slowest = max([*(item.us for item in case.kernels.values()), case.torch_us or 0.0])
    longest = min(slowest, _SCALE * case.oracle_us)  # one hopeless kernel must not flatten the others
    rows = []
    for kernel, item in sorted(case.kernels.items(), key=lambda pair: (pair[1].us, pair[0])):
        mark = "own" if kernel == case.chosen else ""
        error = "" if item.error is None else f"{item.error:.1e}"
        rows.append(_row(_kernel(kernel), item.us, longest, mark, error))
    if case.torch_us is not None:
        rows.append(_row("torch default", case.torch_us, longest, "plain", ""))
    if case.call_us is not None:
        rows.append(_row(f"lz.{_e(case.op)}, dispatch included", case.call_us, longest, "plain", ""))
    refused = "".join(
        f'<li><span class="mono">{_kernel(kernel)}</span> {_e(why)}</li>' for kernel, why in case.refused.items()
    )
    sizes = ", ".join(f"{key} {value}" for key, value in case.sizes.items())
    return (
        f'<details class="case" id="{_anchor(case)}" {_data(case)}><summary>{head}</summary>'
        f'<p class="soft">{_e(case.dtype)}, {_e(case.mode)}, {_e(case.device)}: {_e(sizes)}'
        f'{", while others used the machine" if case.busy else ""}</p><div class="scroll" '
        f'tabindex="0" role="region" aria-label="{_e(case.name)}, every kernel"><table><thead><tr>'
        '<th scope="col">kernel</th><td></td><th scope="col">median</th><th scope="col">largest error</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{f'<ul>{refused}</ul>' if refused else ''}</details>"
    )


def _row(name: str, us: float, longest: float, mark: str, error: str) -> str:
    return (
        f'<tr class="{mark}"><td class="mono">{name}</td>'
        f'<td><div class="bar"><i style="width:{min(100.0, 100 * us / longest):.1f}%"></i></div></td>'
        f'<td class="num">{_time(us)}</td><td class="num">{error}</td></tr>'
    )

"""The demo as one HTML page that needs nothing else: no script, no font, no picture from anywhere.

Every text that comes from outside this file (names of devices, kernels, reasons) goes through `_e`.
"""

from __future__ import annotations

from importlib.resources import files
from statistics import median
from string import Template

from layerzero.model.decision import Candidate
from layerzero_cli.html import breakable as _kernel
from layerzero_cli.html import escaped as _e
from layerzero_cli.html import page
from layerzero_tune.demo.stations import GROUPS, Stop, Tour, decode_lines, duration, introduction, notes, verdict
from layerzero_tune.report.data import backend as _backend

_COLOURS = 6
# Groups that add their result back to the residual stream.
_RESIDUAL = ("attention", "mlp")
_OPEN = ("attention",)
_WIDE = 30  # letters of a fact that take a whole row


def render(tour: Tour) -> str:
    """The whole page."""
    colours = _colours(tour)
    title = f"LayerZero on {tour.device.name or tour.device.device_type}"
    squares, told = _decode(tour)
    own = files("layerzero_tune.demo")
    body = Template(own.joinpath("demo.html").read_text(encoding="utf-8")).substitute(
        title=_e(title),
        introduction=_e(introduction(tour)),
        cards=_cards(tour),
        facts="".join(
            f'<div class="{"wide" if len(value) > _WIDE else ""}"><dt>{_e(name)}</dt><dd>{_e(value)}</dd></div>'
            for name, value in tour.facts
        ),
        cold=_e(duration(tour.first_pass_us)),
        hot=_e(duration(tour.lz_us)),
        stages=_stages(tour, colours),
        legend=_legend(tour, colours),
        ops="\n".join(_op(stop, colours) for stop in tour.stops),
        selections=tour.decode_selections,
        steps=len(tour.decode),
        calls=tour.decode_calls // len(tour.decode),
        squares=squares,
        told=told,
        version=_e(tour.version),
        seconds=f"{tour.seconds:.0f}",
    )
    return page(title, own.joinpath("demo.css").read_text(encoding="utf-8"), [body])


def _colours(tour: Tour) -> dict[str, str]:
    """A colour per backend: grey for the reference, the others in order of appearance."""
    found = {"reference": "var(--b0)"}
    for stop in tour.stops:
        for item in stop.candidates:
            found.setdefault(item.backend, f"var(--b{1 + (len(found) - 1) % (_COLOURS - 1)})")
    return found


def _colour(kernel_id: str, colours: dict[str, str]) -> str:
    return colours.get(_backend(kernel_id), "var(--b0)")


def _cards(tour: Tour) -> str:
    if tour.ok:
        right = ("good", "all match", "every result held against the reference")
    else:
        right = ("bad", f"{len(tour.failed)} wrong", ", ".join(tour.failed))
    cards = [
        ("", f"{len(tour.stops)} ops", f"{tour.kernels_considered} kernels considered, each with a reason"),
        right,
        ("", duration(tour.lz_us), f"for the prompt; plain torch {duration(tour.torch_us)}"),
        ("", f"{tour.decode_selections} of {tour.decode_calls}", "decode calls had to choose; the rest looked it up"),
    ]
    return "".join(
        f'<div class="card {kind}"><b>{_e(value)}</b><span>{_e(text)}</span></div>' for kind, value, text in cards
    )


def _stages(tour: Tour, colours: dict[str, str]) -> str:
    stages = []
    for group, name in GROUPS.items():
        boxes = "".join(
            f'<a class="box" href="#{_e(stop.station.key)}" style="--c:{_colour(stop.kernel, colours)}">'
            f'<strong>{_e(stop.station.title)}</strong><span class="kernel">{_kernel(stop.kernel)}</span>'
            f'<span class="took">{_e(duration(stop.lz_us))}</span></a>'
            for stop in tour.stops
            if stop.station.group == group
        )
        rail = group in _RESIDUAL
        line = '<div class="line" aria-hidden="true"><span>residual</span></div>' if rail else ""
        kind = f"{group} rail" if rail else group
        stages.append(f'<section class="stage {_e(kind)}">{line}<h3>{_e(name)}</h3>{boxes}</section>')
    return "".join(stages)


def _legend(tour: Tour, colours: dict[str, str]) -> str:
    always = ": plain PyTorch, always there"
    used = {_backend(stop.kernel) for stop in tour.stops}
    return "".join(
        f'<span style="--c:{colour}"><i></i>{_e(backend)}{always if backend == "reference" else ""}</span>'
        for backend, colour in colours.items()
        if backend in used
    )


def _op(stop: Stop, colours: dict[str, str]) -> str:
    station = stop.station
    most = max(stop.lz_us, stop.torch_us)
    bars = "".join(
        f"<span>{name}</span>{_bar(us / most, kind)}<span>{_e(duration(us))}</span>"
        for name, us, kind in (("LayerZero", stop.lz_us, "ours"), ("torch", stop.torch_us, "theirs"))
    )
    speed = stop.verdict.rpartition(" ")[2]
    rows = "".join(_candidate(item, stop, colours) for item in stop.candidates)
    said = "".join(f'<p class="note">{_e(note)}</p>' for note in notes(stop))
    return (
        f'<details class="op" id="{_e(station.key)}"{" open" if station.key in _OPEN else ""}>'
        f"<summary><strong>{_e(station.title)}</strong>"
        f'<span class="chip" style="--c:{_colour(stop.kernel, colours)}">{_kernel(stop.kernel)}</span>'
        f'<div class="bars">{bars}</div>'
        f'<div class="says"><span class="{_e(speed)}">{_e(stop.verdict)}</span>'
        f'<span class="{"right" if stop.check.ok else "wrong"}">{_e(stop.check.word)}</span></div></summary>'
        f'<div class="body"><p>{_e(station.lesson)}</p>'
        f'<p class="soft"><code>lz.{_e(station.op)}</code> on {_e(stop.shape)}. '
        f"Check: {_e(stop.check.detail)}; largest error {stop.check.max_error:.1e}.</p>{said}"
        '<table><thead><tr><th scope="col">kernel</th><td></td><th scope="col" class="num">score</th>'
        '<th scope="col">time here</th><th scope="col">why</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _bar(share: float, kind: str = "", colour: str = "") -> str:
    paint = f";background:{colour}" if colour else ""
    return f'<div class="bar {kind}"><i style="width:{100 * share:.1f}%{paint}"></i></div>'


def _candidate(item: Candidate, stop: Stop, colours: dict[str, str]) -> str:
    ran, colour = item.kernel_id == stop.kernel, _colour(item.kernel_id, colours)
    badge, kind = ("ran", "right") if ran else ("fits", "same") if item.accepted else ("refused", "slower")
    us = stop.lz_us if ran else stop.others_us.get(item.kernel_id)
    most = max((stop.lz_us, *stop.others_us.values()))
    time = "" if us is None else _e(duration(us)) + _bar(us / most, colour=colour)
    if ran:
        why = "; ".join([_winning(item, stop), *(f"after {step.name}" for step in item.transforms)])
    elif item.accepted:
        timed = "" if us is None else f"; {verdict(us, stop.lz_us)} when timed here"
        why = f"fits, but {item.outdone or 'failed'}{timed}"
    else:
        why = "; ".join(f"{reason.message} [{reason.code.value}]" for reason in item.reasons)
    hint = "" if item.accepted or not item.flip else f'<br><span class="soft">→ {_e(item.flip)}</span>'
    score = "" if item.score is None else f"{item.score:g}"
    return (
        f'<tr><td class="chip" style="--c:{colour}">{_kernel(item.kernel_id)}</td>'
        f'<td><span class="badge {kind}">{badge}</span></td><td class="num">{_e(score)}</td>'
        f'<td class="time">{time}</td><td class="why">{_e(why)}{hint}</td></tr>'
    )


def _winning(item: Candidate, stop: Stop) -> str:
    """Why this kernel ran, in the words that the others are given."""
    outdone = [other.outdone for other in stop.candidates if other.accepted and other is not item]
    if item.outdone:
        return f"next in line when {stop.chosen} failed"
    by_policy = (why.replace("another", "it") for why in outdone if "another" in why)
    return next(by_policy, "best score of those that fit" if outdone else "the only one that fits")


def _decode(tour: Tour) -> tuple[str, str]:
    """A square for each step, and what is told about all of them."""
    squares = "".join(
        f'<i class="{"chose" if step.selections else ""}" title="context {step.context}: {step.selections} selections, '
        f'{_e(duration(step.lz_us))}">{step.selections or "·"}</i>'
        for step in tour.decode
    )
    ours, theirs = (median(getattr(step, name) for step in tour.decode) for name in ("lz_us", "torch_us"))
    told = [
        *decode_lines(tour),
        f"The other {tour.decode_calls - tour.decode_selections} calls found their kernel; "
        f"{tour.counters['failovers']} had to fail over.",
        f"{1e6 / ours:.0f} tokens per second; plain torch, step by step in turn: {1e6 / theirs:.0f}.",
    ]
    return squares, "".join(f"<li>{_e(line)}</li>" for line in told)

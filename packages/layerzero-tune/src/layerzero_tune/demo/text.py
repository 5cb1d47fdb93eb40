"""The words of the tour: lines that the terminal, the plain text and the page share."""

from __future__ import annotations

from pathlib import Path

from layerzero_tune.demo.stations import Check, Stop, Tour, verdict

__all__ = [
    "HEAD",
    "NEXT",
    "cells",
    "check_word",
    "decode_lines",
    "duration",
    "introduction",
    "notes",
    "plain_lines",
    "reason_to_select",
    "slower_line",
    "summary",
    "whole_line",
    "why_lines",
]

HEAD = ("step", "kernel that ran", "LayerZero", "torch", "vs torch", "check")
_RIGHT = ("LayerZero", "torch")
_CLEARLY = 1.2  # less than this between two kernels may be the noise of a short measurement
NEXT = "Next: lz doctor, lz list, lz explain attention --shape 1,32,128,64 --dtype bfloat16 --device h100"


def duration(us: float) -> str:
    """A time with three digits and a unit."""
    for limit, unit in ((999.5, "µs"), (999.5e3, "ms")):
        if us < limit:
            return f"{us / (limit / 999.5):.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def check_word(check: Check) -> str:
    """The outcome of a check in a word."""
    if not check.ok:
        return f"WRONG, {check.max_error:.0e}"
    return "ok, exact" if check.max_error == 0 else f"ok, {check.max_error:.0e}"


def introduction(tour: Tour) -> str:
    """What was built, in one sentence."""
    sizes = tour.sizes
    return (
        f"One Llama-shaped block on {tour.device.name or tour.device.device_type} in {tour.dtype}: "
        f"hidden {sizes.hidden}, {sizes.heads} heads over {sizes.kv_heads} KV heads, {sizes.prompt} tokens of prompt, "
        f"{sizes.decode_steps} tokens decoded."
    )


def cells(stop: Stop) -> tuple[str, ...]:
    """A row under HEAD."""
    kernel = stop.kernel if stop.ran in (None, stop.chosen) else f"{stop.kernel} (after {stop.chosen} failed)"
    times = (duration(stop.lz_us), duration(stop.torch_us))
    return (stop.station.title, kernel, *times, stop.verdict, check_word(stop.check))


def why_lines(tour: Tour) -> list[tuple[str, list[tuple[str, str]]]]:
    """(op, its why-not lines), each op once: the first stop of an op speaks for those judged alike."""
    seen: dict[tuple[str, tuple[tuple[str, bool], ...]], list[tuple[str, str]]] = {}
    for stop in tour.stops:
        judged = tuple((item.kernel_id, item.accepted) for item in stop.candidates)
        seen.setdefault((stop.station.op, judged), stop.why_not())
    return [(op, lines) for (op, _), lines in seen.items()]


def notes(stop: Stop) -> list[str]:
    """What an honest guide adds at a stop: a failover, a slow choice, and what to do about it."""
    found = []
    if stop.ran not in (None, stop.chosen):
        found.append(f"{stop.chosen} was chosen and failed; {stop.ran} ran instead.")
    if stop.kernel.startswith("reference."):
        found.append(
            "Only the plain reference serves this op here. It is right everywhere and tuned nowhere; "
            "lz doctor says which backend package would bring a faster kernel."
        )
    faster = [name for name, us in stop.others_us.items() if us * _CLEARLY < stop.lz_us]
    if faster:
        found.append(
            f"{', '.join(faster)} was faster in this measurement. Without stored measurements the order follows what "
            f'the backends declare; lz.lock("{stop.station.op}", "{faster[0]}") would choose it.'
        )
    elif stop.plan_us is not None and verdict(stop.lz_us, stop.plan_us).endswith("slower"):
        found.append(
            f"{duration(stop.lz_us - stop.plan_us)} of this is the lookup. Where that matters, "
            f'lz.plan("{stop.station.op}", …) makes it once: {duration(stop.plan_us)} per call.'
        )
    return found


def decode_lines(tour: Tour) -> list[str]:
    """What the decode loop showed."""
    steps, made, calls = len(tour.decode), tour.decode_selections, tour.decode_calls
    lines = [
        f"{steps} steps, {calls} calls, {made} selections: a choice is made once, then looked up while the cache grows."
    ]
    lines += [
        f"  context {step.context}: {step.selections} selected{reason_to_select(tour, step.context)}"
        for step in tour.decode
        if step.selections
    ]
    state = "match" if tour.agreement.ok else "DO NOT match"
    return [
        *lines,
        f"Paged and dense attention {state} at every step (largest difference {tour.agreement.max_error:.0e}).",
    ]


def reason_to_select(tour: Tour, context: int) -> str:
    """Why a decode step had to choose, where that can be told; begins with a comma."""
    if context == tour.decode[0].context:
        return ", because one token at a time is new after the prompt"
    if (context - 1) & (context - 2) == 0:
        return f", because the cache grew past {context - 1}, the end of a bucket"
    return ""


def whole_line(tour: Tour) -> str:
    """The block as a whole: cold, hot, and against torch."""
    return (
        f"The prompt through the whole block: {duration(tour.lz_us)}, plain torch {duration(tour.torch_us)} "
        f"({verdict(tour.lz_us, tour.torch_us)}). The very first pass, with every choice to make: "
        f"{duration(tour.first_pass_us)}."
    )


def slower_line(tour: Tour) -> str:
    """Why some steps are slower than torch; empty when none is."""
    if not any(stop.verdict.endswith("slower") for stop in tour.stops):
        return ""
    return (
        "Slower steps: a call pays some microseconds for its lookup, which shows in small ops; "
        "and where only the plain reference runs, a backend package may bring a faster kernel (lz doctor)."
    )


def summary(tour: Tour, written: Path | None) -> str:
    """The last line: how many, all right or not, where the page is."""
    checks = "all results match the reference" if tour.ok else f"WRONG results: {', '.join(tour.failed)}"
    page = "" if written is None else f", page written to {written}"
    return f"{len(tour.stops)} ops, {tour.kernels_considered} kernels considered, {checks}{page} ({tour.seconds:.0f} s)"


def plain_lines(tour: Tour, written: Path | None) -> list[str]:
    """The tour as text without colour or boxes."""
    rows = [HEAD, *(cells(stop) for stop in tour.stops)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [introduction(tour), ""]
    for row in rows:
        padded = (
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for name, cell, width in zip(HEAD, row, widths, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    lines += ["", whole_line(tour), *filter(None, [slower_line(tour)]), "", "Why not the others"]
    for op, reasons in why_lines(tour):
        lines.append(f"  {op}" if reasons else f"  {op}: no other kernel is registered")
        lines.extend(f"    {kernel_id}: {text}" for kernel_id, text in reasons)
    lines += ["", "Decoding", *(f"  {line}" for line in decode_lines(tour))]
    return [*lines, "", summary(tour, written), NEXT]

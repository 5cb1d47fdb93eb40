"""The part of benchmarks/README.md that tells what layerzero-accel costs and saves."""

from __future__ import annotations

import statistics
from typing import Any


def accel_section(name: str, data: dict[str, Any]) -> str:
    """Keyed dispatch in C and in Python, threads, and whole small calls against bare torch."""
    machine, scale = data["machine"], data["scale"]
    limits = data["limits"]
    shape = statistics.median(data["shape_read_ns"])
    lines = [
        f"## {name}: dispatch with layerzero-accel",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']}); Python {machine['python']}, torch "
        f"{machine['torch']}; load before the run {machine['load']}; commit `{data['commit']}`; reading `.shape` takes "
        f"{shape:.0f} ns here. ns over an empty target; the limits hold at the budget's speed. Repeat: "
        f"`{data['command']}`.",
        "",
        "| figure | ns | at the budget's speed | limit |",
        "|---|---:|---:|---:|",
    ]
    for figure, value in data["raw"].items():
        limit = limits["keyed_us_scaled"].get(figure)
        shown = "" if limit is None else f"{limit * 1e3:.0f}"
        lines.append(f"| {figure} | {value:,.0f} | {data['scaled'][figure]:,.0f} | {shown} |")
    for figure, value in data["decode"].items():
        lines.append(f"| decode loop {figure}, a step | {value:,.0f} | {value / scale:,.0f} | |")
    for figure, value in data["threads"].items():
        limit = f"{limits['p99_us'] * 1e3:,.0f}" if figure == "in C, p99" else ""
        lines.append(f"| 100 threads, {figure} | {value:,.0f} | {value / scale:,.0f} | {limit} |")
    lines += ["", "| small call ÷ bare torch | in C | in Python | limit |", "|---|---:|---:|---:|"]
    for op, limit in limits["ratios"].items():
        lines.append(f"| lz.{op} | {data['ratios'][op]:.2f} | {data['ratios_in_python'][op]:.2f} | {limit:g} |")
    keys = data["keys"]
    lines += ["", f"With few keys a call takes {keys['few keys']:.0f} ns, with 10 000 {keys['many keys']:.0f} ns."]
    return "\n".join(lines) + "\n"

"""The part of the benchmarks page about threads: what all cores gain, what four callers at once cost, and parity."""

from __future__ import annotations

from typing import Any

__all__ = ["threads_section"]

_WORDS = {"bits": "same bits", "within": "within tolerance", "differs": "differs"}


def threads_section(name: str, data: dict[str, Any]) -> str:
    """One row for each CPU kernel."""
    machine = data["machine"]
    lines = [
        f"## {name}: threads and schedulers",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']}); Python {machine['python']}, torch "
        f"{machine['torch']}; load before the run {machine['load']}; commit `{data['commit']}`. Each CPU kernel with "
        f"one thread and with {data['threads']}, and called from {data['callers']} Python threads at once, in "
        "interleaved rounds; × is how many times as fast as one thread, and as the same calls one after another from "
        f"the main thread. Repeat: `{data['command']}`.",
        "",
        "| kernel | scheduler | call | one thread, µs | all threads | four callers | across thread counts |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for row in data["rows"]:
        lines.append(
            f"| `{row['kernel']}` | {row['scheduler']} | {row['case']} {row['dtype']} | {row['us']['1 thread']:,.0f} | "
            f"{row['parallel']:.2f}× | {row['callers']:.2f}× | {_WORDS[row['parity']['threads']]} |"
        )
    wrong = [row["kernel"] for row in data["rows"] if not row["parity"]["ok"]]
    pairs = data["schedulers"]
    lines += [
        "",
        f"Repeated and from four callers, {len(data['rows']) - len(wrong)} of {len(data['rows'])} kernels give the "
        f"same result (the same bits where they say so). {sum(item['ok'] for item in pairs)} of {len(pairs)} ops that "
        "have a kernel on each scheduler agree within the op's tolerance.",
    ]
    return "\n".join(lines) + "\n"

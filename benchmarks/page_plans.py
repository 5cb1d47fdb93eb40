"""The parts of the benchmarks page about planned blocks and about what measured selection costs at run time."""

from __future__ import annotations

from typing import Any

__all__ = ["blocks_section", "store_section"]

_FIGURES = {
    "table_lookup_us": "a lookup in a solved table, µs",
    "table_first_lookup_us": "the same for a call it is asked about for the first time, µs",
    "query_us": "a query to a database of a million rows, µs",
    "open_ms": "what opening it adds to the first selection, ms",
    "record_us": "recording a call, µs",
    "baked_us": "a new call decided by a table, µs",
    "baked_under_load_us": "the same with eight threads at it, µs",
    "runtime_us": "a new call decided by selection, µs",
    "runtime_under_load_us": "the same with eight threads at it, µs",
    "first_call_cold_ms": "the first call of a process, ms",
    "first_call_warm_ms": "the same after a warm-up of that call, ms",
}


def _where(data: dict[str, Any]) -> str:
    machine = data["machine"]
    gpu = f"{machine['gpu']}, " if machine["gpu"] else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores ({machine['arch']}); Python {machine['python']}, torch "
        f"{machine['torch']}; load before the run {machine['load']}; commit `{data['commit']}`."
    )


def blocks_section(name: str, data: dict[str, Any]) -> str:
    """One row for each layer."""
    lines = [
        f"## {name}: planned blocks",
        "",
        f"{_where(data)} A decoder layer by `lz.plan_block(..., measure=True)`, against the public functions called "
        "one by one, which choose by the times that `lz.tune` has measured for the layer's calls, and against their "
        "kernels run as a plan is run, in turns; below 1 the plan is faster. Beside them the kernels chosen before "
        "anything was tuned, and those that a few looks at each op by itself find fastest. "
        f"Repeat: `{data['command']}`.",
        "",
        "| layer | plan, µs | ÷ public functions | ÷ their kernels | ÷ untuned | ÷ each op alone | rewrites |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in data["cases"]:
        rewrites = ", ".join(dict.fromkeys(row["fused"])) or "none"
        lines.append(
            f"| {row['case']} | {row['median_us']['plan']:,.0f} | {row['plan_over_per_op']:.3f} | "
            f"{row['plan_over_own']:.3f} ± {row['standard_error']['plan_over_own']:.3f} | "
            f"{row['plan_over_untuned']:.3f} | {row['plan_over_alone']:.3f} | {rewrites} |"
        )
    best, worst = (item["value"] for item in data["targets"].values())
    lines += ["", f"Against the better of the first two: best {best:.3f}, worst {worst:.3f} (at most 1.02)."]
    return "\n".join(lines) + "\n"


def store_section(name: str, data: dict[str, Any]) -> str:
    """What measured selection costs at run time."""
    lines = [
        f"## {name}: what measured selection costs",
        "",
        f"{_where(data)} Repeat: `{data['command']}`.",
        "",
        "| figure | value | limit |",
        "|---|---:|---:|",
    ]
    for key, words in _FIGURES.items():
        limit = data["limits"].get(key)
        lines.append(f"| {words} | {data['figures'][key]:,.2f} | {'' if limit is None else f'{limit:g}'} |")
    return "\n".join(lines) + "\n"

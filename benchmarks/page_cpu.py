"""The part of benchmarks/README.md about the CPU kernels, rendered from cpu.json."""

from __future__ import annotations

from typing import Any

__all__ = ["cpu_section"]


def cpu_section(name: str, data: dict[str, Any]) -> str:
    """Every case: the kernel chosen, against eager, the best peer and the floor, and the goals."""
    machine, found = data["machine"], data["summary"]
    peers = ", ".join(f"{kind} {version}" for kind, version in data["peers"].items() if kind != "torch") or "none"
    share = f"{found['as_fast_as_best_peer']} of {found['cases']}"
    lines = [
        f"## {name}: CPU kernels",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['arch']}), {data['threads']} threads, {data['isa']}; "
        f"Python {machine['python']}, torch {machine['torch']}; load before the run {machine['load']}; commit "
        f"`{data['commit']}`. `lz` is {data['lz']}. Peers beside torch's own: {peers}. Repeat: `{data['command']}`.",
        "",
        f"{found['goals_met']} of {found['goals']} goals met; at least as fast as the best peer in {share} cases (goal "
        f"{100 * found['goal_of_peers']:.0f} %), in {found['as_fast_within_noise']} within the noise; slower than "
        f"eager: {', '.join(found['slower_than_eager']) or 'none'}.",
        "",
        "| case | kernel | µs | × eager | × best peer | of the floor | goals |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in data["rows"]:
        if "us" not in row:
            lines.append(f"| {row['group']}: {row['case']} | failed: {row['error']} | | | | | |")
            continue
        floor = f"{100 * row['of_floor']:.0f} %" if "of_floor" in row else ""
        goals = ", ".join(
            f"{'' if goal['met'] else 'missed: '}{goal['reached']:.2f} of {goal['factor']:g} {goal['against']}"
            for goal in row["goals"]
        )
        lines.append(
            f"| {row['group']}: {row['case']} | `{row['kernel']}` | {row['us']['lz']:,.1f} | {row['speedup']:.2f} | "
            f"{row['against_best_peer']:.2f} ({row['best_peer']}) | {floor} | {goals} |"
        )
    return "\n".join(lines) + "\n"
